package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/image"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		unpackUntilKilled(dir)
	}
	goleak.VerifyTestMain(m)
}

// day is the default time of entries.
var day = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// Constructors of archive entries.
func dir(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755} }

func file(name, content string) tar.Header {
	return tar.Header{
		Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content)),
		PAXRecords: map[string]string{contentKey: content},
	}
}

func program(name string) tar.Header {
	h := file(name, "#!")
	h.Mode = 0o755
	return h
}

func symlink(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}
}

func hardLink(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, Mode: 0o644}
}

func device(name string, kind byte) tar.Header {
	return tar.Header{Typeflag: kind, Name: name, Mode: 0o666, Devmajor: 1, Devminor: 3}
}

// contentKey is the record with an entry's content until it is written.
const contentKey = "TEST.content"

// archive writes entries in the order given.
func archive(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		content := h.PAXRecords[contentKey]
		if h.PAXRecords = without(h.PAXRecords); len(h.PAXRecords) == 0 {
			h.PAXRecords = nil
		}
		if h.ModTime.IsZero() && h.Typeflag != tar.TypeXGlobalHeader {
			h.ModTime = day
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func without(records map[string]string) map[string]string {
	out := map[string]string{}
	for k, v := range records {
		if k != contentKey {
			out[k] = v
		}
	}
	return out
}

func newTree(t testing.TB, limits image.Limits) *image.Tree {
	t.Helper()
	tree, err := image.NewTree(t.TempDir(), limits)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tree.Close() })
	return tree
}

// pack returns the normal form of a tree.
func pack(t testing.TB, tree *image.Tree) ([]byte, *proto.Image) {
	t.Helper()
	var b bytes.Buffer
	img, err := tree.Pack(&b)
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), img
}

// smallLimits suffice for all tests that are not about limits.
func smallLimits() image.Limits {
	return image.Limits{Entries: 1000, Unpacked: 1 << 20, Stored: 1 << 20}
}

// listing unpacks an image and returns one line for each path: type, mode, content or target. It
// fails if something is written outside the directory.
func listing(t testing.TB, stored []byte) string {
	t.Helper()
	around := t.TempDir()
	root := filepath.Join(around, "a", "root")
	if err := os.MkdirAll(root, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, _, err := image.Unpack(bytes.NewReader(stored), root, smallLimits()); err != nil {
		t.Fatal(err)
	}
	var lines []string
	inodes := map[string]string{}
	err := filepath.WalkDir(around, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil || name == "." || name == ".." || name == "../.." {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		line := fmt.Sprintf("%s %v", name, info.Mode())
		switch info.Mode().Type() {
		case fs.ModeSymlink:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line = name + " -> " + target
		case 0:
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %q", content)
			if links, inode := inodeOf(info); links > 1 {
				if inodes[inode] == "" {
					inodes[inode] = name
				}
				line += " = " + inodes[inode]
			}
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

func testLog(t testing.TB) *slog.Logger { return slog.New(slog.NewTextHandler(t.Output(), nil)) }

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}
