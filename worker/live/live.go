// Package live keeps the live sandboxes of a worker: the way to their guests, and when they stop.
//
// A gateway reaches a guest through [Sandboxes.Handler], with the ticket of the sandbox. The guest
// listens on a Unix socket in a directory that only the worker can enter; in its jail nothing has a
// path to it.
package live

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Sandboxes are the live sandboxes of a worker. It is safe for concurrent use.
type Sandboxes struct {
	path      string   // of the directory of the sockets
	dir       *os.File // the same
	heartbeat *heartbeat
	mu        sync.Mutex
	byID      map[string]*Sandbox
	drained   bool
}

// Open creates the directory of the sockets, which only this process uses. It removes what a
// process that was killed has left there.
func Open(path string) (*Sandboxes, error) {
	err := os.RemoveAll(path)
	if err == nil {
		err = os.MkdirAll(path, 0o700)
	}
	var dir *os.File
	if err == nil {
		dir, err = os.Open(path)
	}
	if err != nil {
		return nil, fmt.Errorf("create a directory for the sockets of sandboxes: %w", err)
	}
	heartbeat, err := startHeartbeat()
	if err != nil {
		return nil, errors.Join(err, dir.Close(), os.RemoveAll(path))
	}
	return &Sandboxes{path: path, dir: dir, heartbeat: heartbeat, byID: map[string]*Sandbox{}}, nil
}

// Close removes the directory of the sockets and stops the heartbeat.
func (s *Sandboxes) Close() error {
	return errors.Join(s.dir.Close(), os.RemoveAll(s.path), s.heartbeat.close())
}

// socket returns the path of a sandbox's socket. Paths of sockets are limited to 108 bytes, which
// that of the directory may exceed.
func (s *Sandboxes) socket(id string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", s.dir.Fd(), id)
}

// Drain stops all sandboxes, and those that are added later. Their homes are saved.
func (s *Sandboxes) Drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drained = true
	for _, x := range s.byID {
		x.stop(Drained)
	}
}

// Len returns the number of sandboxes.
func (s *Sandboxes) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byID)
}

// Add adds the sandbox of a job, which a gateway can reach from now on. The caller removes it when
// its guest has ended.
func (s *Sandboxes) Add(job *proto.Live) (*Sandbox, error) {
	path := s.socket(job.Sandbox)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen for the guest of sandbox %s: %w", job.Sandbox, err)
	}
	listener.SetUnlinkOnClose(false)
	file, err := listener.File()
	if err = errors.Join(err, listener.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("listen for the guest of sandbox %s: %w", job.Sandbox, err), os.Remove(path))
	}
	x := &Sandbox{
		Listener: file, Heartbeat: s.heartbeat.file, sandboxes: s, job: *job, path: path, stopped: make(chan struct{}),
		lastUse: time.Now(), aborts: map[*http.Request]context.CancelCauseFunc{},
		transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", path)
			},
			MaxIdleConnsPerHost: maxIdleConns, IdleConnTimeout: idleConnTimeout, DisableCompression: true,
			MaxResponseHeaderBytes: maxHeader,
		},
	}
	x.proxy = newProxy(x)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.byID[job.Sandbox] = x
	x.timer = time.AfterFunc(never, x.check)
	if s.drained {
		x.stop(Drained)
	}
	x.check()
	return x, nil
}

// get returns the sandbox with an id, nil if it is not here.
func (s *Sandboxes) get(id string) *Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byID[id]
}

const never = time.Duration(math.MaxInt64)

// Reason is why a sandbox stops.
type Reason int

// The reasons.
const (
	NotStopped Reason = iota
	Expired           // its timeout has passed
	Idle              // its idle timeout has passed
	Drained           // the worker is shut down
	Cancelled         // a client stopped it
)

