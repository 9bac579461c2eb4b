package e2b

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Tokens makes the tokens of sandboxes from a key that all gateways have. They depend on the id alone, so that
// they stay the same when a sandbox is paused and resumed.
type Tokens struct{ Key *[32]byte }

// The purposes of tokens.
const (
	accessPurpose  = "access"  // to everything in the sandbox
	trafficPurpose = "traffic" // to its ports
)

func (t Tokens) of(purpose, id string) string {
	mac := hmac.New(sha256.New, t.Key[:])
	mac.Write([]byte(purpose + "\x00" + id))
	return hex.EncodeToString(mac.Sum(nil))
}

// Access returns the token for the guest of a sandbox.
func (t Tokens) Access(id string) string { return t.of(accessPurpose, id) }

// Traffic returns the token for the ports of a sandbox.
func (t Tokens) Traffic(id string) string { return t.of(trafficPurpose, id) }

// matches reports whether a given text is the expected one, in time independent of both.
func matches(given, expected string) bool {
	return subtle.ConstantTimeCompare([]byte(given), []byte(expected)) == 1
}

// The operations that a signature allows.
const (
	signedRead  = "read"
	signedWrite = "write"
)

// signature is what a signed URL for a file has instead of a token.
type signature int

// The results of a check of a signature.
const (
	unsigned signature = iota
	signed
	expiredSignature
)

// checkSignature checks the signature of a request for a file. Repeated parameters are refused, since the
// guest might read another one than was signed.
func (t Tokens) checkSignature(id, operation string, query url.Values, now time.Time) signature {
	for _, name := range []string{"path", "username", "signature", "signature_expiration"} {
		if len(query[name]) > 1 {
			return unsigned
		}
	}
	given := query.Get("signature")
	if given == "" {
		return unsigned
	}
	parts := []string{query.Get("path"), operation, query.Get("username"), t.Access(id)}
	expires := int64(0)
	if query.Has("signature_expiration") {
		var err error
		if expires, err = strconv.ParseInt(query.Get("signature_expiration"), 10, 64); err != nil {
			return unsigned
		}
		parts = append(parts, strconv.FormatInt(expires, 10))
	}
	sum := sha256.Sum256([]byte(strings.Join(parts, ":")))
	switch {
	case !matches(given, "v1_"+base64.RawStdEncoding.EncodeToString(sum[:])):
		return unsigned
	case query.Has("signature_expiration") && now.Unix() > expires:
		return expiredSignature
	default:
		return signed
	}
}
