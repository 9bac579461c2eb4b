package image_test

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/image"
)

func inodeOf(info fs.FileInfo) (links uint64, inode string) {
	sys := info.Sys().(*syscall.Stat_t)
	return sys.Nlink, strconv.FormatUint(sys.Ino, 10)
}

// bash is the only entry of the smallest valid image.
var bash = program("bin/bash")

const bashLines = "bin drwxr-xr-x\nbin/bash -rwxr-xr-x \"#!\""

func with(h tar.Header, change func(*tar.Header)) tar.Header {
	change(&h)
	return h
}

func deep(parts int) string { return strings.Repeat("d/", parts) }

// Each hostile archive is an error or an image with the wanted entries besides bash.
func TestHostileArchives(t *testing.T) {
	for name, tt := range map[string]struct {
		entries []tar.Header
		err     error
		want    string // lines beside those of bash
		left    image.Omitted
	}{
		"name with ..":        {entries: []tar.Header{file("../evil", "x")}, err: image.ErrHostile},
		"name with .. inside": {entries: []tar.Header{file("a/../../evil", "x")}, err: image.ErrHostile},
		"absolute name":       {entries: []tar.Header{file("/evil", "x")}, want: `evil -rw-r--r-- "x"`},
		"absolute name, many": {entries: []tar.Header{file("///./evil", "x")}, want: `evil -rw-r--r-- "x"`},
		"name of the root":    {entries: []tar.Header{dir("/"), dir("./")}},
		"name too long":       {entries: []tar.Header{file(strings.Repeat("n", 256), "x")}, err: image.ErrHostile},
		"path too long": {
			entries: []tar.Header{file(strings.Repeat(strings.Repeat("n", 250)+"/", 17)+"x", "x")},
			err:     image.ErrHostile,
		},
		"path too deep": {entries: []tar.Header{dir(deep(129))}, err: image.ErrHostile},
		"deep by links": {
			entries: []tar.Header{dir(deep(100)), symlink("l", deep(100)), dir("l/" + deep(100))},
			err:     image.ErrHostile,
		},
		"file as directory": {entries: []tar.Header{file("f", "x"), file("f/g", "x")}, err: image.ErrHostile},
		"through an absolute link": {
			entries: []tar.Header{symlink("l", "/tmp"), file("l/f", "x")},
			want:    "l -> /tmp\ntmp drwxr-xr-x\ntmp/f -rw-r--r-- \"x\"",
		},
		"through a relative link": {
			entries: []tar.Header{symlink("l", "../../.."), file("l/f", "x")},
			want:    "f -rw-r--r-- \"x\"\nl -> ../../..",
		},
		"through links of links": {
			entries: []tar.Header{
				symlink("l", "m"), symlink("m", "d/n"), dir("d"), symlink("d/n", "../.././e"),
				file("l/f", "x"),
			}, want: "d drwxr-xr-x\nd/n -> ../.././e\ne drwxr-xr-x\ne/f -rw-r--r-- \"x\"\nl -> m\nm -> d/n",
		},
		"through a loop": {
			entries: []tar.Header{symlink("l", "m"), symlink("m", "l"), file("l/f", "x")},
			err:     image.ErrHostile,
		},
		"through a link to a file": {
			entries: []tar.Header{file("g", "x"), symlink("l", "g"), file("l/f", "x")},
			err:     image.ErrHostile,
		},
		"over a link": {
			entries: []tar.Header{symlink("l", "/etc/passwd"), file("l", "x")},
			want:    `l -rw-r--r-- "x"`,
		},
		"directory over a link": {
			entries: []tar.Header{symlink("l", "/etc"), dir("l"), file("l/f", "x")},
			want:    "l drwxr-xr-x\nl/f -rw-r--r-- \"x\"",
		},
		"hard link outside":     {entries: []tar.Header{hardLink("l", "../../../etc/passwd")}, err: image.ErrHostile},
		"hard link to the host": {entries: []tar.Header{hardLink("l", "/etc/passwd")}, err: image.ErrHostile},
		"hard link through a link": {
			entries: []tar.Header{symlink("s", "/"), hardLink("l", "s/etc/passwd")},
			err:     image.ErrHostile,
		},
		"hard link inside": {
			entries: []tar.Header{file("f", "x"), symlink("s", "/"), hardLink("l", "s/f")},
			want:    "f -rw-r--r-- \"x\" = f\nl -rw-r--r-- \"x\" = f\ns -> /",
		},
		"hard link to a link": {
			entries: []tar.Header{symlink("s", "/etc/passwd"), hardLink("l", "s")},
			want:    "l -> /etc/passwd\ns -> /etc/passwd",
		},
		"hard link to a directory": {entries: []tar.Header{dir("d"), hardLink("l", "d")}, err: image.ErrHostile},
		"hard link to itself":      {entries: []tar.Header{hardLink("l", "l")}, err: image.ErrHostile},
		"link without a target":    {entries: []tar.Header{symlink("l", "")}, err: image.ErrHostile},
		"character device":         {entries: []tar.Header{device("null", tar.TypeChar)}, left: image.Omitted{Devices: 1}},
		"block device":             {entries: []tar.Header{device("sda", tar.TypeBlock)}, left: image.Omitted{Devices: 1}},
		"FIFO":                     {entries: []tar.Header{device("fifo", tar.TypeFifo)}, left: image.Omitted{Devices: 1}},
		"device in place of a file": {
			entries: []tar.Header{file("f", "x"), device("f", tar.TypeChar)},
			left:    image.Omitted{Devices: 1},
		},
		"setuid": {
			entries: []tar.Header{with(file("su", "x"), func(h *tar.Header) { h.Mode = 0o6755 })},
			want:    `su -rwxr-xr-x "x"`, left: image.Omitted{Setuid: 1},
		},
		"sticky and open": {
			entries: []tar.Header{with(dir("tmp"), func(h *tar.Header) { h.Mode = 0o3777 })},
			want:    "tmp drwxr-xr-x",
		},
		"nobody may read": {
			entries: []tar.Header{with(file("f", "x"), func(h *tar.Header) { h.Mode = 0 })},
			want:    `f -rw-r--r-- "x"`,
		},
		"of another user": {
			entries: []tar.Header{with(file("f", "x"), func(h *tar.Header) { h.Uid, h.Gid, h.Uname = 1000, 1000, "eve" })},
			want:    `f -rw-r--r-- "x"`,
		},
		"capability": {
			entries: []tar.Header{with(program("ping"), func(h *tar.Header) {
				h.PAXRecords["SCHILY.xattr.security.capability"] = "\x01"
			})}, want: `ping -rwxr-xr-x "#!"`, left: image.Omitted{Attributes: 1},
		},
		"larger than the limit": {entries: []tar.Header{file("f", strings.Repeat("x", 1<<20))}, err: image.ErrTooLarge},
		"time before all times": {
			entries: []tar.Header{with(file("f", "x"), func(h *tar.Header) { h.ModTime = time.Unix(-1<<40, 0) })},
			want:    `f -rw-r--r-- "x"`,
		},
		"whiteout outside a layer": {
			entries: []tar.Header{file("f", "x"), file(".wh.f", "")}, want: ".wh.f -rw-r--r-- \"\"\nf -rw-r--r-- \"x\"",
		},
		"name that is not UTF-8": {entries: []tar.Header{file("\xff\n-rf", "x")}, want: "\xff\n-rf -rw-r--r-- \"x\""},
		"setuid through a hard link": {
			entries: []tar.Header{file("f", "x"), with(hardLink("su", "f"), func(h *tar.Header) { h.Mode = 0o4755 })},
			want:    "f -rw-r--r-- \"x\" = f\nsu -rw-r--r-- \"x\" = f", left: image.Omitted{Setuid: 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tree := newTree(t, smallLimits())
			err := tree.AddTar(bytes.NewReader(archive(t, append([]tar.Header{bash}, tt.entries...)...)))
			if !errors.Is(err, tt.err) {
				t.Fatalf("got %v, want %v", err, tt.err)
			}
			if tt.err != nil {
				return
			}
			if tree.Omitted() != tt.left {
				t.Errorf("left out: %+v, want %+v", tree.Omitted(), tt.left)
			}
			stored, _ := pack(t, tree)
			got := strings.Split(listing(t, stored), "\n")
			want := slices.DeleteFunc(strings.Split(bashLines+"\n"+tt.want, "\n"), func(s string) bool { return s == "" })
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		})
	}
}

