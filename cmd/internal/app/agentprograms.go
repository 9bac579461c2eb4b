package app

import (
	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/worker/agents"
)

// openAgents reads the operator's directory with the programs of agents, and logs what is there and what
// cannot be used. node means that sandboxes without an image have Node.js.
func (r *workerRole) openAgents(node bool) *agents.Directory {
	if r.cfg.Agents == "" {
		return new(agents.Directory)
	}
	d, problems, err := agents.Open(r.cfg.Agents)
	if err != nil {
		r.logMissing("agents", err)
		return new(agents.Directory)
	}
	for _, p := range problems {
		r.logMissing(queue.CapabilityAgent(p.Agent, p.Version), p.Err)
	}
	for agent, versions := range d.Versions() {
		r.log.Info("agent found", "agent", agent, "versions", versions)
		if program, _ := proto.FindAgentProgram(agent); program.Node && !node {
			r.log.Warn("agent needs Node.js, which this machine lacks: its sandboxes need an image with it", "agent", agent)
		}
	}
	return d
}

// installed returns a function that describes the program of an agent, as workers announce it.
func (s *system) installed(agent string) func() sessions.Installation {
	return func() sessions.Installation {
		x := sessions.Installation{Versions: s.offers.AgentVersions(agent), Dir: proto.AgentDir(agent)}
		if len(x.Versions) == 0 {
			x.Missing = "no worker for live sandboxes has its program; install it with bullpen agent install " + agent +
				" --dir DIR and start the workers with --agents DIR"
			return x
		}
		x.Version = x.Versions[0]
		return x
	}
}
