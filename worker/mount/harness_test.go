package mount_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/s3"
	"github.com/bullpen-run/bullpen/storage/storagetest"
	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
	"github.com/bullpen-run/bullpen/worker/mount"
	"github.com/bullpen-run/bullpen/worker/mount/objectfs"
)

const serverCommand = "mount-server"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == serverCommand {
		err := mount.Serve(func(m proto.Mount, keys proto.S3Credentials) (objectfs.Objects, error) {
			return s3.OpenBucket(s3.BucketConfig{S3Mount: *m.S3, Credentials: keys, Prefix: m.Prefix})
		})
		if err != nil {
			os.Exit(1)
		}
		return
	}
	if os.Getenv(victimEnv) != "" {
		victim()
		return
	}
	goleak.VerifyTestMain(m)
}

// modes are the ways in which jails are made.
var modes = [...]string{"cold", "prewarmed", "forked"} // read only

// world is a worker's part that makes jails and mounts.
type world struct {
	t        testing.TB // of the running subtest
	top      testing.TB // of the whole test
	maker    *nsjail.Maker
	opener   *mount.Opener
	homes    worker.Homes // of volumes
	zygote   jail.Zygote
	root     string // allowed for directories
	spool    string
	endpoint string
	server   *storagetest.Server
	secret   map[string][]byte
	onLine   func(string)  // is called with the output of the next program; nil for none
	kill     chan struct{} // closed to kill the next program; nil if it is not to be killed
}

func nsjailPath(tb testing.TB) string {
	tb.Helper()
	dir, err := os.Getwd()
	if err != nil {
		tb.Fatal(err)
	}
	return filepath.Join(dir, "..", "..", "bin/nsjail/nsjail/bin/nsjail")
}

func tempDir(tb testing.TB, parent string) string {
	tb.Helper()
	dir, err := os.MkdirTemp(parent, "bullpen-test-")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	return dir
}

const spoolBytes = 64 << 20

