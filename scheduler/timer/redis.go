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
	// answerTime is how long Redis may take for an answer. A shorter one would not be kinder: what Redis handed out in an answer that
	// nobody waited for is lost.
	answerTime = 10 * time.Second
	// embeddedLife is after how many timers the embedded Redis is replaced: miniredis keeps a count of the changes of every key for
	// ever, about 150 bytes for each timer that there ever was.
	embeddedLife = 200_000
	// logInterval is how often asynq may warn; during an outage it would several times a second.
	logInterval = 10 * time.Second
)

// parse gives the options that reach the Redis of cfg. Its errors do not repeat the URL, which may hold a password.
func parse(cfg Config) (*redis.Options, error) {
	options, err := redis.ParseURL(cfg.URL)
	if err != nil {
		return nil, errors.New("read the URL of Redis: write redis://HOST:PORT/DB, or rediss:// for TLS")
	}
	if cfg.CA != "" {
		if options.TLSConfig == nil {
			return nil, errors.New("certificate authorities for Redis are given, and its URL is not one of rediss://")
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
	if options.TLSConfig != nil { // go-redis's own does not heed the context with TLS
		options.Dialer = (&tls.Dialer{NetDialer: plain, Config: options.TLSConfig}).DialContext
	}
	return options, nil
}

// bound limits how long anything waits for Redis.
func bound(options *redis.Options) {
	dial := options.Dialer
	options.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		return dial(ctx, network, addr)
	}
	options.ContextTimeoutEnabled = true
	options.ReadTimeout, options.WriteTimeout = answerTime, answerTime
	options.ClientName, options.DisableIdentity = "bullpen", true
}

// Server is what a Redis says about itself.
type Server struct {
	Version   string
	Policy    string // what it drops when its memory is full, such as noeviction; empty when it does not say
	Encrypted bool
	Answers   time.Duration // for one round trip
}

// Check asks the Redis of cfg about itself, within five seconds.
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
	server := Server{Answers: time.Since(began), Encrypted: options.TLSConfig != nil}
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

// embedded is a Redis inside the process. It listens nowhere: connections are pipes.
type embedded struct {
	life int64        // timers until it is replaced
	made atomic.Int64 // timers since it was

	mu     sync.Mutex
	redis  *miniredis.Miniredis
	closed bool
}

func newEmbedded() *embedded { return &embedded{life: embeddedLife, redis: miniredis.NewMiniRedis()} }

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

// pipe is a connection inside the process that breaks as others do: go-redis does not try again after [io.ErrClosedPipe].
type pipe struct{ net.Conn }

func (p pipe) Write(b []byte) (int, error) {
	n, err := p.Conn.Write(b)
	return n, ended(err)
}

func (p pipe) SetReadDeadline(at time.Time) error  { return ended(p.Conn.SetReadDeadline(at)) }
func (p pipe) SetWriteDeadline(at time.Time) error { return ended(p.Conn.SetWriteDeadline(at)) }

func ended(err error) error {
	if errors.Is(err, io.ErrClosedPipe) {
		return io.EOF
	}
	return err
}

// age lets keys of limited life grow older by d, which they do not by themselves.
func (e *embedded) age(d time.Duration) { e.redis.FastForward(d) }

// renew replaces it by an empty one.
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

// line opens connections that can be cut all at once. asynq waits for answers without end, and go-redis does not stop for a context.
type line struct {
	dial func(ctx context.Context, network, addr string) (net.Conn, error)

	mu    sync.Mutex
	conns map[*lineConn]struct{}
	down  bool
}

type lineConn struct {
	net.Conn
	line *line
}

func (l *line) open(ctx context.Context, network, addr string) (net.Conn, error) {
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
	c := &lineConn{Conn: conn, line: l}
	l.conns[c] = struct{}{}
	return c, nil
}

func (c *lineConn) Close() error {
	c.line.mu.Lock()
	delete(c.line.conns, c)
	c.line.mu.Unlock()
	return c.Conn.Close()
}

// cut breaks the connections there are, and lets no other come about.
func (l *line) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = true
	for c := range l.conns {
		_ = c.Conn.Close()
	}
}

// taskLog hands asynq's log to slog. What asynq warns of is at most one warning each [logInterval]; the rest is told at debug level.
type taskLog struct {
	log *slog.Logger

	mu   sync.Mutex
	last time.Time
	away bool
}

// Debug hands on a line.
func (l *taskLog) Debug(args ...any) { l.log.Debug("asynq: " + fmt.Sprint(args...)) }

// Info hands on a line, as one for debugging: asynq tells of every step of its start and end.
func (l *taskLog) Info(args ...any) { l.Debug(args...) }

// Warn hands on a line, if there was none lately.
func (l *taskLog) Warn(args ...any) {
	l.mu.Lock()
	often := time.Since(l.last) < logInterval
	if !often {
		l.last = time.Now()
	}
	l.mu.Unlock()
	if often {
		l.Debug(args...)
		return
	}
	l.log.Warn("asynq: " + fmt.Sprint(args...))
}

// Error hands on a line, as a warning: asynq tries again, and what is lost is made up for by who uses the timers.
func (l *taskLog) Error(args ...any) { l.Warn(args...) }

// Fatal hands on a line; the process goes on.
func (l *taskLog) Fatal(args ...any) { l.Warn(args...) }

// health tells when Redis goes away and when it is back.
func (l *taskLog) health(err error) {
	l.mu.Lock()
	was := l.away
	l.away = err != nil
	l.mu.Unlock()
	switch {
	case err != nil && !was:
		l.log.Warn("Redis does not answer; timers come late until it does", "error", err)
	case err == nil && was:
		l.log.Info("Redis answers again")
	}
}

// quietRedis takes go-redis its log, which it has one of for the whole process, on standard error: its errors are returned as well.
var quietRedis = sync.OnceFunc(func() { redis.SetLogger(silence{}) })

type silence struct{}

// Printf drops a line.
func (silence) Printf(context.Context, string, ...any) {}
