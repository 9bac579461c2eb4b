package codec_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/storage/thread/codec"
)

var unlimited = layer.Limits{Bytes: 1 << 30, Entries: 1000}

// sample returns a layer with every kind of entry.
func sample() (moves []string, entries []layer.Entry) {
	leave := layer.Entry{Kind: layer.Leave}
	return []string{"x/y", "\xff"}, []layer.Entry{
		{
			Kind: layer.Dir, Base: layer.Merge, Mode: 0o755, Sec: -5, Nsec: 999_999_999,
			Xattrs: []layer.Xattr{{Name: "a", Value: []byte{}}, {Name: "b", Value: []byte("\x00")}},
		},
		{
			Kind: layer.File, Name: "a", Mode: 0o1600, Group: 1, Size: 10,
			Extents: []layer.Extent{{Offset: 0, Len: 2}, {Offset: 5, Len: 3}},
		},
		{Kind: layer.Dir, Name: "b", Base: layer.Fresh},
		{Kind: layer.Link, Name: "a", Group: 1},
		{Kind: layer.Symlink, Name: "b", Mode: 0o777, Target: "/etc/passwd", Sec: 1 << 40},
		leave,
		{Kind: layer.Dir, Name: "c", Base: layer.Moved, Move: 1},
		{Kind: layer.Dir, Name: "c", Base: layer.Moved, Move: 0},
		{Kind: layer.Delete, Name: "gone"},
		leave,
		leave,
		{
			Kind: layer.File, Name: "d", Size: layer.MaxFileSize, Extents: []layer.Extent{{Offset: 7, Len: layer.MaxInline + 1}},
			Object: sha256.Sum256(nil),
		},
		{Kind: layer.File, Name: "e", Size: 1 << 20},
		{Kind: layer.Symlink, Name: "f", Target: "x", Group: 2},
		{Kind: layer.Link, Name: "g", Group: 2},
		leave,
	}
}

// parts are the two parts of an encoded layer.
type parts struct{ pack, index []byte }

func encode(moves []string, entries []layer.Entry) (parts, error) {
	contents := make([]string, len(entries))
	for i := range entries {
		contents[i] = "hello, world"
	}
	return encodeContents(moves, entries, contents)
}

func encodeContents(moves []string, entries []layer.Entry, contents []string) (parts, error) {
	var b bytes.Buffer
	w, err := codec.NewWriter(&b, unlimited)
	if err != nil {
		return parts{}, err
	}
	if err := w.Begin(moves); err != nil {
		return parts{}, err
	}
	for i := range entries {
		if err := w.Write(&entries[i], strings.NewReader(contents[i])); err != nil {
			return parts{}, err
		}
	}
	layout, err := w.Close()
	if err != nil {
		return parts{}, err
	}
	all := b.Bytes()
	p := parts{all[:layout.Pack], all[layout.Pack:]}
	if int64(len(p.index)) != layout.Index || sha256.Sum256(p.index) != layout.IndexDigest {
		return parts{}, fmt.Errorf("a layout of %+v for %d bytes", layout, len(all))
	}
	return p, nil
}

// decode reads a whole layer with the content of its files.
func decode(p parts, limits layer.Limits) (moves []string, entries []layer.Entry, content []string, err error) {
	r, err := codec.NewReader(bytes.NewReader(p.index), bytes.NewReader(p.pack), limits)
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
	gotMoves, got, content, err := decode(b, unlimited)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(gotMoves, moves) || !reflect.DeepEqual(got, entries) || content[1] != "hello" {
		t.Errorf("%v %v %q", gotMoves, got, content)
	}
	again, err := encode(moves, entries)
	if err != nil || !bytes.Equal(b.index, again.index) || !bytes.Equal(b.pack, again.pack) {
		t.Errorf("a second encoding differs, %v", err)
	}
}

// several returns files that begin and end within frames and at frame boundaries.
func several() (entries []layer.Entry, contents []string) {
	entries = append(entries, layer.Entry{Kind: layer.Dir})
	contents = append(contents, "")
	random := rand.NewChaCha8([32]byte{1})
	for i, size := range []int64{codec.FrameBytes - 1, 1, 0, codec.FrameBytes, 3, 100_000, layer.MaxInline, 7} {
		b := make([]byte, size)
		_, _ = random.Read(b[:size/2]) // half of it is compressible
		e := layer.Entry{Kind: layer.File, Name: fmt.Sprint(i), Size: size}
		if size > 0 {
			e.Extents = []layer.Extent{{Len: size}}
		}
		entries, contents = append(entries, e), append(contents, string(b))
	}
	return append(entries, layer.Entry{Kind: layer.Leave}), append(contents, "")
}

