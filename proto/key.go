package proto

import (
	"cmp"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"time"
)

// Scope is something that an API key may do.
type Scope string

// The scopes. Each is for objects of the key's organisation alone.
const (
	ScopeExecute Scope = "execute" // run programs, and end them
	ScopeRead    Scope = "read"    // see executions, threads, batches, schedules, pipelines and the queue
	ScopeFiles   Scope = "files"   // read and change the content of threads
	ScopeAdmin   Scope = "admin"   // administer the organisation
)

// Scopes returns all scopes.
func Scopes() []Scope { return []Scope{ScopeExecute, ScopeRead, ScopeFiles, ScopeAdmin} }

// UserScopes returns the scopes of a key that administers nothing.
func UserScopes() []Scope { return []Scope{ScopeExecute, ScopeRead, ScopeFiles} }

// Key is a stored API key. The key itself is never stored, only a keyed hash of it.
type Key struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	Org  string `json:"org"`
	// Plan further limits this key, in addition to the organisation's plan; it may be empty.
	Plan   string  `json:"plan,omitempty"`
	Scopes []Scope `json:"scopes"`
	// Global makes the scope admin one for all organisations and for the server itself.
	Global  bool   `json:"global,omitempty"`
	Profile string `json:"profile,omitempty"` // the name of its sandbox profile; empty for the default one
	// Profiles are the names of further sandbox profiles that requests with the key may choose.
	Profiles []string `json:"profiles,omitempty"`
	// Format is the form of its secret.
	Format KeyFormat `json:"format,omitempty"`
	// Concurrent is how many executions may run at once with this key, MaxTimeout their longest
	// timeout in seconds; 0 for the limits of the plans alone.
	Concurrent int `json:"concurrent,omitempty"`
	MaxTimeout int `json:"max_timeout,omitempty"`
	// RequestRate is how many requests per minute the key may send; 0 for the limits of the plans
	// alone.
	RequestRate int `json:"request_rate,omitempty"`
	// Env are variables of every program. They override the profile's, and the request's override them.
	Env map[string]string `json:"env,omitempty"`
	// AllowedNetworks are the allowed source networks of requests with the key; empty for any.
	AllowedNetworks []netip.Prefix `json:"allowed_networks,omitempty"`
	Secrets         []string       `json:"secrets,omitempty"` // as in a [Profile], over its own
	Mounts          []KeyMount     `json:"mounts,omitempty"`  // what programs see in [MountsDir]
	Hint            string         `json:"hint"`              // the key's first and last few characters
	CreatedAt       time.Time      `json:"created_at"`
	ExpiresAt       *time.Time     `json:"expires_at,omitempty"` // nil for never
	RevokedAt       *time.Time     `json:"revoked_at"`
	// OverlapUntil is when the secret before the last rotation stops working; nil if there was none.
	OverlapUntil *time.Time `json:"overlap_until,omitempty"`
}

// Valid reports whether the key may be used at a time: it is neither revoked nor expired.
func (k *Key) Valid(now time.Time) bool { return k.RevokedAt == nil && !k.Expired(now) }

// Expired reports whether the key has expired at a time.
func (k *Key) Expired(now time.Time) bool { return k.ExpiresAt != nil && !now.Before(*k.ExpiresAt) }

// AllowedFrom reports whether requests with the key may come from an address.
func (k *Key) AllowedFrom(addr netip.Addr) bool {
	return len(k.AllowedNetworks) == 0 ||
		slices.ContainsFunc(k.AllowedNetworks, func(p netip.Prefix) bool { return p.Contains(addr.Unmap().WithZone("")) })
}

// AllowedProfiles returns the names of the sandbox profiles that requests with the key may choose,
// each once, the key's own first.
func (k *Key) AllowedProfiles() []string {
	allowed := []string{cmp.Or(k.Profile, DefaultProfileName)}
	for _, name := range k.Profiles {
		if !slices.Contains(allowed, name) {
			allowed = append(allowed, name)
		}
	}
	return allowed
}

// ParseNetwork parses a prefix such as 192.0.2.0/24, or a single address. A prefix of IPv4-mapped
// IPv6 addresses becomes an IPv4 prefix. Its errors end the sentence "FIELD must …".
func ParseNetwork(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		addr, errAddr := netip.ParseAddr(text)
		if errAddr != nil || addr.Zone() != "" {
			return p, errors.New("be a prefix of IP addresses such as 192.0.2.0/24 or 2001:db8::/32, or a single address")
		}
		p = netip.PrefixFrom(addr, addr.BitLen())
	}
	const mapped = 96 // bits of the prefix ::ffff:0:0
	if p.Addr().Is4In6() && p.Bits() >= mapped {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-mapped)
	}
	if p != p.Masked() {
		return p, fmt.Errorf("have no bits beyond its length: write %s, or a longer prefix", p.Masked())
	}
	return p, nil
}

// Has reports whether the key has a scope.
func (k *Key) Has(s Scope) bool { return slices.Contains(k.Scopes, s) }

// GlobalAdmin reports whether the key administers all organisations and the server.
func (k *Key) GlobalAdmin() bool { return k.Global && k.Has(ScopeAdmin) }

var (
	keyPattern = regexp.MustCompile(`^(sk-[a-z0-9]+-[A-Za-z0-9_-]{20,}|e2b_[0-9a-f]{40,})$`)
	orgPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]*$`)
)

// MaxKeyBytes is the largest size of an API key.
const MaxKeyBytes = 512

// ErrBadKeyForm is returned for a string that does not have the form of an API key.
var ErrBadKeyForm = errors.New(
	"an API key is sk-<region>-<token>: region of a-z 0-9, token of at least 20 characters of A-Z a-z 0-9 _ -; " +
		"or e2b_ and at least 40 characters of 0-9 a-f")

// CheckKeyForm returns [ErrBadKeyForm] unless s has the form of an API key.
func CheckKeyForm(s string) error {
	if len(s) > MaxKeyBytes || !keyPattern.MatchString(s) {
		return ErrBadKeyForm
	}
	return nil
}

// KeyFormat is the form of an API key.
type KeyFormat string

// KeyFormatE2B is e2b_ and hexadecimal digits, the only form that some versions of E2B's clients accept.
// The zero value is this server's own form.
const KeyFormatE2B KeyFormat = "e2b"

// NewSecret returns a new API key of the format with 32 random bytes, as [NewKeySecret] does.
func (f KeyFormat) NewSecret(region string) string {
	if f != KeyFormatE2B {
		return NewKeySecret(region)
	}
	var b [32]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never returns an error since Go 1.24
	return "e2b_" + hex.EncodeToString(b[:])
}

// NewKeySecret returns a new API key with 32 random bytes for a region such as "local".
func NewKeySecret(region string) string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never returns an error since Go 1.24
	return "sk-" + region + "-" + base64.RawURLEncoding.EncodeToString(b[:])
}

// KeyHint returns the displayable part of an API key: enough to recognise the key, too little to
// use or guess it.
func KeyHint(secret string) string {
	const head, tail = 12, 4
	if len(secret) < 20+head {
		return secret[:6] + "…"
	}
	return secret[:head] + "…" + secret[len(secret)-tail:]
}

// ValidOrg reports whether s may name an organisation. The form is narrow because the name is part
// of queue subjects.
func ValidOrg(s string) bool { return len(s) <= maxName && orgPattern.MatchString(s) }
