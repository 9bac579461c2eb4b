package sessions

import "context"

// Absent is an agent of the Sandbox Agent API that this server lists but cannot run.
type Absent struct{ About Info }

// Info implements [Agent].
func (a *Absent) Info() *Info { return &a.About }

// Start implements [Agent]. It is never called: creating a session with the agent fails.
func (a *Absent) Start(context.Context, *Start) (Conversation, error) {
	return nil, notInstalled(&a.About, a.About.Missing)
}

// AbsentAgents returns the agents of the Sandbox Agent API that this server has no adapter for.
func AbsentAgents() []Agent {
	const missing = "this server cannot run it"
	build := Mode{ID: "build", Name: "Build", Description: "Default build mode"}
	return []Agent{
		&Absent{Info{
			ID: "amp", Installation: Installation{Missing: missing}, Modes: []Mode{build}, PermissionModes: []string{PermissionDefault, PermissionBypass},
			Models: []Model{{ID: "amp-default"}}, DefaultModel: "amp-default",
		}},
	}
}
