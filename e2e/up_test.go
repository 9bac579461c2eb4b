package e2e

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// upDeployment is a deployment that `bullpen up` runs.
type upDeployment struct {
	*process
	dir string
}

// upProcess is a line of the list that `bullpen up` prints at its start.
type upProcess struct {
	pid       int
	addr, url string
}

var upLine = regexp.MustCompile(`(?m)^(\S+) +pid (\d+) +(\S+)(?: +(http://\S+))?$`)

// startUp starts `bullpen up` and returns once its gateways accept executions.
func (p *programs) startUp(t *testing.T, file, dir string) *upDeployment {
	t.Helper()
	env := []string{"BULLPEN_NSJAIL=" + p.nsjail}
	u := &upDeployment{p.startProcess(t, "up", env, p.bullpen, "up", "-f", file, "--data", dir), dir}
	u.prints(t, "ready after")
	return u
}

// prints waits until the output has a text.
func (u *upDeployment) prints(t *testing.T, text string) {
	t.Helper()
	eventually(t, "bullpen up prints "+text, func() (bool, any) {
		if u.ended() {
			t.Fatalf("bullpen up ended:\n%s", u.text(t))
		}
		return strings.Contains(u.text(t), text), "no such text"
	})
}

// list returns the processes by name.
func (u *upDeployment) list(t *testing.T) map[string]upProcess {
	t.Helper()
	found := map[string]upProcess{}
	for _, m := range upLine.FindAllStringSubmatch(u.text(t), -1) {
		pid, err := strconv.Atoi(m[2])
		if err != nil {
			t.Fatal(err)
		}
		found[m[1]] = upProcess{pid, m[3], m[4]}
	}
	return found
}

// left returns the processes of the deployment that run. All have its data directory in their
// arguments or variables, or are the program of a running execution.
func (u *upDeployment) left(t *testing.T) (found []string) {
	t.Helper()
	for _, pattern := range []string{"/proc/[0-9]*/environ", "/proc/[0-9]*/cmdline"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if text, err := os.ReadFile(file); err == nil && bytes.Contains(text, []byte(u.dir)) { // it may have ended
				found = append(found, file)
			}
		}
	}
	return found
}

// nothingLeft waits until no process, mount, interface or address of the deployment is left. Its
// network namespaces have no names, so they end with the processes.
func (u *upDeployment) nothingLeft(t *testing.T) {
	t.Helper()
	eventually(t, "nothing of bullpen up is left", func() (bool, any) {
		left := u.left(t)
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(mounts, []byte(u.dir)) {
			left = append(left, "a mount")
		}
		addrs, err := net.InterfaceAddrs()
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range addrs {
			if strings.HasPrefix(a.String(), "10.231.") {
				left = append(left, "the address "+a.String())
			}
		}
		return len(left) == 0, left
	})
}

// testUp runs the default topology, and a receiver of webhooks in its network.
func testUp(t *testing.T, p *programs) {
	dir := filepath.Join(t.TempDir(), "data")
	code, text := p.run(t, nil, "up", "--print")
	if code != 0 || strings.Count(text, "publish: 8080") != 1 {
		t.Fatalf("exit code %d:\n%s", code, text)
	}
	text = strings.Replace(text, "publish: 8080", "publish: 0", 1) +
		fmt.Sprintf("  receiver: {command: [%q, webhook, listen, --address, 0.0.0.0, --json]}\n", p.bullpen) +
		"env: {BULLPEN_WARM_MEMORY: 1, BULLPEN_WEBHOOK_ALLOW_CIDRS: '${receiver}/32', BULLPEN_WEBHOOK_ALLOW_HTTP: true, " +
		"BULLPEN_WEBHOOK_ALLOW_PORTS: 8099}\n"
	file := filepath.Join(t.TempDir(), "topology.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	u := p.startUp(t, file, dir)
	if code, text := p.run(t, nil, "up", "-f", file, "--data", dir); code != 1 ||
		!strings.Contains(text, "in use by another bullpen") {
		t.Errorf("a second one with the same data: exit code %d:\n%s", code, text)
	}
	list := u.list(t)
	var networks []string
	for name, process := range list {
		network, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", process.pid))
		if err != nil || slices.Contains(networks, network) {
			t.Errorf("%s is in %s, others in %v: %v", name, network, networks, err)
		}
		networks = append(networks, network)
	}
	if len(list) != 11 {
		t.Fatalf("got %d processes: %v", len(list), list)
	}
	key, err := os.ReadFile(filepath.Join(dir, "bootstrap.key"))
	if err != nil {
		t.Fatal(err)
	}
	via := func(name string) *api {
		return &api{t, u.list(t)[name].url, strings.TrimSpace(string(key)), newHTTP(t, nil)}
	}
	first, second := via("gateway-1"), via("gateway-2")
	for _, a := range []*api{first, second} {
		a.ended(a.submit(python("print(6 * 7)"))).succeeded(t, "42\n")
	}
	first.submit(bash("echo sent").and("webhook_url", "http://"+list["receiver"].addr+":8099/"))
	u.prints(t, `receiver  | {`)

	h := newHold()
	ids := make([]string, 6)
	for i := range ids {
		ids[i] = first.submit(bash(h.code()).and("max_attempts", 10))
	}
	h.reached(t, len(ids))
	for _, name := range []string{"worker-1", "nats-1"} {
		if err := syscall.Kill(list[name].pid, syscall.SIGKILL); err != nil {
			t.Fatalf("kill %s: %v", name, err)
		}
	}
	for _, name := range []string{"worker-1  |", "nats-1    |"} {
		u.prints(t, name+" [up] ended: signal: killed")
		u.prints(t, name+" [up] started again")
	}
	eventually(t, "all executions end", func() (bool, any) {
		h.release(t) // also in their second attempts
		for _, id := range ids {
			if rec := second.record(id); rec.ExitCode == nil {
				return false, rec
			}
		}
		return true, nil
	})
	for _, id := range ids {
		second.record(id).succeeded(t, "held\nwoken\n")
	}

	u.kill()
	u.nothingLeft(t)
	u = p.startUp(t, file, dir)
	a := via("gateway-1")
	a.record(ids[0]).succeeded(t, "held\nwoken\n")
	a.ended(a.submit(python("print(6 * 7)"))).succeeded(t, "42\n")
	u.signal(os.Interrupt)
	if code := u.exitCode(t); code != 0 {
		t.Errorf("exit code %d after an interrupt:\n%s", code, u.text(t))
	}
	u.nothingLeft(t)
}
