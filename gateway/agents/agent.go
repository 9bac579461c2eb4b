package agents

import (
	"context"
	"errors"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/gateway/executions"
	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/interpreters"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Keys knows what API keys may do.
type Keys interface {
	// ValidKey returns the API key for work without a request, with its entitlement.
	ValidKey(ctx context.Context, id string) (*proto.Key, proto.Entitlement, error)
	// CheckMode rejects a mode that the plan does not include.
	CheckMode(ctx context.Context, e *proto.Entitlement, mode proto.Mode) error
	// CheckQuota rejects a use if the organisation has reached a hard limit this month: of the
	// named quotas, or of any if none are named.
	CheckQuota(ctx context.Context, org string, quotas ...proto.QuotaName) error
	// ProfileOf returns the sandbox profile that a key is bound to.
	ProfileOf(ctx context.Context, key *proto.Key) (proto.Profile, error)
}

// Maker makes the agents of requests and of runs in the background.
type Maker struct {
	*executions.Runner
	Opener   *filestore.Opener
	Keys     Keys
	Threads  Threads
	Versions Versions
	Homes    Homes
	Files    Files
	Batches  Batches // of requests to agents
	// Interpreters keep their state between calls.
	Interpreters *interpreters.Service
	Uploads      Uploads
	// Spool returns an empty file that is removed when closed.
	Spool func() (*os.File, error)
}

// Agent does an agent's work for one request of a surface, or for a background run, with the rights
// and limits of an API key. All errors are [*api.Error]; those of this server are logged with the
// request.
type Agent struct {
	m *Maker
	i *web.Info
	r *web.Request // nil in the background
	// resumed is set in the background if another process may have submitted an execution.
	resumed bool
	// end ends a run in the background, with an error for its client.
	end      context.CancelCauseFunc
	watching sync.WaitGroup // of the key of a run in the background
}

// ForRequest returns the agent of a request of a [web.Surface].
func (m *Maker) ForRequest(r *http.Request) *Agent {
	request := web.RequestOf(r)
	return &Agent{m: m, i: request.Info, r: request}
}

// checkKeyEvery is how often a background run looks its API key up.
const checkKeyEvery = time.Second

// InBackground returns the agent of a run in the background. Until Begin it can only reserve memory.
// Release must be called at the end.
func (m *Maker) InBackground(org, id string) *Agent {
	return &Agent{m: m, i: &web.Info{RequestID: id, Key: proto.Key{Org: org}}, end: func(error) {}}
}

// Begin returns the context for a background run's use of the agent. When the API key may no longer
// run programs, the context is done, with the error for the client as its cause. resumed is set if
// the run has begun before.
func (a *Agent) Begin(ctx context.Context, run *proto.AgentRun, resumed bool) (context.Context, error) {
	key, plan, err := a.m.Keys.ValidKey(ctx, run.Key)
	if err != nil {
		return nil, a.public(err)
	}
	a.i.Key, a.i.Plan, a.resumed = *key, plan, resumed
	ctx, a.end = context.WithCancelCause(ctx)
	a.watching.Go(func() {
		tick := time.NewTicker(checkKeyEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				_, _, _ = a.validKey(ctx)
			}
		}
	})
	return ctx, nil
}

// Release ends a background run's use of the agent, and releases its memory.
func (a *Agent) Release() {
	a.end(nil)
	a.watching.Wait()
	a.m.Shrink(a.i, 0)
}

// validKey returns the current API key of a background run. It ends the run if the key may no
// longer run programs.
func (a *Agent) validKey(ctx context.Context) (*proto.Key, proto.Entitlement, error) {
	key, plan, err := a.m.Keys.ValidKey(ctx, a.i.Key.ID)
	if proto.Final(err) {
		a.end(api.NewError(err))
	}
	return key, plan, err
}

// over reports whether the run of a context has ended, and not only its process.
func over(ctx context.Context) bool {
	_, ended := errors.AsType[*api.Error](context.Cause(ctx))
	return ended || errors.Is(context.Cause(ctx), proto.ErrRunCancelled)
}

func (a *Agent) org() string { return a.i.Key.Org }

// Caller returns the organisation and the id of the API key.
func (a *Agent) Caller() (org, key string) { return a.i.Key.Org, a.i.Key.ID }

// public returns the error for the client, and records err for the log.
func (a *Agent) public(err error) error {
	if err == nil {
		return nil
	}
	a.i.Err, a.i.Reported = err, true
	known := api.NewError(err)
	if _, busy := errors.AsType[*proto.BusyError](err); busy { // worded for clients that only know containers
		known = api.Errorf(api.CodeConflict,
			"the container is in use by another request; try again when that has ended, or use another container")
	}
	if a.r == nil && known.Code == api.CodeInternal && !errors.Is(err, context.Canceled) {
		a.m.Log.Warn("agent call failed", "run", a.i.RequestID, "org", a.org(), "error", err)
	}
	return known
}

// AllowStored refuses a run to be stored if there is no room for it, and a background run if the
// plan has no asynchronous executions.
func (a *Agent) AllowStored(ctx context.Context, background bool) error {
	if err := a.m.CheckDisk(); err != nil {
		return err
	}
	if background {
		if err := a.m.Keys.CheckMode(ctx, &a.i.Plan, proto.ModeAsync); err != nil {
			return a.public(err)
		}
	}
	return a.public(a.m.Keys.CheckQuota(ctx, a.org(), proto.QuotaStored))
}

// RequestID returns the id of the request.
func (a *Agent) RequestID() string { return a.i.RequestID }

// ReadBody reads the body of the request and calls decode with it. Large bodies of one organisation
// are decoded one after another.
func (a *Agent) ReadBody(w http.ResponseWriter, decode func(body []byte) error) error {
	var malformed error
	err := a.m.WithBody(w, a.r, func(body []byte) error {
		if err := a.m.ReserveMessage(a.i, body); err != nil {
			return err
		}
		malformed = decode(body)
		return nil
	})
	if err != nil {
		return a.public(err)
	}
	return malformed
}

// Reserve reserves memory for n bytes of text until the request ends.
func (a *Agent) Reserve(n int64) error {
	if !a.m.ReserveText(a.i, n) {
		return a.public(web.ErrOverloaded)
	}
	return nil
}

// Profile returns the sandbox profile of the API key.
func (a *Agent) Profile(ctx context.Context) (proto.Profile, error) {
	profile, err := a.m.Keys.ProfileOf(ctx, &a.i.Key)
	return profile, a.public(err)
}
