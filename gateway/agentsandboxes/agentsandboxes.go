// Package agentsandboxes gives the sessions of coding agents live sandboxes. A sandbox without a network has one way
// out: to this server's model APIs, over connections that its gateway fetches from it.
package agentsandboxes

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

const (
	// openWait is how long Open waits for a worker, or for the end of an earlier sandbox of the session, which is
	// declared lost after a minute.
	openWait = 10 * time.Minute
	// firstPause and maxPause are the pauses between attempts.
	firstPause = 200 * time.Millisecond
	maxPause   = 5 * time.Second
	// extendEvery is how often a sandbox is extended while its session uses it.
	extendEvery = proto.DefaultSandboxTimeout / 3
	// idleTimeout stops a sandbox whose gateway died.
	idleTimeout = time.Minute
	// closeTimeout limits the end of a sandbox. Its home is saved then.
	closeTimeout = 90 * time.Second
)

// Keys knows the API keys of sessions.
type Keys interface {
	// ValidKey returns the API key with an id and its entitlement. The error is final, see [proto.Final], if the
	// key is no longer valid.
	ValidKey(ctx context.Context, id string) (*proto.Key, proto.Entitlement, error)
}

// Sandboxes opens sandboxes. Its fields must be set before use. It is safe for concurrent use.
type Sandboxes struct {
	Live     *sandboxes.Service
	Keys     Keys
	Threads  Threads
	Versions Versions
	// Server answers the requests of programs in sandboxes.
	Server http.Handler
	Log    *slog.Logger
}

// Sandbox is the sandbox of a session. It is safe for concurrent use.
type Sandbox struct {
	sandboxes *Sandboxes
	session   *proto.AgentSession
	live      *proto.LiveSandbox
	caller    proto.Caller
	guest     *client.Guest
	dir       string
	models    *models
	ctx       context.Context // done when the sandbox is closed
	cancel    context.CancelFunc
	work      sync.WaitGroup

	mu      sync.Mutex
	version int64 // of the files, at the last save
}

// Open starts a sandbox for a session, with the program of its agent. It first stops what is left of an earlier one. It
// waits while no worker is free.
func (s *Sandboxes) Open(ctx context.Context, x *proto.AgentSession) (*Sandbox, error) {
	key, entitlement, err := s.Keys.ValidKey(ctx, x.Key)
	if err != nil {
		return nil, err
	}
	b := &Sandbox{
		sandboxes: s, session: x, caller: proto.Caller{Key: key, Entitlement: entitlement},
		dir: dirOf(x),
	}
	b.ctx, b.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := s.retry(ctx, func() error { return b.start(ctx) }); err != nil {
		b.cancel()
		return nil, fmt.Errorf("start the sandbox of session %s: %w", x.ID, err)
	}
	if err := b.prepare(ctx); err != nil {
		b.Close()
		return nil, fmt.Errorf("prepare the sandbox of session %s: %w", x.ID, err)
	}
	b.work.Go(b.extend)
	return b, nil
}