func TestFrames(t *testing.T) {
	entries, contents := several()
	p, err := encodeContents(nil, entries, contents)
	if err != nil {
		t.Fatal(err)
	}
	_, _, got, err := decode(p, unlimited)
	if err != nil || !slices.Equal(got, contents) {
		t.Fatalf("read with the pack: %v", err)
	}
	x, err := codec.NewIndex(bytes.NewReader(p.index), unlimited)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	var offset, position int64
	for i, f := range x.Frames() {
		if f.Offset != offset || f.Position != position || i < len(x.Frames())-1 && f.Len != codec.FrameBytes {
			t.Errorf("frame %d: %+v", i, f)
		}
		offset, position = offset+f.Size, position+f.Len
	}
	if whole := int64(len(strings.Join(contents, ""))); offset != int64(len(p.pack)) || position != whole {
		t.Errorf("the frames are %d bytes of %d, and %d of %d of content", offset, len(p.pack), position, whole)
	}
	for i, want := range contents {
		e, err := x.Next()
		if err != nil {
			t.Fatal(err)
		}
		if !e.Inline() {
			continue
		}
		var b []byte
		frames := codec.Covering(x.Frames(), x.Position(), e.Data())
		for _, f := range frames {
			piece, err := f.Unpack(p.pack[f.Offset:][:f.Size])
			if err != nil {
				t.Fatal(err)
			}
			b = append(b, piece...)
		}
		if len(frames) > 0 {
			b = b[x.Position()-frames[0].Position:][:e.Data()]
		}
		if string(b) != want {
			t.Errorf("file %d of %d bytes has other content", i, len(want))
		}
		if most := e.Data()/codec.FrameBytes + 2; int64(len(frames)) > most {
			t.Errorf("%d frames for %d bytes", len(frames), e.Data())
		}
	}
	if _, err := x.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
}

