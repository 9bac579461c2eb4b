package e2e

import (
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"log/slog"
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

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/storage"
	"github.com/bullpen-run/bullpen/storage/image"
)

// hostBash makes a root file system with this machine's bash and its libraries.
func hostBash(t testing.TB) (dir string) {
	t.Helper()
	return hostPrograms(t, "/bin/bash")
}

// hostPrograms returns a directory with programs of the host and the libraries that they need.
func hostPrograms(t testing.TB, programs ...string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	linked, err := exec.CommandContext(t.Context(), "ldd", programs...).Output()
	if err != nil {
		t.Fatal(err)
	}
	files := slices.Clone(programs)
	for word := range strings.FieldsSeq(string(linked)) {
		if strings.HasPrefix(word, "/") && !strings.HasSuffix(word, ":") && !slices.Contains(files, word) {
			files = append(files, word)
		}
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, content, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// imageCommand runs bullpen image on a deployment and returns the image that it prints.
func (sys *system) imageCommand(t testing.TB, args ...string) proto.Image {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), sys.programs.bullpen, append([]string{"image"}, args...)...)
	cmd.Env = append(os.Environ(), "BULLPEN_URL="+sys.base, "BULLPEN_API_KEY="+sys.key)
	cmd.Stderr = t.Output()
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("bullpen image: %v\n%s", err, out)
	}
	var img proto.Image
	if err := json.Unmarshal(out, &img); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return img
}

// connectStore connects to the NATS server of a deployment in separate processes.
func (sys *system) connectStore(t testing.TB) *store.Store {
	t.Helper()
	st, err := store.Connect(t.Context(), store.Access{
		URL: sys.broker.url, User: natsUser, Password: natsPassword, CA: sys.programs.cert, Name: "test",
	}, store.Config{AttachOnly: true}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	return st
}

// unpackImage fetches and unpacks an image as a worker of the deployment does.
func (sys *system) unpackImage(t testing.TB, digest string) *image.Unpacked {
	t.Helper()
	st := sys.connectStore(t)
	// Other users cannot traverse the test's own temporary directory.
	around, err := os.MkdirTemp("", "bullpen-images-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(around) })
	if err := os.Chmod(around, 0o755); err != nil {
		t.Fatal(err)
	}
	blobs, err := storage.Open(t.Context(), sys.broker.blobStore(), "")
	if err != nil {
		t.Fatal(err)
	}
	cache, err := image.Open(filepath.Join(around, "images"), &registry.ImageSource{Store: st, Blobs: blobs}, 1<<30,
		slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cache.Close)
	img, release, err := cache.Get(t.Context(), digest)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return img
}

// runIn runs a program in an image as a user that a jail would use and returns its output.
func runIn(t testing.TB, img *image.Unpacked, l proto.Language, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), img.Languages[l], args...)
	cmd.Dir, cmd.Env, cmd.Stderr = "/", []string{}, t.Output()
	for name, value := range img.Env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot: img.Root, Credential: &syscall.Credential{Uid: 1_900_000_001, Gid: 1_900_000_001},
	}
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
	return string(out)
}

// testImage stores an image through the command line and runs the image that a worker gets.
func testImage(t *testing.T, p *programs) {
	sys := newSystem(t, p, topology{separate: true}, noSlots)
	img := sys.imageCommand(t, "import", "--json", "tiny", hostBash(t))
	if img.Architecture != runtime.GOARCH {
		t.Errorf("the image is for %q", img.Architecture)
	}
	out := runIn(t, sys.unpackImage(t, img.Digest), proto.Bash, "-c", "echo hello; echo x > /bin/evil || echo read-only")
	if out != "hello\nread-only\n" {
		t.Fatalf("%q", out)
	}

	// The server rejects what the command line would not send.
	hostile := []byte("not an image")
	sum := sha256.Sum256(hostile)
	path := "/v1/admin/images/hostile?digest=sha256:" + hex.EncodeToString(sum[:])
	if message := sys.do(http.MethodPut, path, hostile).rejection(t, http.StatusBadRequest,
		"validation_error"); !strings.Contains(message, "bullpen image") {
		t.Error(message)
	}
	if r := sys.get("/v1/admin/images"); strings.Contains(string(r.body), "hostile") {
		t.Error(r)
	}
}

// testForeignImage stores an image whose interpreter is for another architecture than the worker. Its
// programs wait, and the worker runs others meanwhile.
func testForeignImage(t *testing.T, p *programs) {
	sys := newSystem(t, p, topology{}, 1, "--queue-wait", "1s")
	foreign, machine := "arm64", elf.EM_AARCH64
	if runtime.GOARCH == foreign {
		foreign, machine = "amd64", elf.EM_X86_64
	}
	root := hostBash(t)
	path := filepath.Join(root, "bin", "bash")
	program, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	binary.LittleEndian.PutUint16(program[18:], uint16(machine))
	if err := os.WriteFile(path, program, 0o755); err != nil {
		t.Fatal(err)
	}
	if img := sys.imageCommand(t, "import", "--json", "foreign", root); img.Architecture != foreign {
		t.Fatalf("the image is for %q", img.Architecture)
	}
	b := sys.sandboxed("foreign", request{"image": "foreign"})
	waiting := b.submit(bash("true"))
	for _, mode := range []string{"application/json", ndjson} {
		r := b.execute(bash("true"), accept, mode)
		message := r.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
		if !strings.Contains(message, "no worker offers images for the architecture "+foreign) ||
			r.header.Get("Retry-After") != "" {
			t.Errorf("%v: %s", r.header, message)
		}
	}
	sys.ended(sys.submit(bash("echo native"))).succeeded(t, "native\n")
	if rec := b.record(waiting); rec.Status != "queued" {
		t.Errorf("in an image of another architecture: %s", rec)
	}
	if out := sys.command(t, sys.key, "workers", "pools"); !regexp.MustCompile(
		`default +` + runtime.GOARCH + ` +1 `).MatchString(out) {
		t.Errorf("bullpen workers pools printed %s", out)
	}
}
