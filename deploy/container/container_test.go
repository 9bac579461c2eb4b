package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"filippo.io/age"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"
)

// userNamespace is the variable with the path of the pod's user namespace, for the process of the
// tests in the pod's network namespace.
const userNamespace = "BULLPEN_TEST_USER_NAMESPACE"

// podID is the user of the host that is root in the pod's user namespace.
const podID = 1 << 20

// TestMain runs the tests in a network namespace that belongs to a user namespace, as that of a pod
// with hostUsers: false does.
func TestMain(m *testing.M) {
	if os.Getenv(userNamespace) == "" {
		if err := runInPod(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if err := loopbackUp(); err != nil {
		fmt.Fprintln(os.Stderr, "loopback:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func runInPod() error {
	runtime.LockOSThread() // Pdeathsig is about the thread
	ids := []syscall.SysProcIDMap{{HostID: podID, Size: 1 << 16}}
	pod := exec.Command("sleep", "infinity")
	pod.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET, UidMappings: ids,
		GidMappings: ids, GidMappingsEnableSetgroups: true, Pdeathsig: syscall.SIGKILL,
	}
	if err := pod.Start(); err != nil {
		return fmt.Errorf("create the pod's namespaces: %w", err)
	}
	program, err := os.Executable()
	if err == nil {
		namespaces := fmt.Sprintf("/proc/%d/ns/", pod.Process.Pid)
		self := exec.Command("nsenter", append([]string{"--net=" + namespaces + "net", program}, os.Args[1:]...)...)
		self.Env = append(os.Environ(), userNamespace+"="+namespaces+"user")
		self.Stdout, self.Stderr = os.Stdout, os.Stderr
		self.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		err = self.Run()
	}
	_ = pod.Process.Kill() // it does nothing else than wait for that
	_ = pod.Wait()
	return err
}

func loopbackUp() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return errors.Join(unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, lo), unix.Close(s))
}

// openDir returns a new directory that the users of containers can traverse.
func openDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for path := dir; path != os.TempDir(); path = filepath.Dir(path) {
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestImages unpacks the images of `make images` and starts them with runc as the chart has a runtime
// start them: as process 1, with the chart's commands, settings, users, capabilities and filter. A
// job in each language runs, no program reads figures of the host, and SIGTERM ends both in order. The
// worker has a user namespace without the host's root, as with hostUsers: false, or none.
func TestImages(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("the test starts containers: run it as root")
	}
	if _, err := exec.LookPath("runc"); err != nil {
		t.Fatal("runc is missing: apt-get install runc")
	}
	dir := openDir(t)
	chart := readChart(t)
	nats, err := server.NewServer(
		&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: filepath.Join(dir, "nats"), NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	nats.Start()
	t.Cleanup(nats.Shutdown)
	if !nats.ReadyForConnections(time.Minute) {
		t.Fatal("NATS does not start")
	}
	startS3(t, filepath.Join(dir, "buckets"))
	if err := os.Mkdir(filepath.Join(dir, "files"), 0o755); err != nil {
		t.Fatal(err)
	}
	identity, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	keyFile := filepath.Join(dir, "files", "secrets.key") // as in a Secret's volume with fsGroup
	if err := errors.Join(os.WriteFile(keyFile, []byte(identity.String()+"\n"), 0o440), os.Chmod(keyFile, 0o440),
		os.Chown(keyFile, 0, user)); err != nil {
		t.Fatal(err)
	}
	const apiKey = "sk-local-0123456789012345678901234567890"
	settings := map[string]string{
		"BULLPEN_NATS": nats.ClientURL(), "BULLPEN_REPLICAS": "1",
		"BULLPEN_STORE":         "s3://bullpen/blobs?endpoint=http://127.0.0.1:7070&region=us-east-1&path_style=1",
		"BULLPEN_REDIS":         "",
		"BULLPEN_BOOTSTRAP_KEY": apiKey, "AWS_ACCESS_KEY_ID": s3Key, "AWS_SECRET_ACCESS_KEY": s3Secret,
		"BULLPEN_DISK_RESERVE": "64MiB",
	}
	files := bind(filepath.Join(dir, "files"), "/etc/bullpen", "ro")

	gateway := unpack(t, dir, "gateway", 0).start(t, chart["gateway"], settings, files)
	started := time.Now()
	poll(t, gateway, "http://127.0.0.1:8080/healthz", http.StatusOK)
	t.Logf("the gateway answered %v after its start", time.Since(started).Round(time.Millisecond))
	gateway.checkStatus(t, map[string]string{
		"Uid": "65532", "Gid": "65532", "NSpid": "1", "CapEff": "0000000000000000",
		"CapBnd": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "0",
	})

	for name, firstID := range map[string]int{"hostUsers false": podID, "hostUsers true": 0} {
		t.Run(name, func(t *testing.T) {
			image := unpack(t, openDir(t), "worker", firstID)
			settings := maps.Clone(settings)
			settings["BULLPEN_LISTEN"] = "127.0.0.1:8081" // its own pod has :8080 free
			c := chart["worker"]
			c.Args = []string{"doctor", "--roles", "worker"}
			doctor := image.start(t, c, settings)
			if err := doctor.wait(); err != nil {
				t.Fatalf("bullpen doctor: %v\n%s", err, doctor.output())
			}
			report := doctor.output()
			t.Logf("bullpen doctor:\n%s", report)
			for _, feature := range []string{"network", "network limits", "homes on disk", "mounts"} {
				if !regexp.MustCompile(`(?m)^none +` + feature + `  `).MatchString(report) {
					t.Errorf("bullpen doctor does not say that the worker does not offer %s", feature)
				}
			}

			worker := image.start(t, chart["worker"], settings)
			started := time.Now()
			poll(t, worker, "http://127.0.0.1:8081/readyz", http.StatusOK)
			poll(t, gateway, "http://127.0.0.1:8080/readyz", http.StatusOK)
			t.Logf("the worker was ready %v after its start", time.Since(started).Round(time.Millisecond))
			worker.checkStatus(t, map[string]string{
				"NSpid": "1", "CapEff": "00000000000000c3", "CapBnd": "00000000000000c3",
				"NoNewPrivs": "1", "Seccomp": "2",
			})
			for file, program := range map[string]struct{ code, want string }{
				"a.py": {"print(6 * 7)", "42"}, "a.js": {"console.log(6 * 7)", "42"}, "a.sh": {"echo $((6 * 7))", "42"},
				"a.rb": {"puts 6 * 7", "42"},
				"host.sh": {"cd /proc; cat {,1/,self/}net/{protocols,rt_acct,sockstat,softnet_stat,stat/rt_cache} 2>/dev/null | " +
					"wc -c; wc -l < net/unix", "0\n1"},
			} {
				path := filepath.Join(t.TempDir(), file)
				if err := os.WriteFile(path, []byte(program.code), 0o644); err != nil {
					t.Fatal(err)
				}
				run := exec.CommandContext(t.Context(), filepath.Join("../../bin/images/tree/usr/bin/bullpen"), "run", path)
				run.Env = []string{"BULLPEN_URL=http://127.0.0.1:8080", "BULLPEN_API_KEY=" + apiKey, "PATH=/usr/bin"}
				var stderr strings.Builder
				run.Stderr = &stderr
				if out, err := run.Output(); err != nil || string(out) != program.want+"\n" {
					t.Fatalf("%s: %v\n%s%s\n%s", file, err, out, &stderr, worker.output())
				}
			}
			worker.terminate(t)
		})
	}
	gateway.terminate(t)
}

const s3Key, s3Secret = "bullpen", "0123456789abcdef"

// startS3 starts the S3 server of the tests, with a bucket named bullpen.
func startS3(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(dir, "bullpen"), 0o700); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "go", "tool", "-modfile=../s3server/go.mod", "-n", "versitygw")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	program, err := build.Output()
	if err != nil {
		t.Fatalf("make s3server: %v", err)
	}
	s3 := exec.CommandContext(t.Context(), strings.TrimSpace(string(program)), "--port", "127.0.0.1:7070", "--access",
		s3Key, "--secret", s3Secret, "posix", dir)
	if err := s3.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s3.Wait() }) // killed
}