func newWorld(tb testing.TB) *world {
	tb.Helper()
	w := &world{t: tb, top: tb, spool: tempDir(tb, "/var/tmp"), root: tempDir(tb, "/var/tmp")}
	must(tb, unix.Mount("tmpfs", w.root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"))
	tb.Cleanup(func() { must(tb, unix.Unmount(w.root, unix.MNT_DETACH)) })
	w.maker = openMaker(tb, nsjailPath(tb), tempDir(tb, "/dev/shm"))
	tb.Cleanup(func() { must(tb, w.maker.Close()) })
	var err error
	w.opener, err = mount.Open(mount.Config{
		Maker: w.maker, Roots: []string{w.root}, SpoolDir: w.spool, SpoolBytes: spoolBytes,
		Command: []string{"bullpen", serverCommand},
	})
	must(tb, err)
	w.server, err = storagetest.Start("/var/tmp")
	must(tb, err)
	tb.Cleanup(func() { must(tb, w.server.Close()) })
	w.endpoint, err = w.server.Endpoint()
	must(tb, err)
	id, key := storagetest.Credentials()
	value, err := json.Marshal(proto.S3Credentials{AccessKeyID: id, SecretAccessKey: key})
	must(tb, err)
	w.secret = map[string][]byte{"key": value}
	return w
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// s3 returns a mount of a prefix of the server's bucket.
func (w *world) s3(slug, prefix string) proto.Mount {
	return proto.Mount{Slug: slug, Kind: proto.MountS3, Prefix: prefix, S3: &proto.S3Mount{
		Endpoint: w.endpoint, Region: storagetest.Region, Bucket: storagetest.Bucket, PathStyle: true, Credential: "key",
	}}
}

func readOnly(m proto.Mount) proto.Mount {
	m.ReadOnly = true
	return m
}

// directory returns a mount of a new directory that belongs to user 1234.
func (w *world) directory(slug string) (m proto.Mount, path string) {
	w.t.Helper()
	path = filepath.Join(w.root, slug)
	must(w.t, os.Mkdir(path, 0o755))
	must(w.t, os.Chown(path, 1234, 1234))
	return proto.Mount{Slug: slug, Kind: proto.MountDirectory, Directory: path}, path
}

// put stores objects in the bucket.
func (w *world) put(objects map[string]string) {
	w.t.Helper()
	b := w.bucket("")
	for name, content := range objects {
		_, err := b.Put(w.t.Context(), name, int64(len(content)), strings.NewReader(content))
		must(w.t, err)
	}
}

func (w *world) bucket(prefix string) *s3.Bucket {
	w.t.Helper()
	id, key := storagetest.Credentials()
	b, err := s3.OpenBucket(s3.BucketConfig{
		S3Mount: *w.s3("", "").S3, Credentials: proto.S3Credentials{AccessKeyID: id, SecretAccessKey: key}, Prefix: prefix,
	})
	must(w.t, err)
	w.t.Cleanup(func() { must(w.t, b.Close()) })
	return b
}

// object returns the content of an object, or "absent".
func (w *world) object(name string) string {
	w.t.Helper()
	b, err := os.ReadFile(w.server.Path(name))
	if errors.Is(err, os.ErrNotExist) {
		return "absent"
	}
	must(w.t, err)
	return string(b)
}

func testSpec() jail.Spec {
	return jail.Spec{
		CPU: 2, Memory: 512 << 20, Pids: 256, OpenFiles: 1024, HomeBytes: 64 << 20, TmpBytes: 64 << 20,
		Inodes: 4096,
	}
}

// prepare returns a jail that is made in a mode.
func (w *world) prepare(mode string) jail.Jail {
	w.t.Helper()
	spec := testSpec()
	if mode != "cold" {
		p, err := jail.Source{Language: "python", Home: nsjail.DefaultHome}.Prewarm()
		must(w.t, err)
		spec.Prewarm = &p
	}
	if mode == "forked" {
		if w.zygote == nil {
			zspec := testSpec()
			p, err := jail.Source{Home: nsjail.DefaultHome}.Zygote(nil)
			must(w.t, err)
			zspec.Prewarm = &p
			w.zygote, err = w.maker.Zygote(w.top.Context(), zspec)
			must(w.t, err)
			w.top.Cleanup(func() { must(w.top, w.zygote.Close()) })
		}
		j, err := w.zygote.Fork(w.t.Context(), spec)
		must(w.t, err)
		return j
	}
	j, err := w.maker.Prepare(w.t.Context(), spec)
	must(w.t, err)
	return j
}

// result is what a program did.
type result struct {
	jail.Outcome
	stdout, stderr string
	finish         error // of what was written
}

// run runs a program of Python with mounts.
func (w *world) run(mode, code string, mounts ...proto.Mount) result {
	w.t.Helper()
	return w.runFor(mode, code, 2*time.Minute, mounts...)
}

func (w *world) runFor(mode, code string, timeout time.Duration, mounts ...proto.Mount) (r result) {
	w.t.Helper()
	set, err := w.opener.Open(mounts)
	must(w.t, err)
	defer func() { must(w.t, set.Close()) }()
	must(w.t, set.Use(w.secret))
	j := w.prepare(mode)
	defer func() { must(w.t, j.Close()) }()
	must(w.t, j.MountData(w.t.Context(), set))
	p, err := jail.Source{Language: "python", Code: code, TraceID: "trc_test", Home: nsjail.DefaultHome}.Program()
	must(w.t, err)
	var stdout, stderr bytes.Buffer
	p.Timeout, p.Stdout, p.Stderr = timeout, lines{&stdout, w.takeOnLine()}, &stderr
	must(w.t, j.Load(w.t.Context(), p))
	ctx, stop := context.WithCancel(w.t.Context())
	defer stop()
	if kill := w.kill; kill != nil {
		w.kill = nil
		go func() { <-kill; stop() }()
	}
	r.Outcome, err = j.Run(ctx, p)
	must(w.t, err)
	r.finish = set.Finish(w.t.Context())
	r.stdout, r.stderr = stdout.String(), stderr.String()
	return r
}

func (w *world) takeOnLine() func(string) {
	f := w.onLine
	w.onLine = nil
	if f == nil {
		return nil
	}
	var once sync.Once
	return func(line string) { once.Do(func() { f(line) }) }
}

// want checks that a program printed exactly a text and that all was stored.
func (w *world) want(r result, stdout string) {
	w.t.Helper()
	if r.Kind != jail.Exited || r.ExitCode != 0 || r.stdout != stdout || r.finish != nil {
		w.t.Errorf("the program ended as %+v, printed %q, want %q; finish: %v; stderr: %s", r.Outcome, r.stdout, stdout,
			r.finish, r.stderr)
	}
}

// inEachMode runs a test in jails that are made in each way.
func inEachMode(t *testing.T, test func(w *world, mode string)) {
	t.Helper()
	inModes(t, modes[:], test)
}

// inEachModeOrOne is inEachMode for tests that are long and do not depend on how jails are made: with
// -short they run in one way.
func inEachModeOrOne(t *testing.T, test func(w *world, mode string)) {
	t.Helper()
	if testing.Short() {
		inModes(t, []string{"forked"}, test)
	} else {
		inModes(t, modes[:], test)
	}
}

func inModes(t *testing.T, modes []string, test func(w *world, mode string)) {
	t.Helper()
	w := newWorld(t)
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			outer := w.t
			w.t = t
			defer func() { w.t = outer }()
			test(w, mode)
		})
	}
}

