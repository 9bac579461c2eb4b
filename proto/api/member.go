package api

import "github.com/bullpen-run/bullpen/proto"

// MemberResource are the members of organisations.
var MemberResource = register(Resource[Member, MemberRequest, MemberSettings]{
	Name: "member", Singular: "member", Plural: "members", Param: "id", OfOrg: true, Settings: (*Member).Settings,
	Columns: []Column[Member]{
		{"ID", func(m *Member) any { return m.ID }},
		{"ORG", func(m *Member) any { return m.Org }},
		{"EMAIL", func(m *Member) any { return m.Email }},
		{"SUBJECT", func(m *Member) any { return m.Subject }},
		{"ROLE", func(m *Member) any {
			if m.Global {
				return "global " + string(m.Role)
			}
			return m.Role
		}},
		{"CREATED", func(m *Member) any { return m.CreatedAt }},
	},
	CreateDoc: "Adds a person who may sign in to the organisation with a browser. The member is the first person to " +
		"sign in with the address, even if the provider later gives it to someone else. What a member runs has the " +
		"default sandbox profile; the administrator of an organisation adds operators and administrators only if an API " +
		"key of the organisation is bound to it.",
	Example:    "bullpen member create --org acme --email ada@example.com --role operator",
	ReplaceDoc: "It applies to requests from then on, also of sessions.",
	RemoveDoc: "The member's sessions end, and nothing starts that the member has scheduled. Running executions " +
		"continue.",
}, func(r *Resource[Member, MemberRequest, MemberSettings]) []Route {
	member := NewMember(&proto.Member{
		ID: "mem_0123456789abcdef01", Org: "acme", Email: "a@example.com", Issuer: "https://id.example.com",
		Subject: "248289761001", Role: proto.RoleViewer, CreatedAt: exampleTime(),
	})
	wanted := MemberRequest{Org: "acme", Email: "a@example.com", MemberSettings: member.Settings()}
	page := Members{Members: []Member{member}}
	routes := r.routes(member, wanted, member.Settings(), page, "The members, the oldest first.")
	routes[routeCreate].Summary = "Add a member to an organisation"
	routes[routeReplace].Summary = "Change the role of a member"
	return routes
})

// MemberSettings are the changeable settings of a member.
type MemberSettings struct {
	Role   proto.Role `json:"role" doc:"The person's rights: a viewer has the scope read, an operator execute, read and files, an administrator all scopes."`
	Global bool       `json:"global,omitempty" default:"false" doc:"The role administrator holds for all organisations and for the server. Only a global administrator gives it."`
}

// Validate checks the values of the fields.
func (m *MemberSettings) Validate() error {
	if m.Role.Scopes() == nil {
		return proto.FieldErrorf("role", "must be viewer, operator or administrator")
	}
	if m.Global && m.Role != proto.RoleAdministrator {
		return proto.FieldErrorf("global", "must be false for another role than administrator")
	}
	return nil
}

// MemberRequest asks for a new member.
type MemberRequest struct {
	Org     string `json:"org" pattern:"^[a-z0-9][a-z0-9_-]{0,62}$" doc:"The organisation. It must exist."`
	Email   string `json:"email,omitempty" maxLength:"254" doc:"The address of the person, which the identity provider must have verified. Either this or subject is required."`
	Subject string `json:"subject,omitempty" maxLength:"255" doc:"The claim sub of the person's id tokens, for providers that do not verify addresses."`

	MemberSettings
}

// Validate checks the values of the fields.
func (m *MemberRequest) Validate() error {
	if !proto.ValidOrg(m.Org) {
		return proto.FieldErrorf("org", "must be 1 to 63 characters of a-z, 0-9, _ and -, the first a letter or digit")
	}
	if (m.Email == "") == (m.Subject == "") {
		return proto.FieldErrorf("email", "or subject must be given, and not both")
	}
	if m.Email != "" && proto.LowerEmail(m.Email) == "" {
		return proto.FieldErrorf("email", "must be an address of ASCII characters, such as a@example.com")
	}
	if m.Subject != "" {
		if err := proto.CheckSubject(m.Subject); err != nil {
			return err
		}
	}
	return m.MemberSettings.Validate()
}

