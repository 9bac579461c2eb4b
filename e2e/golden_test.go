package e2e

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

var updateGolden = flag.Bool("update-golden", false,
	"make the data directory anew that the next versions are tested with")

// The golden data directory was left behind by an earlier version of bullpen. See
// testdata/golden/README.md.
const (
	goldenDir = "testdata/golden"
	// goldenHook is the address for its webhooks. Nothing else listens there.
	goldenHook   = "127.77.0.1:18277"
	goldenThread = "notebook"
)

// golden describes the contents of the golden data directory.
type golden struct {
	Key    string            `json:"key"`   // a global administrator's; created for this test only
	Other  string            `json:"other"` // key of another organisation with its own sandbox
	Gets   map[string]string `json:"gets"`  // responses to the first key, by path
	Large  string            `json:"large"` // printed x 700,000 times
	Queued []string          `json:"queued"`
	Cut    string            `json:"cut"`  // was running when its server was killed
	Owed   string            `json:"owed"` // has ended, but its webhook was not delivered
}

// lastUses are what changes when the test reads the keys.
var lastUses = regexp.MustCompile(`"last_used_at":("[^"]*"|null),`)

// goldenArgs returns settings with which nothing in the directory ever expires.
func goldenArgs() []string {
	return []string{
		"--retention", "870000h", "--queue-expiry", "860000h", "--slots", "1",
		"--webhook-allow-http", "--webhook-allow-cidrs", "127.0.0.0/8", "--webhook-allow-ports",
		strings.Split(goldenHook, ":")[1],
	}
}

// listenGolden receives the webhooks and sends their paths on the channel.
func listenGolden(t *testing.T) (came chan string, stop func()) {
	t.Helper()
	listener, err := net.Listen("tcp", goldenHook)
	if err != nil {
		t.Fatal(err)
	}
	came = make(chan string, 64)
	s := &httptest.Server{
		Listener: listener,
		Config: &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			came <- r.URL.Path
		})},
	}
	s.Start()
	t.Cleanup(s.Close)
	return came, s.Close
}

// testGolden starts this version on data of an earlier one. Everything must read as before, and
// interrupted work must continue.
func testGolden(t *testing.T, p *programs) {
	packed := filepath.Join(goldenDir, "data.tar.zst")
	if *updateGolden {
		makeGolden(t, p, packed)
	}
	var g golden
	raw, err := os.ReadFile(filepath.Join(goldenDir, "expected.json"))
	if err == nil {
		err = json.Unmarshal(raw, &g)
	}
	if err != nil {
		t.Fatal(err)
	}
	sys := &system{
		programs: p, data: filepath.Join(t.TempDir(), "data"), args: goldenArgs(),
		api: &api{t: t, key: g.Key, http: newHTTP(t, nil)},
	}
	unpack(t, packed, sys.data)
	came, _ := listenGolden(t)
	sys.startFront(t)
	for path, want := range g.Gets {
		if got := sys.get(path); !contains(t, got.body, []byte(want)) {
			t.Errorf("%s returns\n%s\nand returned\n%s", path, got.body, want)
		}
	}
	sys.record(g.Large).succeeded(t, strings.Repeat("x", 700_000)+"\n") // large output, stored separately
	for _, id := range g.Queued {
		if rec := sys.ended(id); rec.Status != "success" || rec.Attempt != 1 {
			t.Errorf("queued then: %s", rec)
		}
	}
	sys.ended(g.Cut).failed(t, "failed", "worker_lost", "lost")
	sys.ready(t)
	sys.delivered(g.Owed)
	for <-came != "/owed" { // webhooks of queued executions may come first
	}
	if res := sys.with(g.Other).inline(bash("echo in")); res.Stdout != "in\n" {
		t.Errorf("with the other key: %+v", res)
	}
	res := sys.inline(bash("cat first second staged/file; ls -A").of(goldenThread))
	if want := "first\nsecond\nstaged\n"; !strings.HasPrefix(res.Stdout, want) {
		t.Errorf("the thread has %q", res.Stdout)
	}
}

// contains reports whether got has everything that want has. A later version may add fields.
func contains(t *testing.T, got, want []byte) bool {
	t.Helper()
	now, then := bytes.Split(bytes.TrimSpace(got), []byte("\n")), bytes.Split(bytes.TrimSpace(want), []byte("\n"))
	if len(now) != len(then) {
		return false
	}
	for i := range then {
		var a, b any
		if err := errors.Join(json.Unmarshal(now[i], &a), json.Unmarshal(then[i], &b)); err != nil {
			t.Error(err)
			return false
		}
		if !includes(a, b) {
			return false
		}
	}
	return true
}

func includes(got, want any) bool {
	switch w := want.(type) {
	case map[string]any:
		g, ok := got.(map[string]any)
		for name, v := range w {
			ok = ok && includes(g[name], v)
		}
		return ok
	case []any:
		g, ok := got.([]any)
		if !ok || len(g) != len(w) {
			return false
		}
		for i := range w {
			if !includes(g[i], w[i]) {
				return false
			}
		}
		return true
	default:
		return reflect.DeepEqual(got, want)
	}
}

