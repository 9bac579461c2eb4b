package registry_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

const keepImages = time.Hour

// errNoImage is the error of inspect for a body that begins with "bad".
var errNoImage = &proto.FieldError{Field: "body", Message: "body is no image"}

// inspect accepts everything that does not begin with "bad". A | ends a part.
func inspect(r io.Reader) (*proto.Image, []proto.ImagePart, error) {
	content, err := io.ReadAll(r)
	if err == nil && len(content) == 0 {
		err = io.EOF
	}
	if err != nil {
		return nil, nil, fmt.Errorf("inspect: %w", err)
	}
	if bytes.HasPrefix(content, []byte("bad")) {
		return nil, nil, errNoImage
	}
	var parts []proto.ImagePart
	for part := range bytes.SplitAfterSeq(content, []byte("|")) {
		parts = append(parts, proto.ImagePart{Size: int64(len(part)), Digest: digestOf(part)})
	}
	return &proto.Image{
		Digest: digestOf(content), Size: int64(len(content)),
		Languages: map[proto.Language]string{proto.Bash: "/bin/bash"}, Env: map[string]string{},
	}, parts, nil
}

func digestOf(content []byte) string {
	sum := sha256.Sum256(content)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// images opens the registry as a gateway does, with a connection of its own.
func images(
	t *testing.T, s *natsembed.Server, blobs registry.Blobs, full func() bool,
) (*registry.Images, *store.Store) {
	t.Helper()
	st := storetest.Open(t, s)
	i, err := registry.OpenImages(storetest.Context(t), registry.ImagesConfig{
		Store: st, Blobs: blobs, Inspect: inspect, Keep: keepImages, Full: full, Log: storetest.Log(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	runUntilEnd(t, i.Run)
	return i, st
}

func putImage(t *testing.T, i *registry.Images, name string, content []byte, replaces bool) {
	t.Helper()
	img, replaced, err := i.Put(storetest.Context(t), name, digestOf(content), bytes.NewReader(content))
	if err != nil || replaced != replaces || img.Name != name || img.Size != int64(len(content)) ||
		img.CreatedAt.IsZero() {
		t.Fatalf("%+v, %v, %v", img, replaced, err)
	}
}

// memoryBlobs is a blob store in memory.
type memoryBlobs struct {
	mu      sync.Mutex
	objects map[string][]byte
	down    error // returned by Put
}

func (m *memoryBlobs) Put(_ context.Context, b proto.Blob, content io.ReaderAt) error {
	read, err := io.ReadAll(io.NewSectionReader(content, 0, b.Size))
	if err != nil || m.down != nil {
		return errors.Join(m.down, err)
	}
	if int64(len(read)) != b.Size || digestOf(read) != b.Digest {
		return fmt.Errorf("%d bytes with digest %s put as %+v", len(read), digestOf(read), b)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.objects == nil {
		m.objects = map[string][]byte{}
	}
	m.objects[b.Key] = read
	return nil
}

func (m *memoryBlobs) Get(_ context.Context, b proto.Blob) (io.ReadCloser, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	content, ok := m.objects[b.Key]
	if !ok {
		return nil, proto.ErrNotFound
	}
	return io.NopCloser(bytes.NewReader(content)), nil
}

func (m *memoryBlobs) Delete(_ context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.objects, key)
	return nil
}

func (m *memoryBlobs) List(_ context.Context, prefix string) iter.Seq2[proto.BlobEntry, error] {
	return func(yield func(proto.BlobEntry, error) bool) {
		for _, key := range m.keys() {
			if strings.HasPrefix(key, prefix) && !yield(proto.BlobEntry{Key: key, Modified: time.Now()}, nil) {
				return
			}
		}
	}
}

func (m *memoryBlobs) keys() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.objects))
}

// fetch reads an image as a worker does, which attaches to existing streams only.
func fetch(t *testing.T, s *natsembed.Server, blobs registry.Blobs, digest string) ([]byte, error) {
	t.Helper()
	st, err := store.Connect(storetest.Context(t), store.Access{InProcess: s, Name: "worker"},
		store.Config{AttachOnly: true}, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	r, err := (&registry.ImageSource{Store: st, Blobs: blobs}).Fetch(storetest.Context(t), digest)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	return io.ReadAll(r)
}

func TestImageIsSeenByEveryGatewayAndWorker(t *testing.T) {
	s, blobs := storetest.Server(t), &memoryBlobs{}
	here, _ := images(t, s, blobs, nil)
	there, _ := images(t, s, blobs, nil)
	ctx := storetest.Context(t)
	one, two := []byte("one"), []byte("two")
	putImage(t, here, "py", one, false)
	eventually(t, "seen by the other gateway", func() bool {
		img, err := there.Image(ctx, "py")
		return err == nil && img.Digest == digestOf(one) && img.Languages[proto.Bash] == "/bin/bash"
	})
	putImage(t, there, "py", two, true)
	for _, content := range [][]byte{one, two} {
		if got, err := fetch(t, s, blobs, digestOf(content)); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%q, %v", got, err)
		}
	}
	putImage(t, here, "another", []byte("3"), false)
	list, err := here.List(ctx)
	if err != nil || len(list) != 2 || list[0].Name != "another" || list[1].Digest != digestOf(two) {
		t.Errorf("%+v, %v", list, err)
	}
	late, _ := images(t, s, blobs, nil)
	if _, err := late.Image(ctx, "py"); err != nil {
		t.Error(err)
	}
	if _, err := here.Image(ctx, "none"); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
	if _, err := fetch(t, s, blobs, digestOf([]byte("none"))); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
}

// Accepted jobs need the image that their sandbox had when they were accepted.
func TestImageWithoutNameIsKeptForAcceptedJobs(t *testing.T) {
	s, blobs := storetest.Server(t), &memoryBlobs{}
	i, _ := images(t, s, blobs, nil)
	ctx := storetest.Context(t)
	one := []byte("one")
	putImage(t, i, "a", one, false)
	putImage(t, i, "b", one, false)
	for _, name := range []string{"a", "b"} {
		if img, err := i.Remove(ctx, name); err != nil || img.Name != name {
			t.Fatal(err)
		}
		if _, err := i.Image(ctx, name); !errors.Is(err, proto.ErrNotFound) {
			t.Error(err)
		}
	}
	if _, err := i.Remove(ctx, "a"); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
	sweep := func(in time.Duration) {
		t.Helper()
		if err := i.Sweep(ctx, time.Now().Add(in)); err != nil {
			t.Fatal(err)
		}
	}
	sweep(keepImages - time.Minute)
	if got, err := fetch(t, s, blobs, digestOf(one)); err != nil || !bytes.Equal(got, one) {
		t.Fatalf("%q, %v", got, err)
	}
	putImage(t, i, "c", one, false)
	putImage(t, i, "d", one, false) // stored once, as the newest upload
	sweep(3 * keepImages)
	if got, err := fetch(t, s, blobs, digestOf(one)); err != nil || !bytes.Equal(got, one) || len(blobs.keys()) != 1 {
		t.Fatalf("%q, %v, %d stored", got, err, len(blobs.keys()))
	}
	putImage(t, i, "c", []byte("other"), true)
	putImage(t, i, "d", []byte("other"), true)
	sweep(3 * keepImages)
	if _, err := fetch(t, s, blobs, digestOf(one)); !errors.Is(err, proto.ErrNotFound) || len(blobs.keys()) != 1 {
		t.Fatalf("%v, %d stored", err, len(blobs.keys()))
	}
}

// After a restore of the registry alone, blobs may be missing in the store. Storing an image again
// repairs all its names.
func TestLostImageIsRepairedByStoringItAgain(t *testing.T) {
	s, blobs := storetest.Server(t), &memoryBlobs{}
	i, _ := images(t, s, blobs, nil)
	one := []byte("one")
	putImage(t, i, "a", one, false)
	putImage(t, i, "b", one, false)
	blobs.objects = nil
	if _, err := fetch(t, s, blobs, digestOf(one)); !errors.Is(err, proto.ErrNotFound) {
		t.Fatal(err)
	}
	putImage(t, i, "b", one, true)
	if got, err := fetch(t, s, blobs, digestOf(one)); err != nil || !bytes.Equal(got, one) {
		t.Fatalf("%q, %v", got, err)
	}
}

// mustFetch fails the test unless an image can be fetched.
func mustFetch(t *testing.T, s *natsembed.Server, blobs registry.Blobs, content string) {
	t.Helper()
	if got, err := fetch(t, s, blobs, digestOf([]byte(content))); err != nil || string(got) != content {
		t.Fatalf("%q, %v, want %q", got, err, content)
	}
}

// An image stores only the parts that no other image has, and keeps those that it shares.
func TestImagesShareParts(t *testing.T) {
	s, blobs := storetest.Server(t), &memoryBlobs{}
	i, _ := images(t, s, blobs, nil)
	ctx := storetest.Context(t)
	// stored returns the bytes of all blobs but lists of parts.
	stored := func() (all string) {
		for _, key := range blobs.keys() {
			if !strings.HasSuffix(key, "/parts") {
				all += string(blobs.objects[key])
			}
		}
		return all
	}
	putImage(t, i, "old", []byte("base|pandas|end"), false)
	putImage(t, i, "new", []byte("base|pandas|numpy|base|end"), false)
	if got := stored(); len(got) != len("base|pandas|endnumpy|") {
		t.Errorf("stored %q", got)
	}
	mustFetch(t, s, blobs, "base|pandas|end")
	mustFetch(t, s, blobs, "base|pandas|numpy|base|end")
	if _, err := i.Remove(ctx, "old"); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second one removes what the first one found unnamed
		if err := i.Sweep(ctx, time.Now().Add(3*keepImages)); err != nil {
			t.Fatal(err)
		}
	}
	mustFetch(t, s, blobs, "base|pandas|numpy|base|end")
	if _, err := i.Remove(ctx, "new"); err != nil {
		t.Fatal(err)
	}
	if err := i.Sweep(ctx, time.Now().Add(3*keepImages)); err != nil || len(blobs.keys()) != 0 {
		t.Errorf("%v, stored %q", err, blobs.keys())
	}
}

