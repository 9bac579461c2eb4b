package files

import (
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// What clients read about versions that threads do not have, and about URLs that are not valid.
func TestErrors(t *testing.T) {
	for _, tt := range []struct {
		err  error
		code api.Code
		text string // empty for any
	}{
		{
			versionError("x", "t", 2, proto.ErrNotFound), api.CodeNotFound,
			"there is no such thread, or it does not have that version; see /v1/threads/{id}",
		},
		{errBadURL, api.CodeForbidden, ""},
		{errOldURL, api.CodeForbidden, ""},
	} {
		if e := api.NewError(tt.err); e.Code != tt.code || e.Message == "" || tt.text != "" && e.Message != tt.text {
			t.Errorf("%v: %s %q", tt.err, e.Code, e.Message)
		}
	}
}
