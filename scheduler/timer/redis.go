package timer

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
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

const (
	dialTimeout = 2 * time.Second
	// answerTimeout limits Redis' answer to a request. A shorter one does not help: whatever Redis
	// delivers after its request timed out is lost.
	answerTimeout = 10 * time.Second
	// embeddedLife is the number of timers after which the embedded Redis is replaced. miniredis
	// counts changes per key for ever, at about 150 bytes per timer.
	embeddedLife = 200_000
	// logInterval is the minimum time between warnings of asynq, which would be several per second
	// during an outage.
	logInterval = 10 * time.Second
)

// parse returns the options for the Redis server of cfg. Its errors do not contain the URL, which
// may contain a password.
func parse(cfg Config) (*redis.Options, error) {
	options, err := redis.ParseURL(cfg.URL)
	if err != nil {
		return nil, errors.New("read the URL of Redis: write redis://HOST:PORT/DB, or rediss:// for TLS")
	}
	if cfg.CA != "" {
		if options.TLSConfig == nil {
			return nil, errors.New("certificate authorities for Redis need a rediss:// URL")
		}
		pem, err := os.ReadFile(cfg.CA)
		if err != nil {
			return nil, fmt.Errorf("read certificate authorities for Redis: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("read certificate authorities for Redis: no PEM certificate in %s", cfg.CA)
		}
		options.TLSConfig.RootCAs = pool
	}
	plain := &net.Dialer{}
	options.Dialer = plain.DialContext
	if options.TLSConfig != nil { // go-redis' own ignores the context with TLS
		options.Dialer = (&tls.Dialer{NetDialer: plain, Config: options.TLSConfig}).DialContext
	}
	return options, nil
}

// bound limits how long requests wait for Redis.
func bound(options *redis.Options) {
	dial := options.Dialer
	options.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		return dial(ctx, network, addr)
	}
	options.ContextTimeoutEnabled = true
	options.ReadTimeout, options.WriteTimeout = answerTimeout, answerTimeout
	options.ClientName, options.DisableIdentity = "bullpen", true
}

// Server describes a Redis server.
type Server struct {
	Version   string
	Policy    string // for evicting keys when memory is full, such as noeviction; empty if unknown
	Encrypted bool
	RTT       time.Duration
}

// Check asks the Redis server of cfg about itself, within five seconds.
func Check(ctx context.Context, cfg Config) (Server, error) {
	quietRedis()
	options, err := parse(cfg)
	if err != nil {
		return Server{}, err
	}
	bound(options)
	options.MaxRetries = -1
	client := redis.NewClient(options)
	defer func() { _ = client.Close() }()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := client.Ping(ctx).Err(); err != nil { // also connects
		return Server{}, err
	}
	began := time.Now()
	if err := client.Ping(ctx).Err(); err != nil {
		return Server{}, err
	}
	server := Server{RTT: time.Since(began), Encrypted: options.TLSConfig != nil}
	info, err := client.Info(ctx).Result()
	if err != nil {
		return Server{}, fmt.Errorf("ask about itself: %w", err)
	}
	for entry := range strings.Lines(info) {
		switch name, value, _ := strings.Cut(strings.TrimSpace(entry), ":"); name {
		case "redis_version":
			server.Version = value
		case "maxmemory_policy":
			server.Policy = value
		}
	}
	return server, nil
}

// embedded is a Redis inside the process. It has no listener: connections are pipes.
type embedded struct {
	life    int64        // timers until it is replaced
	created atomic.Int64 // timers since it was

	mu     sync.Mutex
	redis  *miniredis.Miniredis
	closed bool
}

func newEmbedded() *embedded { return &embedded{life: embeddedLife, redis: miniredis.NewMiniRedis()} }

// ServeRedis serves an embedded Redis at an address until ctx is done, for processes on the same
// machine. Its content is lost at its end.
func ServeRedis(ctx context.Context, address, password string) error {
	e := newEmbedded()
	e.redis.RequireAuth(password)
	if err := e.redis.StartAddr(address); err != nil {
		return fmt.Errorf("serve Redis: %w", err)
	}
	defer e.close()
	tick := time.NewTicker(cleanInterval)
	defer tick.Stop()
	for last := time.Now(); ; {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			e.age(now.Sub(last))
			last = now
		}
	}
}

