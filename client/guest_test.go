package client

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/bullpen-run/bullpen/guest/processpb"
)

const (
	sandboxID = "iabcdefghijklmnopqrstuvwxyz"
	atGuest   = "/v1/sandboxes/" + sandboxID + "/guest"
)

// guest is a guest of one process with the id 7.
type guest struct {
	processpb.UnimplementedProcessHandler
	start   func(ctx context.Context, r *connect.Request[processpb.StartRequest], send func(*processpb.ProcessEvent)) error
	connect func(after uint64, send func(*processpb.ProcessEvent)) error
	input   func(data []byte) error // nil data closes it
	signal  func(processpb.Signal)
}

func (g *guest) Start(
	ctx context.Context, r *connect.Request[processpb.StartRequest], out *connect.ServerStream[processpb.StartResponse],
) error {
	return g.start(ctx, r, func(e *processpb.ProcessEvent) { _ = out.Send(&processpb.StartResponse{Event: e}) })
}

func (g *guest) Connect(
	_ context.Context, r *connect.Request[processpb.ConnectRequest],
	out *connect.ServerStream[processpb.ConnectResponse],
) error {
	return g.connect(r.Msg.GetAfterSeq(), func(e *processpb.ProcessEvent) {
		_ = out.Send(&processpb.ConnectResponse{Event: e})
	})
}

func (g *guest) SendInput(
	_ context.Context, r *connect.Request[processpb.SendInputRequest],
) (*connect.Response[processpb.SendInputResponse], error) {
	return connect.NewResponse(&processpb.SendInputResponse{}), g.input(r.Msg.GetInput().GetStdin())
}

func (g *guest) CloseStdin(
	context.Context, *connect.Request[processpb.CloseStdinRequest],
) (*connect.Response[processpb.CloseStdinResponse], error) {
	return connect.NewResponse(&processpb.CloseStdinResponse{}), g.input(nil)
}

func (g *guest) SendSignal(
	_ context.Context, r *connect.Request[processpb.SendSignalRequest],
) (*connect.Response[processpb.SendSignalResponse], error) {
	g.signal(r.Msg.GetSignal())
	return connect.NewResponse(&processpb.SendSignalResponse{}), nil
}

func started() *processpb.ProcessEvent {
	return &processpb.ProcessEvent{Event: &processpb.ProcessEvent_Start{Start: &processpb.ProcessEvent_StartEvent{Pid: 7}}}
}

func stdout(seq uint64, text string) *processpb.ProcessEvent {
	return &processpb.ProcessEvent{Event: &processpb.ProcessEvent_Data{Data: &processpb.ProcessEvent_DataEvent{
		Seq: seq, Output: &processpb.ProcessEvent_DataEvent_Stdout{Stdout: []byte(text)},
	}}}
}

func exited(code int32, status string) *processpb.ProcessEvent {
	return &processpb.ProcessEvent{Event: &processpb.ProcessEvent_End{End: &processpb.ProcessEvent_EndEvent{
		ExitCode: code, Exited: code >= 0, Status: status,
	}}}
}

// serve returns a client of a server with the guest.
func (g *guest) serve(t *testing.T) *Guest {
	t.Helper()
	_, handler := processpb.NewProcessHandler(g)
	server := httptest.NewServer(http.StripPrefix(atGuest, http.HandlerFunc(
		func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "Bearer k" || r.Header.Get("Bullpen-User") != "root" {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			handler.ServeHTTP(w, r)
		})))
	t.Cleanup(server.Close)
	return guestAt(t, server.URL)
}

func guestAt(t *testing.T, url string) *Guest {
	t.Helper()
	transport := http.DefaultTransport.(*http.Transport).Clone()
	t.Cleanup(transport.CloseIdleConnections)
	c, err := New(Config{URL: url, Key: "k", HTTP: &http.Client{Transport: transport}})
	if err != nil {
		t.Fatal(err)
	}
	return c.Guest(sandboxID, "root")
}

