package app

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"
)

// serveRole runs a process with a role on a NATS server of its own until the end of the test, and returns
// the address of its API. args are further settings.
func serveRole(ctx context.Context, t *testing.T, role string, args ...string) (web string) {
	t.Helper()
	nats, address := freeAddress(t), freeAddress(t)
	startNATS(t, nats, "")
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	c := config(t, append([]string{
		"--roles", role, "--secrets-plain", "--store", "file://" + t.TempDir(), "--nats", "nats://" + nats.String(),
		"--listen", address.String(),
	}, args...)...)
	go func() { ended <- Run(running, c) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return "http://" + address.String()
}

// Metrics that have an address of their own are not served at that of the API, with and without a gateway.
func TestMetricsAddress(t *testing.T) {
	for _, role := range []string{"gateway", "webhook"} {
		t.Run(role, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
			t.Cleanup(cancel)
			metrics := freeAddress(t)
			web := serveRole(ctx, t, role, "--metrics-listen", metrics.String())
			waitFor(ctx, t, "http://"+metrics.String()+"/metrics", http.StatusOK, "bullpen_build_info")
			waitFor(ctx, t, "http://"+metrics.String()+"/healthz", http.StatusNotFound, "")
			waitFor(ctx, t, web+"/healthz", http.StatusOK, "ok")
			waitFor(ctx, t, web+"/metrics", http.StatusNotFound, "")
		})
	}
}

// Profiles are not served at the address of the API.
func TestProfiles(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	t.Cleanup(cancel)
	profiles := freeAddress(t)
	web := serveRole(ctx, t, "gateway", "--profile-listen", profiles.String())
	waitFor(ctx, t, web+"/readyz", http.StatusServiceUnavailable, "no worker is live")
	waitFor(ctx, t, web+"/debug/pprof/goroutine?debug=1", http.StatusNotFound, "")
	waitFor(ctx, t, "http://"+profiles.String()+"/debug/pprof/goroutine?debug=1", http.StatusOK, "(*Dispatcher).Run")
	waitFor(ctx, t, "http://"+profiles.String()+"/debug/pprof/allocs?debug=1", http.StatusOK, "TotalAlloc")
	waitFor(ctx, t, "http://"+profiles.String()+"/debug/pprof/cmdline", http.StatusNotFound, "")
}

func TestProfileAddressIsLoopback(t *testing.T) {
	for _, bad := range []string{
		"0.0.0.0:6060", ":6060", "[::]:6060", "192.0.2.1:6060", "localhost:6060", "127.0.0.1",
		"127.0.0.1:x", "[::ffff:192.0.2.1]:6060",
	} {
		if _, err := ParseConfig([]string{"--profile-listen", bad}); err == nil ||
			!strings.Contains(err.Error(), "--profile-listen") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	for _, good := range []string{"", "127.0.0.1:0", "127.9.9.9:6060", "[::1]:6060"} {
		if _, err := ParseConfig([]string{"--profile-listen", good}); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
}

func TestAddressInUse(t *testing.T) {
	for _, flag := range []string{"--profile-listen", "--metrics-listen"} {
		t.Run(flag, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			nats := freeAddress(t)
			startNATS(t, nats, "")
			c := config(t, "--roles", "gateway", "--secrets-plain", "--store", "file://"+t.TempDir(), "--nats",
				"nats://"+nats.String(), "--listen", "127.0.0.1:0", flag, nats.String())
			if err := Run(ctx, c); err == nil || !strings.Contains(err.Error(), flag) {
				t.Fatalf("Run returned %v", err)
			}
		})
	}
}
