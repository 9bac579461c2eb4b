package history_test

import (
	"bytes"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// nobody is the user that a PostgreSQL server runs as: it refuses to run as root.
const nobody = 65534

// server is the PostgreSQL server of all tests of this process.
var server struct {
	once      sync.Once
	err       error
	dir       string // of the data and the socket
	process   *exec.Cmd
	databases atomic.Int32
}

// postgres returns the URL of a new database. Without PostgreSQL the test fails, except in short
// mode, which skips it.
func postgres(t testing.TB) string {
	t.Helper()
	if testing.Short() {
		t.Skip("starting PostgreSQL takes seconds")
	}
	server.once.Do(func() { server.err = startPostgres() })
	if server.err != nil {
		t.Fatal(server.err)
	}
	db, err := sql.Open("pgx", databaseURL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	name := fmt.Sprint("test", server.databases.Add(1))
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) { // it may be starting
		if _, err = db.ExecContext(t.Context(), "CREATE DATABASE "+name); err == nil {
			return databaseURL(name)
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func databaseURL(name string) string {
	return "postgres:///" + name + "?" + url.Values{"host": {server.dir}, "user": {"bullpen"}, "sslmode": {"disable"}}.Encode()
}

func startPostgres() (err error) {
	initdb, err := exec.LookPath("initdb")
	if err != nil {
		list, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb") // a pattern without mistakes
		if len(list) == 0 {
			return fmt.Errorf("this test needs PostgreSQL: apt-get install postgresql: %w", err)
		}
		initdb = list[len(list)-1]
	}
	if initdb, err = filepath.EvalSymlinks(initdb); err != nil {
		return err
	}
	// Not in t.TempDir(), whose parents belong to root.
	if server.dir, err = os.MkdirTemp("", "postgres"); err != nil {
		return err
	}
	user := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Getuid() == 0 {
		user.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
		if err := os.Chown(server.dir, nobody, nobody); err != nil {
			return err
		}
	}
	command := func(name string, args ...string) *exec.Cmd {
		c := exec.Command(filepath.Join(filepath.Dir(initdb), name), args...)
		c.Dir, c.SysProcAttr, c.Env = server.dir, user, append(os.Environ(), "LC_ALL=C")
		return c
	}
	data := filepath.Join(server.dir, "data")
	if out, err := command("initdb", "--pgdata="+data, "--username=bullpen", "--auth=trust", "--encoding=UTF8", "--no-sync").CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, out)
	}
	server.process = command("postgres", "-D", data, "-c", "listen_addresses=", "-c", "unix_socket_directories="+server.dir, "-c", "fsync=off")
	server.process.Stderr = new(bytes.Buffer)
	return server.process.Start()
}

func stopPostgres() {
	if server.process != nil {
		_ = server.process.Process.Signal(syscall.SIGINT) // ends its connections
		_ = server.process.Wait()
	}
	if server.dir != "" {
		_ = os.RemoveAll(server.dir)
	}
}