// A part that the store has lost is stored again, by the same image or by another one.
func TestLostPartIsNotShared(t *testing.T) {
	s, blobs := storetest.Server(t), &memoryBlobs{}
	i, _ := images(t, s, blobs, nil)
	putImage(t, i, "a", []byte("base|a"), false)
	for _, key := range blobs.keys() {
		if string(blobs.objects[key]) == "base|" {
			delete(blobs.objects, key)
		}
	}
	if _, err := fetch(t, s, blobs, digestOf([]byte("base|a"))); !errors.Is(err, proto.ErrNotFound) {
		t.Fatal(err)
	}
	putImage(t, i, "b", []byte("base|b"), false)
	mustFetch(t, s, blobs, "base|b")
	putImage(t, i, "a", []byte("base|a"), true)
	mustFetch(t, s, blobs, "base|a")
}

// removing is a blob store whose next Put is preceded by a call.
type removing struct {
	*memoryBlobs
	before func()
}

func (r *removing) Put(ctx context.Context, b proto.Blob, content io.ReaderAt) error {
	if before := r.before; before != nil {
		r.before = nil
		before()
	}
	return r.memoryBlobs.Put(ctx, b, content)
}

// The image whose parts an upload shares may be removed while the rest is being stored.
func TestSharedPartsRemovedDuringAnUpload(t *testing.T) {
	s, blobs := storetest.Server(t), &removing{memoryBlobs: &memoryBlobs{}}
	i, _ := images(t, s, blobs, nil)
	ctx := storetest.Context(t)
	putImage(t, i, "old", []byte("base|old"), false)
	blobs.before = func() {
		if _, err := i.Remove(ctx, "old"); err != nil {
			t.Error(err)
		}
		if err := i.Sweep(ctx, time.Now().Add(3*keepImages)); err != nil {
			t.Error(err)
		}
	}
	putImage(t, i, "new", []byte("base|new"), false)
	mustFetch(t, s, blobs, "base|new")
}

