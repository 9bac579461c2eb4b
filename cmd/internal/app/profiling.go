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

// profiled are the profiles that are told, besides that of processor time: those that name functions, and no values of theirs.
var profiled = []string{"allocs", "goroutine", "heap"} // read only

func (c *Config) validateProfileListen() error {
	if c.ProfileListen == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(c.ProfileListen)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	// An address and no name: what localhost is, a file says.
	at, errAddr := netip.ParseAddr(host)
	return setting("profile-listen", err == nil && errAddr == nil && at.IsLoopback(),
		"%q must be an address of this machine alone with a port, such as 127.0.0.1:6060: profiles are for nobody else", c.ProfileListen)
}

// tellProfiles tells whoever is on this machine what the process does, in the form of go tool pprof, until ctx ends. A profile that is being
// made then is broken off.
func tellProfiles(ctx context.Context, address string, log *slog.Logger) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen: %w: choose another --profile-listen", err)
	}
	log.Info("telling profiles", "url", "http://"+listener.Addr().String()+"/debug/pprof/profile")
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/profile", httppprof.Profile)
	for _, name := range profiled {
		mux.Handle("GET /debug/pprof/"+name, httppprof.Handler(name))
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