// Output continues after a broken connection where it stopped, and says what is lost.
func TestExecResumes(t *testing.T) {
	t.Parallel()
	var connects []uint64
	g := &guest{
		start: func(_ context.Context, r *connect.Request[processpb.StartRequest], send func(*processpb.ProcessEvent)) error {
			p := r.Msg.GetProcess()
			if p.GetCmd() != "a" || strings.Join(p.GetArgs(), " ") != "b c" || p.GetEnvs()["X"] != "1" || p.GetCwd() != "d" ||
				!r.Msg.GetNumbered() || r.Msg.Stdin == nil || r.Msg.GetStdin() || r.Header().Get("Connect-Timeout-Ms") != "60000" {
				t.Errorf("the request is %v with %v", r.Msg, r.Header())
			}
			send(started())
			send(stdout(1, "one\n"))
			send(stdout(2, "two\n"))
			panic(http.ErrAbortHandler)
		},
		connect: func(after uint64, send func(*processpb.ProcessEvent)) error {
			connects = append(connects, after)
			send(started())
			if len(connects) == 1 {
				panic(http.ErrAbortHandler)
			}
			send(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Gap{
				Gap: &processpb.ProcessEvent_GapEvent{First: 3, Last: 4, Total: 18},
			}})
			send(stdout(5, "five\n"))
			send(exited(3, "exit status 3"))
			return nil
		},
	}
	var out bytes.Buffer
	exit, err := g.serve(t).Exec(t.Context(), &Command{
		Args: []string{"a", "b", "c"}, Env: map[string]string{"X": "1"}, Dir: "d", Timeout: time.Minute, Stdout: &out,
	})
	if err != nil || exit != (Exit{Code: 3, Lost: 10}) || out.String() != "one\ntwo\nfive\n" {
		t.Errorf("%+v, %v, output %q", exit, err, &out)
	}
	if len(connects) != 2 || connects[0] != 2 || connects[1] != 2 {
		t.Errorf("connected after %v", connects)
	}
}

// A command with the tag of an earlier one is that one.
func TestExecFindsItsTag(t *testing.T) {
	t.Parallel()
	starts := 0
	g := &guest{
		start: func(_ context.Context, r *connect.Request[processpb.StartRequest], send func(*processpb.ProcessEvent)) error {
			if starts++; r.Msg.GetTag() != "call 1" {
				t.Errorf("the tag is %q", r.Msg.GetTag())
			}
			send(started())
			send(exited(0, "exit status 0"))
			return nil
		},
		connect: func(after uint64, send func(*processpb.ProcessEvent)) error {
			if starts == 0 {
				return connect.NewError(connect.CodeNotFound, errors.New("there is no process with that tag"))
			}
			send(started())
			send(stdout(after+1, "again"))
			send(exited(3, "exit status 3"))
			return nil
		},
	}
	at := g.serve(t)
	for _, want := range []struct {
		code int
		out  string
	}{{0, ""}, {3, "again"}} {
		var out bytes.Buffer
		exit, err := at.Exec(t.Context(), &Command{Args: []string{"a"}, Tag: "call 1", Stdout: &out})
		if err != nil || exit.Code != want.code || out.String() != want.out {
			t.Errorf("%+v, %v, output %q", exit, err, &out)
		}
	}
	if starts != 1 {
		t.Errorf("%d commands were started", starts)
	}
}

// How a command ends is data; that it did not run is an error.
func TestExecEnds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		end  *processpb.ProcessEvent
		err  error
		exit Exit
		code string
	}{
		{name: "exit", end: exited(0, "exit status 0"), exit: Exit{}},
		{name: "signal", end: exited(-1, "signal: killed"), exit: Exit{Code: -1, Signal: 9}},
		{name: "dump", end: exited(-1, "signal: segmentation fault (core dumped)"), exit: Exit{Code: -1, Signal: 11}},
		{name: "number", end: exited(-1, "signal: signal 34"), exit: Exit{Code: -1, Signal: 34}},
		{name: "unknown", end: exited(-1, "gone"), exit: Exit{Code: -1}},
		{
			name: "timeout", err: connect.NewError(connect.CodeDeadlineExceeded, errors.New("late")),
			exit: Exit{Code: -1, TimedOut: true},
		},
		{
			name: "error", err: connect.NewError(connect.CodeInvalidArgument, errors.New("no such program")),
			exit: Exit{Code: -1}, code: "invalid_argument",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := &guest{start: func(
				_ context.Context, _ *connect.Request[processpb.StartRequest], send func(*processpb.ProcessEvent),
			) error {
				if c.code == "" {
					send(started())
				}
				if c.end != nil {
					send(c.end)
				}
				return c.err
			}}
			exit, err := g.serve(t).Exec(t.Context(), &Command{Args: []string{"a"}, Timeout: time.Minute})
			failed, _ := errors.AsType[*GuestError](err)
			if exit != c.exit || (err != nil) != (c.code != "") || failed != nil && failed.Code != c.code {
				t.Errorf("%+v, %v", exit, err)
			}
		})
	}
}

