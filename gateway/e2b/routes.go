package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	maxRefresh = 3600 // seconds
	// A sandbox that starts or stops is waited for, since clients take the answer that it does for a
	// failure.
	settleWait = 30 * time.Second
	settlePoll = 200 * time.Millisecond
)

func (s *Server) get(w http.ResponseWriter, r *web.Request) error {
	x, err := s.sandbox(r)
	if err != nil {
		return err
	}
	form := s.newDetail(x, s.profiles(r).of(x.Profile))
	if !r.Key.Has(proto.ScopeExecute) {
		form.EnvdAccessToken = "" // with which programs can be run
	}
	return web.WriteValue(w, http.StatusOK, form)
}

func (s *Server) kill(w http.ResponseWriter, r *web.Request) error {
	x, err := s.sandbox(r)
	if err != nil {
		return err
	}
	if _, err := s.Sandboxes.Stop(r.Context(), x.ID, proto.SandboxKill, web.CallerOf(r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// settled returns the sandbox in the path of a request when it is neither starting nor stopping. If ending
// is not empty, it is an execution of the sandbox that is stopping although the state may be running.
func (s *Server) settled(r *web.Request, ending proto.TraceID) (*proto.LiveSandbox, error) {
	ctx, cancel := s.Core.Until(r.Context(), time.Now().Add(settleWait))
	defer cancel()
	for {
		x, err := s.sandbox(r)
		if err != nil {
			return nil, err
		}
		running := x.State == proto.SandboxRunning && x.Execution != ending
		if running || !x.State.Active() {
			return x, nil
		}
		select {
		case <-ctx.Done():
			return nil, api.Errorf(api.CodeConflict, "the sandbox is %s; send the request again", x.State)
		case <-time.After(settlePoll):
		}
	}
}

// timeoutRequest asks for another timeout.
type timeoutRequest struct {
	Timeout *int  `json:"timeout"` // seconds from now
	Memory  *bool `json:"memory"`
}

func (t *timeoutRequest) check(least int) error {
	switch {
	case t.Timeout != nil && *t.Timeout < least:
		return proto.FieldErrorf("timeout", "must be a number of seconds, at least %d", least)
	case t.Memory != nil && *t.Memory:
		return errMemory("memory", `on_resume="reboot"`)
	default:
		return nil
	}
}

// connect returns the handler that resumes a paused sandbox, and extends a running one.
func (s *Server) connect(timeout int) web.Handle {
	return func(w http.ResponseWriter, r *web.Request) error {
		request, err := decode(s, w, r, decodeAs[timeoutRequest])
		if err != nil {
			return err
		}
		if err := request.check(1); err != nil {
			return err
		}
		seconds, in := seconds(request.Timeout, timeout)
		for ending := proto.TraceID(""); ; {
			x, err := s.settled(r, ending)
			if err != nil {
				return err
			}
			if x.State == proto.SandboxPaused {
				return s.start(w, r, x.ID, seconds)
			}
			err = s.extendTo(r, x, in)
			if err == nil {
				return web.WriteValue(w, http.StatusOK, s.started(x))
			}
			conflict, ok := errors.AsType[*sandboxes.ConflictError](err)
			if !ok || conflict.State != proto.SandboxStopping {
				return err
			}
			ending = x.Execution
		}
	}
}

func (s *Server) resume(w http.ResponseWriter, r *web.Request) error {
	request, err := decode(s, w, r, decodeAs[timeoutRequest])
	if err != nil {
		return err
	}
	if err := request.check(1); err != nil {
		return err
	}
	x, err := s.sandbox(r)
	if err != nil {
		return err
	}
	timeout, _ := seconds(request.Timeout, timeoutV1)
	return s.start(w, r, x.ID, timeout)
}

// start starts a paused sandbox.
func (s *Server) start(w http.ResponseWriter, r *web.Request, id string, timeout int) error {
	x, err := s.Sandboxes.Resume(r.Context(), r.Info, id, timeout, web.CallerOf(r))
	if err != nil {
		return startError(err)
	}
	return web.WriteValue(w, http.StatusCreated, s.started(x))
}

// extendTo makes a sandbox run for at least so long.
func (s *Server) extendTo(r *web.Request, x *proto.LiveSandbox, in time.Duration) error {
	if x.ExpiresAt.After(time.Now().Add(in)) {
		return nil
	}
	return s.extend(r, x.ID, int(in.Seconds()))
}

func (s *Server) extend(r *web.Request, id string, timeout int) error {
	_, err := s.Sandboxes.Extend(r.Context(), id, &timeout, web.CallerOf(r))
	return startError(err)
}

func (s *Server) setTimeout(w http.ResponseWriter, r *web.Request) error {
	request, err := decode(s, w, r, decodeAs[timeoutRequest])
	if err != nil {
		return err
	}
	if request.Timeout == nil {
		return proto.FieldErrorf("timeout", "must be a number of seconds")
	}
	if err := request.check(0); err != nil {
		return err
	}
	x, err := s.sandbox(r)
	if err != nil {
		return err
	}
	if err := s.extend(r, x.ID, *request.Timeout); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) refresh(w http.ResponseWriter, r *web.Request) error {
	request, err := decode(s, w, r, decodeAs[struct {
		Duration *int `json:"duration"`
	}])
	if err != nil {
		return err
	}
	timeout, in := seconds(request.Duration, timeoutV1)
	if timeout < 0 || timeout > maxRefresh {
		return proto.FieldErrorf("duration", "must be a number of seconds, at most %d", maxRefresh)
	}
	x, err := s.sandbox(r)
	if err != nil {
		return err
	}
	if err := s.extendTo(r, x, in); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// headerPauseMode tells a client that asks for memory by default what a pause has kept.
const headerPauseMode = "Bullpen-Pause-Mode"

func (s *Server) pause(w http.ResponseWriter, r *web.Request) error {
	request, err := decode(s, w, r, decodeAs[struct {
		Memory              *bool `json:"memory"`
		RequireHealthyGuest bool  `json:"requireHealthyGuest"`
	}])
	if err != nil {
		return err
	}
	if request.Memory != nil && *request.Memory && !asksForMemory(r.UserAgent()) {
		return errMemory("memory", `mode="filesystem" (keepMemory: false)`)
	}
	x, err := s.sandbox(r)
	if err != nil {
		return err
	}
	if request.RequireHealthyGuest && x.State == proto.SandboxRunning {
		if err := s.Guests.Ping(r.Context(), x.Org, x.ID); err != nil {
			return errors.Join(api.Unavailable(1, "the sandbox does not answer and was not paused"), err)
		}
	}
	if _, err := s.Sandboxes.Stop(r.Context(), x.ID, proto.SandboxPause, web.CallerOf(r)); err != nil {
		return err
	}
	w.Header().Set(headerPauseMode, filesystemOnly)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) alias(w http.ResponseWriter, r *web.Request) error {
	name := chi.URLParam(r.Request, "name")
	if _, _, err := s.template(r.Context(), &r.Key, name); err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, struct {
		TemplateID string `json:"templateID"`
		Public     bool   `json:"public"`
	}{TemplateID: name})
}

// metrics answers with what the guest of a sandbox measures now. Nothing is measured before.
func (s *Server) metrics(w http.ResponseWriter, r *web.Request) error {
	x, err := s.sandbox(r)
	if err != nil {
		return err
	}
	start, err := unixParam(r, "start")
	if err != nil {
		return err
	}
	end, err := unixParam(r, "end")
	if err != nil {
		return err
	}
	list, now := []metric{}, time.Now()
	if x.State == proto.SandboxRunning && (start == 0 || start <= now.Unix()) && (end == 0 || end >= now.Unix()) {
		measured, err := s.measure(r.Context(), x, now)
		if err != nil {
			return err
		}
		list = append(list, measured)
	}
	return web.WriteValue(w, http.StatusOK, list)
}

// measure asks the guest of a sandbox what it uses.
func (s *Server) measure(ctx context.Context, x *proto.LiveSandbox, now time.Time) (m metric, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "/metrics", http.NoBody)
	if err != nil {
		return m, err
	}
	r.RequestURI = "/metrics"
	answer := &buffer{header: http.Header{}}
	s.Guests.Serve(answer, r, sandboxes.Target{Org: x.Org, ID: x.ID, Path: "/metrics"}, func(cause error) {
		err = cause
	})
	var found struct {
		CPUCount   float64 `json:"cpu_count"`
		CPUUsedPct float64 `json:"cpu_used_pct"`
		MemTotal   int64   `json:"mem_total"`
		MemUsed    int64   `json:"mem_used"`
		MemCache   int64   `json:"mem_cache"`
		DiskTotal  int64   `json:"disk_total"`
		DiskUsed   int64   `json:"disk_used"`
	}
	if err == nil {
		err = json.Unmarshal(answer.body, &found)
	}
	if err != nil {
		return m, errors.Join(api.Unavailable(1, "the sandbox does not answer"), err)
	}
	return metric{
		Timestamp: timeText(now), TimestampUnix: now.Unix(), CPUCount: found.CPUCount, CPUUsedPct: found.CPUUsedPct,
		MemUsed: found.MemUsed, MemTotal: found.MemTotal, MemCache: found.MemCache, DiskUsed: found.DiskUsed,
		DiskTotal: found.DiskTotal,
	}, nil
}

// maxBuffer is the largest answer that a buffer keeps, in bytes.
const maxBuffer = 64 << 10

// buffer keeps the answer of a guest. Whoever runs in the sandbox may have changed it.
type buffer struct {
	header http.Header
	body   []byte
}

func (b *buffer) Header() http.Header { return b.header }
func (b *buffer) WriteHeader(int)     {}

// EnableFullDuplex makes a buffer fit for [sandboxes.Tunnels], which need an answer that may begin before the
// request has ended.
func (b *buffer) EnableFullDuplex() error { return nil }

func (b *buffer) Write(p []byte) (int, error) {
	if len(b.body)+len(p) > maxBuffer {
		return 0, errors.New("the answer of the guest is too large")
	}
	b.body = append(b.body, p...)
	return len(p), nil
}
