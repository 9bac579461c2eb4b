package api

import (
	"cmp"

	"github.com/bullpen-run/bullpen/proto"
)

// PlanResource are the plans. The built-in ones can be changed, too.
var PlanResource = register(Resource[proto.Plan, proto.Plan, proto.Plan]{
	Name: "plan", Singular: "plan", Plural: "plans", Param: "name", Settings: same[proto.Plan],
	ReplaceDoc: "It applies to requests from then on. A built-in plan can be changed, too.",
	RemoveDoc: "Removing a changed built-in plan restores its built-in form; an unchanged one is a 404. 409 " +
		"while an organisation or an unrevoked API key uses the plan.",
}, func(r *Resource[proto.Plan, proto.Plan, proto.Plan]) []Route {
	plan, _ := proto.PresetPlan("pro")
	wanted, page := PlanRequest{Plan: plan}, Plans{Plans: []proto.Plan{plan}}
	routes := r.routes(plan, wanted, wanted, page, "The built-in plans, then the others by name.")
	return changedByGlobal(routes)
})

// PlanRequest is a plan to store.
type PlanRequest struct {
	_ struct{} `partial:"true" doc:"null means absent."`

	proto.Plan
}

// Plans is the list of all plans.
type Plans struct {
	Plans      []proto.Plan `json:"plans"`
	NextCursor *string      `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// DecodePlan decodes and validates a plan. If name is not empty, the body may omit the name and must
// not give another. Errors are [*proto.FieldError].
func DecodePlan(name string, body []byte) (proto.Plan, error) {
	var request PlanRequest
	if err := decodeFields(&request, body); err != nil {
		return proto.Plan{}, err
	}
	p := request.Plan
	if err := nameInPath(&p.Name, name); err != nil {
		return p, err
	}
	p.Title = cmp.Or(p.Title, p.Name)
	return p, p.Validate()
}

// nameInPath completes the name in a body by that in the path, and returns an error if they differ.
func nameInPath(inBody *string, inPath string) error {
	if inPath != "" && *inBody != "" && *inBody != inPath {
		return proto.FieldErrorf("name", "must be %s or be left out", inPath)
	}
	*inBody = cmp.Or(*inBody, inPath)
	return nil
}
