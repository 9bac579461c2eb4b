package web

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	"github.com/bullpen-run/bullpen/proto/api"
)

// EntityTag returns the ETag of an answer with the JSON form of v. It depends only on that form, so
// that it is the same at all gateways.
func EntityTag(v any) (string, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return "", fmt.Errorf("encode answer: %w", err)
	}
	hash := sha256.Sum256(body)
	return `"` + hex.EncodeToString(hash[:12]) + `"`, nil
}

// WriteTagged is writeValue with an ETag, which a request that changes the object may send in
// If-Match.
func WriteTagged(w http.ResponseWriter, status int, v any) error {
	tag, err := EntityTag(v)
	if err != nil {
		return err
	}
	w.Header().Set("ETag", tag)
	return WriteValue(w, status, v)
}

// CheckMatch returns an error if a request's If-Match header does not match the current form of the
// object to change. present is what a GET of the object returns.
func CheckMatch(r *Request, present any) error {
	wanted := ListItems(r.Header.Values("If-Match"))
	if len(wanted) == 0 || slices.Equal(wanted, []string{"*"}) {
		return nil
	}
	tag, err := EntityTag(present)
	if err != nil {
		return err
	}
	if !slices.Contains(wanted, tag) {
		return api.Errorf(api.CodePreconditionFailed, "this was changed since it was read: its ETag is %s now; read it "+
			"again, then send the change again", tag)
	}
	return nil
}
