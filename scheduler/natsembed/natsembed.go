// Package natsembed runs a NATS JetStream server inside the process, for bullpen as one binary, or
// one of a cluster, for deployments on one machine. It locks the directory of the server's files,
// synchronises every durable write, and restarts the server after a full disk: a JetStream store
// that met one rejects writes until it is opened again. It is independent of jobs.
package natsembed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Server is an embedded NATS server. It is a [nats.InProcessConnProvider]: connections survive a
// restart of the server.
type Server struct {
	// MaxSubjects is the number of subjects beyond which no more jobs may be stored, 0 for no
	// limit. The server keeps an index of all subjects in memory, with about [SubjectCost] for
	// each: every record is one, and the output of an execution, its delivery and its idempotency
	// key are others. It is set before Run.
	MaxSubjects int

	dir     string
	reserve uint64
	node    *Node // nil for a server that is reached inside the process only
	log     *slog.Logger
	lock    *os.File
	fault   atomic.Bool
	crowded atomic.Bool // there are more than MaxSubjects

	mu      sync.Mutex
	current *server.Server
}

// SubjectCost is the memory that one stored subject takes, in bytes.
const SubjectCost = 256

const (
	readyTimeout  = 30 * time.Second
	watchInterval = 500 * time.Millisecond
	// compactEvery is how often the server returns the space of deleted messages to the disk. Its
	// default of 2 minutes is long enough for programs to fill a disk with output that is evicted.
	compactEvery = 10 * time.Second
	lockPause    = 50 * time.Millisecond
	lockTries    = 60
)

// Open starts a server whose files are under dir. After a full disk it is restarted once reserve
// bytes are free. Open returns an error if another process has locked dir.
func Open(dir string, reserve uint64, log *slog.Logger) (*Server, error) {
	return open(dir, reserve, nil, log)
}

func open(dir string, reserve uint64, node *Node, log *slog.Logger) (*Server, error) {
	lock, err := LockDir(dir)
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, reserve: reserve, node: node, log: log, lock: lock}
	if err := s.start(); err != nil {
		_ = lock.Close()
		return nil, err
	}
	return s, nil
}

// LockDir creates a data directory and locks it against other processes until the file is closed.
func LockDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make data directory: %w", err)
	}
	name := filepath.Join(dir, "lock")
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock of the data directory: %w", err)
	}
	for range lockTries {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			break
		}
		// If a server was killed while starting a child process, the child holds the lock until it
		// calls exec.
		time.Sleep(lockPause)
	}
	if err == nil {
		return f, nil
	}
	_ = f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, fmt.Errorf("data directory %s is in use by another bullpen: stop it or choose another --data", dir)
	}
	return nil, fmt.Errorf("lock data directory %s: %w", dir, err)
}

func (s *Server) start() error {
	opts := &server.Options{
		ServerName: "bullpen", JetStream: true, StoreDir: s.dir,
		DontListen: true, NoSigs: true, SyncAlways: true, SyncInterval: compactEvery,
		// The free space of the disk is the limit, and callers check it before they submit work. At
		// a limit of its own, JetStream would reject programs' results, too. Its default is a share
		// of the free space at the start.
		JetStreamMaxStore:  1 << 50,
		JetStreamMaxMemory: 64 << 20,
	}
	if s.node != nil {
		s.node.apply(opts)
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		return fmt.Errorf("start embedded NATS: %w", err)
	}
	srv.SetLoggerV2(&logger{log: s.log, fault: &s.fault}, false, false, false)
	srv.Start()
	if !srv.ReadyForConnections(readyTimeout) {
		srv.Shutdown()
		return fmt.Errorf("start embedded NATS: not ready within %s", readyTimeout)
	}
	if !srv.JetStreamEnabled() {
		srv.Shutdown()
		return errors.New("start embedded NATS: JetStream could not open its store; see the log, and check the disk")
	}
	s.mu.Lock()
	s.current = srv
	s.mu.Unlock()
	return nil
}

