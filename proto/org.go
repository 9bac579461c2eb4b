package proto

import (
	"fmt"
	"time"
)

// DefaultOrg is the organisation of the first API key.
const DefaultOrg = "default"

// Org is an organisation: the tenant that owns API keys, threads, secrets and all else.
type Org struct {
	Name  string `json:"name"`
	Title string `json:"title,omitempty"` // for people
	// Plan limits all API keys of the organisation together. A key may only narrow it.
	Plan string `json:"plan"`
	// Suspended makes the API refuse all requests of the organisation's keys. Accepted work continues.
	Suspended bool      `json:"suspended,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	// DeletingAt is when the deletion of the organisation began; nil if it is not being deleted. The
	// API refuses all requests of its keys from then on, and nothing starts for it. A deletion
	// continues until the organisation is gone.
	DeletingAt *time.Time `json:"deleting_at,omitempty"`
}

// OrgData is the stored data of an organisation, by kind.
type OrgData struct {
	Org   string
	Kinds []StoredData
}

// StoredData is what is stored of one kind.
type StoredData struct {
	Kind  string `json:"kind"`
	Count int64  `json:"count" minimum:"0"`
	Bytes int64  `json:"bytes,omitempty" minimum:"0" doc:"Absent if the store does not say."`
}

// PlanInUseError is returned if a plan cannot be removed because organisations or keys have it.
type PlanInUseError struct {
	Plan  string
	Users []string // "organisation NAME" and "API key ID"
}

func (e *PlanInUseError) Error() string {
	return fmt.Sprintf("plan %s is that of %s; give them another one first", e.Plan, ListSome(e.Users))
}

// Conflict marks the error's text as meant for the client.
func (*PlanInUseError) Conflict() {}
