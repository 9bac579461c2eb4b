package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// freeAddress returns an address with a free port.
func freeAddress(t *testing.T) *net.TCPAddr {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }() // free it for the server
	return l.Addr().(*net.TCPAddr)
}

// startNATS starts a NATS server at an address.
func startNATS(t *testing.T, at *net.TCPAddr, user string) {
	t.Helper()
	o := &server.Options{Host: at.IP.String(), Port: at.Port, JetStream: true}
	if user != "" {
		o.Username, o.Password = user, "right"
	}
	storetest.Start(t, o)
}

// config parses args, with a data directory of its own.
func config(t *testing.T, args ...string) *Config {
	t.Helper()
	c, err := ParseConfig(append(args, "--data", filepath.Join(t.TempDir(), "data")))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// waitFor polls url until the response has the status and the text.
func waitFor(ctx context.Context, t *testing.T, url string, status int, text string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var last string
	for {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if a, err := client.Do(r); err != nil {
			last = err.Error()
		} else {
			body, err := io.ReadAll(a.Body)
			_ = a.Body.Close()
			last = a.Status + " " + string(body)
			if err == nil && a.StatusCode == status && strings.Contains(string(body), text) {
				return
			}
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s did not return %d with %s; last: %s", url, status, text, last)
		case <-tick.C:
		}
	}
}

func TestServerWaitsForNATS(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	nats, web := freeAddress(t), freeAddress(t)
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	c := config(t, "--roles", "gateway", "--secrets-plain", "--store", "file://"+t.TempDir(), "--nats",
		"nats://"+nats.String(), "--listen", web.String())
	go func() { ended <- Run(running, c) }()
	base := "http://" + web.String()
	waitFor(ctx, t, base+"/healthz", http.StatusOK, "ok")
	waitFor(ctx, t, base+"/readyz", http.StatusServiceUnavailable, "starting")
	startNATS(t, nats, "")
	waitFor(ctx, t, base+"/readyz", http.StatusServiceUnavailable, "no worker is live")
	waitFor(ctx, t, base+"/healthz", http.StatusOK, "ok")
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

// A wrong --store is reported before a thread or an image needs it.
func TestServerWaitsForItsStore(t *testing.T) {
	server := s3Server(t)
	endpoint, err := server.Endpoint()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	nats, web := freeAddress(t), freeAddress(t)
	startNATS(t, nats, "")
	c := config(t, "--roles", "gateway", "--secrets-plain", "--store",
		strings.Replace(storagetest.StoreURL(endpoint, "p"), "//blobs/", "//later/", 1),
		"--nats", "nats://"+nats.String(), "--listen", web.String())
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- Run(running, c) }()
	waitFor(ctx, t, "http://"+web.String()+"/readyz", http.StatusServiceUnavailable, `"missing":"store"`)
	problems := func() []proto.Problem {
		t.Helper()
		all, err := Processes(ctx, c)
		if err != nil || len(all) != 1 || !slices.Equal(all[0].Roles, []string{"gateway"}) {
			t.Fatalf("the processes are %+v: %v", all, err)
		}
		return all[0].Problems
	}
	if p := problems(); len(p) != 1 || p[0].Need != "store" || !strings.Contains(p[0].Message, "make the bucket later") {
		t.Errorf("the problems are %+v", p)
	}
	if err := os.Mkdir(server.Path("../later"), 0o755); err != nil {
		t.Fatal(err)
	}
	waitFor(ctx, t, "http://"+web.String()+"/readyz", http.StatusServiceUnavailable, "no worker is live")
	if p := problems(); len(p) != 0 {
		t.Errorf("the problems are %+v", p)
	}
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func TestStopWhileWaitingForNATS(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	web := freeAddress(t)
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	c := config(t, "--roles", "gateway", "--secrets-plain", "--store", "file://"+t.TempDir(), "--nats",
		"nats://"+freeAddress(t).String(), "--listen", web.String())
	go func() { ended <- Run(running, c) }()
	waitFor(ctx, t, "http://"+web.String()+"/healthz", http.StatusOK, "ok")
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func TestWrongNATSCredentials(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	nats := freeAddress(t)
	startNATS(t, nats, "bullpen")
	c := config(t, "--roles", "gateway", "--secrets-plain", "--store", "file://"+t.TempDir(), "--nats",
		"nats://"+nats.String(), "--nats-user", "bullpen", "--nats-password", "wrong",
		"--listen", "127.0.0.1:0")
	if err := Run(ctx, c); err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), "credentials") {
		t.Fatalf("Run returned %v", err)
	}
}

// A gateway stores no secrets unencrypted unless it was told to. Other roles store none.
func TestGatewayNeedsSecretsKey(t *testing.T) {
	nats := freeAddress(t) // no server listens there
	for args, want := range map[string]bool{
		"--roles=gateway --nats": false, "--roles=gateway,worker --nats": false,
		"--secrets-plain --roles=gateway --nats": true,
		"--secrets-key=k --roles=gateway --nats": true, "--roles=worker --nats": true,
		"--roles=scheduler,webhook --nats": true, "": true,
	} {
		if strings.HasSuffix(args, "--nats") {
			args += "=nats://" + nats.String() + " --store=file:///s"
		}
		if err := config(t, strings.Fields(args)...).checkSecrets(); (err == nil) != want ||
			!want && !strings.Contains(err.Error(), "--secrets-plain") {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// Processes with different roles must not share a data directory either.
func TestDataDirectoryIsOfOneProcess(t *testing.T) {
	nats := freeAddress(t) // no server listens there
	blobs, data := t.TempDir(), t.TempDir()
	with := func(roles string) *Config {
		c := config(t, "--roles", roles, "--secrets-plain", "--store", "file://"+blobs, "--nats", "nats://"+nats.String(),
			"--listen", "127.0.0.1:0", "--nsjail", "/nonexistent")
		c.Data = data
		return c
	}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	lock, err := natsembed.LockDir(data)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lock.Close(); err != nil {
			t.Error(err)
		}
	})
	all := config(t, "--nsjail", "/nonexistent")
	all.Data = data
	for _, c := range []*Config{with("gateway"), with("worker"), with("scheduler"), with("webhook"), all} {
		t.Run(fmt.Sprint(len(c.Roles), c.Roles[0]), func(t *testing.T) {
			t.Parallel() // each tries for three seconds
			if _, err := open(t.Context(), c, log); err == nil || !strings.Contains(err.Error(), "in use by another bullpen") {
				t.Error(err)
			}
		})
	}
}

func TestFailedStartFreesAddress(t *testing.T) {
	web := freeAddress(t)
	c := config(t, "--nsjail", "/nonexistent/nsjail", "--listen", web.String())
	if err := Run(t.Context(), c); err == nil || !strings.Contains(err.Error(), "nsjail") {
		t.Fatalf("Run returned %v", err)
	}
	l, err := net.Listen("tcp", web.String())
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}

func TestErrorsOfAllParts(t *testing.T) {
	ctx, fail := context.WithCancelCause(t.Context())
	defer fail(nil)
	first, second := errors.New("first"), errors.New("second")
	parts := &group{fail: fail}
	var wait sync.WaitGroup
	parts.start(ctx, &wait, part{"a", func(context.Context) error { return first }})
	parts.start(ctx, &wait, part{"b", func(ctx context.Context) error { <-ctx.Done(); return second }})
	wait.Wait()
	if err := errors.Join(parts.errs...); !errors.Is(err, first) || !errors.Is(err, second) {
		t.Fatal(err)
	}
}
