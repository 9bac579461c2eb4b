package storagetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"
)

// nobody is the user that a [Postgres] runs as: it refuses to run as root.
const nobody = 65534

// Postgres is a PostgreSQL server. It ends with this process at the latest.
type Postgres struct {
	programs  string // the directory of PostgreSQL's programs
	dir       string // of the data and the socket
	process   *exec.Cmd
	databases atomic.Int32
}

// StartPostgres starts the PostgreSQL server of this machine with data of its own.
func StartPostgres() (*Postgres, error) {
	initdb, err := exec.LookPath("initdb")
	if err != nil {
		list, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb") // a pattern without mistakes
		if len(list) == 0 {
			return nil, fmt.Errorf("this test needs PostgreSQL: apt-get install postgresql: %w", err)
		}
		initdb = list[len(list)-1]
	}
	if initdb, err = filepath.EvalSymlinks(initdb); err != nil {
		return nil, err
	}
	// Not in a test's directory, whose parents belong to root.
	p := &Postgres{programs: filepath.Dir(initdb)}
	if p.dir, err = os.MkdirTemp("", "postgres"); err != nil {
		return nil, err
	}
	if err := p.start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(p.dir))
	}
	return p, nil
}

func (p *Postgres) start() error {
	user := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Getuid() == 0 {
		user.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
		if err := os.Chown(p.dir, nobody, nobody); err != nil {
			return err
		}
	}
	command := func(name string, args ...string) *exec.Cmd {
		c := exec.Command(filepath.Join(p.programs, name), args...)
		c.Dir, c.SysProcAttr, c.Env = p.dir, user, append(os.Environ(), "LC_ALL=C")
		return c
	}
	data := filepath.Join(p.dir, "data")
	if out, err := command("initdb", "--pgdata="+data, "--username=bullpen", "--auth=trust", "--encoding=UTF8",
		"--no-sync").CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, out)
	}
	p.process = command("postgres", "-D", data, "-c", "listen_addresses=", "-c", "unix_socket_directories="+p.dir, "-c",
		"fsync=off")
	p.process.Stderr = new(bytes.Buffer)
	return p.process.Start()
}

// NewDatabase creates a database and returns its URL.
func (p *Postgres) NewDatabase(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	name := fmt.Sprint("test", p.databases.Add(1))
	for {
		out, err := exec.CommandContext(ctx, filepath.Join(p.programs, "createdb"), "--host="+p.dir, "--username=bullpen",
			name).CombinedOutput()
		if err == nil {
			return "postgres:///" + name + "?" + url.Values{
				"host": {p.dir}, "user": {"bullpen"}, "sslmode": {"disable"},
			}.Encode(), nil
		}
		select { // it may be starting
		case <-ctx.Done():
			return "", fmt.Errorf("create a database: %w\n%s", err, out)
		case <-tick.C:
		}
	}
}

// Close ends the server and its connections, and removes its data.
func (p *Postgres) Close() error {
	_ = p.process.Process.Signal(syscall.SIGINT) // ends its connections
	_ = p.process.Wait()
	return os.RemoveAll(p.dir)
}
