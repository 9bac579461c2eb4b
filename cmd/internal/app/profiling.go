package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	httppprof "net/http/pprof"
	"net/netip"
	"strconv"
)

// profiled are the profiles besides the CPU profile. They name functions, but contain no values.
var profiled = []string{"allocs", "goroutine", "heap"} // read only

func (c *Config) validateProfileListen() error {
	if c.ProfileListen == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(c.ProfileListen)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	// An address rather than a name: /etc/hosts could map localhost to another machine.
	at, errAddr := netip.ParseAddr(host)
	return setting("profile-listen", err == nil && errAddr == nil && at.IsLoopback(),
		"%q must be a loopback address with a port, such as 127.0.0.1:6060", c.ProfileListen)
}

// serveProfiles serves profiles for go tool pprof until ctx is done, which also interrupts a
// profile in progress.
func (c *Config) serveProfiles(ctx context.Context, log *slog.Logger) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/profile", httppprof.Profile)
	for _, name := range profiled {
		mux.Handle("GET /debug/pprof/"+name, httppprof.Handler(name))
	}
	return serveApart(ctx, "profile-listen", c.ProfileListen, "/debug/pprof/profile", mux, log)
}

// serveMetrics serves the metrics at an address of their own until ctx is done.
func (s *system) serveMetrics(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", s.metrics.Handler())
	return serveApart(ctx, "metrics-listen", s.cfg.MetricsListen, "/metrics", mux, s.log)
}

// serveApart serves requests at the address of a setting until ctx is done, which also interrupts
// requests in progress. It logs the URL of a path.
func serveApart(
	ctx context.Context, setting, address, path string, handler http.Handler, log *slog.Logger,
) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen: %w: choose another --%s", err, setting)
	}
	log.Info("listening", "setting", setting, "url", "http://"+listener.Addr().String()+path)
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout,
		MaxHeaderBytes: maxHeaderBytes,
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
