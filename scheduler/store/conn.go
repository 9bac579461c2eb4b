package store

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/nats-io/nats.go"
)

// Access is how to reach NATS: an address with credentials, or a server in this process.
type Access struct {
	URL            string // comma-separated for a cluster; empty with InProcess
	InProcess      nats.InProcessConnProvider
	Creds          string // path of a .creds file
	User, Password string
	CA             string // path of PEM certificates to trust instead of the system's
	Cert, Key      string // paths of a PEM client certificate and its key
	Name           string // shown in the server's connection list
	// Role names the inbox of this process, so that permissions can keep other roles from listening
	// to answers: they arrive on subjects below [Inbox] of it. Without a role any inbox is used.
	Role string
}

const (
	connectTimeout = 2 * time.Second
	dialPause      = time.Second
	reconnectWait  = 100 * time.Millisecond
	maxReconnects  = -1 // for ever: callers have deadlines
	// A server that has stopped or is cut off does not say so. The connection counts as lost after
	// that many unanswered pings, which is before the rest of a cluster has elected new leaders.
	pingEvery   = time.Second
	pingsMissed = 2
)

// Connect waits for NATS, and opens all that bullpen keeps there, creating what is missing. It
// waits until ctx is done, and returns an error only if the server rejects the credentials or a
// request. The connection reconnects for ever. Publishing fails while it is down, instead of
// filling memory.
func Connect(ctx context.Context, a Access, cfg Config, log *slog.Logger) (*Store, error) {
	var nc *nats.Conn
	err := Retry{
		Pause: dialPause, Transient: isUnreachable, OnRetry: func(err error, pause time.Duration) {
			log.Warn("NATS unreachable, will retry", "error", err, "in_ms", pause.Milliseconds())
		},
	}.Do(ctx, func(context.Context) (err error) {
		nc, err = Dial(a, log)
		return err
	})
	if err != nil {
		return nil, err
	}
	s, err := open(ctx, nc, cfg, log)
	if err != nil {
		nc.Close()
		return nil, err
	}
	return s, nil
}

// isUnreachable reports whether a connection failed because nobody was there to answer.
func isUnreachable(err error) bool {
	if network, ok := errors.AsType[*net.OpError](err); ok {
		return network.Op != "remote error" // a rejection by TLS
	}
	return errors.Is(err, nats.ErrNoServers) || errors.Is(err, nats.ErrTimeout) || errors.Is(err, io.EOF)
}

// Close closes the connection.
func (s *Store) Close() { s.Conn.Close() }

// Dial connects to NATS without opening any stream.
func Dial(a Access, log *slog.Logger) (*nats.Conn, error) {
	opts := []nats.Option{
		nats.Name(a.Name), nats.Timeout(connectTimeout), nats.MaxReconnects(maxReconnects), nats.IgnoreAuthErrorAbort(),
		nats.PingInterval(pingEvery), nats.MaxPingsOutstanding(pingsMissed),
		nats.ReconnectWait(reconnectWait), nats.ReconnectJitter(reconnectWait, reconnectWait), nats.ReconnectBufSize(-1),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("NATS connection lost, reconnecting", "error", err)
			}
		}),
		nats.ReconnectHandler(func(c *nats.Conn) { log.Info("NATS connection restored", "server", c.ConnectedServerName()) }),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			if errors.Is(err, nats.ErrSlowConsumer) {
				return // a slow reader of a live tail notices the gap, and reads it from the stream
			}
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			log.Warn("NATS error", "subject", subject, "error", err)
		}),
	}
	if a.InProcess != nil {
		opts = append(opts, nats.InProcessServer(a.InProcess))
	}
	if a.Role != "" {
		opts = append(opts, nats.CustomInboxPrefix(Inbox(a.Role)))
	}
	if a.Creds != "" {
		opts = append(opts, nats.UserCredentials(a.Creds))
	}
	if a.User != "" {
		opts = append(opts, nats.UserInfo(a.User, a.Password))
	}
	if a.CA != "" || a.Cert != "" {
		cfg, err := a.tls()
		if err != nil {
			return nil, err
		}
		opts = append(opts, nats.Secure(cfg))
	}
	nc, err := nats.Connect(a.URL, opts...)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS at %q: %w: check --nats and its credentials", a.URL, err)
	}
	return nc, nil
}

func (a Access) tls() (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if a.CA != "" {
		pem, err := os.ReadFile(a.CA)
		if err != nil {
			return nil, fmt.Errorf("read --nats-ca: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("read --nats-ca: %s contains no PEM certificate", a.CA)
		}
	}
	if a.Cert != "" {
		cert, err := tls.LoadX509KeyPair(a.Cert, a.Key)
		if err != nil {
			return nil, fmt.Errorf("read --nats-cert and --nats-key: %w", err)
		}
		cfg.Certificates = []tls.Certificate{cert}
	}
	return cfg, nil
}
