package api

import (
	"cmp"

	"github.com/bullpen-run/bullpen/proto"
)

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