func (e *embedded) dial(context.Context, string, string) (net.Conn, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, net.ErrClosed
	}
	conn, err := e.redis.Dial()
	if err != nil {
		return nil, err
	}
	return pipe{conn}, nil
}

// pipe is an in-process connection that fails like a network one: go-redis does not retry after
// [io.ErrClosedPipe].
type pipe struct{ net.Conn }

func (p pipe) Write(b []byte) (int, error) {
	n, err := p.Conn.Write(b)
	return n, asEOF(err)
}

func (p pipe) SetReadDeadline(at time.Time) error  { return asEOF(p.Conn.SetReadDeadline(at)) }
func (p pipe) SetWriteDeadline(at time.Time) error { return asEOF(p.Conn.SetWriteDeadline(at)) }

func asEOF(err error) error {
	if errors.Is(err, io.ErrClosedPipe) {
		return io.EOF
	}
	return err
}

// age expires keys as if d had passed, which miniredis does not do on its own.
func (e *embedded) age(d time.Duration) { e.redis.FastForward(d) }

// renew replaces the embedded Redis by an empty one.
func (e *embedded) renew() {
	e.mu.Lock()
	old := e.redis
	e.redis = miniredis.NewMiniRedis()
	e.mu.Unlock()
	old.Close()
}

func (e *embedded) close() {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.redis.Close()
}

// cuttableDialer opens connections that can be closed all at once. asynq waits for answers
// indefinitely, and go-redis does not stop when a context is done.
type cuttableDialer struct {
	dial func(ctx context.Context, network, addr string) (net.Conn, error)

	mu    sync.Mutex
	conns map[*cuttableConn]struct{}
	down  bool
}

type cuttableConn struct {
	net.Conn
	dialer *cuttableDialer
}

func (l *cuttableDialer) open(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := l.dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down {
		_ = conn.Close()
		return nil, net.ErrClosed
	}
	c := &cuttableConn{Conn: conn, dialer: l}
	l.conns[c] = struct{}{}
	return c, nil
}

func (c *cuttableConn) Close() error {
	c.dialer.mu.Lock()
	delete(c.dialer.conns, c)
	c.dialer.mu.Unlock()
	return c.Conn.Close()
}

// cut closes all connections, and prevents new ones.
func (l *cuttableDialer) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = true
	for c := range l.conns {
		_ = c.Conn.Close()
	}
}

// taskLog forwards asynq's log to slog: at most one warning per [logInterval], the rest at debug
// level.
type taskLog struct {
	log *slog.Logger

	mu          sync.Mutex
	last        time.Time
	unreachable bool
}

// Debug logs a line.
func (l *taskLog) Debug(args ...any) { l.log.Debug("asynq: " + fmt.Sprint(args...)) }

// Info logs a line at debug level: asynq reports every step of its start and end.
func (l *taskLog) Info(args ...any) { l.Debug(args...) }

// Warn logs a line, unless there was a warning within logInterval.
func (l *taskLog) Warn(args ...any) {
	l.mu.Lock()
	recent := time.Since(l.last) < logInterval
	if !recent {
		l.last = time.Now()
	}
	l.mu.Unlock()
	if recent {
		l.Debug(args...)
		return
	}
	l.log.Warn("asynq: " + fmt.Sprint(args...))
}

// Error logs a line as a warning: asynq retries, and the user of the timers recovers from losses.
func (l *taskLog) Error(args ...any) { l.Warn(args...) }

// Fatal logs a line. The process continues.
func (l *taskLog) Fatal(args ...any) { l.Warn(args...) }

// health logs when Redis becomes unreachable and reachable.
func (l *taskLog) health(err error) {
	l.mu.Lock()
	was := l.unreachable
	l.unreachable = err != nil
	l.mu.Unlock()
	switch {
	case err != nil && !was:
		l.log.Warn("Redis unreachable, timers are late until it answers", "error", err)
	case err == nil && was:
		l.log.Info("Redis reachable")
	}
}

// quietRedis disables go-redis' log, which is global and on standard error. Its errors are returned
// as well.
var quietRedis = sync.OnceFunc(func() { redis.SetLogger(silence{}) })

type silence struct{}

// Printf discards a line.
func (silence) Printf(context.Context, string, ...any) {}