// unique returns a name for the mode.
func unique(name, mode string) string { return fmt.Sprintf("%s-%s", name, mode) }

// wantFile checks a file's content and owner.
func (w *world) wantFile(path, content string, uid uint32) {
	w.t.Helper()
	b, err := os.ReadFile(path)
	must(w.t, err)
	var st unix.Stat_t
	must(w.t, unix.Stat(path, &st))
	if string(b) != content || st.Uid != uid {
		w.t.Errorf("%s has %q of user %d, want %q of %d", path, b, st.Uid, content, uid)
	}
}

// victimEnv makes the test binary a worker to be killed.
const victimEnv = "BULLPEN_TEST_VICTIM"

// panicTB is for helpers that are called without a test.
type panicTB struct{ testing.TB }

func (*panicTB) Helper()                  {}
func (*panicTB) Fatal(args ...any)        { panic(fmt.Sprint(args...)) }
func (*panicTB) Context() context.Context { return context.Background() }
func (*panicTB) Output() io.Writer        { return os.Stderr }

type atomicBool = atomic.Bool

var discardLog = log.New(io.Discard, "", 0)

// forward sends a request to a server. It keeps what the signature covers.
func forward(endpoint string, rw http.ResponseWriter, r *http.Request) {
	out, err := http.NewRequestWithContext(r.Context(), r.Method, endpoint+r.URL.RequestURI(), r.Body)
	if err != nil {
		panic(err)
	}
	out.Header, out.Host, out.ContentLength = r.Header.Clone(), r.Host, r.ContentLength
	response, err := http.DefaultTransport.RoundTrip(out)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer func() { _ = response.Body.Close() }()
	maps.Copy(rw.Header(), response.Header)
	rw.WriteHeader(response.StatusCode)
	_, _ = io.Copy(rw, response.Body)
}

func openMaker(tb testing.TB, nsjailPath, runDir string) *nsjail.Maker {
	tb.Helper()
	m, err := nsjail.Open(nsjail.Config{
		NsjailPath: nsjailPath, RunDir: runDir, Log: slog.New(slog.NewTextHandler(tb.Output(), nil)),
	})
	must(tb, err)
	return m
}

// lines calls a function with each write to it.
type lines struct {
	buffer *bytes.Buffer
	onLine func(string)
}

func (l lines) Write(p []byte) (int, error) {
	if l.onLine != nil {
		l.onLine(string(p))
	}
	return l.buffer.Write(p)
}
