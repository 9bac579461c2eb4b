package web

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"strings"
	"time"
)

// URLLife is how long a signed URL accepts new requests.
const URLLife = 15 * time.Minute

// SignedText returns text and its signature for a URL.
func SignedText(secret [32]byte, text string) string {
	encode := base64.RawURLEncoding.EncodeToString
	return encode([]byte(text)) + "." + encode(Signature(secret, text))
}

// VerifyText returns the text in a result of SignedText. ok is false for other tokens.
func VerifyText(secret [32]byte, token string) (text string, ok bool) {
	body, sum, _ := strings.Cut(token, ".")
	decode := base64.RawURLEncoding.Strict().DecodeString
	raw, err := decode(body)
	if err != nil {
		return "", false
	}
	mac, err := decode(sum)
	return string(raw), err == nil && hmac.Equal(mac, Signature(secret, string(raw)))
}

// Signature returns the signature of a text.
func Signature(secret [32]byte, text string) []byte {
	mac := hmac.New(sha256.New, secret[:])
	_, _ = mac.Write([]byte(text)) // never an error
	return mac.Sum(nil)
}