// Headers announce more than follows.
func TestHugeAndSparseFiles(t *testing.T) {
	huge := archive(t, bash, file("f", "x"))
	at := bytes.Index(huge, []byte("f\x00"))
	sizeField := func(b []byte, octal string) []byte {
		b = slices.Clone(b)
		copy(b[at+124:], octal)
		copy(b[at+148:], "        ")
		sum := 0
		for _, c := range b[at : at+512] {
			sum += int(c)
		}
		copy(b[at+148:], strings.Repeat("0", 6-len(strconv.FormatInt(int64(sum), 8)))+
			strconv.FormatInt(int64(sum), 8)+"\x00 ")
		return b
	}
	if err := newTree(t, smallLimits()).AddTar(bytes.NewReader(sizeField(huge, "77777777777\x00"))); !errors.Is(
		err, image.ErrTooLarge) {
		t.Errorf("8 GiB in the header: %v", err)
	}
	sparse := slices.Clone(huge)
	sparse[at+156] = tar.TypeGNUSparse
	copy(sparse[at+257:], "ustar  \x00")
	copy(sparse[at+386:], "00000000000\x0000000000001\x00") // one byte at 0
	copy(sparse[at+483:], "77777777777\x00")                // of 8 GiB
	if err := newTree(t, smallLimits()).AddTar(bytes.NewReader(sizeField(sparse, "00000000001\x00"))); !errors.Is(
		err, image.ErrTooLarge) {
		t.Errorf("sparse: %v", err)
	}
	copy(sparse[at+483:], "00000010000\x00") // of 4 KiB
	tree := newTree(t, smallLimits())
	if err := tree.AddTar(bytes.NewReader(sizeField(sparse, "00000000001\x00"))); err != nil {
		t.Fatal(err)
	}
	stored, _ := pack(t, tree)
	if want := strconv.Quote("x" + strings.Repeat("\x00", 4095)); !strings.Contains(listing(t, stored), want) {
		t.Error("the holes are not zeros")
	}
}

