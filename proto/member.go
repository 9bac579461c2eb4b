package proto

import (
	"cmp"
	"strings"
	"time"
)

// Role determines the scopes of a member of an organisation.
type Role string

// The roles, from the least to the most.
const (
	RoleViewer        Role = "viewer"        // see what is there
	RoleOperator      Role = "operator"      // also run programs, and change files
	RoleAdministrator Role = "administrator" // also administer the organisation
)

// Roles returns all roles.
func Roles() []Role { return []Role{RoleViewer, RoleOperator, RoleAdministrator} }

// Scopes returns the scopes of a role, none for an unknown one.
func (r Role) Scopes() []Scope {
	switch r {
	case RoleViewer:
		return []Scope{ScopeRead}
	case RoleOperator:
		return UserScopes()
	case RoleAdministrator:
		return Scopes()
	default:
		return nil
	}
}

// MemberPrefix is the beginning of the ids of members. No id of an API key has it.
const MemberPrefix = "mem_"

// MaxMembers is the largest number of members of an organisation.
const MaxMembers = 1000

// Identity is a person as an identity provider knows it.
type Identity struct {
	Issuer  string // the URL of the provider
	Subject string // never given to another person by the provider
	Email   string // in lower case; empty unless the provider has verified it
}

// Member is a person who may sign in to an organisation.
type Member struct {
	ID  string `json:"id"`
	Org string `json:"org"`
	// Email is the address that identifies the person at the first login, in lower case. It is
	// empty for a member identified by Subject.
	Email string `json:"email,omitempty"`
	// Issuer and Subject identify the person bound to the member at the first login. The binding
	// stays, even if the provider gives the address to another person.
	Issuer    string    `json:"issuer,omitempty"`
	Subject   string    `json:"subject,omitempty"`
	Role      Role      `json:"role"`
	Global    bool      `json:"global,omitempty"` // as of a [Key]
	CreatedAt time.Time `json:"created_at"`
}

// Name returns what the member is called in lists and logs.
func (m *Member) Name() string { return cmp.Or(m.Email, m.Subject) }

// Is reports whether the member is the person with that identity.
func (m *Member) Is(id Identity) bool {
	if m.Subject != "" {
		return m.Subject == id.Subject && (m.Issuer == "" || m.Issuer == id.Issuer)
	}
	return m.Email != "" && m.Email == id.Email
}

// Key returns the key as which the member acts. It has no secret.
func (m *Member) Key() Key {
	return Key{ID: m.ID, Name: m.Name(), Org: m.Org, Scopes: m.Role.Scopes(), Global: m.Global, CreatedAt: m.CreatedAt}
}

// LowerEmail returns an address in the form used for comparison, or "" if it is invalid. Only ASCII
// is accepted: other characters have lookalikes and case-insensitive equivalents.
func LowerEmail(address string) string {
	const maxEmail = 254
	name, host, ok := strings.Cut(address, "@")
	if !ok || name == "" || host == "" || len(address) > maxEmail || strings.Contains(host, "@") {
		return ""
	}
	for i := range len(address) {
		if address[i] <= ' ' || address[i] > '~' {
			return ""
		}
	}
	return strings.ToLower(address)
}

// CheckSubject returns a [FieldError] unless s is a valid subject of an identity provider.
func CheckSubject(s string) error {
	const maxSubject = 255
	if s == "" || len(s) > maxSubject || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return FieldErrorf("subject", "must be 1 to %d printable ASCII characters", maxSubject)
	}
	return nil
}
