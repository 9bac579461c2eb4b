// Command guest is the daemon in a live sandbox: it starts processes, moves files and passes
// requests on to the sandbox's ports. It speaks the protocol of E2B's daemon over HTTP/1.1 on a
// listening Unix socket, which it inherits as descriptor 3, and watches the heartbeat of its
// worker, descriptor 5. Its argument is the path of its config. Whoever can connect to the socket
// may do everything. Its environment is for Go's runtime alone.
//
// It imports nothing of the server. In a jail it runs as user 0 with the capabilities SETUID, SETGID,
// CHOWN, KILL, DAC_OVERRIDE, FOWNER and FSETID. What it starts has none, except the processes of capable
// users.
package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
	"github.com/bullpen-run/bullpen/guest/contexts"
	"github.com/bullpen-run/bullpen/guest/files"
	"github.com/bullpen-run/bullpen/guest/mask"
	"github.com/bullpen-run/bullpen/guest/process"
)

// Descriptors that the guest is started with. Between them is its executable.
const (
	listenFD    = 3
	heartbeatFD = 5
)

const (
	stopGrace   = 5 * time.Second // from SIGTERM to SIGKILL
	finishGrace = 2 * time.Second // for clients to read the end

	// Threads that exist from the start. Linux may refuse others later, and Go ends a program that it
	// refuses a thread.
	fileThreads  = 6  // that change files as other users
	spareThreads = 17 // for calls to the system that block, one of which awaits the heartbeat
)

func main() {
	setName("guest") // it was executed by descriptor
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 2 {
		return errors.New("the argument must be the path of a config")
	}
	syscall.Umask(0o022)
	if err := hideDescriptors(); err != nil {
		return err
	}
	looks, changes := account.NewLane(1), account.NewLane(fileThreads)
	defer looks.Close()
	warm(spareThreads)
	socket, heart, err := sandboxFiles()
	if err != nil {
		return err
	}
	c, users, err := readConfig(os.Args[1])
	if err != nil {
		return err
	}
	if err := protect(users); err != nil {
		return err
	}
	capable, err := limitInheritance(slices.ContainsFunc(users.List, func(u account.User) bool { return u.Capable }))
	if err != nil {
		return err
	}
	listener, err := inherit(socket)
	if err != nil {
		return err
	}
	table := &process.Table{
		Users: users, Lane: looks, Env: c.Env, Dir: c.Dir, Capabilities: capable,
		Log: process.NewLog(os.Stdout, c.LogBytes),
	}
	table.Open()
	user, err := users.Lookup("")
	if err != nil {
		return err
	}
	cells := &contexts.Contexts{
		Table: table, User: user, Interpreters: c.Interpreters, Runners: c.Runners, Preload: c.Preload, Start: c.Start,
		Masks: mask.New(c.Masks),
	}
	server := newServer(table, files.NewTree(users, changes), cells, c)
	abandoned := make(chan struct{})
	if c.HeartbeatTimeout > 0 {
		h, err := openHeartbeat(heart)
		if err != nil {
			return err
		}
		go h.await(c.HeartbeatTimeout, abandoned)
	}
	stop, cancel := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case err := <-served:
		table.Close(0)
		return fmt.Errorf("serve: %w", err)
	case <-abandoned: // what it has started, the init kills
		return fmt.Errorf("the worker's heartbeat has stopped for %s", c.HeartbeatTimeout)
	case <-stop.Done():
	}
	table.Close(stopGrace)
	table.Log.Close(finishGrace)
	finish, cancel := context.WithTimeout(context.Background(), finishGrace)
	defer cancel()
	if err := server.Shutdown(finish); err != nil {
		_ = server.Close()
	}
	return nil
}

// setName names all threads. ps shows the name of the first one.
func setName(name string) {
	text := append([]byte(name), 0)
	address := unsafe.Pointer(&text[0]) //nolint:gosec // of a system call
	_, _, _ = syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(address), 0)
	runtime.KeepAlive(&text[0])
}