// Member returns the member to create, without its id and its time.
func (m *MemberRequest) Member() proto.Member {
	return proto.Member{Org: m.Org, Email: proto.LowerEmail(m.Email), Subject: m.Subject, Role: m.Role, Global: m.Global}
}

// Member is a person who may sign in to an organisation.
type Member struct {
	ID        string     `json:"id" doc:"Everything the person starts, such as executions, has it as key_id."`
	Org       string     `json:"org"`
	Email     *string    `json:"email" doc:"The address by which the person was added; null if it was by the subject."`
	Subject   *string    `json:"subject" doc:"The person's id at the identity provider; null until the first login."`
	Issuer    *string    `json:"issuer" doc:"The identity provider; null until the first login."`
	Role      proto.Role `json:"role"`
	Global    bool       `json:"global" doc:"The role administrator holds for all organisations and for the server."`
	CreatedAt Time       `json:"created_at"`
}

// Settings returns what an administrator may change of the member.
func (m *Member) Settings() MemberSettings { return MemberSettings{Role: m.Role, Global: m.Global} }

// Members is a list of members.
type Members struct {
	Members    []Member `json:"members"`
	NextCursor *string  `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// NewMember returns the form of a member.
func NewMember(m *proto.Member) Member {
	return Member{
		ID: m.ID, Org: m.Org, Email: optional(m.Email), Subject: optional(m.Subject), Issuer: optional(m.Issuer),
		Role: m.Role, Global: m.Global,
		CreatedAt: Time{m.CreatedAt},
	}
}

// Session is the login of a browser.
type Session struct {
	ID        string `json:"id"`
	Org       string `json:"org"`
	KeyID     string `json:"key_id" doc:"The member, or the API key that the session was made with."`
	Name      string `json:"name" doc:"Of the member or the API key at the login."`
	UserAgent string `json:"user_agent" doc:"What the browser called itself at the login."`
	CreatedAt Time   `json:"created_at"`
	UsedAt    Time   `json:"used_at" doc:"The last use, up to an hour too early."`
	ExpiresAt Time   `json:"expires_at" doc:"The end, without further use."`
}

// Sessions is a list of sessions.
type Sessions struct {
	Sessions   []Session `json:"sessions"`
	NextCursor *string   `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// NewSession returns the form of a session.
func NewSession(s *proto.Session) Session {
	return Session{
		ID: s.ID, Org: s.Org, KeyID: s.KeyID, Name: s.Name, UserAgent: s.UserAgent,
		CreatedAt: Time{s.CreatedAt}, UsedAt: Time{s.UsedAt}, ExpiresAt: Time{s.ExpiresAt()},
	}
}

// Caller is who sends a request, and what it may do.
type Caller struct {
	KeyID   string        `json:"key_id" doc:"The API key or the member."`
	Name    string        `json:"name"`
	Org     string        `json:"org"`
	Scopes  []proto.Scope `json:"scopes"`
	Global  bool          `json:"global" doc:"The scope admin holds for all organisations and for the server."`
	Session *Session      `json:"session" doc:"Null for a request with an API key."`
}

// Login has the ways to sign in.
type Login struct {
	OIDC    bool   `json:"oidc" doc:"The server has an identity provider: open /login in a browser. An API key always works."`
	Version string `json:"version" doc:"The version of the server."`
}

// NewCaller returns the form of who sends a request. session is nil for a request with an API key.
func NewCaller(k *proto.Key, session *proto.Session) Caller {
	c := Caller{KeyID: k.ID, Name: k.Name, Org: k.Org, Scopes: k.Scopes, Global: k.Global}
	if session != nil {
		c.Session = new(NewSession(session))
	}
	return c
}
