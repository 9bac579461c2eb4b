package image_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/image"
)

// manyFiles returns 8 MiB of small files and a large one, all incompressible.
func manyFiles() []tar.Header {
	random := rand.New(rand.NewPCG(1, 2))
	content := func(size int) string {
		b := make([]byte, size)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		return string(b)
	}
	entries := []tar.Header{dir("bin"), bash, dir("lib")}
	for n := range 400 {
		entries = append(entries, file(fmt.Sprintf("lib/%03d", n), content(20<<10)))
	}
	return append(entries, file("lib/large", content(5<<20)))
}

func sum(b []byte) []byte {
	digest := sha256.Sum256(b)
	return digest[:]
}

// packed packs entries and returns the stored image with its parts.
func packed(t *testing.T, entries []tar.Header) ([]byte, []proto.ImagePart) {
	t.Helper()
	tree := newTree(t, image.DefaultLimits())
	if err := tree.AddTar(bytes.NewReader(archive(t, entries...))); err != nil {
		t.Fatal(err)
	}
	stored, img := pack(t, tree)
	seen, parts, err := image.Inspect(bytes.NewReader(stored), image.DefaultLimits())
	if err != nil || seen.Digest != img.Digest {
		t.Fatalf("%+v, %v", seen, err)
	}
	at := 0
	for _, p := range parts {
		if part := stored[at:min(at+int(p.Size), len(stored))]; "sha256:"+hex.EncodeToString(sum(part)) != p.Digest {
			t.Fatalf("the part at %d is not %+v", at, p)
		}
		at += int(p.Size)
	}
	if at != len(stored) {
		t.Fatalf("the parts have %d bytes of %d", at, len(stored))
	}
	return stored, parts
}

// An image in which few files differ has most of its parts in common with the other one.
func TestSimilarImagesHaveCommonParts(t *testing.T) {
	before := manyFiles()
	_, parts := packed(t, before)
	after := append(slices.Clone(before), file("lib/100-one-more", "new"))
	stored, others := packed(t, after)
	known := map[string]bool{}
	for _, p := range parts {
		known[p.Digest] = true
	}
	added := int64(0)
	for _, p := range others {
		if !known[p.Digest] {
			added += p.Size
		}
	}
	if len(parts) < 4 || added == 0 || added > int64(len(stored))/3 {
		t.Errorf("%d of %d bytes differ, in %d parts", added, len(stored), len(others))
	}
}

// Images of versions that compressed them as one stream stay readable.
func TestImageOfEarlierVersion(t *testing.T) {
	entries := manyFiles()
	stored, _ := packed(t, entries)
	in, err := zstd.NewReader(bytes.NewReader(stored))
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	var old bytes.Buffer
	out, err := zstd.NewWriter(&old, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(8<<20))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	img, parts, err := image.Inspect(bytes.NewReader(old.Bytes()), image.DefaultLimits())
	if err != nil || len(parts) != 1 || parts[0] != (proto.ImagePart{Size: int64(old.Len()), Digest: img.Digest}) {
		t.Fatalf("%+v, %+v, %v", img, parts, err)
	}
	for what, content := range map[string][]byte{"old": old.Bytes(), "new": stored} {
		at := t.TempDir()
		if _, _, err := image.Unpack(bytes.NewReader(content), at, image.DefaultLimits()); err != nil {
			t.Fatal(what, err)
		}
		names, err := filepath.Glob(filepath.Join(at, "lib", "*"))
		if err != nil || len(names) != 401 {
			t.Errorf("%s: %d files, %v", what, len(names), err)
		}
		for _, h := range []string{"lib/000", "lib/large"} {
			want := entries[slices.IndexFunc(entries, func(e tar.Header) bool { return e.Name == h })].PAXRecords[contentKey]
			if got, err := os.ReadFile(filepath.Join(at, h)); err != nil || string(got) != want {
				t.Errorf("%s: %s has %d bytes, %v", what, h, len(got), err)
			}
		}
	}
}

// A frame that is cut off, too large, or no frame is rejected.
func TestMalformedFrames(t *testing.T) {
	stored, parts := packed(t, manyFiles())
	second := int(parts[0].Size)
	big, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = big.Close() }()
	for what, content := range map[string][]byte{
		"cut off":     stored[:second+1000],
		"no frame":    append(bytes.Clone(stored[:second]), "not a frame, and long enough"...),
		"empty frame": append(bytes.Clone(stored[:second]), 0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 1, 2, 3, 4),
		"large frame": append(bytes.Clone(stored[:second]), big.EncodeAll(make([]byte, 64<<20), nil)...),
	} {
		if _, _, err := image.Inspect(bytes.NewReader(content), image.DefaultLimits()); !errors.Is(err, image.ErrForm) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