// Who stops waiting ends the command; its last output is delivered.
func TestExecIsInterrupted(t *testing.T) {
	t.Parallel()
	terminated := make(chan struct{})
	var left atomic.Int64 // signals for what the command has left behind
	g := &guest{
		start: func(ctx context.Context, _ *connect.Request[processpb.StartRequest], send func(*processpb.ProcessEvent),
		) error {
			send(started())
			send(stdout(1, "ready\n"))
			select {
			case <-terminated:
			case <-ctx.Done():
				t.Error("the stream was cut")
			}
			send(stdout(2, "bye\n"))
			send(exited(0, "exit status 0"))
			return nil
		},
		signal: func(s processpb.Signal) {
			switch s {
			case processpb.Signal_SIGNAL_SIGTERM:
				close(terminated)
			case processpb.Signal_SIGNAL_SIGKILL:
				left.Add(1)
			}
		},
	}
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	var out bytes.Buffer
	_, err := g.serve(t).Exec(ctx, &Command{Args: []string{"a"}, Stdout: writerFunc(func(p []byte) (int, error) {
		cancel(cause)
		return out.Write(p)
	})})
	if !errors.Is(err, cause) || out.String() != "ready\nbye\n" {
		t.Errorf("%v, output %q", err, &out)
	}
	// So does an output that cannot be written.
	terminated = make(chan struct{})
	_, err = g.serve(t).Exec(t.Context(), &Command{
		Args: []string{"a"}, Stdout: writerFunc(func([]byte) (int, error) { return 0, cause }),
	})
	if !errors.Is(err, cause) {
		t.Error(err)
	}
	if n := left.Load(); n != 2 {
		t.Errorf("what two commands have left behind was killed %d times", n)
	}
}

// Standard input arrives in order, and a command need not read it.
func TestExecSendsInput(t *testing.T) {
	t.Parallel()
	for _, fails := range []bool{false, true} {
		var mu sync.Mutex
		var got bytes.Buffer
		closed := make(chan struct{})
		g := &guest{
			start: func(_ context.Context, r *connect.Request[processpb.StartRequest], send func(*processpb.ProcessEvent),
			) error {
				if !r.Msg.GetStdin() {
					t.Error("the command has no standard input")
				}
				send(started())
				<-closed
				send(exited(0, ""))
				return nil
			},
			input: func(data []byte) error {
				mu.Lock()
				defer mu.Unlock()
				if data == nil || fails {
					close(closed)
				}
				if fails {
					return connect.NewError(connect.CodeFailedPrecondition, errors.New("closed"))
				}
				_, err := got.Write(data)
				return err
			},
		}
		text := strings.Repeat("0123456789", 10_000)
		exit, err := g.serve(t).Exec(t.Context(), &Command{Args: []string{"a"}, Stdin: strings.NewReader(text)})
		mu.Lock()
		if err != nil || exit.Code != 0 || !fails && got.String() != text {
			t.Errorf("%+v, %v, %d bytes", exit, err, got.Len())
		}
		mu.Unlock()
	}
}

// A refusal of the server is the server's error, and the key goes to nobody else.
func TestGuestRefusals(t *testing.T) {
	t.Parallel()
	var elsewhere, asked int
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere++ }))
	defer other.Close()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch path := r.URL.Query().Get("path"); {
		case strings.HasSuffix(r.URL.Path, "/Start") && asked == 0:
			asked++
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, `{"error":"unavailable","message":"later"}`)
		case path == "moved":
			http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
		case path == "missing":
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"code":404,"message":"no such file"}`)
		case path == "file" && r.URL.Query().Get("username") == "root":
			_, _ = io.WriteString(w, "content")
		default:
			w.WriteHeader(http.StatusConflict)
			_, _ = io.WriteString(w, `{"error":"conflict","message":"the sandbox is paused"}`)
		}
	}))
	defer server.Close()
	g, ctx := guestAt(t, server.URL), t.Context()
	var conflict *Error
	if _, err := g.Exec(ctx, &Command{Args: []string{"a"}}); !errors.As(err, &conflict) || conflict.Code != "conflict" {
		t.Errorf("%v", err)
	}
	if asked != 1 {
		t.Error("a request that the server wants again was not sent again")
	}
	for path, code := range map[string]string{"moved": "unknown", "missing": "not_found"} {
		var failed *GuestError
		if err := g.Download(ctx, path, io.Discard); !errors.As(err, &failed) || failed.Code != code {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := g.Upload(ctx, "x", strings.NewReader("x"), 1); !errors.As(err, &conflict) {
		t.Errorf("%v", err)
	}
	var got bytes.Buffer
	if err := g.Download(ctx, "file", &got); err != nil || got.String() != "content" {
		t.Errorf("%v, %q", err, &got)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, other.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := g.HTTP.Do(r); err == nil {
		_ = resp.Body.Close()
		t.Error("a request to another server was sent")
	}
	if elsewhere > 0 {
		t.Error("another server was asked")
	}
}