func TestTreeLimits(t *testing.T) {
	for _, tt := range []struct {
		limits image.Limits
		err    error
	}{
		{image.Limits{Entries: 4, Unpacked: 5, Stored: 1 << 20}, nil},
		{image.Limits{Entries: 3, Unpacked: 5, Stored: 1 << 20}, image.ErrTooLarge},
		{image.Limits{Entries: 4, Unpacked: 4, Stored: 1 << 20}, image.ErrTooLarge},
		{image.Limits{Entries: 4, Unpacked: 5, Stored: 10}, image.ErrTooLarge},
	} {
		tree := newTree(t, tt.limits)
		err := tree.AddTar(bytes.NewReader(archive(t, bash, file("a", "xyz"), symlink("b", "c")))) // bin, bash, a, b; 5 bytes
		if err == nil {
			_, err = tree.Pack(&bytes.Buffer{})
		}
		if !errors.Is(err, tt.err) {
			t.Errorf("%+v: %v", tt.limits, err)
		}
	}
}

func TestLayers(t *testing.T) {
	base := []tar.Header{
		dir("bin"), bash, dir("d"), file("d/a", "1"), file("d/b", "1"), dir("d/sub"),
		file("d/sub/c", "1"),
	}
	for name, tt := range map[string]struct {
		layers [][]tar.Header
		want   string
		err    error
	}{
		"a file is hidden": {
			layers: [][]tar.Header{{file("d/.wh.a", "")}}, want: "d, d/b, d/sub, d/sub/c",
		},
		"a directory is hidden": {layers: [][]tar.Header{{file(".wh.d", "")}}},
		"hidden and made anew": {
			layers: [][]tar.Header{{file(".wh.d", "")}, {dir("d"), file("d/x", "2")}},
			want:   "d, d/x",
		},
		"made and hidden in one layer": {
			layers: [][]tar.Header{{file("d/a", "2"), file("d/.wh.a", "")}},
			want:   "d, d/a, d/b, d/sub, d/sub/c",
		},
		"a directory made and hidden in one": {
			layers: [][]tar.Header{{file("d/x", "2"), file(".wh.d", "")}},
			want:   "d, d/x",
		},
		"opaque": {
			layers: [][]tar.Header{{dir("d"), file("d/.wh..wh..opq", ""), file("d/x", "2")}}, want: "d, d/x",
		},
		"opaque after what is new": {
			layers: [][]tar.Header{{dir("d"), file("d/x", "2"), file("d/sub/y", "2"), file("d/.wh..wh..opq", "")}},
			want:   "d, d/sub, d/sub/y, d/x",
		},
		"opaque at the root": {layers: [][]tar.Header{{file(".wh..wh..opq", ""), bash}}},
		"of what is not there": {
			layers: [][]tar.Header{{file(".wh.x", "")}}, want: "d, d/a, d/b, d/sub, d/sub/c",
		},
		"notes of storage drivers": {
			layers: [][]tar.Header{{file(".wh..wh.plnk", "")}}, want: "d, d/a, d/b, d/sub, d/sub/c",
		},
		"of the directory above":  {layers: [][]tar.Header{{file("d/.wh...", "")}}, err: image.ErrHostile},
		"of the directory itself": {layers: [][]tar.Header{{file("d/.wh..", "")}}, err: image.ErrHostile},
		"of nothing":              {layers: [][]tar.Header{{file("d/.wh.", "")}}, err: image.ErrHostile},
		"through a link": {
			layers: [][]tar.Header{{symlink("l", "/d")}, {file("l/.wh.a", "")}},
			want:   "d, d/b, d/sub, d/sub/c, l",
		},
		"a file in place of a directory": {layers: [][]tar.Header{{file("d", "2")}}, want: "d"},
		"a directory in place of a file": {
			layers: [][]tar.Header{{dir("d/a"), file("d/a/x", "2")}}, want: "d, d/a, d/a/x, d/b, d/sub, d/sub/c",
		},
		"a directory again keeps what is in it": {layers: [][]tar.Header{{dir("d")}}, want: "d, d/a, d/b, d/sub, d/sub/c"},
		"a hard link to what is below": {
			layers: [][]tar.Header{{hardLink("e", "d/a")}, {file("d/.wh.a", "")}},
			want:   "d, d/b, d/sub, d/sub/c, e",
		},
		"a link that the layer below made a dir": {
			layers: [][]tar.Header{{file(".wh.d", ""), symlink("d", "/bin")}, {file("d/x", "3")}}, want: "bin/x, d",
		},
	} {
		t.Run(name, func(t *testing.T) {
			tree := newTree(t, smallLimits())
			var err error
			for _, layer := range append([][]tar.Header{base}, tt.layers...) {
				if err == nil {
					err = tree.AddLayer(bytes.NewReader(archive(t, layer...)))
				}
			}
			if !errors.Is(err, tt.err) {
				t.Fatalf("got %v, want %v", err, tt.err)
			}
			if tt.err != nil {
				return
			}
			stored, _ := pack(t, tree)
			var got []string
			for line := range strings.SplitSeq(listing(t, stored), "\n") {
				if name, _, _ := strings.Cut(line, " "); name != "bin" && name != "bin/bash" {
					got = append(got, name)
				}
			}
			slices.Sort(got)
			if strings.Join(got, ", ") != tt.want {
				t.Errorf("got %s\nwant %s", strings.Join(got, ", "), tt.want)
			}
		})
	}
}

