// Package answer writes answers of the guest's plain HTTP routes.
package answer

import (
	"encoding/json"
	"net/http"
)

// JSON writes a value.
func JSON(w http.ResponseWriter, code int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		b, code = []byte(`{"code":500,"message":"the answer cannot be encoded"}`), http.StatusInternalServerError
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(append(b, '\n'))
}

// Error writes an error.
func Error(w http.ResponseWriter, code int, message string) {
	JSON(w, code, struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{code, message})
}
