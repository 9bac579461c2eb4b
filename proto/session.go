package proto

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"time"
)

// How long a browser stays signed in.
const (
	SessionIdle = 12 * time.Hour     // without a request
	SessionLife = 7 * 24 * time.Hour // at most
)

// MaxSessions is the maximum number of sessions per member or API key. Another one evicts the least
// recently used.
const MaxSessions = 20

// Session is the login of a browser. It acts as a member or as an API key of one organisation.
type Session struct {
	ID  string `json:"id"`
	Org string `json:"org"`
	// KeyID is the id of the member or API key that the session acts for.
	KeyID string `json:"key_id"`
	Name  string `json:"name"` // of the member or of the API key at the login
	// Issuer and Subject identify the person; they are empty for a session of an API key.
	Issuer  string `json:"issuer,omitempty"`
	Subject string `json:"subject,omitempty"`
	// KeyHash is the hash of the API key that created the session, empty for a person. The session
	// ends when that key ends or its secret changes.
	KeyHash   string    `json:"key_hash,omitempty"`
	UserAgent string    `json:"user_agent,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	UsedAt    time.Time `json:"used_at"` // up to a twelfth of SessionIdle too early
}

// ExpiresAt returns when the session ends unless it is used again.
func (s *Session) ExpiresAt() time.Time {
	idle, end := s.UsedAt.Add(SessionIdle), s.CreatedAt.Add(SessionLife)
	if idle.Before(end) {
		return idle
	}
	return end
}

// Of reports whether the session belongs to the member.
func (s *Session) Of(m *Member) bool {
	return s.Subject != "" && s.Issuer == m.Issuer && s.Subject == m.Subject
}

// Expired reports whether the session has expired at a time.
func (s *Session) Expired(now time.Time) bool { return !now.Before(s.ExpiresAt()) }

// Stale reports whether a use of the session at a time should refresh UsedAt.
func (s *Session) Stale(now time.Time) bool { return now.Sub(s.UsedAt) > SessionIdle/12 }

const (
	sessionRandom  = 32 // bytes
	sessionPrefix  = "ses_"
	sessionIDBytes = 20
)

// NewSessionToken returns the secret of a new session: 32 random bytes, and a code that proves to
// processes with the same secret that one of them made the token.
func NewSessionToken(secret *[32]byte) string {
	b := make([]byte, sessionRandom, sessionRandom+sha256.Size)
	_, _ = rand.Read(b) // crypto/rand.Read never returns an error since Go 1.24
	return base64.RawURLEncoding.EncodeToString(append(b, sessionProof(b, secret)...))
}

// CheckSessionToken reports whether NewSessionToken has made a token, also one of a session that has
// ended.
func CheckSessionToken(token string, secret *[32]byte) bool {
	b, err := base64.RawURLEncoding.Strict().DecodeString(token)
	return err == nil && len(b) == sessionRandom+sha256.Size &&
		hmac.Equal(b[sessionRandom:], sessionProof(b[:sessionRandom], secret))
}

func sessionProof(random []byte, secret *[32]byte) []byte {
	mac := hmac.New(sha256.New, secret[:])
	mac.Write(random)
	return mac.Sum(nil)
}

// SessionID returns the id of the session with a token. The token cannot be found from the id.
func SessionID(token string) string {
	hash := sha256.Sum256([]byte(token))
	return sessionPrefix + hex.EncodeToString(hash[:sessionIDBytes])
}