// container is what the chart says of one.
type container struct {
	Args            []string
	Env             []struct{ Name, Value string }
	SecurityContext struct {
		RunAsUser                *uint32
		ReadOnlyRootFilesystem   bool
		AllowPrivilegeEscalation *bool
		Capabilities             struct{ Add, Drop []string }
		ProcMount                string
		SeccompProfile           struct{ Type string }
	}
	VolumeMounts []struct {
		MountPath string
		ReadOnly  bool
	}
}

// readChart returns the containers of deploy/helm/rendered/minimal.yaml by their names.
func readChart(t *testing.T) map[string]container {
	t.Helper()
	text, err := os.ReadFile("../helm/rendered/minimal.yaml")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]container{}
	for _, document := range regexp.MustCompile(`(?m)^---$`).Split(string(text), -1) {
		var w struct {
			Spec struct {
				Template struct {
					Spec struct {
						SecurityContext struct{ RunAsUser *uint32 }
						Containers      []struct {
							Name string
							container
						}
					}
				}
			}
		}
		if err := yaml.Unmarshal([]byte(document), &w); err != nil {
			t.Fatal(err)
		}
		for _, c := range w.Spec.Template.Spec.Containers {
			if c.SecurityContext.RunAsUser == nil {
				c.SecurityContext.RunAsUser = w.Spec.Template.Spec.SecurityContext.RunAsUser
			}
			all[c.Name] = c.container
		}
	}
	return all
}

