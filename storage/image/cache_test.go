package image_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/image"
)

// imageStore is a source of images.
type imageStore struct {
	mu        sync.Mutex
	images    map[string][]byte
	fetched   atomic.Int32
	gate      chan struct{} // nil, or closed when images may come
	requested chan struct{} // receives a value for each fetch that waits
}

func newImageStore() *imageStore {
	return &imageStore{images: map[string][]byte{}, requested: make(chan struct{}, 100)}
}

// put adds an image with a file of its own.
func (s *imageStore) put(t testing.TB, content string) (digest string) {
	t.Helper()
	tree := newTree(t, image.DefaultLimits())
	if err := tree.AddTar(bytes.NewReader(archive(t, dir("bin"), bash, file("f", content)))); err != nil {
		t.Fatal(err)
	}
	tree.Env = map[string]string{"LANG": "C.UTF-8"}
	stored, img := pack(t, tree)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.images[img.Digest] = stored
	return img.Digest
}

func (s *imageStore) Fetch(ctx context.Context, digest string) (io.ReadCloser, error) {
	s.fetched.Add(1)
	if s.gate != nil {
		s.requested <- struct{}{}
		select {
		case <-s.gate:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.images[digest]
	if !ok {
		return nil, proto.ErrNotFound
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

func open(t testing.TB, dir string, from image.Source, most int64) *image.Cache {
	t.Helper()
	c, err := image.Open(dir, from, most, testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// get returns an image and checks the content of its file.
func get(t testing.TB, c *image.Cache, digest, content string) (*image.Unpacked, func()) {
	t.Helper()
	img, release, err := c.Get(testContext(t), digest)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(img.Root, "f")); err != nil || string(b) != content {
		t.Fatalf("%q, %v", b, err)
	}
	if img.Languages[proto.Bash] != "/bin/bash" || img.Env["LANG"] != "C.UTF-8" || img.Size <= 0 {
		t.Fatalf("%+v", img)
	}
	return img, release
}

func TestImageIsUnpackedOnce(t *testing.T) {
	s := newImageStore()
	digest := s.put(t, "hello")
	s.gate = make(chan struct{})
	c := open(t, filepath.Join(t.TempDir(), "images"), s, 1<<20)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			_, release := get(t, c, digest, "hello")
			release()
			release() // a second call has no effect
		})
	}
	<-s.requested
	close(s.gate)
	all.Wait()
	if n := s.fetched.Load(); n != 1 {
		t.Errorf("fetched %d times", n)
	}
	if stats := c.Stats(); stats.Hits != 7 || stats.Misses != 1 || stats.Bytes == 0 {
		t.Errorf("%+v", stats)
	}
}

// All users can read unpacked images and traverse their directories. Only the owner can write.
func TestUnpackedImageIsWorldReadable(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	s := newImageStore()
	digest := s.put(t, "hello")
	at := filepath.Join(t.TempDir(), "images")
	img, release := get(t, open(t, at, s, 1<<20), digest, "hello")
	defer release()
	err := filepath.WalkDir(at, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		want := fs.FileMode(0o644)
		if d.IsDir() || d.Name() == "bash" {
			want = 0o755
		}
		if strings.HasPrefix(path, img.Root) || d.IsDir() {
			if info.Mode().Perm() != want || info.Sys().(*syscall.Stat_t).Uid != uint32(os.Getuid()) {
				t.Errorf("%s is %v", path, info.Mode())
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(img.Root, "f"))
	if err != nil || !info.ModTime().Equal(day) {
		t.Errorf("%v, %v", info.ModTime(), err)
	}
	if info, err := os.Stat(filepath.Join(img.Root, "bin")); err != nil || !info.ModTime().Equal(day) {
		t.Errorf("%v, %v", info.ModTime(), err)
	}
}

func TestUnusedImagesAreEvicted(t *testing.T) {
	s := newImageStore()
	a, b, d := s.put(t, "a"), s.put(t, "b"), s.put(t, "d")
	at := t.TempDir()
	probe := open(t, t.TempDir(), s, 1<<20)
	img, release := get(t, probe, a, "a")
	release()
	c := open(t, at, s, 2*img.Size) // fits two images
	inA, releaseA := get(t, c, a, "a")
	inB, releaseB := get(t, c, b, "b")
	releaseB()
	_, releaseD := get(t, c, d, "d")
	if _, err := os.Stat(inB.Root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the unused image still exists: %v", err)
	}
	_, releaseB = get(t, c, b, "b")
	// Three images are in use and stay.
	get(t, c, a, "a")
	releaseA() // the other user still has it
	releaseD()
	if _, err := os.Stat(inA.Root); err != nil {
		t.Errorf("one in use was removed: %v", err)
	}
	releaseB()
	c.Close()
	if entries, err := os.ReadDir(at); err != nil || len(entries) != 3 { // boot, a, b
		t.Errorf("%v, %v", entries, err)
	}
}

func TestCacheStaysForTheNextProcess(t *testing.T) {
	s := newImageStore()
	digest := s.put(t, "hello")
	at := t.TempDir()
	c := open(t, at, s, 1<<20)
	_, release := get(t, c, digest, "hello")
	release()
	c.Close()
	get(t, open(t, at, s, 1<<20), digest, "hello")
	if n := s.fetched.Load(); n != 1 {
		t.Errorf("fetched %d times", n)
	}
	// Files were not synced. After a reboot of the machine they may be empty.
	if err := os.WriteFile(filepath.Join(at, "boot"), []byte("another"), 0o600); err != nil {
		t.Fatal(err)
	}
	get(t, open(t, at, s, 1<<20), digest, "hello")
	if n := s.fetched.Load(); n != 2 {
		t.Errorf("fetched %d times", n)
	}
	// A smaller limit applies from the start.
	small := open(t, at, s, 1)
	small.Close()
	if entries, err := os.ReadDir(at); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
}

func TestWrongImagesLeaveNothing(t *testing.T) {
	s := newImageStore()
	good := s.put(t, "hello")
	other, torn, wild := "sha256:"+strings.Repeat("0", 64), "sha256:"+strings.Repeat("1", 64),
		"sha256:"+strings.Repeat("2", 64)
	s.images[other] = s.images[good]
	s.images[torn] = s.images[good][:100]
	s.images[wild] = compress(t, archive(t, about, symlink("l", "/tmp"), file("l/f", "x")))
	at := t.TempDir()
	c := open(t, at, s, 1<<20)
	for digest, want := range map[string]error{
		other: image.ErrForm, torn: image.ErrForm, wild: image.ErrForm,
		"sha256:" + strings.Repeat("3", 64): proto.ErrNotFound,
	} {
		for range 2 { // the error is not cached
			if _, _, err := c.Get(testContext(t), digest); !errors.Is(err, want) {
				t.Errorf("%s: %v", digest, err)
			}
		}
	}
	for _, digest := range []string{"", "../../etc", "sha256:../../../../etc", strings.Repeat("0", 64)} {
		if _, _, err := c.Get(testContext(t), digest); err == nil {
			t.Errorf("%q was accepted as a digest", digest)
		}
	}
	if n := s.fetched.Load(); n != 8 {
		t.Errorf("fetched %d times", n)
	}
	c.Close()
	if entries, err := os.ReadDir(at); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
}

func TestCancelledCallerDoesNotEndTheFetch(t *testing.T) {
	s := newImageStore()
	digest := s.put(t, "hello")
	s.gate = make(chan struct{})
	c := open(t, t.TempDir(), s, 1<<20)
	ctx, leave := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	first := make(chan error, 1)
	go func() {
		_, _, err := c.Get(ctx, digest)
		first <- err
	}()
	<-s.requested
	leave(gone)
	if err := <-first; !errors.Is(err, gone) {
		t.Error(err)
	}
	close(s.gate)
	get(t, c, digest, "hello")
	if n := s.fetched.Load(); n != 1 {
		t.Errorf("fetched %d times", n)
	}
}

func TestCloseEndsTheFetch(t *testing.T) {
	s := newImageStore()
	digest := s.put(t, "hello")
	s.gate = make(chan struct{})
	c := open(t, t.TempDir(), s, 1<<20)
	got := make(chan error, 1)
	go func() {
		_, _, err := c.Get(context.Background(), digest)
		got <- err
	}()
	<-s.requested
	c.Close()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// childDir is set in a child process that unpacks an endless image into a cache in that directory.
const childDir = "BULLPEN_TEST_CACHE"

// endless returns the beginning of an image, prints a line once a file of it is in dir, and then
// blocks.
type endless struct {
	head io.Reader
	dir  string
}

func (e *endless) Read(b []byte) (int, error) {
	n, err := e.head.Read(b)
	if err == nil {
		return n, nil
	}
	// Files are written while more is read.
	for files := []string(nil); len(files) == 0; runtime.Gosched() {
		if files, err = filepath.Glob(filepath.Join(e.dir, "*", "root", "*")); err != nil {
			panic(err)
		}
	}
	fmt.Println("half-way")
	select {}
}

func (e *endless) Close() error { return nil }

func (e *endless) Fetch(context.Context, string) (io.ReadCloser, error) { return e, nil }

func unpackUntilKilled(dir string) {
	head, err := os.ReadFile(filepath.Join(dir, "head"))
	if err != nil {
		panic(err)
	}
	images := filepath.Join(dir, "images")
	c, err := image.Open(images, &endless{bytes.NewReader(head), images}, 16<<20, nil)
	if err != nil {
		panic(err)
	}
	_, _, err = c.Get(context.Background(), os.Getenv("BULLPEN_TEST_DIGEST"))
	panic(err)
}

// A process that is killed while it unpacks leaves no image that looks complete, and no other
// files.
func TestKilledHalfWay(t *testing.T) {
	s := newImageStore()
	random := make([]byte, 6<<20) // incompressible, so that the stored image is as long, and has several frames
	x := uint32(1)
	for i := range random {
		x ^= x << 13
		x ^= x >> 17
		x ^= x << 5
		random[i] = byte(x)
	}
	digest := s.put(t, string(random))
	at := t.TempDir()
	if err := os.WriteFile(filepath.Join(at, "head"), s.images[digest][:5<<20], 0o600); err != nil {
		t.Fatal(err)
	}
	child := exec.CommandContext(t.Context(), os.Args[0])
	child.Env = append(os.Environ(), childDir+"="+at, "BULLPEN_TEST_DIGEST="+digest)
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if line := make([]byte, len("half-way\n")); true {
		if _, err := io.ReadFull(out, line); err != nil {
			t.Fatalf("%q, %v", line, err)
		}
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // killed
	images := filepath.Join(at, "images")
	left, err := filepath.Glob(filepath.Join(images, "*", "root", "*"))
	if err != nil || len(left) == 0 {
		t.Fatalf("it was not half-way: %v, %v", left, err)
	}
	c := open(t, images, s, 16<<20)
	get(t, c, digest, string(random))
	c.Close()
	if entries, err := os.ReadDir(images); err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
}
