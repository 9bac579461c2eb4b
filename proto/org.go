package proto

import (
	"fmt"
	"time"
)

// DefaultOrg is the organisation of the first API key.
const DefaultOrg = "default"

// Org is an organisation. API keys, threads, secrets and all else that a tenant has belong to one.
type Org struct {
	Name  string `json:"name"`
	Title string `json:"title,omitempty"` // for people
	// Plan limits what all API keys of the organisation may do together. A key may only narrow it.
	Plan string `json:"plan"`
	// Suspended makes the API refuse all requests of the organisation's keys. What was accepted
	// before goes on.
	Suspended bool      `json:"suspended,omitempty"`
	CreatedAt time.Time `json:"created_at"`
}

// PlanInUseError is returned if a plan cannot be removed because organisations or keys have it.
type PlanInUseError struct {
	Plan  string
	Users []string // "organisation NAME" and "API key ID"
}

func (e *PlanInUseError) Error() string {
	return fmt.Sprintf("plan %s is that of %s; give them another one first", e.Plan, ListSome(e.Users))
}

// Conflict marks the error as one whose text is for the client.
func (*PlanInUseError) Conflict() {}
