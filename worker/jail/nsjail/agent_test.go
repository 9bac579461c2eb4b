package nsjail

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/processpb"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// makeAgents returns a directory of an operator with two agents, of which others must not see anything.
func makeAgents(t *testing.T) string {
	t.Helper()
	dir := tempDir(t, "/dev/shm")
	for name, content := range map[string]string{
		"claude/1.0.0/run": "#!/bin/bash\necho runs\n", "claude/1.0.0/vendor/file": "kept\n", "codex/2.0.0/file": "secret\n",
		"file": "secret\n",
	} {
		write(t, dir, name, []byte(content), 0o755)
	}
	top := filepath.Join(dir, "claude", "1.0.0")
	// A link leads to what its path is in the jail, and never out of it.
	if err := os.Symlink("../../codex/2.0.0/file", filepath.Join(top, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(top, "below"), 0o755); err != nil {
		t.Fatal(err)
	}
	mountTmpfs(t, filepath.Join(top, "below"))
	write(t, dir, "claude/1.0.0/below/file", []byte("secret\n"), 0o755)
	write(t, dir, "claude/1.0.0/suid", []byte("x"), 0o755)
	if err := os.Chmod(filepath.Join(top, "suid"), 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	return dir
}

func mountTmpfs(t *testing.T, dir string) {
	t.Helper()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// guest is the guest of a live sandbox in a jail.
type guest struct {
	client processpb.ProcessClient
	ended  chan error
	cancel func()
}

// startGuest runs the guest in a jail with Spec.Guest.
func startGuest(t *testing.T, j jail.Jail) *guest {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "socket")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	listener.SetUnlinkOnClose(false)
	file, err := listener.File()
	if err != nil {
		t.Fatal(err)
	}
	heartbeat, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	config, err := json.Marshal(map[string]any{
		"users": []map[string]any{
			{"name": jail.GuestUser, "uid": jail.ProgramID, "gid": jail.ProgramID, "home": DefaultHome},
			{"name": "root", "uid": 0, "gid": 0, "home": "/root", "capable": true},
		},
		"default_user": jail.GuestUser, "dir": DefaultHome, "log_bytes": 1 << 20,
		"env": map[string]string{"PATH": "/usr/local/bin:/usr/bin:/bin"},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	g := &guest{ended: make(chan error, 1), cancel: cancel}
	go func() {
		_, err := j.Run(ctx, jail.Program{
			Argv: []string{jail.GuestConfig}, Env: []string{"GOMAXPROCS=1", "GOMEMLIMIT=16MiB"}, Dir: "/",
			Files:    []jail.File{{Path: jail.GuestConfig, Mode: 0o600, Owner: jail.OwnerInit, Content: config}},
			Listener: file, Heartbeat: heartbeat,
		})
		g.ended <- errors.Join(err, file.Close(), heartbeat.Close())
	}()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	g.client = processpb.NewProcessClient(&http.Client{Transport: transport}, "http://guest", connect.WithProtoJSON())
	return g
}

// run runs a Bash program as a user, and returns its output and its exit status.
func (g *guest) run(t *testing.T, user, code string) (output string, exit int32) {
	t.Helper()
	call := connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", "exec 2>&1; " + code}},
	})
	call.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":")))
	stream, err := g.client.Start(t.Context(), call)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stream.Close() }()
	var out strings.Builder
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		out.Write(event.GetData().GetStdout())
		if end := event.GetEnd(); end != nil {
			exit = end.GetExitCode()
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	return out.String(), exit
}

// close kills the jail.
func (g *guest) close(t *testing.T) {
	t.Helper()
	g.cancel()
	if err := <-g.ended; err != nil {
		t.Error(err)
	}
}

// The program of an agent can be run in its own sandbox, changed by none of its users, and shows nothing
// else of the operator's directory.
func TestMountAgent(t *testing.T) {
	t.Parallel()
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	agents := makeAgents(t)
	image := testSpec()
	image.Root = makeImage(t, map[string]string{"bin": "-> usr/bin"})
	root := image
	root.RootBytes = 16 << 20
	for name, spec := range map[string]jail.Spec{"host": testSpec(), "image": image, "writable root": root} {
		spec.Guest = true
		j := prepare(t, m, spec)
		if err := j.MountAgent(t.Context(), "mock", agents); err == nil {
			t.Errorf("%s: an agent without a program was mounted", name)
		}
		if err := j.MountAgent(t.Context(), "claude", filepath.Join(agents, "claude", "1.0.0")); err != nil {
			t.Fatal(name, err)
		}
		g := startGuest(t, j)
		for _, user := range []string{jail.GuestUser, "root"} {
			got, exit := g.run(t, user, `cd `+proto.AgentDir("claude")+` && ./run && read -r l < vendor/file && echo "$l"
echo * below/* ../*/*
for f in run vendor/file new; do (echo x >> $f) 2>/dev/null && echo "wrote to $f"; done
[ -e link ] && echo "the link leads out"
while read -r _ path _ options _; do [ $path = $PWD ] && echo "${options%,relatime*}"; done < /proc/mounts; true`)
			if want := "runs\nkept\nbelow link run suid vendor below/* ../claude/below ../claude/link " +
				"../claude/run ../claude/suid ../claude/vendor\nro,nosuid,nodev\n"; got != want || exit != 0 {
				t.Errorf("%s, %s: got %q with exit status %d, want %q", name, user, got, exit, want)
			}
		}
		g.close(t)
	}
	other := testSpec()
	other.Guest = true
	g := startGuest(t, prepare(t, m, other))
	// Programs of agents reserve much more memory than they use, open many files and write large ones.
	got, _ := g.run(t, jail.GuestUser, "ulimit -v; ulimit -f; ulimit -t; ulimit -n")
	if got != "unlimited\nunlimited\nunlimited\n1024\n" {
		t.Errorf("the limits of address space, file size, cpu time and open files are %q", got)
	}
	if got, _ := g.run(t, "root", "cd /run/bullpen/agents; echo * */*"); got != "amp claude codex opencode */*\n" {
		t.Errorf("another sandbox shows %q", got)
	}
	g.close(t)
	for name, want := range map[string]string{"run": "#!/bin/bash\necho runs\n", "vendor/file": "kept\n"} {
		if got, err := os.ReadFile(filepath.Join(agents, "claude/1.0.0", name)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	m.nothingLeft(t)
}
