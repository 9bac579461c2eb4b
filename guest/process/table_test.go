package process

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/guest/account"
	"github.com/bullpen-run/bullpen/guest/processpb"
)

// newTable returns a table whose only user is that of the test.
func newTable(t *testing.T) *Table {
	t.Helper()
	home := t.TempDir()
	user := account.User{Name: "user", UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()), Home: home}
	table := &Table{Users: &account.Users{List: []account.User{user}, Default: "user"}, Lane: account.NewLane(1)}
	table.Open()
	t.Cleanup(func() {
		table.Close(time.Second)
		table.Lane.Close()
		for len(table.outputs.list) > 0 {
			table.outputs.remove(table.outputs.list[0])
		}
	})
	return table
}

// TestConcurrentUse starts, reads, kills and lists at the same time, for the race detector.
func TestConcurrentUse(t *testing.T) {
	table := newTable(t)
	user := table.Users.List[0]
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var ended sync.WaitGroup
	for i := range 24 {
		ended.Go(func() {
			for j := range 4 {
				script, timeout := fmt.Sprintf("seq %d; exit %d", 1+10_000*j, i), time.Duration(0)
				if i%3 == 0 {
					script += "; sleep 1000"
					timeout = 100 * time.Millisecond
				}
				if i%3 == 1 {
					script = "sleep 1000 & seq 1000; wait"
				}
				p, r, err := table.start(user, &processpb.StartRequest{
					Process: &processpb.ProcessConfig{Cmd: "sh", Args: []string{"-c", script}},
				}, timeout)
				if err != nil {
					t.Error(err)
					return
				}
				other := p.out.readAfter(0)
				if i%3 == 1 {
					if _, err := p.group.kill(ctx, table.view()); err != nil {
						t.Error(err)
					}
				}
				a, b := readToEnd(ctx, r), readToEnd(ctx, other)
				if a != b || !strings.HasPrefix("1\n2\n", a[:min(len(a), 2)]) {
					t.Errorf("%d bytes and %d bytes", len(a), len(b))
				}
				r.close()
				other.close()
				<-p.done
				if want := int32(i); i%3 == 2 && p.event.GetExitCode() != want {
					t.Errorf("%v", p.event)
				}
				selector := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: uint32(p.pid)}}
				if _, e, err := table.find(selector); err != nil || e == nil {
					t.Errorf("an ended process is not found: %v", err)
				}
			}
		})
	}
	ended.Wait()
	table.mu.Lock()
	defer table.mu.Unlock()
	if len(table.running) != 0 || table.configs != 0 {
		t.Errorf("%d processes run, with %d bytes", len(table.running), table.configs)
	}
}

// readToEnd returns the whole output.
func readToEnd(ctx context.Context, r *reader) string {
	var all strings.Builder
	for {
		c, ok, ended, more := r.read()
		switch {
		case ended:
			return all.String()
		case ok:
			all.Write(c.data)
			continue
		}
		select {
		case <-more:
		case <-ctx.Done():
			return all.String()
		}
	}
}

// TestStoppedTable starts nothing.
func TestStoppedTable(t *testing.T) {
	table := newTable(t)
	table.Close(0)
	request := &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "true"}}
	_, _, err := table.start(table.Users.List[0], request, 0)
	if err == nil || !strings.Contains(err.Error(), "stopping") {
		t.Fatal(err)
	}
}
