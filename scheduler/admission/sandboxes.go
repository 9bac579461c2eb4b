package admission

import (
	"context"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// SandboxWait is how long a live sandbox waits for a worker when it starts.
const SandboxWait = 20 * time.Second

// SandboxJob returns the job that runs the guest of a live sandbox, as its next execution. ticketHash
// is the hash of the ticket with which gateways identify themselves to the worker.
func (a *Admission) SandboxJob(
	ctx context.Context, x *proto.LiveSandbox, c proto.Caller, ticketHash [32]byte,
) (*proto.Job, error) {
	job, err := a.Job(ctx, &api.ExecuteRequest{
		Timeout: int(time.Duration(x.Timeout).Seconds()), ThreadID: x.ThreadID, Metadata: x.Metadata, Env: x.Env,
		MaxAttempts: 1, SubPaths: x.SubPaths, Profile: x.Profile,
	}, c, proto.ModeSandbox, x.Execution, SandboxWait)
	if err != nil {
		return nil, err
	}
	_, job.Container = proto.OwnerContainer.NameOf(x.ThreadID)
	job.KillGrace, job.SandboxID = new(proto.Seconds(proto.SandboxStopGrace)), x.ID
	job.SandboxMemory, job.Agent, job.AgentVersion = job.Sandbox.Memory, x.Agent, x.AgentVersion
	job.Live = &proto.Live{
		Start:   x.Starts,
		Sandbox: x.ID, TicketHash: ticketHash, ExpiresAt: x.ExpiresAt, IdleTimeout: x.IdleTimeout,
	}
	return job, nil
}

// CheckSandboxTimeout rejects a timeout of a live sandbox, in seconds, that the plan does not include.
func (a *Admission) CheckSandboxTimeout(ctx context.Context, e *proto.Entitlement, timeout int) error {
	return a.checkPlan(ctx, e, proto.ModeSandbox, timeout, nil)
}

// CheckKey returns an error if the key with an id may no longer run anything.
func (a *Admission) CheckKey(ctx context.Context, id string) error {
	_, _, err := a.ValidKey(ctx, id)
	return err
}
