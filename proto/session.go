package proto

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"strings"
	"time"
)

// How long a browser stays signed in.
const (
	SessionIdle = 12 * time.Hour     // without a request
	SessionLife = 7 * 24 * time.Hour // at most
)

// MaxSessions is the largest number of sessions of a member or of an API key. A further one ends the
// one that was not used for the longest time.
const MaxSessions = 20

// Session is the login of a browser. It acts as a member or as an API key of one organisation.
type Session struct {
	ID  string `json:"id"`
	Org string `json:"org"`
	// KeyID is the id of the member or of the API key as which the session acts.
	KeyID string `json:"key_id"`
	Name  string `json:"name"` // of the member or of the API key at the login
	// Issuer and Subject are those of the person, empty with an API key.
	Issuer  string `json:"issuer,omitempty"`
	Subject string `json:"subject,omitempty"`
	// KeyHash is the hash of the API key with which the session was made, empty for a person. The
	// session ends when the API key does, or gets another secret.
	KeyHash   string    `json:"key_hash,omitempty"`
	UserAgent string    `json:"user_agent,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	UsedAt    time.Time `json:"used_at"` // up to a twelfth of SessionIdle too early
}

// ExpiresAt returns when the session ends if it is not used any more.
func (s *Session) ExpiresAt() time.Time {
	idle, end := s.UsedAt.Add(SessionIdle), s.CreatedAt.Add(SessionLife)
	if idle.Before(end) {
		return idle
	}
	return end
}

// Expired reports whether the session has expired at a time.
func (s *Session) Expired(now time.Time) bool { return !now.Before(s.ExpiresAt()) }

// Stale reports whether UsedAt of a session that is used at a time is to be stored again.
func (s *Session) Stale(now time.Time) bool { return now.Sub(s.UsedAt) > SessionIdle/12 }

const (
	sessionPrefix  = "ses_"
	sessionIDBytes = 20
)

// NewSessionToken returns the secret of a new session, 32 random bytes.
func NewSessionToken() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never returns an error since Go 1.24
	return base64.RawURLEncoding.EncodeToString(b[:])
}

// SessionID returns the id of the session with a token. The token cannot be found from the id.
func SessionID(token string) string {
	hash := sha256.Sum256([]byte(token))
	return sessionPrefix + hex.EncodeToString(hash[:sessionIDBytes])
}

// ValidSessionID reports whether s has the form of a session's id.
func ValidSessionID(s string) bool {
	digits, ok := strings.CutPrefix(s, sessionPrefix)
	_, err := hex.DecodeString(digits)
	return ok && err == nil && len(digits) == 2*sessionIDBytes && strings.ToLower(digits) == digits
}
