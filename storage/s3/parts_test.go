package s3

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

func openTestBucket(t *testing.T) (*Bucket, *storagetest.Server) {
	t.Helper()
	server, err := storagetest.Start("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	endpoint, err := server.Endpoint()
	if err != nil {
		t.Fatal(err)
	}
	id, secret := storagetest.Credentials()
	b, err := OpenBucket(BucketConfig{
		S3Mount: proto.S3Mount{
			Endpoint: endpoint, Region: storagetest.Region, Bucket: storagetest.Bucket,
			PathStyle: true,
		},
		Credentials: proto.S3Credentials{AccessKeyID: id, SecretAccessKey: secret}, Prefix: "base",
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b, server
}

// Objects that servers do not copy in one request are copied in parts.
func TestCopyInParts(t *testing.T) {
	b, server := openTestBucket(t)
	content := make([]byte, 12<<20)
	_, _ = rand.Read(content)
	if err := b.PutStream(t.Context(), "a b/from+é", int64(len(content)), bytes.NewReader(content)); err != nil {
		t.Fatal(err)
	}
	o, err := b.Stat(t.Context(), "a b/from+é")
	if err != nil {
		t.Fatal(err)
	}
	if err := b.copyParts(t.Context(), o, "to", 5<<20); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(server.Path("base/to")); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	o.Name = "missing"
	if err := b.copyParts(t.Context(), o, "other", 5<<20); err == nil {
		t.Error("a missing object was copied")
	}
	wantUploads(t, server, 0)
}

// wantUploads checks how many uploads in parts the server has.
func wantUploads(t *testing.T, server *storagetest.Server, n int) {
	t.Helper()
	if got, err := filepath.Glob(server.Path(".sgwtmp/multipart/*/*")); err != nil || len(got) != n {
		t.Errorf("%d uploads, want %d: %v, %v", len(got), n, got, err)
	}
}

var errBroken = errors.New("broken")

// Content that breaks off leaves no object and no parts.
func TestStreamBreaksOff(t *testing.T) {
	b, server := openTestBucket(t)
	files := &Files{Bucket: b}
	id, err := files.BeginUpload(t.Context(), "y", 1)
	if err != nil {
		t.Fatal(err)
	}
	wantUploads(t, server, 1)
	if err := files.AbortUpload(t.Context(), "y", id); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int64{1 << 20, 20 << 20} {
		broken := io.MultiReader(bytes.NewReader(make([]byte, size/2)), errReader{})
		if err := b.PutStream(t.Context(), "x", size, broken); !errors.Is(err, errBroken) {
			t.Errorf("%d: %v", size, err)
		}
		if err := b.PutStream(t.Context(), "x", size, bytes.NewReader(make([]byte, size/2))); !errors.Is(
			err, io.ErrUnexpectedEOF) {
			t.Errorf("%d: %v", size, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := b.PutStream(ctx, "x", size, bytes.NewReader(make([]byte, size))); err == nil {
			t.Errorf("%d: stored", size)
		}
	}
	if _, err := os.Stat(server.Path("base/x")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
	wantUploads(t, server, 0)
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errBroken }

// The memory of an upload does not grow with its size.
func TestStreamTakesLittleMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("stores 300 MiB")
	}
	b, _ := openTestBucket(t)
	const size = 300 << 20
	var most uint64
	body := readerFunc(func(p []byte) (int, error) {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		most = max(most, m.HeapInuse)
		return len(p), nil
	})
	if err := b.PutStream(t.Context(), "x", size, body); err != nil {
		t.Fatal(err)
	}
	o, err := b.Stat(t.Context(), "x")
	if err != nil || o.Size != size {
		t.Errorf("%+v, %v", o, err)
	}
	if most > 128<<20 {
		t.Errorf("%d MiB of heap", most>>20)
	}
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// No key leaves the prefix.
func TestFilesKeepToThePrefix(t *testing.T) {
	b, _ := openTestBucket(t)
	f := &Files{Bucket: b}
	for _, name := range []string{"..", "../x", "a/../../x", "a//b", "a/./b", strings.Repeat("a", 256), "a\x00b"} {
		_, errOpen := f.Open(t.Context(), name)
		_, errDelete := f.Delete(t.Context(), name, true)
		_, errRename := f.Rename(t.Context(), name, "x")
		_, errBegin := f.BeginUpload(t.Context(), name, 1)
		for what, err := range map[string]error{
			"open": errOpen, "delete": errDelete, "rename": errRename, "begin": errBegin,
			"put":  f.Put(t.Context(), name, 0, strings.NewReader("")),
			"list": f.List(t.Context(), name, true, nil), "part": f.PutPart(t.Context(), name, "id", 1, nil),
			"abort": f.AbortUpload(t.Context(), name, "id"),
		} {
			if !errors.Is(err, syscall.EINVAL) {
				t.Errorf("%s %q: %v", what, name, err)
			}
		}
	}
}

// Names that programs cannot give to objects cannot be given by requests.
func TestNewNamesOfFiles(t *testing.T) {
	f := &Files{} // which sends nothing
	for _, name := range []string{"a\n", "d\x1b[2J/x", "\x7f", "r\xe9.csv", "\u0085"} {
		_, errRename := f.Rename(t.Context(), "x", name)
		_, errBegin := f.BeginUpload(t.Context(), name, 1)
		for what, err := range map[string]error{
			"rename": errRename, "begin": errBegin, "check": f.CheckPut(t.Context(), name, 1),
			"put": f.Put(t.Context(), name, 0, strings.NewReader("")),
		} {
			if _, ok := errors.AsType[*proto.PathError](err); !ok {
				t.Errorf("%s %q: %v", what, name, err)
			}
		}
	}
}