// retry calls f until it succeeds or fails for good.
func (*Sandboxes) retry(ctx context.Context, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, openWait)
	defer cancel()
	for pause := firstPause; ; pause = min(2*pause, maxPause) {
		err := f()
		if err == nil || proto.Final(err) && !passes(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

// passes reports whether a refusal is expected to pass: an earlier sandbox of the session has the home until its end,
// and a session outlives the workers.
func passes(err error) bool {
	_, busy := errors.AsType[*proto.BusyError](err)
	refused, ok := errors.AsType[*proto.Rejection](err)
	return busy || ok && refused.Reason == proto.RejectedNoWorker
}

// active returns the sandboxes of an agent session that have not stopped. The home of the session is a thread.
func (s *Sandboxes) active(org, thread string) []proto.LiveSandbox {
	list, _ := s.Live.Store.Page(org, "", proto.MaxLiveSandboxes, func(x *proto.LiveSandbox) bool {
		return x.AgentSession != "" && x.ThreadID == thread && x.State.Active()
	})
	return list
}

// stop stops the sandboxes of an agent session on behalf of a caller.
func (s *Sandboxes) stop(ctx context.Context, thread string, c proto.Caller) error {
	list := s.active(c.Key.Org, thread)
	for i := range list {
		if _, err := s.Live.Stop(ctx, list[i].ID, proto.SandboxKill, c); err != nil {
			return fmt.Errorf("stop a sandbox of the session: %w", err)
		}
	}
	return nil
}

// Home returns the files of the running sandbox whose home a thread is; nil if there is none.
func (s *Sandboxes) Home(org, thread string) (*sandboxes.Home, error) {
	for _, x := range s.active(org, thread) {
		if x.State == proto.SandboxRunning {
			return s.Live.Home(org, x.ID)
		}
	}
	return nil, nil
}

// Stop stops the sandbox whose home a thread is, if one runs, on behalf of an API key.
func (s *Sandboxes) Stop(ctx context.Context, org, key, thread string) error {
	return s.stop(ctx, thread, proto.Caller{Key: &proto.Key{Org: org, ID: key}})
}

// start stops the session's sandboxes that still run, and starts one.
func (b *Sandbox) start(ctx context.Context) error {
	s, x := b.sandboxes, b.session
	if err := s.stop(ctx, x.ThreadID(), b.caller); err != nil {
		return err
	}
	live := &proto.LiveSandbox{
		ID: proto.NewSandboxID(), Org: x.Org, Key: x.Key, Name: x.Agent, ThreadID: x.ThreadID(), AgentSession: x.LogID(),
		Agent: x.Agent, AgentVersion: x.AgentVersion,
		OnTimeout: proto.SandboxKill, Timeout: proto.Seconds(proto.DefaultSandboxTimeout),
		IdleTimeout: proto.Seconds(idleTimeout),
	}
	b.live = live
	return s.Live.Create(ctx, &web.Info{Key: *b.caller.Key, Plan: b.caller.Entitlement}, live, b.caller)
}

// prepare makes a running sandbox ready for the agent.
func (b *Sandbox) prepare(ctx context.Context) error {
	if err := b.readVersion(ctx); err != nil {
		return err
	}
	var err error
	if b.guest, err = b.sandboxes.Live.Guest(b.live.Org, b.live.ID); err != nil {
		return err
	}
	if b.dir != proto.SandboxHome {
		exit, err := b.guest.Exec(ctx, &client.Command{Args: []string{"mkdir", "-p", "--", b.dir}})
		if err == nil && exit.Code != 0 {
			err = fmt.Errorf("mkdir ended with %d", exit.Code)
		}
		if err != nil {
			return fmt.Errorf("create the directory of the session: %w", err)
		}
	}
	b.models, err = b.openModels(ctx)
	return err
}

// extend extends the sandbox until it is closed.
func (b *Sandbox) extend() {
	tick := time.NewTicker(extendEvery)
	defer tick.Stop()
	for {
		select {
		case <-b.ctx.Done():
			return
		case <-tick.C:
		}
		if _, err := b.sandboxes.Live.Extend(b.ctx, b.live.ID, nil, b.caller); err != nil && b.ctx.Err() == nil {
			b.sandboxes.Log.WarnContext(b.ctx, "sandbox of an agent session not extended", "session", b.session.ID,
				"org", b.session.Org, "sandbox", b.live.ID, "error", err)
		}
	}
}

// Home returns the absolute path of the home directory.
func (*Sandbox) Home() string { return proto.SandboxHome }

// dirOf returns the path of a session's directory. One outside of the home, such as that of a client on another
// machine, stands for the home.
func dirOf(x *proto.AgentSession) string {
	dir := x.Directory
	if !path.IsAbs(dir) {
		dir = path.Join(proto.SandboxHome, dir)
	}
	if dir = path.Clean(dir); strings.HasPrefix(dir, proto.SandboxHome+"/") {
		return dir
	}
	return proto.SandboxHome
}

// Dir returns the absolute path of the session's directory.
func (b *Sandbox) Dir() string { return b.dir }

// Transport returns the transport to a port of the sandbox's loopback interface, whatever the host of a request.
func (b *Sandbox) Transport(port int) http.RoundTripper { return b.sandboxes.transport(b.live, port) }

func (s *Sandboxes) transport(x *proto.LiveSandbox, port int) *sandboxes.Transport {
	return &sandboxes.Transport{Service: s.Live, Org: x.Org, ID: x.ID, Port: port}
}

// Lost returns why the sandbox has ended by itself, in words for users; empty if it has not.
func (b *Sandbox) Lost(ctx context.Context) string {
	if b.ctx.Err() != nil {
		return ""
	}
	x, err := b.sandboxes.Live.Store.Get(ctx, b.live.Org, b.live.ID)
	if err != nil || x.State.Active() && b.sandboxes.Live.Ping(ctx, x.Org, x.ID) == nil {
		return ""
	}
	const again = "the files are as after the last turn; send the message again"
	switch {
	case x.State.Active():
		return "the connection to the sandbox was lost: " + again
	case x.Message != "":
		return "the sandbox has ended: " + x.Message + ": " + again
	default:
		return "the sandbox has ended (" + string(x.Reason) + "): " + again
	}
}

// Close ends all programs, saves the files and stops the sandbox.
func (b *Sandbox) Close() {
	b.cancel()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.ctx), closeTimeout)
	defer cancel()
	_, err := b.sandboxes.Live.Stop(ctx, b.live.ID, proto.SandboxKill, b.caller)
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		b.sandboxes.Log.WarnContext(ctx, "sandbox of an agent session not stopped", "session", b.session.ID,
			"org", b.session.Org, "sandbox", b.live.ID, "error", err)
	}
	b.work.Wait()
}

// newToken returns a random API key for the programs of one sandbox.
func newToken() string { return "sandbox-" + rand.Text() }