// TestEmptyPack decodes a layer without content.
func TestEmptyPack(t *testing.T) {
	p, err := encode(nil, []layer.Entry{
		{Kind: layer.Dir, Base: layer.Merge},
		{Kind: layer.File, Name: "empty"},
		{Kind: layer.Leave},
	})
	if err != nil || len(p.pack) != 0 {
		t.Fatalf("%d bytes, %v", len(p.pack), err)
	}
	r, err := codec.NewReader(bytes.NewReader(p.index), nil, unlimited)
	for range 3 {
		if err == nil {
			_, err = r.Next()
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := r.Next(); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

// TestMismatchedPackIsRejected decodes packs that do not match the index.
func TestMismatchedPackIsRejected(t *testing.T) {
	entries, contents := several()
	p, err := encodeContents(nil, entries, contents)
	if err != nil {
		t.Fatal(err)
	}
	changed, swapped := bytes.Clone(p.pack), []byte{}
	changed[len(changed)-1] ^= 1
	x, err := codec.NewIndex(bytes.NewReader(p.index), unlimited)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	for _, f := range x.Frames() {
		swapped = append(bytes.Clone(p.pack[f.Offset:][:f.Size]), swapped...)
	}
	for name, pack := range map[string][]byte{
		"none": nil, "cut off": p.pack[:len(p.pack)-1], "longer": append(bytes.Clone(p.pack), 0), "changed": changed,
		"swapped": swapped,
	} {
		if _, _, _, err := decode(parts{pack, p.index}, unlimited); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	first := x.Frames()[0]
	if _, err := first.Unpack(changed[1:][:first.Size]); err == nil {
		t.Error("a corrupt frame was unpacked")
	}
}

// TestFrameOfWrongLength unpacks frames with the right digest whose content is not as long as the
// index claims.
func TestFrameOfWrongLength(t *testing.T) {
	whole := strings.Repeat("x", codec.FrameBytes)
	for name, b := range map[string][]byte{
		"shorter": pack(t, nil, whole[1:]), "longer": pack(t, nil, whole, "x"),
		"a bomb": pack(t, nil, strings.Repeat(whole, 64)),
		"two":    append(pack(t, nil, whole), pack(t, nil, whole)...), "nothing": nil, "not zstd": []byte(whole),
	} {
		f := codec.Frame{Len: codec.FrameBytes, Size: int64(len(b)), Digest: sha256.Sum256(b)}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := f.Unpack(b)
		runtime.ReadMemStats(&after)
		if err == nil || after.TotalAlloc-before.TotalAlloc > 8<<20 {
			t.Errorf("%s: %v after %d bytes", name, err, after.TotalAlloc-before.TotalAlloc)
		}
	}
}

// pack compresses an arbitrary stream with the settings of a Writer.
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

// assemble encodes a layer from the part of an index that follows the table, and the content of a
// pack.
func assemble(tb testing.TB, rest, content string) parts {
	tb.Helper()
	p := parts{}
	table := binary.AppendUvarint([]byte("bullpen home 1\n"), uint64(len(content)))
	for len(content) > 0 {
		n := min(len(content), codec.FrameBytes)
		frame := pack(tb, []zstd.EOption{zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1)},
			content[:n])
		digest := sha256.Sum256(frame)
		table = append(binary.AppendUvarint(table, uint64(len(frame))), digest[:]...)
		p.pack, content = append(p.pack, frame...), content[n:]
	}
	p.index = pack(tb, []zstd.EOption{zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1)},
		string(table), rest)
	return p
}

func TestInvalidLayerIsRejected(t *testing.T) {
	const (
		magic = "bullpen home 1\n"
		begin = magic + "\x00\x00" // no content, no moves
		root  = "D\x00\x01\x00\x00\x00\x00"
		meta  = "\x00\x00\x00\x00"
	)
	num := func(n uint64) string { return string(binary.AppendUvarint(nil, n)) }
	str := func(s string) string { return num(uint64(len(s))) + s }
	for name, stream := range map[string]string{
		"nothing":             "",
		"magic":               "bullpen home 2\n\x00\x00" + root + "U",
		"no root":             begin + "U",
		"root with a name":    begin + "D\x01a\x01" + meta + "U",
		"root is a file":      begin + "F\x00" + meta + "\x00\x00\x00\x00",
		"root is moved":       magic + "\x00\x01\x01a" + "D\x00\x02\x00" + meta + "U",
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
		"unused move":         magic + "\x00\x01\x01a" + root + "U",
		"move twice": magic + "\x00\x01\x01a" + root + "D\x01a\x02\x00" + meta + "U" + "D\x01b\x02\x00" +
			meta + "UU",
		"moves twice": magic + "\x00\x02\x01a\x01a" + root + "D\x01a\x02\x00" + meta + "U" + "D\x01b\x02\x01" +
			meta + "UU",
		"move of ..":       magic + "\x00\x01" + str("a/../../b") + root + "D\x01a\x02\x00" + meta + "UU",
		"move of /etc":     magic + "\x00\x01" + str("/etc") + root + "D\x01a\x02\x00" + meta + "UU",
		"move of the root": magic + "\x00\x01\x00" + root + "D\x01a\x02\x00" + meta + "UU",
		"many moves":       magic + "\x00" + num(1<<60),
		"long string":      begin + root + "X" + num(1<<62),
		"group of none":    begin + root + "L\x01a\x01U",
		"group 0":          begin + root + "L\x01a\x00U",
		"group too high":   begin + root + "F\x01a" + meta + "\x02\x00\x00\x00U",
		"huge file":        begin + root + "F\x01a" + meta + "\x00" + num(1<<62) + "\x00\x00U",
		"empty target":     begin + root + "S\x01a" + meta + "\x00\x00U",
		"long target":      begin + root + "S\x01a" + meta + "\x00" + str(strings.Repeat("t", 1024)) + "U",
		"NUL in a target":  begin + root + "S\x01a" + meta + "\x00\x01\x00U",
		"attribute twice":  begin + root + "D\x01a\x00\x00\x00\x00\x02\x01x\x00\x01x\x00UU",
		"empty attribute":  begin + root + "D\x01a\x00\x00\x00\x00\x01\x00\x00UU",
		"many attributes":  begin + root + "D\x01a\x00\x00\x00\x00" + num(1000),
		"large attributes": begin + root + "D\x01a\x00\x00\x00\x00\x02\x01x" + str(strings.Repeat("v", 2000)) + "\x01y" +
			str(strings.Repeat("v", 2000)) + "UU",
		"padded number":  magic + "\x00\x80\x00" + root + "U",
		"endless number": magic + strings.Repeat("\xff", 20),
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, _, err := decode(parts{index: pack(t, nil, stream)}, unlimited); err == nil {
				t.Error("accepted")
			}
		})
	}
	if _, _, _, err := decode(parts{index: pack(t, nil, begin+root+"D\x01a\x00"+meta+"UU")}, unlimited); err != nil {
		t.Error(err) // the table proves nothing otherwise
	}
	file := func(fields string) string { return "\x00" + root + "F\x01a" + meta + "\x00" + fields + "U" }
	for name, test := range map[string]struct{ entries, content string }{
		"part beyond the end": {file("\x01\x01\x00\x02\x00"), "ab"},
		"part of nothing":     {file("\x01\x01\x00\x00\x00"), ""},
		"hole beyond the end": {file("\x01\x01\x02\x01\x00"), "a"},
		"adjacent parts":      {file("\x02\x02\x00\x01\x00\x01\x00"), "ab"},
		"small object":        {file("\x01\x01\x00\x01\x01" + strings.Repeat("d", 32)), ""},
		"large content":       {file(num(5<<20) + "\x01\x00" + num(5<<20) + "\x00"), strings.Repeat("a", 5<<20)},
		"short content":       {file("\x05\x01\x00\x05\x00"), "abcd"},
		"long content":        {file("\x05\x01\x00\x05\x00"), "abcdef"},
		"content of nothing":  {"\x00" + root + "U", "abcde"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, _, err := decode(assemble(t, test.entries, test.content), unlimited); err == nil {
				t.Error("accepted")
			}
		})
	}
	if _, _, _, err := decode(assemble(t, file("\x05\x01\x00\x05\x00"), "abcde"), unlimited); err != nil {
		t.Error(err)
	}
	for name, table := range map[string]string{
		"no frames":        num(5),
		"huge content":     num(1<<63 - 1),
		"endless content":  num(1<<63) + num(5) + strings.Repeat("d", 32),
		"cut off":          num(5) + num(5) + strings.Repeat("d", 31),
		"huge frame":       num(5) + num(1<<21) + strings.Repeat("d", 32),
		"frame of nothing": num(5) + num(0) + strings.Repeat("d", 32),
		"unknown digest":   num(5) + num(5) + strings.Repeat("d", 32),
	} {
		t.Run("table: "+name, func(t *testing.T) {
			p := parts{index: pack(t, nil, magic, table, file("\x05\x01\x00\x05\x00")), pack: []byte("abcde")}
			if _, _, _, err := decode(p, unlimited); err == nil {
				t.Error("accepted")
			}
		})
	}
	for name, b := range map[string][]byte{
		"not zstd":     []byte(begin + root + "U"),
		"cut off":      pack(t, nil, begin+root+"U")[:20],
		"large window": pack(t, []zstd.EOption{zstd.WithWindowSize(8 << 20)}, begin+root, strings.Repeat("x", 9<<20)),
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, _, err := decode(parts{index: b}, unlimited); err == nil {
				t.Error("accepted")
			}
		})
	}
}

