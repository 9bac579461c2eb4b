package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/guest/cell"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/live"
)

// guestConfig is the configuration of a guest, which package guest defines.
type guestConfig struct {
	Env         map[string]string `json:"env"` // of all processes
	Users       []guestUser       `json:"users"`
	DefaultUser string            `json:"default_user"`
	Dir         string            `json:"dir"` // the working directory of processes
	// HeartbeatTimeout is the age of the worker's heartbeat at which the guest ends.
	HeartbeatTimeout time.Duration `json:"heartbeat_timeout"`
	// LogBytes is how much of what processes print the guest copies to its standard output.
	LogBytes int `json:"log_bytes"`
	// CPU is the sandbox's number of processors. Memory is its memory limit in bytes.
	CPU    float64 `json:"cpu"`
	Memory int64   `json:"memory"`
	// Interpreters are absolute paths by the names of runtimes, and Runners is the directory of the runners of cells.
	Interpreters map[string]string `json:"interpreters,omitempty"`
	Runners      string            `json:"runners"`
	Preload      []string          `json:"preload,omitempty"` // Python modules of contexts
	Masks        []string          `json:"masks,omitempty"`   // secrets that contexts must not print
	Start        int               `json:"start"`             // the number of the sandbox's start
}

// guestUser is a user in a live sandbox.
type guestUser struct {
	Name string `json:"name"`
	UID  int    `json:"uid"`
	GID  int    `json:"gid"`
	Home string `json:"home"`
	// Capable means that the user's processes have the capabilities of the guest.
	Capable bool `json:"capable"`
}

// guestEnv returns the environment of a guest: settings of Go's runtime. Changing them in the running
// program would take a part of the time that it needs to start.
func guestEnv() []string { return []string{"GOMAXPROCS=1", "GOMEMLIMIT=16MiB"} }

// guestProgram returns the part of the program that is the same for all guests.
func guestProgram() jail.Program {
	return jail.Program{Argv: []string{jail.GuestConfig}, Env: guestEnv(), Dir: "/"}
}

// guestFor returns the guest of the job's live sandbox.
func (a *attempt) guestFor(b *sandbox) (jail.Program, error) {
	job := a.job
	env := map[string]string{}
	maps.Copy(env, b.jail.image.Env)
	maps.Copy(env, withSecrets(job, b.secrets))
	if b.injector != nil {
		env = withTrust(env)
	}
	config, err := json.Marshal(guestConfig{
		Env: env, DefaultUser: jail.GuestUser, Dir: proto.SandboxHome,
		HeartbeatTimeout: proto.GuestTimeout, LogBytes: min(job.Sandbox.OutputBytes, proto.MaxSandboxLog),
		CPU: job.Sandbox.CPU, Memory: job.Sandbox.Memory,
		Interpreters: interpreters(b.jail.image), Runners: cell.Dir, Preload: job.Sandbox.Preload, Start: job.Live.Start,
		Masks: visibleSecrets(job, b.secrets),
		Users: []guestUser{
			{jail.GuestUser, jail.ProgramID, jail.ProgramID, proto.SandboxHome, false},
			{"root", 0, 0, "/root", job.Sandbox.RootBytes > 0},
		},
	})
	if err != nil {
		return jail.Program{}, fmt.Errorf("encode the configuration of the guest: %w", err)
	}
	p := guestProgram()
	p.Listener, p.Heartbeat = a.live.Listener, a.live.Heartbeat
	p.Files = []jail.File{{Path: jail.GuestConfig, Mode: 0o600, Owner: jail.OwnerInit, Content: config}}
	p.Files = append(p.Files, secretFiles(job, b.secrets)...)
	if b.injector != nil {
		p.Interception = b.injector.Interception()
		p.Files = append(p.Files, trustFile(a.Roots, b.injector))
	}
	p.CancelGrace = job.CancelGrace()
	return p, nil
}

// interpreters returns the interpreters of an image by the names of runtimes; nil if it is the host's.
func interpreters(img Image) map[string]string {
	if img.Languages == nil {
		return nil
	}
	all := map[string]string{}
	for language, path := range img.Languages {
		all[string(language)] = path
	}
	return all
}

// addLive adds the job's live sandbox, if there is one, to those of this worker.
func (a *attempt) addLive() (err error) {
	if a.job.Live != nil {
		a.live, err = a.Live.Add(a.job.Live)
	}
	return err
}

// liveStop is what ends a guest.
type liveStop struct {
	cancel  chan struct{} // closed when the guest must end
	release func()        // ends the wait, and makes the sandbox unreachable
}

// stopLive returns what ends the guest: a client, or the sandbox itself.
func (a *attempt) stopLive(c *claim) liveStop {
	cancel, over := make(chan struct{}), make(chan struct{})
	var waiting sync.WaitGroup
	waiting.Go(func() {
		select {
		case <-c.cancelled:
			a.live.Cancel()
			close(cancel)
		case <-a.live.Stopped():
			close(cancel)
		case <-over:
		}
	})
	return liveStop{cancel, func() {
		close(over)
		waiting.Wait()
	}}
}

// removeLive makes the job's live sandbox unreachable, if there is one.
func (a *attempt) removeLive(ctx context.Context) {
	if a.live == nil {
		return
	}
	if err := a.live.Remove(); err != nil {
		a.log.ErrorContext(ctx, "socket of a sandbox not removed", "error", err)
	}
}

// liveResult returns the result of a guest that its sandbox has stopped, and r of any other.
func (a *attempt) liveResult(r proto.Result) proto.Result {
	if a.live == nil || r.ErrorCode == nil || proto.ErrorCode(*r.ErrorCode) != proto.CodeCancelled {
		return r
	}
	switch a.live.Why() {
	case live.Expired:
		return proto.Failure(proto.CodeSandboxExpired, "The timeout of the sandbox passed.")
	case live.Idle:
		return proto.Failure(proto.CodeSandboxIdle, "The sandbox was not used for as long as its idle timeout.")
	case live.Drained:
		return proto.Failure(proto.CodeSandboxDrained, "The worker of the sandbox was shut down.")
	default:
		return r
	}
}