func TestEqualTreesHaveEqualBytes(t *testing.T) {
	entries := []tar.Header{
		dir("bin"), bash, dir("d"), file("d/a", "1"), hardLink("z", "d/a"), symlink("l", "d"), file("d.x", "2"),
		file("d/ä", "3"),
	}
	one := newTree(t, smallLimits())
	if err := one.AddTar(bytes.NewReader(archive(t, entries...))); err != nil {
		t.Fatal(err)
	}
	one.Env = map[string]string{"LANG": "C.UTF-8", "PATH": "/bin"}
	first, img := pack(t, one)
	if again, _ := pack(t, one); !bytes.Equal(first, again) {
		t.Error("packed twice, it differs")
	}
	// In another order, over another layer, by another user, with fractions of a second.
	two := newTree(t, smallLimits())
	if err := two.AddLayer(bytes.NewReader(archive(t, file("gone", "x"), file("d/a", "0")))); err != nil {
		t.Fatal(err)
	}
	turned := []tar.Header{file(".wh.gone", "")}
	for _, i := range []int{2, 7, 6, 5, 3, 4, 0, 1} {
		h := entries[i]
		h.Uid, h.ModTime, h.Format = 1000, day.Add(time.Millisecond), tar.FormatPAX
		turned = append(turned, h)
	}
	if err := two.AddLayer(bytes.NewReader(archive(t, turned...))); err != nil {
		t.Fatal(err)
	}
	two.Env = map[string]string{"PATH": "/bin", "LANG": "C.UTF-8", "LD_PRELOAD": "/evil.so"}
	if other, _ := pack(t, two); !bytes.Equal(first, other) {
		t.Errorf("another way to the same tree differs:\n%s\n\n%s", listing(t, first), listing(t, other))
	}
	seen, _, err := image.Inspect(bytes.NewReader(first), smallLimits())
	if err != nil {
		t.Fatal(err)
	}
	if seen.Digest != img.Digest || seen.Size != img.Size || seen.UnpackedSize != img.UnpackedSize ||
		seen.Env["PATH"] != "/bin" ||
		seen.Env["LD_PRELOAD"] != "" || seen.Languages[proto.Bash] != "/bin/bash" || img.UnpackedSize != 5 ||
		!proto.ValidImageDigest(img.Digest) {
		t.Errorf("packed %+v, seen %+v", img, seen)
	}
}

