package layer_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/worker/home/layer"
)

var roomy = layer.Limits{Bytes: 1 << 30, Entries: 1000}

// sample has everything an entry can be.
func sample() (moves []string, entries []layer.Entry) {
	leave := layer.Entry{Kind: layer.Leave}
	return []string{"x/y", "\xff"}, []layer.Entry{
		{Kind: layer.Dir, Base: layer.Merge, Mode: 0o755, Sec: -5, Nsec: 999_999_999, Xattrs: []layer.Xattr{{Name: "a", Value: []byte{}}, {Name: "b", Value: []byte("\x00")}}},
		{Kind: layer.File, Name: "a", Mode: 0o1600, Group: 1, Size: 10, Extents: []layer.Extent{{Offset: 0, Len: 2}, {Offset: 5, Len: 3}}},
		{Kind: layer.Dir, Name: "b", Base: layer.Fresh},
		{Kind: layer.Link, Name: "a", Group: 1},
		{Kind: layer.Symlink, Name: "b", Mode: 0o777, Target: "/etc/passwd", Sec: 1 << 40},
		leave,
		{Kind: layer.Dir, Name: "c", Base: layer.Moved, Move: 1},
		{Kind: layer.Dir, Name: "c", Base: layer.Moved, Move: 0},
		{Kind: layer.Delete, Name: "gone"},
		leave,
		leave,
		{Kind: layer.File, Name: "d", Size: layer.MaxFileSize, Extents: []layer.Extent{{Offset: 7, Len: layer.MaxInline + 1}}, Object: sha256.Sum256(nil)},
		{Kind: layer.File, Name: "e", Size: 1 << 20},
		{Kind: layer.Symlink, Name: "f", Target: "x", Group: 2},
		{Kind: layer.Link, Name: "g", Group: 2},
		leave,
	}
}

func encode(moves []string, entries []layer.Entry) ([]byte, error) {
	var b bytes.Buffer
	w, err := layer.NewWriter(&b, moves, roomy)
	if err != nil {
		return nil, err
	}
	for i := range entries {
		if err := w.Write(&entries[i], strings.NewReader("hello, world")); err != nil {
			return nil, err
		}
	}
	err = w.Close()
	return b.Bytes(), err
}

// decode reads a layer to its end, and what files hold too.
func decode(b []byte, limits layer.Limits) (moves []string, entries []layer.Entry, content []string, err error) {
	r, err := layer.NewReader(bytes.NewReader(b), limits)
	if err != nil {
		return nil, nil, nil, err
	}
	defer r.Close()
	for {
		e, err := r.Next()
		if errors.Is(err, io.EOF) {
			return r.Moves(), entries, content, nil
		}
		if err != nil {
			return nil, nil, nil, err
		}
		c, err := io.ReadAll(r.Content())
		if err != nil {
			return nil, nil, nil, err
		}
		entries, content = append(entries, *e), append(content, string(c))
	}
}

func TestRoundTrip(t *testing.T) {
	moves, entries := sample()
	b, err := encode(moves, entries)
	if err != nil {
		t.Fatal(err)
	}
	gotMoves, got, content, err := decode(b, roomy)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(gotMoves, moves) || !reflect.DeepEqual(got, entries) || content[1] != "hello" {
		t.Errorf("%v %v %q", gotMoves, got, content)
	}
	again, err := encode(moves, entries)
	if err != nil || !bytes.Equal(b, again) {
		t.Errorf("a second encoding differs, %v", err)
	}
}

