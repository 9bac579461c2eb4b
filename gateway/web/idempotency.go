package web

import (
	"net/http"

	"github.com/bullpen-run/bullpen/proto"
)

// IdempotencyKeyOf returns the Idempotency-Key of a request, empty for none.
func IdempotencyKeyOf(h http.Header) (string, error) {
	values := h.Values("Idempotency-Key")
	if len(values) == 0 {
		return "", nil
	}
	if key := values[0]; len(values) == 1 && key != "" && len(key) <= proto.MaxIdempotencyKeyLen && printable(key) {
		return key, nil
	}
	return "", proto.FieldErrorf("Idempotency-Key", "must be one value of 1 to %d printable ASCII characters",
		proto.MaxIdempotencyKeyLen)
}
