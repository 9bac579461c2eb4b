package gateway

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	"github.com/bullpen-run/bullpen/proto/api"
)

// entityTag returns the ETag of an answer with the JSON form of v. It depends on nothing but that
// form, so that it is the same at all gateways.
func entityTag(v any) (string, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return "", fmt.Errorf("encode answer: %w", err)
	}
	hash := sha256.Sum256(body)
	return `"` + hex.EncodeToString(hash[:12]) + `"`, nil
}

// writeTagged is writeValue with an ETag, which a request that changes the object may name in
// If-Match.
func writeTagged(w http.ResponseWriter, status int, v any) error {
	tag, err := entityTag(v)
	if err != nil {
		return err
	}
	w.Header().Set("ETag", tag)
	return writeValue(w, status, v)
}

// checkMatch returns an error if a request has an If-Match header that does not name the present
// form of the object that it changes. present is what a GET of the object answers with.
func checkMatch(r *http.Request, present any) error {
	wanted := listItems(r.Header.Values("If-Match"))
	if len(wanted) == 0 || slices.Equal(wanted, []string{"*"}) {
		return nil
	}
	tag, err := entityTag(present)
	if err != nil {
		return err
	}
	if !slices.Contains(wanted, tag) {
		return api.Errorf(api.CodePreconditionFailed, "this was changed since it was read: its ETag is %s now; read it again, then send the change again", tag)
	}
	return nil
}
