package api

import (
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// OrgResource are the organisations.
var OrgResource = register(Resource[Org, OrgRequest, OrgRequest]{
	Name: "organisation", Singular: "org", Plural: "orgs", Param: "name", Settings: func(o *Org) OrgRequest {
		settings := o.Request()
		settings.Name = "" // the path has it
		return settings
	},
	ReplaceDoc: "A new plan applies to requests from then on.",
	RemoveDoc: "From then on, all requests of its API keys are refused, and nothing starts for it. Its " +
		"executions are cancelled, then all its data is removed, and finally the organisation itself, which is " +
		"then a 404. This cannot be undone. 409 for the organisation of the API key in use, for that of the " +
		"first API key, and if no global administrator's key without expiry would be left.",
}, func(r *Resource[Org, OrgRequest, OrgRequest]) []Route {
	org := Org{Name: "acme", Title: "Acme Inc.", Plan: "pro", CreatedAt: Time{exampleTime()}}
	deleting := org
	deleting.DeletingAt = &Time{exampleTime().Add(time.Hour)}
	routes := r.routes(org, org.Request(), org.Request(), Orgs{Orgs: []Org{org}},
		"All organisations by name for a global administrator, otherwise that of the API key.")
	remove := &routes[routeRemove]
	remove.ID, remove.Audit, remove.Summary = "deleteOrg", "org.delete", "Delete an organisation with all its data"
	remove.Responses = []Response{{
		Status: http.StatusAccepted, Doc: "The organisation, which is being deleted.", Body: deleting,
	}}
	return append(changedByGlobal(routes), Route{
		Method: http.MethodGet, Path: "/v1/admin/orgs/{name}/data", ID: "getOrgData", Tag: tagAdmin, Scope: proto.ScopeAdmin,
		Global: true, Summary: "List what is stored of an organisation", PathDoc: routes[routeGet].PathDoc,
		Doc: "Counted in the stores themselves. An organisation that does not exist has no data, which proves " +
			"its deletion. The index of executions is the answering gateway's; other gateways follow within 10 s.",
		Responses: ok("How much is stored, by kind.",
			OrgData{
				Org: "acme", Total: 3,
				Data: []proto.StoredData{{Kind: "threads", Count: 1}, {Kind: "files of threads", Count: 2, Bytes: 4096}},
			}),
		Errors: []int{http.StatusBadRequest},
	})
})

// OrgRequest is an organisation to store.
type OrgRequest struct {
	Name      string `json:"name,omitempty" pattern:"^[a-z0-9][a-z0-9_-]{0,62}$" doc:"Required, unless the path has it."`
	Title     string `json:"title,omitempty" maxLength:"128" doc:"A name for people."`
	Plan      string `json:"plan,omitempty" format:"plan" default:"unlimited" doc:"The plan of the organisation."`
	Suspended bool   `json:"suspended,omitempty" doc:"Refuses all requests of the organisation's API keys. Work accepted before continues."`
}

// DecodeOrg decodes and validates an organisation. If name is not empty, the body may omit the name
// and must not give another. Errors are [*proto.FieldError].
func DecodeOrg(name string, body []byte) (proto.Org, error) {
	var r OrgRequest
	if err := decodeFields(&r, body); err != nil {
		return proto.Org{}, err
	}
	if err := nameInPath(&r.Name, name); err != nil {
		return proto.Org{}, err
	}
	if !proto.ValidOrg(r.Name) {
		return proto.Org{}, proto.FieldErrorf(
			"name", "must be 1 to 63 characters of a-z, 0-9, _ and -, the first a letter or digit")
	}
	return proto.Org{Name: r.Name, Title: r.Title, Plan: r.Plan, Suspended: r.Suspended}, proto.CheckTitle(r.Title)
}

// Org is an organisation.
type Org struct {
	Name       string `json:"name"`
	Title      string `json:"title" doc:"A name for people; empty for none."`
	Plan       string `json:"plan" doc:"The plan that limits all its API keys together."`
	Suspended  bool   `json:"suspended" doc:"Whether requests of its API keys are refused."`
	CreatedAt  Time   `json:"created_at"`
	DeletingAt *Time  `json:"deleting_at,omitempty" doc:"When its deletion began. Absent if it is not being deleted."`
}

// OrgData is the stored data of an organisation.
type OrgData struct {
	Org   string             `json:"org"`
	Total int64              `json:"total" minimum:"0" doc:"The sum of all counts: 0 if nothing is stored."`
	Data  []proto.StoredData `json:"data" doc:"Every kind of data, including those without stored data."`
}

// NewOrgData returns the form of what is stored of an organisation.
func NewOrgData(d *proto.OrgData) OrgData {
	answer := OrgData{Org: d.Org, Data: d.Kinds}
	for _, kind := range d.Kinds {
		answer.Total += kind.Count
	}
	return answer
}

// Request returns the stored form of the organisation.
func (o *Org) Request() OrgRequest {
	return OrgRequest{Name: o.Name, Title: o.Title, Plan: o.Plan, Suspended: o.Suspended}
}

// Orgs is the list of organisations.
type Orgs struct {
	Orgs       []Org   `json:"orgs"`
	NextCursor *string `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// NewOrg returns the form of an organisation.
func NewOrg(o *proto.Org) Org {
	org := Org{Name: o.Name, Title: o.Title, Plan: o.Plan, Suspended: o.Suspended, CreatedAt: Time{o.CreatedAt}}
	if o.DeletingAt != nil {
		org.DeletingAt = &Time{*o.DeletingAt}
	}
	return org
}