// pack compresses a stream as a writer does, which may be anything.
func pack(tb testing.TB, options []zstd.EOption, parts ...string) []byte {
	tb.Helper()
	var b bytes.Buffer
	z, err := zstd.NewWriter(&b, append([]zstd.EOption{zstd.WithWindowSize(1 << 20)}, options...)...)
	if err != nil {
		tb.Fatal(err)
	}
	for _, p := range parts {
		if _, err := io.WriteString(z, p); err != nil {
			tb.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

func TestWhatIsNoLayerIsRefused(t *testing.T) {
	const (
		begin = "bullpen home 1\n\x00"
		root  = "D\x00\x01\x00\x00\x00\x00"
		meta  = "\x00\x00\x00\x00"
	)
	num := func(n uint64) string { return string(binary.AppendUvarint(nil, n)) }
	str := func(s string) string { return num(uint64(len(s))) + s }
	for name, stream := range map[string]string{
		"nothing":             "",
		"magic":               "bullpen home 2\n\x00" + root + "U",
		"no root":             begin + "U",
		"root with a name":    begin + "D\x01a\x01" + meta + "U",
		"root is a file":      begin + "F\x00" + meta + "\x00\x00\x00\x00",
		"root is moved":       "bullpen home 1\n\x01\x01a" + "D\x00\x02\x00" + meta + "U",
		"not at its end":      begin + root,
		"after the end":       begin + root + "UU",
		"bytes after the end": begin + root + "U\x00",
		"unknown kind":        begin + root + "Z\x01a" + "U",
		"empty name":          begin + root + "X\x00" + "U",
		"dot":                 begin + root + "X" + str(".") + "U",
		"dot dot":             begin + root + "X" + str("..") + "U",
		"slash":               begin + root + "X" + str("a/b") + "U",
		"NUL":                 begin + root + "X" + str("a\x00") + "U",
		"long name":           begin + root + "X" + str(strings.Repeat("a", 256)) + "U",
		"descending names":    begin + root + "X\x01bX\x01aU",
		"name twice":          begin + root + "X\x01aX\x01aU",
		"set-uid":             begin + root + "D\x01a\x00" + num(0o4755) + "\x00\x00\x00UU",
		"nanoseconds":         begin + root + "D\x01a\x00\x00\x00" + num(1e9) + "\x00UU",
		"base":                begin + root + "D\x01a\x03" + meta + "UU",
		"move without moves":  begin + root + "D\x01a\x02\x00" + meta + "UU",
		"unused move":         "bullpen home 1\n\x01\x01a" + root + "U",
		"move twice":          "bullpen home 1\n\x01\x01a" + root + "D\x01a\x02\x00" + meta + "U" + "D\x01b\x02\x00" + meta + "UU",
		"moves twice":         "bullpen home 1\n\x02\x01a\x01a" + root + "D\x01a\x02\x00" + meta + "U" + "D\x01b\x02\x01" + meta + "UU",
		"move of ..":          "bullpen home 1\n\x01" + str("a/../../b") + root + "D\x01a\x02\x00" + meta + "UU",
		"move of /etc":        "bullpen home 1\n\x01" + str("/etc") + root + "D\x01a\x02\x00" + meta + "UU",
		"move of the root":    "bullpen home 1\n\x01\x00" + root + "D\x01a\x02\x00" + meta + "UU",
		"many moves":          "bullpen home 1\n" + num(1<<60),
		"long string":         begin + root + "X" + num(1<<62),
		"group of none":       begin + root + "L\x01a\x01U",
		"group 0":             begin + root + "L\x01a\x00U",
		"group too high":      begin + root + "F\x01a" + meta + "\x02\x00\x00\x00U",
		"huge file":           begin + root + "F\x01a" + meta + "\x00" + num(1<<62) + "\x00\x00U",
		"part beyond the end": begin + root + "F\x01a" + meta + "\x00\x01\x01\x00\x02\x00abU",
		"part of nothing":     begin + root + "F\x01a" + meta + "\x00\x01\x01\x00\x00\x00U",
		"hole beyond the end": begin + root + "F\x01a" + meta + "\x00\x01\x01\x02\x01\x00aU",
		"adjacent parts":      begin + root + "F\x01a" + meta + "\x00\x02\x02\x00\x01\x00\x01\x00abU",
		"small object":        begin + root + "F\x01a" + meta + "\x00\x01\x01\x00\x01\x01" + strings.Repeat("d", 32) + "U",
		"large content":       begin + root + "F\x01a" + meta + "\x00" + num(5<<20) + "\x01\x00" + num(5<<20) + "\x00" + strings.Repeat("a", 5<<20) + "U",
		"short content":       begin + root + "F\x01a" + meta + "\x00\x05\x01\x00\x05\x00aU",
		"empty target":        begin + root + "S\x01a" + meta + "\x00\x00U",
		"long target":         begin + root + "S\x01a" + meta + "\x00" + str(strings.Repeat("t", 1024)) + "U",
		"NUL in a target":     begin + root + "S\x01a" + meta + "\x00\x01\x00U",
		"attribute twice":     begin + root + "D\x01a\x00\x00\x00\x00\x02\x01x\x00\x01x\x00UU",
		"empty attribute":     begin + root + "D\x01a\x00\x00\x00\x00\x01\x00\x00UU",
		"many attributes":     begin + root + "D\x01a\x00\x00\x00\x00" + num(1000),
		"large attributes":    begin + root + "D\x01a\x00\x00\x00\x00\x02\x01x" + str(strings.Repeat("v", 2000)) + "\x01y" + str(strings.Repeat("v", 2000)) + "UU",
		"padded number":       "bullpen home 1\n\x80\x00" + root + "U",
		"endless number":      "bullpen home 1\n" + strings.Repeat("\xff", 20),
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, _, err := decode(pack(t, nil, stream), roomy); err == nil {
				t.Error("taken")
			}
		})
	}
	if _, _, _, err := decode(pack(t, nil, begin+root+"D\x01a\x00"+meta+"UU"), roomy); err != nil {
		t.Error(err) // or the table says nothing
	}
	for name, b := range map[string][]byte{
		"not zstd":     []byte(begin + root + "U"),
		"cut off":      pack(t, nil, begin+root+"U")[:20],
		"large window": pack(t, []zstd.EOption{zstd.WithWindowSize(8 << 20)}, begin+root, strings.Repeat("x", 9<<20)),
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, _, err := decode(b, roomy); err == nil {
				t.Error("taken")
			}
		})
	}
}

