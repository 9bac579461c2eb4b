package app

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/sandboxes"
	"github.com/bullpen-run/bullpen/worker/live"
)

// liveWorker serves the live sandboxes of a worker.
type liveWorker struct {
	sandboxes *live.Sandboxes
	slots     *queue.Slots
	listener  net.Listener
	server    *http.Server
	endpoint  proto.WorkerEndpoint
}

// openLive opens what live sandboxes need, nil if this worker runs none. capabilities are those of the
// worker's programs.
func (r *workerRole) openLive(capabilities []string, c *closers) (*liveWorker, error) {
	n := r.cfg.liveSandboxes()
	if n == 0 {
		return nil, nil
	}
	found, err := live.Open(filepath.Join(r.cfg.Data, "sandboxes"))
	if err != nil {
		return nil, err
	}
	*c = append(*c, found.Close)
	certificate, err := newCertificate()
	if err != nil {
		return nil, err
	}
	address, err := r.cfg.tunnelAddress()
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen for gateways: %w: choose another --tunnel", err)
	}
	limited := &limitedListener{Listener: listener, limit: r.cfg.maxConnections()}
	w := &liveWorker{
		sandboxes: found,
		listener: tls.NewListener(limited, &tls.Config{
			Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13,
		}),
		server: &http.Server{
			Handler: found.Handler(), ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout,
			MaxHeaderBytes: maxHeaderBytes, ConnState: limited.count,
			ErrorLog: slog.NewLogLogger(r.log.Handler(), slog.LevelDebug),
		},
		endpoint: proto.WorkerEndpoint{
			Address: listener.Addr().String(), Certificate: sha256.Sum256(certificate.Certificate[0]),
		},
	}
	*c = append(*c, w.server.Close, func() error {
		if err := listener.Close(); !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	})
	offered := []string{queue.CapabilitySandboxes}
	for _, name := range capabilities {
		switch {
		case name == queue.CapabilityImages:
			offered = append(offered, queue.CapabilitySandboxImages)
		case name == queue.CapabilityLanguage(proto.Node):
			offered = append(offered, queue.CapabilitySandboxNode)
		case !strings.HasPrefix(name, queue.CapabilityLanguage("")):
			offered = append(offered, name)
		}
	}
	if !slices.Contains(offered, queue.CapabilityThreads) {
		return nil, nil // their homes are threads; why there are none is logged
	}
	w.slots = &queue.Slots{
		Store: r.store, Worker: queue.LiveWorker(r.instance), Live: true, Pool: r.cfg.Pool, Total: n,
		Memory: r.cfg.sandboxMemory(), Capabilities: offered,
		Ended: r.executionEnded, Started: r.metrics.ExecutionStarted, Log: r.log, Full: r.dataDiskFull,
	}
	return w, nil
}

// tunnelAddress returns the address on which the worker serves gateways.
func (c *Config) tunnelAddress() (string, error) {
	host, port, err := net.SplitHostPort(c.Tunnel)
	if err != nil || host != "" {
		return c.Tunnel, err
	}
	servers, err := c.controlPlane()
	if err != nil {
		return "", err
	}
	if len(servers) == 0 {
		return net.JoinHostPort("127.0.0.1", port), nil
	}
	// A UDP socket sends nothing when it is connected, but gets the address that the route has.
	conn, err := net.Dial("udp", servers[0])
	if err != nil {
		return "", fmt.Errorf("find the address from which NATS is reached: %w: give --tunnel a host", err)
	}
	defer func() { _ = conn.Close() }()
	own, _, err := net.SplitHostPort(conn.LocalAddr().String())
	return net.JoinHostPort(own, port), err
}

// run serves gateways and holds the lease of the sandboxes until ctx is done.
func (w *liveWorker) run(ctx context.Context, r *workerRole) error {
	serving := make(chan error, 1)
	go func() { serving <- w.server.Serve(w.listener) }()
	announced := make(chan error, 1)
	go func() { announced <- sandboxes.Announce(ctx, r.store, w.slots.Worker, w.endpoint) }()
	err := errors.Join(w.slots.Run(ctx), <-announced, w.server.Close())
	if served := <-serving; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

// newCertificate returns a certificate of a new key, which gateways know by its hash.
func newCertificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("generate the key for gateways: %w", err)
	}
	now := time.Now()
	template := &x509.Certificate{SerialNumber: big.NewInt(now.UnixNano()), NotBefore: now, NotAfter: now}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("create the certificate for gateways: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// validHostPort reports whether an address has a host, which may be empty, and a port.
func validHostPort(address string) bool {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	_, err = strconv.ParseUint(port, 10, 16)
	return err == nil
}