// unpacked is an image that is unpacked, as a bundle of runc.
type unpacked struct {
	dir        string
	entrypoint []string
	env        []string
	firstID    int // id of the host that root of its user namespace is; 0 without one
}

// unpack unpacks the image that make images wrote.
func unpack(t *testing.T, dir, name string, firstID int) *unpacked {
	t.Helper()
	index, err := layout.ImageIndexFromPath(filepath.Join("../../bin/images", name))
	if err != nil {
		t.Fatalf("make images: %v", err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	image, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	b := &unpacked{
		dir: filepath.Join(dir, name), entrypoint: config.Config.Entrypoint, env: config.Config.Env,
		firstID: firstID,
	}
	layers := mutate.Extract(image)
	defer func() { _ = layers.Close() }() // only read
	if err := untar(layers, filepath.Join(b.dir, "rootfs"), firstID); err != nil {
		t.Fatal(err)
	}
	return b
}

// untar unpacks a trusted archive, with firstID added to its ids.
func untar(from io.Reader, to string, firstID int) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for r := tar.NewReader(from); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		path := filepath.Join(to, h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(path, 0o755)
		case tar.TypeReg:
			var f *os.File
			if f, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600); err == nil {
				_, err = io.Copy(f, r)
				err = errors.Join(err, f.Close())
			}
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, path)
		case tar.TypeLink:
			err = os.Link(filepath.Join(to, h.Linkname), path)
		default:
			err = fmt.Errorf("%s has the type %c", h.Name, h.Typeflag)
		}
		if err == nil && h.Typeflag != tar.TypeLink {
			err = os.Lchown(path, firstID+h.Uid, firstID+h.Gid)
		}
		if err == nil && h.Typeflag != tar.TypeSymlink && h.Typeflag != tar.TypeLink {
			err = unix.Chmod(path, uint32(h.Mode)&0o7777)
		}
		if err != nil {
			return err
		}
	}
}

// giveGroups makes a container's root the owner of its control groups of version 1, as runc does with
// those of version 2.
const giveGroups = `pid=$(sed 's/.*"pid":\([0-9]*\).*/\1/')
while IFS=: read -r _ name path; do
	dir=/sys/fs/cgroup/${name#name=}$path
	if [ "$path" != / ] && [ -n "$name" ] && [ -d "$dir" ]; then chown -R "$1:$1" "$dir"; fi
done </proc/$pid/cgroup`

func bind(from, to, mode string) specs.Mount {
	return specs.Mount{Destination: to, Source: from, Type: "bind", Options: []string{"rbind", mode, "nosuid", "nodev"}}
}

// running is a container that runc has started.
type running struct {
	id   string
	cmd  *exec.Cmd
	log  *bytes.Buffer
	done chan struct{}
	err  error // after done
}

