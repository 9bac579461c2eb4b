package gateway

import (
	"strings"
	"testing"
)

func TestRotateSecretsKey(t *testing.T) {
	h := newHarness(t)
	if a := h.do("POST", "/v1/admin/secrets/rotate-key", "").want(200, ""); a.json()["wrapped_for"] != "age1new" {
		t.Error(a.json())
	}
	if !strings.Contains(h.log.String(), "key of secrets rotated") {
		t.Error("the rotation was not logged")
	}
	h.stub.noSecretsKey = true
	h.do("POST", "/v1/admin/secrets/rotate-key", "").want(409, "conflict", "--secrets-key")
}