func TestWriterRejectsInvalidLayer(t *testing.T) {
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
			t.Errorf("%s: accepted", name)
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
	// Leave entries do not count; moves and the content of files do.
	exact := layer.Limits{Entries: 12 + 2, Bytes: 5 + layer.MaxInline + 1}
	if _, _, _, err := decode(b, exact); err != nil {
		t.Error(err)
	}
	for _, limits := range []layer.Limits{
		{Entries: exact.Entries - 1, Bytes: exact.Bytes}, {Entries: exact.Entries, Bytes: exact.Bytes - 1},
	} {
		if _, _, _, err := decode(b, limits); !errors.Is(err, layer.ErrLimit) {
			t.Errorf("%+v: %v", limits, err)
		}
	}
}

// TestBomb decodes small layers that claim to be large. They are rejected before memory is
// allocated for them.
func TestBomb(t *testing.T) {
	const (
		magic = "bullpen home 1\n"
		root  = "\x00D\x00\x01\x00\x00\x00\x00"
	)
	num := func(n uint64) string { return string(binary.AppendUvarint(nil, n)) }
	part := strings.Repeat("\x00", 1<<20)
	zeros := make([]string, 0, 300)
	for range 299 {
		zeros = append(zeros, part)
	}
	frame := pack(t, nil, part)
	digest := sha256.Sum256(frame)
	table := func(content, frames int) string {
		return magic + num(uint64(content)) + strings.Repeat(num(uint64(len(frame)))+string(digest[:]), frames)
	}
	files := make([]string, 0, 300)
	for i := range 300 {
		files = append(files, fmt.Sprintf("F\x04%04d\x00\x00\x00\x00\x00\x80\x80\x40\x01\x00\x80\x80\x40\x00", i))
	}
	for name, p := range map[string]parts{
		"zeros": {nil, pack(t, nil, append([]string{magic + "\x00" + root}, zeros...)...)},
		"table": {nil, pack(t, nil, append([]string{magic + num(1<<60)}, zeros...)...)},
		"files": {
			bytes.Repeat(frame, 300),
			pack(t, nil, append([]string{table(300<<20, 300) + root}, files...)...),
		},
		"files, small table": {
			bytes.Repeat(frame, 300),
			pack(t, nil, append([]string{table(10<<20, 10) + root}, files...)...),
		},
	} {
		if len(p.index)+len(p.pack) > 200<<10 {
			t.Errorf("%s: %d bytes are too many for a bomb", name, len(p.index)+len(p.pack))
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _, err := readAll(p, layer.Limits{Bytes: 10 << 20, Entries: 1000})
		runtime.ReadMemStats(&after)
		if err == nil || after.TotalAlloc-before.TotalAlloc > 32<<20 {
			t.Errorf("%s: %v after %d bytes", name, err, after.TotalAlloc-before.TotalAlloc)
		}
	}
}

// readAll reads a whole layer without keeping it.
func readAll(p parts, limits layer.Limits) (entries, content int64, err error) {
	r, err := codec.NewReader(bytes.NewReader(p.index), bytes.NewReader(p.pack), limits)
	if err != nil {
		return 0, 0, err
	}
	defer r.Close()
	for {
		_, err := r.Next()
		if errors.Is(err, io.EOF) {
			return entries, content, nil
		}
		if err != nil {
			return 0, 0, err
		}
		n, err := io.Copy(io.Discard, r.Content())
		if err != nil {
			return 0, 0, err
		}
		entries, content = entries+1, content+n
	}
}

// rest returns the part of an index that follows the table.
func rest(tb testing.TB, p parts) string {
	tb.Helper()
	z, err := zstd.NewReader(bytes.NewReader(p.index), zstd.WithDecoderConcurrency(1))
	if err != nil {
		tb.Fatal(err)
	}
	defer z.Close()
	b, err := io.ReadAll(z)
	if err != nil {
		tb.Fatal(err)
	}
	b = b[len("bullpen home 1\n"):]
	number := func() uint64 {
		n, size := binary.Uvarint(b)
		b = b[size:]
		return n
	}
	for range (number() + codec.FrameBytes - 1) / codec.FrameBytes {
		_ = number()
		b = b[sha256.Size:]
	}
	return string(b)
}

// FuzzReader decodes indexes given without compression and table, and encodes every accepted layer
// again: a change has a single encoding.
func FuzzReader(f *testing.F) {
	moves, entries := sample()
	p, err := encode(moves, entries)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(rest(f, p), "hello")
	f.Add("\x00D\x00\x01\x00\x00\x00\x00U", "")
	f.Fuzz(func(t *testing.T, stream, content string) {
		moves, entries, contents, err := decode(assemble(t, stream, content), unlimited)
		if err != nil {
			return
		}
		again, err := encodeContents(moves, entries, contents)
		if err != nil {
			t.Fatal(err)
		}
		if got := rest(t, again); got != stream || strings.Join(contents, "") != content {
			t.Errorf("%q became %q", stream, got)
		}
	})
}

// FuzzFrame decodes arbitrary bytes of a store.
func FuzzFrame(f *testing.F) {
	moves, entries := sample()
	p, err := encode(moves, entries)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(p.index, p.pack)
	f.Fuzz(func(_ *testing.T, index, pack []byte) {
		_, _, _, _ = decode(parts{pack, index}, layer.Limits{Bytes: 1 << 20, Entries: 100})
	})
}
