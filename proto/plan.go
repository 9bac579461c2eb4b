package proto

import (
	"math"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxTimeout is the longest timeout of an execution that any plan allows, in seconds.
const MaxTimeout = 86400

// NoLimit means "unlimited" where a number is needed.
const NoLimit = math.MaxInt32

// LimitOf returns a limit of a plan, or [NoLimit] for none.
func LimitOf(n int) int {
	if n == 0 {
		return NoLimit
	}
	return n
}

// UnlimitedPlan is the plan of organisations created without one.
const UnlimitedPlan = "unlimited"

// Plan is a named set of limits that organisations are assigned to. A number that is 0 is no limit.
type Plan struct {
	Name       string `json:"name" pattern:"^[a-z0-9][a-z0-9_-]{0,62}$" doc:"Required, unless the path has it."`
	Title      string `json:"title" maxLength:"128" doc:"The name in messages; by default the name."`
	Concurrent int    `json:"concurrent,omitempty" minimum:"1" maximum:"1000000" doc:"Executions of the organisation that run at once; no limit if absent."`
	MaxQueued  int    `json:"max_queued,omitempty" minimum:"1" maximum:"10000000" doc:"Async executions of the organisation that wait; no limit if absent."`
	Sandboxes  int    `json:"sandboxes,omitempty" minimum:"1" maximum:"1000000" doc:"Live sandboxes of the organisation that are active at once; no limit if absent."`
	MaxTimeout int    `json:"max_timeout,omitempty" minimum:"1" maximum:"86400" doc:"Seconds that an execution may ask for; 86400 if absent."`
	Weight     int    `json:"weight" default:"1" minimum:"1" maximum:"1000" doc:"Share of slots while several organisations wait: this many executions start for each one of an organisation with weight 1."`
	// RequestRate is the number of requests per minute and API key.
	RequestRate int    `json:"request_rate,omitempty" minimum:"1" maximum:"1000000" doc:"Requests that each API key may send in a minute; no limit if absent."`
	Streaming   bool   `json:"streaming" default:"true" doc:"Whether executions may be streamed."`
	Async       bool   `json:"async" default:"true" doc:"Whether executions may be asynchronous."`
	Monthly     Quotas `json:"monthly,omitzero"`
	Next        string `json:"next,omitempty" pattern:"^[a-z0-9][a-z0-9_-]{0,62}$" doc:"The plan that messages suggest when a limit is reached. They do so only with --upgrade-url."`
}

// PresetPlans returns the built-in plans. A stored plan of the same name replaces one of them.
func PresetPlans() []Plan {
	return []Plan{
		{Name: "free", Title: "Free", Concurrent: 5, Sandboxes: 1, MaxTimeout: 60, Weight: 1, Next: "pro"},
		{
			Name: "pro", Title: "Pro", Concurrent: 100, MaxQueued: 1000, Sandboxes: 20, MaxTimeout: 3600, Weight: 4,
			Streaming: true, Async: true, Next: "enterprise",
		},
		{
			Name: "enterprise", Title: "Enterprise", Concurrent: 1000, MaxQueued: 100000, Sandboxes: 200, MaxTimeout: MaxTimeout,
			Weight:    16,
			Streaming: true, Async: true,
		},
		{Name: UnlimitedPlan, Title: "Unlimited", Weight: 16, Streaming: true, Async: true},
	}
}

// PresetPlan returns the built-in plan of that name. ok is false if there is none.
func PresetPlan(name string) (p Plan, ok bool) {
	for _, p := range PresetPlans() {
		if p.Name == name {
			return p, true
		}
	}
	return Plan{}, false
}

// Narrow returns the limits allowed by both plans, with the name, the weight and the monthly quotas
// of p. Usage is counted per organisation, so a key's plan does not limit it.
func (p Plan) Narrow(other Plan) Plan {
	p.Concurrent = narrower(p.Concurrent, other.Concurrent)
	p.MaxQueued = narrower(p.MaxQueued, other.MaxQueued)
	p.Sandboxes = narrower(p.Sandboxes, other.Sandboxes)
	p.MaxTimeout = narrower(p.MaxTimeout, other.MaxTimeout)
	p.RequestRate = narrower(p.RequestRate, other.RequestRate)
	p.Streaming = p.Streaming && other.Streaming
	if p.Async = p.Async && other.Async; !p.Async {
		p.MaxQueued = 0
	}
	return p
}

// narrower returns the lower of two limits; 0 means no limit.
func narrower(a, b int) int {
	if n := min(LimitOf(a), LimitOf(b)); n != NoLimit {
		return n
	}
	return 0
}

// Within reports whether other allows everything that p allows.
func (p Plan) Within(other Plan) bool {
	return p.Narrow(other) == p
}

// Allows reports whether the plan includes a mode of execution.
func (p Plan) Allows(m Mode) bool {
	return m != ModeStreaming && m != ModeAsync || m == ModeStreaming && p.Streaming || m == ModeAsync && p.Async
}

// LongestTimeout returns the longest timeout that the plan allows, in seconds.
func (p Plan) LongestTimeout() int { return min(LimitOf(p.MaxTimeout), MaxTimeout) }

// Validate checks what struct tags cannot express, and returns a [*FieldError].
func (p *Plan) Validate() error {
	if err := CheckPlanName("name", p.Name); err != nil {
		return err
	}
	if p.Next != "" {
		if err := CheckPlanName("next", p.Next); err != nil {
			return err
		}
	}
	if p.MaxQueued != 0 && !p.Async {
		return FieldErrorf("max_queued", "must be left out for a plan without async executions")
	}
	if err := p.Monthly.validate("monthly"); err != nil {
		return err
	}
	return CheckTitle(p.Title)
}

// CheckPlanName checks the form of a plan's name in a field.
func CheckPlanName(field, name string) error {
	if !ValidOrg(name) {
		return FieldErrorf(field, "must be 1 to 63 characters of a-z, 0-9, _ and -, the first a letter or digit")
	}
	return nil
}

// maxTitleLen bounds names for people, in characters.
const maxTitleLen = 128

// CheckTitle checks the field title, a name for people.
func CheckTitle(title string) error {
	if utf8.RuneCountInString(title) > maxTitleLen || strings.ContainsFunc(title, unicode.IsControl) {
		return FieldErrorf("title", "must be at most %d characters without control characters", maxTitleLen)
	}
	return nil
}
