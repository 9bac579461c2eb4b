package proto

// Plan is a named set of limits.
type Plan struct {
	Name       string
	Title      string // for messages
	Concurrent int    // executions at once, per organisation
	MaxQueued  int    // async executions waiting, per organisation
	MaxTimeout int    // seconds
	Weight     int    // jobs that are served for each job of an organisation of weight 1, while both wait for slots
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

// PlanByName returns the plan of that name. ok is false if there is none.
func PlanByName(name string) (p Plan, ok bool) {
	for _, p := range Plans() {
		if p.Name == name {
			return p, true
		}
	}
	return Plan{}, false
}
