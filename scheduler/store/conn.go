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

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
)

// Access says how to reach NATS: an address with credentials, or a server in this process.
type Access struct {
	URL            string // comma-separated for a cluster; empty with InProcess
	InProcess      nats.InProcessConnProvider
	Creds          string // path of a .creds file
	User, Password string
	CA             string // path of PEM certificates to trust instead of the system's
	Cert, Key      string // paths of a PEM client certificate and its key
	Name           string // shown in the server's connection list
}

const (
	connectTimeout = 2 * time.Second
	dialFirst      = 100 * time.Millisecond // between tries to reach a NATS that is not there yet
	dialMost       = 5 * time.Second
	openTimeout    = 30 * time.Second // for the streams, once it is there
	reconnectWait  = 100 * time.Millisecond
	openNote       = time.Second // after which the log says what is waited for
	maxReconnects  = -1          // for ever: what waits has its own deadline
	// A server that has stopped, or is cut off, says nothing of it: the connection counts as lost when that many pings went unanswered,
	// which is before the others of a cluster have chosen new leaders.
	pingEvery   = time.Second
	pingsMissed = 2
)

// Connect waits for NATS and opens all that bullpen keeps there, making what is missing. An answer that says no, to the credentials or
// to what is asked for, is an error at once. The connection reconnects for ever; while it is away publishes fail at once rather than
// pile up in memory.
func Connect(ctx context.Context, a Access, cfg Config, log *slog.Logger) (*Store, error) {
	wait := backoff.NewExponentialBackOff(backoff.WithInitialInterval(dialFirst), backoff.WithMaxInterval(dialMost), backoff.WithMaxElapsedTime(0))
	nc, err := backoff.RetryNotifyWithData(func() (*nats.Conn, error) {
		nc, err := Dial(a, log)
		if err != nil && !away(err) {
			err = backoff.Permanent(err)
		}
		return nc, err
	}, backoff.WithContext(wait, ctx), func(err error, next time.Duration) {
		log.Warn("NATS does not answer, will try again", "error", err, "in_ms", next.Milliseconds())
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if cfg.AttachOnly {
		waiting := time.AfterFunc(openNote, func() {
			log.Info("waiting for the streams of bullpen on this NATS; a gateway or scheduler makes them when it starts", "at_most", openTimeout)
		})
		defer waiting.Stop()
	}
	s, err := open(ctx, nc, cfg)
	if err != nil {
		nc.Close()
		return nil, err
	}
	return s, nil
}

// away reports whether a connection was not made because nobody was there to answer.
func away(err error) bool {
	if network, ok := errors.AsType[*net.OpError](err); ok {
		return network.Op != "remote error" // which is TLS's no
	}
	return errors.Is(err, nats.ErrNoServers) || errors.Is(err, nats.ErrTimeout) || errors.Is(err, io.EOF)
}

// Close ends the connection.
func (s *Store) Close() { s.Conn.Close() }

// Dial only connects.
func Dial(a Access, log *slog.Logger) (*nats.Conn, error) {
	opts := []nats.Option{
		nats.Name(a.Name), nats.Timeout(connectTimeout), nats.MaxReconnects(maxReconnects), nats.IgnoreAuthErrorAbort(),
		nats.PingInterval(pingEvery), nats.MaxPingsOutstanding(pingsMissed),
		nats.ReconnectWait(reconnectWait), nats.ReconnectJitter(reconnectWait, reconnectWait), nats.ReconnectBufSize(-1),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("lost the connection to NATS, reconnecting", "error", err)
			}
		}),
		nats.ReconnectHandler(func(c *nats.Conn) { log.Info("connected to NATS again", "server", c.ConnectedServerName()) }),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			if errors.Is(err, nats.ErrSlowConsumer) {
				return // a slow reader of a live tail: it notices the gap and reads it from the stream
			}
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			log.Warn("NATS reported an error", "subject", subject, "error", err)
		}),
	}
	if a.InProcess != nil {
		opts = append(opts, nats.InProcessServer(a.InProcess))
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
			return nil, fmt.Errorf("read --nats-ca: %s holds no PEM certificate", a.CA)
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