// makeGolden makes the data directory with this version and kills the server while it works.
func makeGolden(t *testing.T, p *programs, packed string) {
	g := golden{Key: newSecret(), Gets: map[string]string{}}
	sys := &system{
		programs: p, data: filepath.Join(t.TempDir(), "data"), args: goldenArgs(),
		api: &api{t: t, key: g.Key, http: newHTTP(t, nil)},
		env: []string{"BULLPEN_BOOTSTRAP_KEY=" + g.Key},
	}
	sys.startFront(t)
	sys.ready(t)
	sys.front.kill()
	s, err := natsembed.Open(sys.data, 1<<20, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	st, err := store.Connect(t.Context(), store.Access{InProcess: s}, store.Config{AttachOnly: true, Replicas: 1},
		storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.JS.PublishMsg(
		t.Context(), &nats.Msg{Subject: "bullpen.job.background.default.k.stale", Data: []byte("not a job")}); err != nil {
		t.Fatal(err)
	}
	st.Close()
	s.Close()
	_, stop := listenGolden(t)
	sys.startFront(t)
	sys.ready(t)

	sys.settings(http.MethodPut, "/v1/webhook", request{"url": "http://" + goldenHook + "/delivered"})
	g.Other = sys.sandboxed("small", request{"memory": "256MiB", "env": request{"A": "b"}}).key
	var ids []string
	for _, r := range []request{
		bash("echo one; echo two >&2; exit 3").and("metadata", map[string]string{"build": "7"}),
		bash("sleep 60").and("timeout", 1),
		bash("echo first > first").of(goldenThread), bash("echo second > second").of(goldenThread),
	} {
		id := sys.submit(r)
		sys.ended(id)
		sys.delivered(id).check(t, proto.DeliveryDelivered, 1)
		ids = append(ids, id)
	}
	g.Large = sys.submit(python("print('x' * 700_000)"))
	sys.ended(g.Large)
	sys.delivered(g.Large)
	sys.upload(t, goldenThread, "staged/file", []byte("staged\n"))
	stop()
	g.Owed = sys.submit(bash("echo owed").and("webhook_url", "http://"+goldenHook+"/owed"))
	sys.ended(g.Owed)
	eventually(t, "the webhook has failed once", func() (bool, any) {
		r := sys.get(execution(g.Owed, "webhook"))
		return strings.Contains(string(r.body), `"attempts_made":1`), r
	})
	const dead = "/v1/admin/dead-letters"
	eventually(t, "the malformed job is dead-lettered", func() (bool, any) {
		r := sys.get(dead)
		return strings.Contains(string(r.body), string(proto.DeadMalformed)), r
	})
	paths := []string{
		dead, "/v1/webhook", "/v1/threads/" + goldenThread, "/v1/admin/keys", profilesPath,
		profilesPath + "/small",
	}
	for _, id := range ids {
		paths = append(paths, execution(id), execution(id, "output"), execution(id, "webhook"))
	}
	for _, path := range paths {
		r := sys.get(path)
		if r.status != http.StatusOK {
			t.Fatalf("%s: %s", path, r)
		}
		g.Gets[path] = lastUses.ReplaceAllString(string(r.body), "")
	}
	h := newHold()
	g.Cut = sys.submit(bash(h.code()))
	h.reached(t, 1)
	g.Queued = []string{sys.submit(bash("echo queued")), sys.submit(bash("echo fresh > first").of("fresh"))}
	sys.front.kill()
	pack(t, sys.data, packed)
	raw, err := json.MarshalIndent(g, "", "\t")
	if err == nil {
		err = os.WriteFile(filepath.Join(goldenDir, "expected.json"), append(raw, '\n'), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// pack archives dir without the homes and volumes that are local to a worker.
func pack(t *testing.T, dir, name string) {
	t.Helper()
	var out bytes.Buffer
	z, err := zstd.NewWriter(&out, zstd.WithEncoderLevel(zstd.SpeedBestCompression))
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(z)
	for _, of := range []string{"jetstream", "blobs", "secrets.key"} {
		err := filepath.WalkDir(filepath.Join(dir, of), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			raw, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			path, err = filepath.Rel(dir, path)
			if err != nil {
				return err
			}
			if err := w.WriteHeader(&tar.Header{Name: path, Mode: 0o600, Size: int64(len(raw))}); err != nil {
				return err
			}
			_, err = w.Write(raw)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), z.Close(), os.WriteFile(name, out.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s has %d bytes", name, out.Len())
}

func unpack(t *testing.T, name, dir string) {
	t.Helper()
	for r := tar.NewReader(bytes.NewReader(decompressed(t, name))); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		raw, err := io.ReadAll(r)
		if err != nil || !filepath.IsLocal(h.Name) {
			t.Fatal(fmt.Errorf("%s: %w", h.Name, err))
		}
		path := filepath.Join(dir, h.Name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, raw, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
}