func TestRejectedImageLeavesNothing(t *testing.T) {
	blobs, full := &memoryBlobs{}, false
	i, _ := images(t, storetest.Server(t), blobs, func() bool { return full })
	ctx := storetest.Context(t)
	good := bytes.Repeat([]byte("0123456789abcde\n"), 128<<10)
	errBroken := errors.New("the connection broke")
	for what, tt := range map[string]struct {
		digest string
		body   io.Reader
		want   func(error) bool
	}{
		"another digest": {digestOf([]byte("x")), bytes.NewReader(good), func(err error) bool {
			var f *proto.FieldError
			return errors.As(err, &f) && f.Field == "digest"
		}},
		"no image": {digestOf([]byte("bad")), strings.NewReader("bad" + string(good)), func(err error) bool {
			return errors.Is(err, errNoImage)
		}},
		"a broken upload": {
			digestOf(good), io.MultiReader(bytes.NewReader(good), iotest.ErrReader(errBroken)),
			func(err error) bool { return errors.Is(err, errBroken) },
		},
		"nothing": {digestOf(nil), strings.NewReader(""), func(err error) bool { return errors.Is(err, io.EOF) }},
	} {
		if _, _, err := i.Put(ctx, "py", tt.digest, tt.body); !tt.want(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	full = true
	var refused *proto.Rejection
	if _, _, err := i.Put(ctx, "py", digestOf(good), bytes.NewReader(good)); !errors.As(err, &refused) ||
		refused.Reason != proto.RejectedDiskFull {
		t.Errorf("full disk: %v", err)
	}
	full, blobs.down = false, syscall.ENOSPC
	if _, _, err := i.Put(ctx, "py", digestOf(good), bytes.NewReader(good)); !errors.As(err, &refused) ||
		refused.Reason != proto.RejectedDiskFull {
		t.Errorf("full store: %v", err)
	}
	if list, err := i.List(ctx); err != nil || len(list) != 0 || len(blobs.keys()) != 0 {
		t.Errorf("%+v, %v, stored %q", list, err, blobs.keys())
	}
}

// A gateway that is killed between storing a blob and naming it leaves a blob without a name.
func TestBlobWithoutNameIsSwept(t *testing.T) {
	blobs := &memoryBlobs{}
	i, _ := images(t, storetest.Server(t), blobs, nil)
	ctx := storetest.Context(t)
	putImage(t, i, "py", []byte("good"), false)
	for _, key := range []string{"images/lost", "layers/others"} {
		if err := blobs.Put(ctx, proto.Blob{Key: key, Digest: digestOf(nil)}, strings.NewReader("")); err != nil {
			t.Fatal(err)
		}
	}
	if err := i.Sweep(ctx, time.Now()); err != nil || len(blobs.keys()) != 3 {
		t.Fatalf("an upload that may be going on was removed: %v", err)
	}
	if err := i.Sweep(ctx, time.Now().Add(3*time.Hour)); err != nil || len(blobs.keys()) != 2 ||
		blobs.keys()[1] != "layers/others" {
		t.Fatalf("stored %q, %v", blobs.keys(), err)
	}
}

func TestMalformedCatalogIsIgnored(t *testing.T) {
	i, st := images(t, storetest.Server(t), &memoryBlobs{}, nil)
	ctx := storetest.Context(t)
	putImage(t, i, "py", []byte("good"), false)
	sound, err := st.Images.Get(ctx, "catalog")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Images.Put(ctx, "catalog", []byte("{")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := i.Put(ctx, "py", digestOf([]byte("x")), strings.NewReader("x")); err == nil {
		t.Error("a malformed catalog was overwritten")
	}
	if err := i.Sweep(ctx, time.Now().Add(24*time.Hour)); err == nil {
		t.Error("swept without a catalog")
	}
	if _, err := i.Image(ctx, "py"); err != nil {
		t.Error(err)
	}
	if _, err := st.Images.Put(ctx, "catalog", sound.Value()); err != nil {
		t.Fatal(err)
	}
	putImage(t, i, "py", []byte("again"), true)
}

func TestNumberOfImagesIsLimited(t *testing.T) {
	blobs := &memoryBlobs{}
	i, st := images(t, storetest.Server(t), blobs, nil)
	ctx := storetest.Context(t)
	var all []string
	for n := range proto.MaxImages {
		all = append(all, fmt.Sprintf(`{"name":"i%03d","digest":"sha256:%064d","key":"images/u"}`, n, 0))
	}
	if _, err := st.Images.Put(ctx, "catalog", []byte(`{"images":[`+strings.Join(all, ",")+`]}`)); err != nil {
		t.Fatal(err)
	}
	var field *proto.FieldError
	if _, _, err := i.Put(ctx, "j", digestOf([]byte("x")), strings.NewReader("x")); !errors.As(err, &field) ||
		len(blobs.keys()) != 0 {
		t.Errorf("one too many: %v, stored %q", err, blobs.keys())
	}
	putImage(t, i, "i000", []byte("x"), true)
}
