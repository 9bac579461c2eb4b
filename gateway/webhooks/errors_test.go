package webhooks

import (
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// What clients read about settings that an API key does not have.
func TestSettingsError(t *testing.T) {
	e := api.NewError(settingsError(proto.ErrNotFound))
	if e.Code != api.CodeNotFound || e.Message != "this API key has no webhook settings; PUT them at /v1/webhook" {
		t.Errorf("%s %q", e.Code, e.Message)
	}
}
