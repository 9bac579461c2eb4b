// Package storagetest has an S3 server for tests and benchmarks, a proxy that injects faults, a
// backend in memory, and a PostgreSQL server. None of it is for production.
package storagetest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v4"
)

const (
	// Bucket is the only bucket of a [Server].
	Bucket = "blobs"
	// Region is the region of the bucket.
	Region = "us-east-1"

	accessKey = "tester"
	secretKey = "not-a-secret"
	startWait = time.Minute
)

// Env returns environment variables, as NAME=VALUE, with the credentials for a [Server] and no
// others.
func Env() []string {
	return []string{
		"AWS_ACCESS_KEY_ID=" + accessKey, "AWS_SECRET_ACCESS_KEY=" + secretKey, "AWS_EC2_METADATA_DISABLED=true",
		"AWS_CONFIG_FILE=" + os.DevNull, "AWS_SHARED_CREDENTIALS_FILE=" + os.DevNull,
	}
}

// Credentials returns the credentials for a [Server].
func Credentials() (id, secret string) { return accessKey, secretKey }

// Setenv sets the variables of [Env] in this process.
func Setenv() error {
	var errs []error
	for _, v := range Env() {
		name, value, _ := strings.Cut(v, "=")
		errs = append(errs, os.Setenv(name, value))
	}
	return errors.Join(errs...)
}

// Server is a versitygw process, an S3 server that stores files. It ends with this process at the
// latest.
type Server struct {
	dir     string
	process *exec.Cmd
	exited  chan struct{}

	mu     sync.Mutex
	relays []*relay
}

// Start builds the server if necessary and starts it in a new directory below dir. The path should
// be short, since it contains a socket. Start needs the Go command, and the module's source around
// the working directory.
func Start(dir string) (*Server, error) {
	program, err := build()
	if err != nil {
		return nil, fmt.Errorf("build the S3 server: %w", err)
	}
	dir, err = os.MkdirTemp(dir, "s3-")
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, exited: make(chan struct{})}
	if err := s.start(program); err != nil {
		return nil, errors.Join(fmt.Errorf("start the S3 server: %w", err), os.RemoveAll(dir))
	}
	return s, nil
}

// build builds the server into Go's cache and returns its path.
func build() (program string, err error) {
	run := func(args ...string) string {
		if err != nil {
			return ""
		}
		cmd := exec.Command("go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		var out []byte
		out, err = cmd.Output()
		if failed, ok := errors.AsType[*exec.ExitError](err); ok {
			err = fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, failed.Stderr)
		}
		return strings.TrimSpace(string(out))
	}
	module := filepath.Dir(run("env", "GOMOD"))
	program = run("tool", "-modfile="+filepath.Join(module, "deploy", "s3server", "go.mod"), "-n", "versitygw")
	return program, err
}

func (s *Server) start(program string) error {
	buckets, meta := filepath.Join(s.dir, "buckets"), filepath.Join(s.dir, "meta")
	if err := errors.Join(os.MkdirAll(filepath.Join(buckets, Bucket), 0o700), os.Mkdir(meta, 0o700)); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(s.dir, "log"))
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }() // the server has its own descriptor
	s.process = exec.Command(program, "--port", s.socket(), "--region", Region, "--access", accessKey,
		"--secret", secretKey,
		"--keep-alive", "posix", "--sidecar", meta, buckets)
	s.process.Stdout, s.process.Stderr = log, log
	s.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // the signal follows the thread
		defer runtime.UnlockOSThread()
		err := s.process.Start()
		started <- err
		if err == nil {
			_ = s.process.Wait() // killed
			close(s.exited)
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startWait)
	defer cancel()
	err = backoff.Retry(func() error {
		c, err := net.Dial("unix", s.socket())
		if err == nil {
			return c.Close()
		}
		text, _ := os.ReadFile(log.Name())
		err = fmt.Errorf("it does not listen: %w\n%s", err, text)
		select {
		case <-s.exited:
			return backoff.Permanent(err)
		default:
			return err
		}
	}, backoff.WithContext(backoff.NewConstantBackOff(20*time.Millisecond), ctx))
	if err != nil {
		s.kill()
	}
	return err
}

func (s *Server) socket() string { return filepath.Join(s.dir, "socket") }

func (s *Server) kill() {
	_ = s.process.Process.Kill() // it may have ended already
	<-s.exited
}

// Close stops the server and removes its files. Its proxies must be closed before.
func (s *Server) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.relays {
		r.close()
	}
	s.kill()
	return os.RemoveAll(s.dir)
}

// Path returns the file of an object in [Bucket].
func (s *Server) Path(name string) string { return filepath.Join(s.dir, "buckets", Bucket, name) }

// Endpoint returns a TCP endpoint of the server without faults, http://127.0.0.1:PORT.
func (s *Server) Endpoint() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	r := &relay{Listener: listener, to: s.socket(), open: map[net.Conn]bool{}}
	r.group.Go(r.run)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.relays = append(s.relays, r)
	return "http://" + listener.Addr().String(), nil
}

// StoreURL returns the URL of a blob store with a prefix at an endpoint.
func StoreURL(endpoint, prefix string) string {
	return fmt.Sprintf("s3://%s/%s?endpoint=%s&region=%s&path_style=1", Bucket, prefix, endpoint, Region)
}