func TestAddDir(t *testing.T) {
	from := t.TempDir()
	for _, err := range []error{
		os.MkdirAll(filepath.Join(from, "bin"), 0o700),
		os.WriteFile(filepath.Join(from, "bin", "bash"), []byte("#!"), 0o700),
		os.Chmod(filepath.Join(from, "bin", "bash"), 0o700|fs.ModeSetuid),
		os.Link(filepath.Join(from, "bin", "bash"), filepath.Join(from, "bin", "sh")),
		os.Symlink("/etc", filepath.Join(from, "etc")),
		os.Symlink("/etc/passwd", filepath.Join(from, "passwd")),
		syscall.Mkfifo(filepath.Join(from, "fifo"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	tree := newTree(t, smallLimits())
	if err := tree.AddDir(from); err != nil {
		t.Fatal(err)
	}
	stored, _ := pack(t, tree)
	want := "bin drwxr-xr-x\nbin/bash -rwxr-xr-x \"#!\" = bin/bash\nbin/sh -rwxr-xr-x \"#!\" = bin/bash\netc -> " +
		"/etc\npasswd -> /etc/passwd"
	if got := listing(t, stored); got != want || tree.Omitted() != (image.Omitted{Devices: 1, Setuid: 1}) {
		t.Errorf("got %+v\n%s", tree.Omitted(), got)
	}
}

func TestInterpreters(t *testing.T) {
	for name, tt := range map[string]struct {
		env     string // PATH
		entries []tar.Header
		want    map[proto.Language]string
	}{
		"in the usual places": {
			entries: []tar.Header{program("usr/bin/python3"), program("usr/local/bin/node"), program("usr/bin/node"), bash},
			want:    map[proto.Language]string{"python": "/usr/bin/python3", "node": "/usr/local/bin/node", "bash": "/bin/bash"},
		},
		"the image's PATH goes first": {
			env: "/app/bin:relative:/usr/bin",
			entries: []tar.Header{
				program("app/bin/python"), program("usr/bin/python3"), program("opt/venv/bin/python3"),
				program("relative/node"),
			},
			want: map[proto.Language]string{"python": "/app/bin/python"},
		},
		"python3 before python before versions": {
			entries: []tar.Header{
				program("bin/python3.9"), program("bin/python3.14"), program("bin/python3.14-config"),
				program("bin/python3.014"),
			},
			want: map[proto.Language]string{"python": "/bin/python3.14"},
		},
		"ruby and deno": {
			entries: []tar.Header{program("usr/bin/ruby3.1"), program("usr/bin/ruby3.3"), program("usr/local/bin/deno")},
			want:    map[proto.Language]string{"ruby": "/usr/bin/ruby3.3", "deno": "/usr/local/bin/deno"},
		},
		"a virtual environment, with its python a link": {
			entries: []tar.Header{
				file("opt/venv/pyvenv.cfg", ""), symlink("opt/venv/bin/python3", "/usr/bin/python3.14"),
				program("usr/bin/python3.14"),
			},
			want: map[proto.Language]string{"python": "/opt/venv/bin/python3"},
		},
		"a virtual environment elsewhere, when there is no other": {
			entries: []tar.Header{
				file("srv/app/env/pyvenv.cfg", ""), program("srv/app/env/bin/python"),
				file("srv/b/pyvenv.cfg", ""), program("srv/b/bin/python"),
			},
			want: map[proto.Language]string{"python": "/srv/b/bin/python"},
		},
		"conda": {
			entries: []tar.Header{
				program("opt/conda/bin/python3"), program("opt/conda/envs/x/bin/node"),
				program("usr/bin/python3"),
			},
			want: map[proto.Language]string{"python": "/opt/conda/bin/python3", "node": "/opt/conda/envs/x/bin/node"},
		},
		"through the alternatives": {
			entries: []tar.Header{
				symlink("bin", "usr/bin"), symlink("usr/bin/nodejs", "/etc/alternatives/node"),
				symlink("etc/alternatives/node", "/opt/n/node"), program("opt/n/node"),
			},
			want: map[proto.Language]string{"node": "/usr/bin/nodejs"},
		},
		"not what cannot run": {
			entries: []tar.Header{
				bash, file("usr/bin/python3", "text"), dir("usr/local/bin/node"), symlink("usr/bin/node", "/missing"),
				symlink("bin/node", "node"),
				with(file("bin/python3", ""), func(h *tar.Header) { h.Mode = 0o755 }),
			},
			want: map[proto.Language]string{"bash": "/bin/bash"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tree := newTree(t, smallLimits())
			if err := tree.AddTar(bytes.NewReader(archive(t, tt.entries...))); err != nil {
				t.Fatal(err)
			}
			if tt.env != "" {
				tree.Env = map[string]string{"PATH": tt.env}
			}
			_, img := pack(t, tree)
			if len(img.Languages) != len(tt.want) {
				t.Errorf("got %v", img.Languages)
			}
			for l, path := range tt.want {
				if img.Languages[l] != path {
					t.Errorf("%s is %s, want %s", l, img.Languages[l], path)
				}
			}
		})
	}
	empty := newTree(t, smallLimits())
	if _, err := empty.Pack(&bytes.Buffer{}); !errors.Is(err, image.ErrNoLanguage) {
		t.Errorf("without an interpreter: %v", err)
	}
}

// elfProgram is an executable file with the header of an ELF file for a machine.
func elfProgram(name string, order binary.AppendByteOrder, machine elf.Machine) tar.Header {
	data := elf.ELFDATA2LSB
	if order == binary.BigEndian {
		data = elf.ELFDATA2MSB
	}
	content := append([]byte(elf.ELFMAG), byte(elf.ELFCLASS64), byte(data))
	content = append(content, make([]byte, 12)...)
	h := file(name, string(order.AppendUint16(content, uint16(machine))))
	h.Mode = 0o755
	return h
}

// The client that packs an image and the server that reads it find the same architecture, in the
// image's interpreters.
func TestArchitecture(t *testing.T) {
	little, big := binary.LittleEndian, binary.BigEndian
	for name, tt := range map[string]struct {
		entries []tar.Header
		want    string
		err     string
	}{
		"amd64": {entries: []tar.Header{elfProgram("bin/bash", little, elf.EM_X86_64)}, want: "amd64"},
		"arm64, through a link": {
			entries: []tar.Header{elfProgram("opt/b", little, elf.EM_AARCH64), symlink("bin/bash", "/opt/b")}, want: "arm64",
		},
		"arm64, by a hard link": {
			entries: []tar.Header{
				elfProgram("a", little, elf.EM_AARCH64),
				with(hardLink("bin/bash", "a"), func(h *tar.Header) { h.Mode = 0o755 }),
			}, want: "arm64",
		},
		"scripts": {entries: []tar.Header{bash, program("bin/python3")}},
		"a script beside a binary": {
			entries: []tar.Header{program("bin/python3"), elfProgram("bin/bash", little, elf.EM_X86_64)}, want: "amd64",
		},
		"other files do not count": {entries: []tar.Header{bash, elfProgram("lib/foreign.so", little, elf.EM_AARCH64)}},
		"two": {
			entries: []tar.Header{
				elfProgram("bin/bash", little, elf.EM_X86_64),
				elfProgram("bin/python3", little, elf.EM_AARCH64),
			},
			err: "/bin/python3 is for arm64, another interpreter for amd64",
		},
		"none that workers have": {
			entries: []tar.Header{elfProgram("bin/bash", big, elf.EM_S390)},
			err:     "/bin/bash is for EM_S390; workers are amd64 or arm64",
		},
		"a header cut short": {
			entries: []tar.Header{with(file("bin/bash", elf.ELFMAG), func(h *tar.Header) { h.Mode = 0o755 })},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tree := newTree(t, smallLimits())
			if err := tree.AddTar(bytes.NewReader(archive(t, tt.entries...))); err != nil {
				t.Fatal(err)
			}
			if tt.err != "" {
				if _, err := tree.Pack(io.Discard); !errors.Is(err, image.ErrArchitecture) ||
					!strings.Contains(err.Error(), tt.err) {
					t.Errorf("got %v", err)
				}
				sent := compress(t, archive(t, append([]tar.Header{about, dir("bin/")}, tt.entries...)...))
				if _, _, err := image.Inspect(bytes.NewReader(sent), smallLimits()); !errors.Is(err, image.ErrArchitecture) {
					t.Errorf("the server: %v", err)
				}
				return
			}
			packed, img := pack(t, tree)
			seen, _, err := image.Inspect(bytes.NewReader(packed), smallLimits())
			if err != nil || img.Architecture != tt.want || seen.Architecture != tt.want {
				t.Errorf("packed %q, the server reads %+v, %v", img.Architecture, seen, err)
			}
		})
	}
}

func TestEnvironment(t *testing.T) {
	got := image.CleanEnv(map[string]string{
		"PATH": "bin:/usr/bin::/bin:.", "LANG": "C.UTF-8", "TZ": "a\nb", "LC_ALL": "\xff",
		"JAVA_HOME": strings.Repeat("x", 4<<10+1), "R_HOME": "",
		"LD_PRELOAD": "/x", "LD_LIBRARY_PATH": "/x", "PYTHONPATH": "/x", "NODE_OPTIONS": "-r x", "HOME": "/root",
		"BASH_ENV": "/x", "SECRET": "s",
	})
	if len(got) != 2 || got["PATH"] != "/usr/bin:/bin" || got["LANG"] != "C.UTF-8" {
		t.Errorf("got %q", got)
	}
}
