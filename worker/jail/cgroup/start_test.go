package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// newTree opens a tree in the machine's own control groups.
func newTree(t *testing.T, instance string) *Tree {
	t.Helper()
	tree, err := Open(instance)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tree.Close(); err != nil {
			t.Error(err)
		}
	})
	return tree
}

func newGroup(t *testing.T, tree *Tree, name string) *Group {
	t.Helper()
	g, err := tree.New(name, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Remove(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// whereabouts returns the groups of a process at its start. It reads the output, so the process has
// not been moved since.
func whereabouts(g *Group) (string, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return "", err
	}
	defer func() { _ = r.Close() }()
	p, err := g.StartProcess("/bin/cat", []string{"cat", "/proc/self/cgroup"}, &os.ProcAttr{Files: []*os.File{nil, w, w}})
	if err := errors.Join(err, w.Close()); err != nil {
		return "", err
	}
	var out bytes.Buffer
	_, rerr := out.ReadFrom(r)
	_, err = p.Wait()
	return out.String(), errors.Join(rerr, err)
}

// strays returns the threads of this process that are in another group than its main thread.
func strays(t *testing.T) []string {
	t.Helper()
	want, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	tasks, err := filepath.Glob("/proc/self/task/*/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, f := range tasks {
		got, err := os.ReadFile(f)
		if err == nil && !bytes.Equal(got, want) {
			found = append(found, f+": "+string(got))
		}
	}
	return found
}

func TestStartProcess(t *testing.T) {
	tree := newTree(t, "test-start")
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			name := "j" + strconv.Itoa(i)
			g, err := tree.New(name, false)
			if err != nil {
				t.Error(err)
				return
			}
			got, err := whereabouts(g)
			if n := strings.Count(got, "/bullpen/test-start/"+name+"\n"); n != tree.limits || err != nil {
				t.Errorf("%s: in %d groups of %d, %v\n%s", name, n, tree.limits, err, got)
			}
			if err := g.Remove(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if s := strays(t); len(s) > 0 {
		t.Errorf("threads left in groups: %q", s)
	}
	if _, err := newGroup(t, tree, "x").StartProcess("/nonexistent", nil, &os.ProcAttr{}); !errors.Is(
		err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if s := strays(t); len(s) > 0 {
		t.Errorf("threads left in groups after a failure: %q", s)
	}
}

// onFirst receives functions to call on the main thread.
var onFirst = func() chan func() {
	// The goroutine of init is on the main thread until main begins. To stay there it must be locked
	// now.
	runtime.LockOSThread()
	return make(chan func())
}()

func TestMain(m *testing.M) {
	if os.Getenv(settlerEnv) != "" {
		settler()
		return
	}
	if os.Getenv(enterEnv) != "" {
		fmt.Println((&Tree{version: 1}).CheckEntry())
		return
	}
	code := make(chan int)
	go func() { code <- m.Run() }()
	for {
		select {
		case f := <-onFirst:
			f()
		case c := <-code:
			os.Exit(c)
		}
	}
}

// The main thread carries the memory of the process and is never moved.
func TestMainThreadIsNotMoved(t *testing.T) {
	tree := newTree(t, "test-first")
	if tree.version != 1 {
		return // no thread is moved
	}
	g := newGroup(t, tree, "x")
	type on struct{ first, started bool }
	got := make(chan on, 1)
	onFirst <- func() {
		caller, started := unix.Gettid(), 0
		_, _ = g.startFromInside(false, func() (*os.Process, error) {
			started = unix.Gettid()
			return nil, nil
		})
		got <- on{caller == unix.Getpid(), started != 0 && started != caller}
	}
	if o := <-got; !o.first || !o.started {
		t.Errorf("%+v", o)
	}
}

// A thread that cannot return is ended, and does not block the removal of the group.
func TestThreadThatCannotReturnIsNotReused(t *testing.T) {
	tree := newTree(t, "test-lost")
	if tree.version != 1 {
		return // no thread is moved
	}
	for name, h := range map[string]*home{
		"refused":          {groups: tree.home.groups, tasks: []int{-1}},
		"moved":            {groups: []byte("elsewhere"), tasks: tree.home.tasks},
		"not to be seen":   {},
		"all in its place": tree.home,
	} {
		t.Run(name, func(t *testing.T) {
			g := newGroup(t, tree, name)
			g.home = h
			thread := 0
			p, err := g.startFromInside(false, func() (*os.Process, error) {
				thread = unix.Gettid()
				return os.StartProcess("/bin/true", []string{"true"}, &os.ProcAttr{})
			})
			if err != nil {
				t.Fatal(err)
			}
			if state, err := p.Wait(); err != nil || !state.Success() {
				t.Errorf("%v, %v", state, err)
			}
			if err := g.Remove(); err != nil {
				t.Error(err)
			}
			if s := strays(t); len(s) > 0 {
				t.Errorf("threads left in groups: %q", s)
			}
			_, err = os.Stat("/proc/self/task/" + strconv.Itoa(thread))
			if alive := err == nil; alive != (h == tree.home) {
				t.Errorf("thread alive: %v", alive)
			}
		})
	}
}

// On version 2. The hierarchy has no controllers if the machine uses version 1 for them.
func TestStartProcessVersion2(t *testing.T) {
	root := t.TempDir()
	if err := unix.Mount("none", root, "cgroup2", 0, ""); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(root, "bullpen-test-start2")
	if err := os.Mkdir(dir, 0o750); err != nil {
		t.Error(err)
	}
	attr := syscall.SysProcAttr{Setpgid: true}
	g := &Group{tree: &Tree{version: 2}, version: 2, dirs: []string{dir}}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p, err := g.StartProcess("/bin/cat", []string{"cat", "/proc/self/cgroup"},
		&os.ProcAttr{Files: []*os.File{nil, w, w}, Sys: &attr})
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	out, rerr := io.ReadAll(r)
	_, err = p.Wait()
	if err := errors.Join(rerr, err, g.Remove(), unix.Unmount(root, 0), r.Close()); err != nil {
		t.Error(err)
	}
	if !strings.Contains(string(out), "/bullpen-test-start2\n") {
		t.Errorf("in %s", out)
	}
	if attr.UseCgroupFD {
		t.Error("the caller's attributes were changed")
	}
}