func TestWriterRefusesWhatAReaderWould(t *testing.T) {
	root := layer.Entry{Kind: layer.Dir, Base: layer.Merge}
	leave := layer.Entry{Kind: layer.Leave}
	for name, entries := range map[string][]layer.Entry{
		"order":   {root, {Kind: layer.Delete, Name: "b"}, {Kind: layer.Delete, Name: "a"}, leave},
		"open":    {root},
		"set-gid": {root, {Kind: layer.File, Name: "a", Mode: 0o2644}, leave},
		"target":  {root, {Kind: layer.Symlink, Name: "a", Target: strings.Repeat("x", 1024)}, leave},
		"content": {root, {Kind: layer.File, Name: "a", Size: 13, Extents: []layer.Extent{{Len: 13}}}, leave}, // has 12
	} {
		if _, err := encode(nil, entries); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

func TestDepth(t *testing.T) {
	for depth, ok := range map[int]bool{layer.MaxDepth: true, layer.MaxDepth + 1: false} {
		entries := []layer.Entry{{Kind: layer.Dir, Base: layer.Merge}}
		for range depth - 1 {
			entries = append(entries, layer.Entry{Kind: layer.Dir, Name: "d"})
		}
		for range depth {
			entries = append(entries, layer.Entry{Kind: layer.Leave})
		}
		if _, err := encode(nil, entries); (err == nil) != ok {
			t.Errorf("depth %d: %v", depth, err)
		}
	}
}

func TestLimits(t *testing.T) {
	moves, entries := sample()
	b, err := encode(moves, entries)
	if err != nil {
		t.Fatal(err)
	}
	// Without those that leave, and with the two moves; and what is in the files.
	exact := layer.Limits{Entries: 12 + 2, Bytes: 5 + layer.MaxInline + 1}
	if _, _, _, err := decode(b, exact); err != nil {
		t.Error(err)
	}
	for _, limits := range []layer.Limits{{Entries: exact.Entries - 1, Bytes: exact.Bytes}, {Entries: exact.Entries, Bytes: exact.Bytes - 1}} {
		if _, _, _, err := decode(b, limits); !errors.Is(err, layer.ErrLimit) {
			t.Errorf("%+v: %v", limits, err)
		}
	}
}

// TestBomb is a small layer that says it is large. What it says is refused before
// it is made.
func TestBomb(t *testing.T) {
	const root = "D\x00\x01\x00\x00\x00\x00"
	begin := "bullpen home 1\n\x00" + root
	part := strings.Repeat("\x00", 1<<20)
	zeros := make([]string, 0, 300)
	for range 299 {
		zeros = append(zeros, part)
	}
	file := func(i int) string {
		return fmt.Sprintf("F\x04%04d\x00\x00\x00\x00\x00\x80\x80\x40\x01\x00\x80\x80\x40\x00", i) + part
	}
	files := []string{begin}
	for i := range 300 {
		files = append(files, file(i))
	}
	for name, b := range map[string][]byte{"zeros": pack(t, nil, append([]string{begin}, zeros...)...), "files": pack(t, nil, files...)} {
		if len(b) > 200<<10 {
			t.Errorf("%s: %d bytes are no bomb", name, len(b))
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		r, err := layer.NewReader(bytes.NewReader(b), layer.Limits{Bytes: 10 << 20, Entries: 1000})
		if err != nil {
			t.Fatal(err)
		}
		for err == nil {
			_, err = r.Next()
		}
		r.Close()
		runtime.ReadMemStats(&after)
		if errors.Is(err, io.EOF) || after.TotalAlloc-before.TotalAlloc > 32<<20 {
			t.Errorf("%s: %v after %d bytes", name, err, after.TotalAlloc-before.TotalAlloc)
		}
	}
}

// FuzzReader has streams without compression, which is not what is tried here, and
// encodes again what was taken: one change has one encoding.
func FuzzReader(f *testing.F) {
	moves, entries := sample()
	var b bytes.Buffer
	w, err := layer.NewPlainWriter(&b, moves, roomy)
	for i := range entries {
		err = errors.Join(err, w.Write(&entries[i], strings.NewReader("hello, world")))
	}
	if err := errors.Join(err, w.Close()); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add([]byte("bullpen home 1\n\x00D\x00\x01\x00\x00\x00\x00U"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		moves, entries, content, err := decode(pack(t, []zstd.EOption{zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1)}, string(stream)), roomy)
		if err != nil {
			return
		}
		var again bytes.Buffer
		w, err := layer.NewPlainWriter(&again, moves, roomy)
		for i := range entries {
			err = errors.Join(err, w.Write(&entries[i], strings.NewReader(content[i])))
		}
		if err := errors.Join(err, w.Close()); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(again.Bytes(), stream) {
			t.Errorf("%q became %q", stream, again.Bytes())
		}
	})
}

// FuzzFrame has bytes as they may come from a store.
func FuzzFrame(f *testing.F) {
	moves, entries := sample()
	b, err := encode(moves, entries)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(_ *testing.T, b []byte) { _, _, _, _ = decode(b, layer.Limits{Bytes: 1 << 20, Entries: 100}) })
}