// warm has Go create threads, which it then keeps.
func warm(n int) {
	var locked, unlocked sync.WaitGroup
	release := make(chan struct{})
	locked.Add(n)
	for range n {
		unlocked.Go(func() {
			runtime.LockOSThread() // all have threads of their own at the same time
			defer runtime.UnlockOSThread()
			locked.Done()
			<-release
		})
	}
	locked.Wait()
	close(release)
	unlocked.Wait()
}

// protect keeps root of the sandbox from lowering this process's limits and from tracing it. Linux allows that to
// whoever has the user and the group that are a process's real, effective and saved ones. The saved group becomes
// another user's, so that nobody can have them all.
func protect(users *account.Users) error {
	other := slices.IndexFunc(users.List, func(u account.User) bool { return int(u.GID) != os.Getegid() })
	if other < 0 {
		return nil
	}
	if err := syscall.Setresgid(-1, -1, int(users.List[other].GID)); err != nil { // of all threads
		return fmt.Errorf("set the saved group: %w", err)
	}
	return nil
}

// limitInheritance has started programs inherit no capabilities by themselves, and keeps the guest's own. If
// some users are capable, it returns the capabilities that their processes can be given.
func limitInheritance(someCapable bool) (capable []uintptr, err error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return nil, fmt.Errorf("read capabilities: %w", err)
	}
	if someCapable {
		for c := range uintptr(32) {
			if data[0].Inheritable&data[0].Permitted&(1<<c) != 0 {
				capable = append(capable, c)
			}
		}
		// A process inherits only what is in its ambient set, or what its program's file asks for, and no file
		// can: jails are mounted nosuid.
		_, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0)
		if errno != 0 {
			return nil, fmt.Errorf("clear ambient capabilities: %w", errno)
		}
		return capable, nil
	}
	data[0].Inheritable, data[1].Inheritable = 0, 0
	// Ambient capabilities are inheritable ones: the call removes them, too.
	headerAddress, dataAddress := unsafe.Pointer(&header), unsafe.Pointer(&data) //nolint:gosec // of a system call
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(headerAddress), uintptr(dataAddress), 0)
	runtime.KeepAlive(&header)
	runtime.KeepAlive(&data)
	if errno != 0 {
		return nil, fmt.Errorf("drop inheritable capabilities: %w", errno)
	}
	return nil, nil
}

// hideDescriptors has started programs inherit none of the descriptors that the guest was started with.
func hideDescriptors() error {
	const first = 3
	if err := unix.CloseRange(first, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err == nil {
		return nil
	}
	// A kernel before Linux 5.11.
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("list descriptors: %w", err)
	}
	for _, entry := range entries {
		if fd, err := strconv.Atoi(entry.Name()); err == nil && fd >= first {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}

// sandboxFiles returns the descriptors of the listening socket and of the heartbeat. A guest that
// was started ahead waits for them.
func sandboxFiles() (socket, heart int, err error) {
	if os.Getenv(prewarmEnv) == "" {
		return listenFD, heartbeatFD, nil
	}
	if socket, heart, err = awaitSandbox(); err != nil {
		return 0, 0, fmt.Errorf("wait for the sandbox: %w", err)
	}
	return socket, heart, nil
}

// inherit returns the listener of a descriptor that this program was given.
func inherit(fd int) (net.Listener, error) {
	file := os.NewFile(uintptr(fd), "listener")
	listener, err := net.FileListener(file)
	if err != nil {
		return nil, fmt.Errorf("descriptor %d is no listening socket: %w", fd, err)
	}
	return listener, file.Close()
}

// newServer returns the server of all routes.
func newServer(table *process.Table, tree *files.Tree, cells *contexts.Contexts, c config) *http.Server {
	return &http.Server{
		Handler:           routes(table, tree, cells, c),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       15 * time.Minute, // longer than that of clients and proxies
		MaxHeaderBytes:    64 << 10,
	}
}
