package registry_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
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

// errNoImage is what the tests' inspector says of a body that begins with "bad".
var errNoImage = &proto.FieldError{Field: "body", Message: "body is no image"}

// inspect takes everything for an image that does not begin with "bad".
func inspect(r io.Reader) (*proto.Image, error) {
	head := make([]byte, 3)
	n, err := io.ReadFull(r, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, fmt.Errorf("inspect: %w", err)
	}
	if string(head) == "bad" {
		return nil, errNoImage
	}
	sum := sha256.New()
	sum.Write(head[:n])
	rest, err := io.Copy(sum, r)
	if err != nil {
		return nil, fmt.Errorf("inspect: %w", err)
	}
	return &proto.Image{
		Digest: "sha256:" + hex.EncodeToString(sum.Sum(nil)), Size: int64(n) + rest,
		Languages: map[proto.Language]string{proto.Bash: "/bin/bash"}, Env: map[string]string{},
	}, nil
}

func digestOf(content []byte) string {
	sum := sha256.Sum256(content)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// images opens the registry as one gateway does.
func images(t *testing.T, s *natsembed.Server, full func() bool) (*registry.Images, *store.Store) {
	t.Helper()
	st := storetest.Open(t, s)
	i, err := registry.OpenImages(storetest.Context(t), registry.ImagesConfig{
		Store: st, Inspect: inspect, Keep: keepImages, Full: full, Log: storetest.Log(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- i.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return i, st
}

func putImage(t *testing.T, i *registry.Images, name string, content []byte, replaces bool) {
	t.Helper()
	img, replaced, err := i.Put(storetest.Context(t), name, digestOf(content), bytes.NewReader(content))
	if err != nil || replaced != replaces || img.Name != name || img.Size != int64(len(content)) || img.CreatedAt.IsZero() {
		t.Fatalf("%+v, %v, %v", img, replaced, err)
	}
}

// stored counts the messages that hold images.
func stored(t *testing.T, st *store.Store) uint64 {
	t.Helper()
	info, err := st.ImageParts.Info(storetest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	return info.State.Msgs
}

// fetch reads an image as a worker does, which only opens what it needs.
func fetch(t *testing.T, s *natsembed.Server, digest string) ([]byte, error) {
	t.Helper()
	st, err := store.Connect(storetest.Context(t), store.Access{InProcess: s, Name: "worker"}, store.Config{AttachOnly: true}, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	r, err := (&registry.ImageSource{Store: st}).Fetch(storetest.Context(t), digest)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	return io.ReadAll(r)
}

// large takes several messages.
func large(n int) []byte { return bytes.Repeat([]byte("0123456789abcde\n"), n<<10/16) }

func TestImageIsKnownToEveryGatewayAndWorker(t *testing.T) {
	s := storetest.Server(t)
	here, st := images(t, s, nil)
	there, _ := images(t, s, nil)
	ctx := storetest.Context(t)
	one, two := large(3000), []byte("two")
	putImage(t, here, "py", one, false)
	if n := stored(t, st); n < 3 {
		t.Errorf("%d messages for %d bytes", n, len(one))
	}
	eventually(t, "known elsewhere", func() bool {
		img, err := there.Image(ctx, "py")
		return err == nil && img.Digest == digestOf(one) && img.Languages[proto.Bash] == "/bin/bash"
	})
	for _, content := range [][]byte{one, two} {
		if content[0] == 't' {
			putImage(t, there, "py", two, true)
		}
		if got, err := fetch(t, s, digestOf(content)); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
	}
	putImage(t, here, "another", []byte("3"), false)
	list, err := here.List(ctx)
	if err != nil || len(list) != 2 || list[0].Name != "another" || list[1].Digest != digestOf(two) {
		t.Errorf("%+v, %v", list, err)
	}
	late, _ := images(t, s, nil)
	if _, err := late.Image(ctx, "py"); err != nil {
		t.Error(err)
	}
	if _, err := here.Image(ctx, "none"); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
	if _, err := fetch(t, s, digestOf([]byte("none"))); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
}

// Jobs that were accepted need the image that their sandbox had then.
func TestImageWithoutANameStaysForAcceptedJobs(t *testing.T) {
	s := storetest.Server(t)
	i, st := images(t, s, nil)
	ctx := storetest.Context(t)
	one := []byte("one")
	putImage(t, i, "a", one, false)
	putImage(t, i, "b", one, false) // the same, which is stored once
	if n := stored(t, st); n != 1 {
		t.Errorf("%d messages", n)
	}
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
	if got, err := fetch(t, s, digestOf(one)); err != nil || !bytes.Equal(got, one) {
		t.Fatalf("%q, %v", got, err)
	}
	// A name in time saves it.
	putImage(t, i, "c", one, false)
	sweep(3 * keepImages)
	if _, err := fetch(t, s, digestOf(one)); err != nil || stored(t, st) != 1 {
		t.Fatal(err)
	}
	// Being replaced is losing the name, too.
	putImage(t, i, "c", []byte("other"), true)
	sweep(3 * keepImages)
	if _, err := fetch(t, s, digestOf(one)); !errors.Is(err, proto.ErrNotFound) || stored(t, st) != 1 {
		t.Fatalf("%v, %d stored", err, stored(t, st))
	}
}

func TestImageThatIsRefusedLeavesNothing(t *testing.T) {
	s := storetest.Server(t)
	full := false
	i, st := images(t, s, func() bool { return full })
	ctx := storetest.Context(t)
	good := large(2000)
	broken := errors.New("the line broke")
	for what, tt := range map[string]struct {
		digest string
		body   io.Reader
		want   func(error) bool
	}{
		"another digest": {digestOf([]byte("x")), bytes.NewReader(good), func(err error) bool {
			var f *proto.FieldError
			return errors.As(err, &f) && f.Field == "digest"
		}},
		"no image":        {digestOf([]byte("bad")), strings.NewReader("bad" + string(good)), func(err error) bool { return errors.Is(err, errNoImage) }},
		"a broken upload": {digestOf(good), io.MultiReader(bytes.NewReader(good), iotest.ErrReader(broken)), func(err error) bool { return errors.Is(err, broken) }},
		"nothing":         {digestOf(nil), strings.NewReader(""), func(err error) bool { return errors.Is(err, io.EOF) }},
	} {
		if _, _, err := i.Put(ctx, "py", tt.digest, tt.body); !tt.want(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	full = true
	var refused *proto.Refusal
	if _, _, err := i.Put(ctx, "py", digestOf(good), bytes.NewReader(good)); !errors.As(err, &refused) || refused.Reason != proto.RefusedUnavailable {
		t.Errorf("a full disk: %v", err)
	}
	if list, err := i.List(ctx); err != nil || len(list) != 0 || stored(t, st) != 0 {
		t.Errorf("%+v, %v, %d messages", list, err, stored(t, st))
	}
}

// A gateway that dies in the middle of an upload leaves parts that nothing names.
func TestBrokenUploadsAreSwept(t *testing.T) {
	s := storetest.Server(t)
	i, st := images(t, s, nil)
	ctx := storetest.Context(t)
	putImage(t, i, "py", []byte("good"), false)
	for n := range 3 {
		if _, err := st.JS.Publish(ctx, store.ImagePartSubject("lost", n), []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	if err := i.Sweep(ctx, time.Now()); err != nil || stored(t, st) != 4 {
		t.Fatalf("an upload that may be going on was removed: %v", err)
	}
	if err := i.Sweep(ctx, time.Now().Add(2*time.Hour)); err != nil || stored(t, st) != 1 {
		t.Fatalf("%d messages, %v", stored(t, st), err)
	}
}

func TestMalformedCatalogIsNotFollowed(t *testing.T) {
	s := storetest.Server(t)
	i, st := images(t, s, nil)
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
		t.Error("a malformed catalog was written over")
	}
	if _, err := i.Image(ctx, "py"); err != nil {
		t.Error(err)
	}
	if _, err := st.Images.Put(ctx, "catalog", sound.Value()); err != nil {
		t.Fatal(err)
	}
	putImage(t, i, "py", []byte("again"), true)
}

func TestThereIsABoundOnImages(t *testing.T) {
	i, st := images(t, storetest.Server(t), nil)
	ctx := storetest.Context(t)
	var all []string
	for n := range proto.MaxImages {
		all = append(all, fmt.Sprintf(`{"name":"i%03d","digest":"sha256:%064d","upload":"u"}`, n, 0))
	}
	if _, err := st.Images.Put(ctx, "catalog", []byte(`{"images":[`+strings.Join(all, ",")+`]}`)); err != nil {
		t.Fatal(err)
	}
	var field *proto.FieldError
	if _, _, err := i.Put(ctx, "j", digestOf([]byte("x")), strings.NewReader("x")); !errors.As(err, &field) || stored(t, st) != 0 {
		t.Errorf("one too many: %v", err)
	}
	putImage(t, i, "i000", []byte("x"), true)
}
