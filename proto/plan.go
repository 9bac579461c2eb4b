package proto

// Plan is a named set of limits.
type Plan struct {
	Name       string
	Title      string // as written to people
	Concurrent int    // executions at once, per organisation
	MaxQueued  int    // async executions waiting, per organisation
	MaxTimeout int    // seconds
	Weight     int    // while organisations wait for slots, how many jobs of one are served for one of an organisation of weight 1
	Streaming  bool
	Async      bool
	Next       string // the plan to upgrade to; empty for the highest
}

// Plans lists the built-in plans from the smallest to the largest.
func Plans() []Plan {
	return []Plan{
		{Name: "free", Title: "Free", Concurrent: 5, MaxQueued: 0, MaxTimeout: 60, Weight: 1, Next: "pro"},
		{Name: "pro", Title: "Pro", Concurrent: 100, MaxQueued: 1000, MaxTimeout: 3600, Weight: 4, Streaming: true, Async: true, Next: "enterprise"},
		{Name: "enterprise", Title: "Enterprise", Concurrent: 1000, MaxQueued: 100000, MaxTimeout: 86400, Weight: 16, Streaming: true, Async: true},
	}
}

// PlanByName finds a plan; ok is false where there is none of that name.
func PlanByName(name string) (p Plan, ok bool) {
	for _, p := range Plans() {
		if p.Name == name {
			return p, true
		}
	}
	return Plan{}, false
}