// Sandbox is a live sandbox.
type Sandbox struct {
	// Listener is the socket on which the guest listens. Heartbeat is the worker's heartbeat, which
	// all guests share.
	Listener, Heartbeat *os.File

	sandboxes *Sandboxes
	path      string // of the socket
	transport *http.Transport
	proxy     http.Handler
	timer     *time.Timer // calls check
	removed   sync.Once

	mu      sync.Mutex
	job     proto.Live
	save    func(ctx context.Context) proto.SandboxSave
	why     Reason
	stopped chan struct{}                             // closed when why is set
	open    int                                       // requests
	aborts  map[*http.Request]context.CancelCauseFunc // abort the open requests that end at a stop
	lastUse time.Time                                 // when a request ended last
}

// Stopped returns a channel that is closed when the sandbox must stop.
func (x *Sandbox) Stopped() <-chan struct{} { return x.stopped }

// Why returns why the sandbox stops.
func (x *Sandbox) Why() Reason {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.why
}

// Remove makes the sandbox unreachable. It may be called again.
func (x *Sandbox) Remove() (err error) {
	x.removed.Do(func() { err = x.remove() })
	return err
}

func (x *Sandbox) remove() error {
	x.sandboxes.mu.Lock()
	delete(x.sandboxes.byID, x.job.Sandbox)
	x.sandboxes.mu.Unlock()
	x.timer.Stop()
	x.transport.CloseIdleConnections()
	return errors.Join(x.Listener.Close(), os.Remove(x.path))
}

// Cancel stops the sandbox at a client's request.
func (x *Sandbox) Cancel() { x.stop(Cancelled) }

// OnSave sets the function that saves the home of the running sandbox, nil for none. It may be called
// concurrently. Its context is done when the sandbox stops.
func (x *Sandbox) OnSave(save func(ctx context.Context) proto.SandboxSave) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.save = save
}

// saver returns the function that saves the home, nil if the sandbox does not run.
func (x *Sandbox) saver() func(ctx context.Context) proto.SandboxSave {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.save
}

// stop stops the sandbox, unless it is already stopping. It first aborts the requests that end at a
// stop, so their clients see nothing that happens in the sandbox afterwards.
func (x *Sandbox) stop(why Reason) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.why == NotStopped {
		x.why = why
		for _, abort := range x.aborts {
			abort(errStopped)
		}
		close(x.stopped)
	}
}

// extend sets when the timeout passes.
func (x *Sandbox) extend(at time.Time) {
	x.mu.Lock()
	x.job.ExpiresAt = at
	x.mu.Unlock()
	x.check()
}

// check stops the sandbox if one of its timeouts has passed, and otherwise sets the next check.
func (x *Sandbox) check() {
	x.mu.Lock()
	now, next, why := time.Now(), x.job.ExpiresAt, Expired
	if idle := time.Duration(x.job.IdleTimeout); idle > 0 && x.open == 0 {
		if at := x.lastUse.Add(idle); at.Before(next) {
			next, why = at, Idle
		}
	}
	x.mu.Unlock()
	if !now.Before(next) {
		x.stop(why)
		return
	}
	x.timer.Reset(next.Sub(now))
}

var (
	errStopped = errors.New("the sandbox has stopped")
	errTooMany = errors.New("too many requests are open")
)

// beginRequest registers a request to the guest. If abort is not nil, it is called when the sandbox
// stops. The caller must call done when the request has ended. The error is errStopped or
// errTooMany.
func (x *Sandbox) beginRequest(r *http.Request, abort context.CancelCauseFunc) (done func(), err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.why != NotStopped:
		return nil, errStopped
	case x.open >= maxOpen:
		return nil, errTooMany
	}
	x.open++
	if abort != nil {
		x.aborts[r] = abort
	}
	return func() {
		x.mu.Lock()
		x.open--
		delete(x.aborts, r)
		x.lastUse = time.Now()
		last := x.open == 0 && x.job.IdleTimeout > 0
		x.mu.Unlock()
		if last {
			x.check()
		}
	}, nil
}