// InProcessConn opens a connection to the current server.
func (s *Server) InProcessConn() (net.Conn, error) {
	s.mu.Lock()
	srv := s.current
	s.mu.Unlock()
	if srv == nil {
		return nil, errors.New("embedded NATS is restarting")
	}
	return srv.InProcessConn()
}

// Crowded reports whether more than MaxSubjects are stored.
func (s *Server) Crowded() bool { return s.crowded.Load() }

// full reports whether less than the reserve is free on the disk, or that is unknown.
func (s *Server) full() bool {
	var st syscall.Statfs_t
	if err := syscall.Statfs(s.dir, &st); err != nil {
		return true
	}
	return st.Bavail*uint64(st.Bsize) < s.reserve
}

// Run checks the server until ctx is done. It counts the subjects, and restarts the server when its
// store has failed and the disk has free space again.
func (s *Server) Run(ctx context.Context) error {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		s.count()
		if s.healthy() || s.full() {
			continue
		}
		s.log.Warn("embedded NATS: store failed earlier and the disk has free space again, restarting")
		s.stop()
		s.fault.Store(false)
		if err := s.start(); err != nil {
			s.log.Error("embedded NATS restart failed, will retry", "error", err)
		}
	}
}

// count compares the number of subjects with MaxSubjects.
func (s *Server) count() {
	s.mu.Lock()
	srv := s.current
	s.mu.Unlock()
	if srv == nil || s.MaxSubjects == 0 {
		return
	}
	info, err := srv.Jsz(&server.JSzOptions{Accounts: true, Streams: true})
	if err != nil {
		return // JetStream is disabled, and stores nothing
	}
	subjects := 0
	for _, account := range info.AccountDetails {
		for _, stream := range account.Streams {
			subjects += stream.State.NumSubjects
		}
	}
	if crowded := subjects > s.MaxSubjects; crowded != s.crowded.Swap(crowded) {
		s.log.Warn("share of memory of stored records", "exceeded", crowded, "subjects", subjects, "limit", s.MaxSubjects)
	}
}

func (s *Server) healthy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current != nil && s.current.JetStreamEnabled() && !s.fault.Load()
}

func (s *Server) stop() {
	s.mu.Lock()
	srv := s.current
	s.current = nil
	s.mu.Unlock()
	if srv != nil {
		srv.Shutdown()
		srv.WaitForShutdown()
	}
}

// Close stops the server and releases the directory.
func (s *Server) Close() {
	s.stop()
	_ = s.lock.Close()
}

// logger forwards the server's log to slog, and detects store failures, which the server reports
// nowhere else.
type logger struct {
	log   *slog.Logger
	fault *atomic.Bool
}

func (l *logger) Noticef(f string, v ...any) { l.log.Debug("nats: " + fmt.Sprintf(f, v...)) }
func (l *logger) Warnf(f string, v ...any)   { l.log.Warn("nats: " + fmt.Sprintf(f, v...)) }
func (l *logger) Fatalf(f string, v ...any)  { l.errorf(fmt.Sprintf(f, v...)) }
func (l *logger) Errorf(f string, v ...any)  { l.errorf(fmt.Sprintf(f, v...)) }
func (l *logger) Debugf(string, ...any)      {}
func (l *logger) Tracef(string, ...any)      {}

func (l *logger) errorf(text string) {
	if isPeerRestart(text) {
		l.log.Info("nats: " + text)
		return
	}
	l.log.Error("nats: " + text)
	for _, sign := range []string{"critical write error", "no space left on device", "jetstream out of "} {
		if strings.Contains(strings.ToLower(text), sign) {
			l.fault.Store(true)
			return
		}
	}
}

// isPeerRestart reports whether a server error means that another server of the cluster is starting
// or stopping. The server keeps trying.
func isPeerRestart(text string) bool {
	return strings.HasPrefix(text, "Error trying to connect to route") || strings.Contains(text, " - rid:") &&
		strings.Contains(text, "Error flushing")
}
