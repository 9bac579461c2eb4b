package admin

import (
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// What clients read about dead letters that are gone, and images that cannot be removed.
func TestErrors(t *testing.T) {
	for _, tt := range []struct {
		err  error
		code api.Code
		text string
	}{
		{
			deadLetterError(proto.ErrNotFound), api.CodeNotFound,
			"there is no dead letter of that id; see /v1/admin/dead-letters",
		},
		{
			imageInUse("py", []string{"a", "b", "c", "d", "e"}), api.CodeConflict,
			"image py is used by the sandbox a, b, c and 2 more; change its image or remove the sandbox first",
		},
	} {
		if e := api.NewError(tt.err); e.Code != tt.code || e.Message != tt.text {
			t.Errorf("%v: %s %q", tt.err, e.Code, e.Message)
		}
	}
}