// start starts a container with the privileges of the chart.
func (b *unpacked) start(t *testing.T, c container, settings map[string]string, mounts ...specs.Mount) *running {
	t.Helper()
	run := exec.Command("runc", "spec")
	run.Dir = b.dir
	if err := os.RemoveAll(filepath.Join(b.dir, "config.json")); err != nil {
		t.Fatal(err)
	}
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("runc spec: %v\n%s", err, out)
	}
	text, err := os.ReadFile(filepath.Join(b.dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var s specs.Spec
	if err := json.Unmarshal(text, &s); err != nil {
		t.Fatal(err)
	}
	security := c.SecurityContext
	var capabilities []string
	for _, name := range security.Capabilities.Add {
		capabilities = append(capabilities, "CAP_"+name)
	}
	if !slices.Equal(security.Capabilities.Drop, []string{"ALL"}) || !security.ReadOnlyRootFilesystem ||
		security.AllowPrivilegeEscalation == nil || *security.AllowPrivilegeEscalation {
		t.Fatalf("the chart has the security context %+v", security)
	}
	s.Process.Terminal = false
	s.Process.User = specs.User{UID: *security.RunAsUser, GID: *security.RunAsUser}
	s.Process.Args = append(slices.Clone(b.entrypoint), c.Args...)
	s.Process.Capabilities = &specs.LinuxCapabilities{
		Bounding: capabilities, Effective: capabilities, Permitted: capabilities,
	}
	s.Process.NoNewPrivileges = true
	s.Process.Rlimits = nil
	s.Process.Env = slices.Clone(b.env)
	for _, env := range c.Env {
		value, ok := settings[env.Name]
		if !ok {
			value = env.Value
		}
		if value != "" {
			s.Process.Env = append(s.Process.Env, env.Name+"="+value)
		}
	}
	s.Root.Readonly = true
	// The network namespace is this process's.
	s.Linux.Namespaces = slices.DeleteFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool {
		return n.Type == specs.NetworkNamespace
	})
	s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	s.Mounts = append(s.Mounts, mounts...)
	owner := b.firstID + int(*security.RunAsUser)
	if b.firstID != 0 {
		s.Linux.Namespaces = append(
			s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace, Path: os.Getenv(userNamespace)})
		s.Linux.UIDMappings = []specs.LinuxIDMapping{{ContainerID: 0, HostID: uint32(b.firstID), Size: 1 << 16}}
		s.Linux.GIDMappings = s.Linux.UIDMappings
		s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{
			{Path: "/bin/sh", Args: []string{"sh", "-c", giveGroups, "sh", fmt.Sprint(owner)}},
		}}
	}
	for _, m := range c.VolumeMounts {
		switch {
		case m.ReadOnly:
		case m.MountPath == "/run":
			s.Mounts = append(s.Mounts,
				specs.Mount{Destination: "/run", Type: "tmpfs", Source: "tmpfs", Options: []string{"mode=755"}})
		default: // an emptyDir
			dir := filepath.Join(b.dir, strings.ReplaceAll(m.MountPath, "/", "-"))
			if err := errors.Join(os.MkdirAll(dir, 0o755), os.Chown(dir, owner, owner)); err != nil {
				t.Fatal(err)
			}
			s.Mounts = append(s.Mounts, bind(dir, m.MountPath, "rw"))
		}
	}
	if security.ProcMount == "Unmasked" {
		s.Linux.MaskedPaths, s.Linux.ReadonlyPaths = nil, nil
	}
	if security.SeccompProfile.Type == "Localhost" {
		text, err := os.ReadFile("../seccomp.json")
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &s.Linux.Seccomp); err != nil {
			t.Fatal(err)
		}
		// The worker's runtime class has writable control groups.
		for i := range s.Mounts {
			if s.Mounts[i].Type == "cgroup" {
				s.Mounts[i].Options = slices.DeleteFunc(s.Mounts[i].Options, func(o string) bool { return o == "ro" })
			}
		}
	}
	if text, err = json.Marshal(&s); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(b.dir, "config.json"), text, 0o600); err != nil {
		t.Fatal(err)
	}

	r := &running{
		id: fmt.Sprintf("bullpen-test-%d-%d", os.Getpid(), time.Now().UnixNano()), log: new(bytes.Buffer),
		done: make(chan struct{}),
	}
	pidFile := filepath.Join(b.dir, r.id)
	r.cmd = exec.Command("runc", "run", "--pid-file", pidFile, r.id)
	r.cmd.Dir, r.cmd.Stdout, r.cmd.Stderr = b.dir, r.log, r.log
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		r.err = r.cmd.Wait()
		close(r.done)
	}()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_ = exec.CommandContext(ctx, "runc", "delete", "--force", r.id).Run() // gone already, if the test passed
		<-r.done
	})
	return r
}

func (r *running) wait() error { <-r.done; return r.err }

// output returns what an ended container wrote, and kills one that runs.
func (r *running) output() string {
	_ = exec.Command("runc", "kill", r.id, "KILL").Run() // not if it has ended
	<-r.done
	return r.log.String()
}

// checkStatus checks /proc/PID/status of process 1.
func (r *running) checkStatus(t *testing.T, want map[string]string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "runc", "state", r.id).Output()
	if err != nil {
		t.Fatal(err)
	}
	var state specs.State
	if err := json.Unmarshal(out, &state); err != nil {
		t.Fatal(err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", state.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		name, values, _ := strings.Cut(line, ":")
		fields := strings.Fields(values)
		if value, ok := want[name]; ok && fields[len(fields)-1] != value {
			t.Errorf("process 1 has %s %v, want %s", name, fields, value)
		}
	}
}

// terminate sends SIGTERM, after which process 1 must end in order.
func (r *running) terminate(t *testing.T) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "runc", "kill", r.id, "TERM").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := r.wait(); err != nil {
		t.Errorf("after SIGTERM: %v\n%s", err, r.log)
	}
}

// poll waits for an answer with the status.
func poll(t *testing.T, r *running, url string, status int) {
	t.Helper()
	for {
		resp, err := http.Get(url)
		if err == nil {
			body, _ := io.ReadAll(resp.Body) // shown in the log alone
			_ = resp.Body.Close()
			if resp.StatusCode == status {
				return
			}
			if testing.Verbose() {
				t.Logf("%s: %d %s", url, resp.StatusCode, body)
			}
		}
		select {
		case <-r.done:
			t.Fatalf("it ended: %v\n%s", r.err, r.log)
		case <-time.After(200 * time.Millisecond):
		}
	}
}
