package home_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/storage/thread/codec"
	"github.com/bullpen-run/bullpen/worker/home"
)

// TestTenantCannotMarkTheOverlay tries to create whiteouts and opaque directories as a tenant.
func TestTenantCannotMarkTheOverlay(t *testing.T) {
	th := newThread(t)
	dir, _ := th.run(`mkdir d; echo x > d/f
		if mknod w c 0 0 2>&1; then exit 1; fi
		if python3 -c "import os; os.setxattr('d', 'trusted.overlay.opaque', b'y')" 2>&1; then exit 1; fi
		if ln /etc/passwd passwd 2>&1; then exit 1; fi`)
	if got := must[[]os.DirEntry](t)(os.ReadDir(dir)); len(got) != 1 {
		t.Errorf("the version has %v", got)
	}
}

// TestUpperIsNotFollowed reads upper directories that only root could create.
func TestUpperIsNotFollowed(t *testing.T) {
	outside := t.TempDir()
	check(t, os.WriteFile(filepath.Join(outside, "secret"), []byte("the secret"), 0o600))
	for _, test := range []struct {
		name, err string
		change    func(upper string) error
	}{
		{"symlinks", "", func(u string) error {
			return errors.Join(os.Symlink(outside, u+"/dir"), os.Symlink(outside+"/secret", u+"/file"),
				os.Symlink("/proc/self/root", u+"/magic"))
		}},
		{"device", "", func(u string) error { return unix.Mknod(u+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))) }},
		{"whiteouts of nothing", "", func(u string) error { return unix.Mknod(u+"/gone", unix.S_IFCHR, 0) }},
		{"redirect to ..", "renamed from", mark("redirect", "/../../etc")},
		{"redirect to a symlink", "renamed from", mark("redirect", "/link")},
		{"redirect to nothing", "renamed from", mark("redirect", "/nothing")},
		{"unknown opaque mark", "unknown mark", mark("opaque", "x")},
	} {
		t.Run(test.name, func(t *testing.T) {
			f, volume := tmpfs(t)
			defer func() { _ = f.Close() }()
			o := &home.Overlay{Lower: newDir(t), Volume: volume, Owner: owner(t)}
			check(t, os.Symlink(outside, filepath.Join(o.Lower, "link")))
			mount := must[*os.File](t)(o.Mount())
			check(t, mount.Close(), test.change(volume+"/upper"))
			l, stats, err := encodeDiff(t.Context(), o, unlimited, objects{}.store)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Fatalf("%v", err)
				}
				return
			}
			check(t, err)
			if test.name == "device" && stats.Skipped != 1 {
				t.Errorf("%+v", stats)
			}
			next := newDir(t)
			check(t, apply(next, l, objects{}))
			if got := listing(t, next); strings.Contains(got, " 10 ") {
				t.Error(got)
			}
		})
	}
}

func mark(name, value string) func(string) error {
	return func(u string) error {
		return errors.Join(os.Mkdir(u+"/d", 0o755), unix.Setxattr(u+"/d", "trusted.overlay."+name, []byte(value), 0))
	}
}

func bind(tb testing.TB, from, to string) error {
	tb.Helper()
	to = must[string](tb)(filepath.EvalSymlinks(to))
	fd, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	tb.Cleanup(func() { _ = unix.Close(fd) })
	return unix.MoveMount(fd, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// TestConcurrentSwaps repeatedly swaps directories and files with symlinks that lead outside while
// the home is read. The layer must never contain anything from outside.
func TestConcurrentSwaps(t *testing.T) {
	outside := t.TempDir()
	check(t, os.WriteFile(filepath.Join(outside, "f"), []byte("the secret"), 0o644))
	dir := newDir(t)
	check(t, os.Mkdir(dir+"/d", 0o755), os.WriteFile(dir+"/d/f", []byte("x"), 0o644), os.Symlink(outside, dir+"/l"),
		os.WriteFile(dir+"/f", []byte("x"), 0o644), os.Symlink(outside+"/f", dir+"/m"))
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, dir+"/d", unix.AT_FDCWD, dir+"/l", unix.RENAME_EXCHANGE)
				_ = unix.Renameat2(unix.AT_FDCWD, dir+"/f", unix.AT_FDCWD, dir+"/m", unix.RENAME_EXCHANGE)
			}
		}
	}()
	succeeded := 0
	for range 300 {
		l, _, err := encodeFull(dir, objects{}.store)
		if err != nil {
			continue
		}
		succeeded++
		r := must[*codec.Reader](t)(codec.NewReader(bytes.NewReader(l.index), bytes.NewReader(l.pack), unlimited))
		for {
			_, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			check(t, err)
			if c := must[[]byte](t)(io.ReadAll(r.Content())); bytes.Contains(c, []byte("secret")) {
				t.Error("a symlink was followed")
			}
		}
		r.Close()
	}
	close(stop)
	<-done
	t.Logf("%d of 300 attempts succeeded", succeeded)
}

// build encodes a layer of an attacker who can write to the store.
func build(tb testing.TB, moves []string, entries ...layer.Entry) parts {
	tb.Helper()
	l, _, err := encode(unlimited, func(w layer.Writer) (home.Stats, error) {
		check(tb, w.Begin(moves), w.Write(&layer.Entry{Kind: layer.Dir, Base: layer.Merge, Mode: 0o755}, nil))
		for i := range entries {
			check(tb, w.Write(&entries[i], strings.NewReader("evil")))
		}
		return home.Stats{}, w.Write(&layer.Entry{Kind: layer.Leave}, nil)
	})
	check(tb, err)
	return l
}

func TestApplyStaysInside(t *testing.T) {
	leave := layer.Entry{Kind: layer.Leave}
	evil := layer.Entry{Kind: layer.File, Name: "file", Size: 4, Extents: []layer.Extent{{Len: 4}}}
	for name, l := range map[string]parts{
		"merge with a symlink": build(t, nil, layer.Entry{Kind: layer.Dir, Name: "link", Base: layer.Merge}, evil, leave),
		"merge with a file":    build(t, nil, layer.Entry{Kind: layer.Dir, Name: "plain", Base: layer.Merge}, evil, leave),
		"move from a symlink": build(t, []string{"link/dir"},
			layer.Entry{Kind: layer.Dir, Name: "n", Base: layer.Moved}, leave),
		"move of a symlink": build(t, []string{"link"}, layer.Entry{Kind: layer.Dir, Name: "n", Base: layer.Moved},
			evil, leave),
		"move of nothing": build(t, []string{"nothing"},
			layer.Entry{Kind: layer.Dir, Name: "n", Base: layer.Moved}, leave),
		"move into itself": build(t, []string{"dir"}, layer.Entry{Kind: layer.Dir, Name: "dir", Base: layer.Merge},
			layer.Entry{Kind: layer.Dir, Name: "n", Base: layer.Moved}, leave, leave),
		"merge with a mount": build(t, nil, layer.Entry{Kind: layer.Dir, Name: "mount", Base: layer.Merge}, evil, leave),
		"removal of a mount": build(t, nil, layer.Entry{Kind: layer.Delete, Name: "mount"}),
		"no such object": build(t, nil, layer.Entry{
			Kind: layer.File, Name: "file", Size: 5 * mib, Extents: []layer.Extent{{Len: 5 * mib}},
		}),
	} {
		t.Run(name, func(t *testing.T) {
			outside, dir := newDir(t), newDir(t)
			check(t, os.Mkdir(outside+"/dir", 0o755), os.WriteFile(outside+"/file", []byte("good"), 0o644),
				os.Symlink(outside, dir+"/link"), os.WriteFile(dir+"/plain", nil, 0o644), os.Mkdir(dir+"/dir", 0o755),
				os.Mkdir(dir+"/mount", 0o755))
			check(t, bind(t, outside, dir+"/mount"))
			defer func() { check(t, unix.Unmount(dir+"/mount", unix.MNT_DETACH)) }()
			before := digest(t, outside)
			if err := apply(dir, l, objects{}); err == nil {
				t.Error("applied")
			}
			if digest(t, outside) != before {
				t.Error("a directory outside was modified")
			}
		})
	}
	t.Run("in place of a symlink", func(t *testing.T) {
		outside, dir := newDir(t), newDir(t)
		check(t, os.WriteFile(outside+"/file", []byte("good"), 0o644), os.Symlink(outside+"/file", dir+"/file"),
			os.Symlink(outside, dir+"/link"))
		before := digest(t, outside)
		l := build(t, nil, evil, layer.Entry{Kind: layer.Dir, Name: "link", Base: layer.Fresh}, evil, leave)
		check(t, apply(dir, l, objects{}))
		if digest(t, outside) != before || string(must[[]byte](t)(os.ReadFile(dir+"/file"))) != "evil" {
			t.Error("a symlink was followed")
		}
	})
}

func TestWrongObjectIsRejected(t *testing.T) {
	dir := newDir(t)
	check(t, os.WriteFile(dir+"/big", bytes.Repeat([]byte("x"), 5*mib), 0o644))
	stored := objects{}
	l, _ := full(t, dir, stored)
	for digest, content := range stored {
		for name, bad := range map[string][]byte{"changed": append(bytes.Clone(content[1:]), 'y'), "short": content[1:]} {
			fetch := func(context.Context, layer.Digest, int64) (io.ReadCloser, error) {
				return io.NopCloser(bytes.NewReader(bad)), nil
			}
			if err := applyWith(newDir(t), l, unlimited, fetch); err == nil ||
				!strings.Contains(err.Error(), fmt.Sprintf("%x", digest)) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// TestDiffRejects checks that errors name the limit that is exceeded.
func TestDiffRejects(t *testing.T) {
	for _, test := range []struct {
		name, script, err string
		limits            layer.Limits
	}{
		{"entries", "touch a b c", "more than 3 files, directories and deletions", layer.Limits{Bytes: 100, Entries: 3}},
		{"bytes", "head -c 101 /dev/zero > a", "more than 100 bytes", layer.Limits{Bytes: 100, Entries: 10}},
		{"bytes of an object", "head -c 5000000 /dev/zero > a", "more than 100 bytes", layer.Limits{Bytes: 100, Entries: 10}},
		{"depth", "mkdir -p $(printf 'd/%.0s' {1..512})", "more than 512 levels deep", unlimited},
		{
			"target", "mkdir d; ln -s $(printf 'x%.0s' {1..1024}) d/l",
			`"d/l" has 1024 bytes in its link target, more than 1023`, unlimited,
		},
		{
			"size", "mkdir -p d/e; truncate -s 3T d/e/f",
			`"d/e/f" has 3298534883328 bytes including holes, more than 2199023255552`, unlimited,
		},
		{"parts of a file", "parts f 32769", `"f" has 32769 parts between holes, more than 32768`, unlimited},
		{
			"parts of all files", "mkdir d; parts d/a 16384; : > b; parts c 16385",
			`"d/a" has 32769 parts between holes with the files before it, more than 32768`, unlimited,
		},
		{
			"attributes of a file", "mkdir d; touch d/f; setxattr 4000 d/f",
			`"d/f" has 4025 bytes of extended attributes, with 24 for each, more than 4000`, unlimited,
		},
		{"attributes of a directory", "mkdir d; setxattr 4000 d", `"d" has 4025 bytes`, unlimited},
		{
			"attributes", `python3 -c "
import os
for i in range(4300): open(str(i), 'w').close(); os.setxattr(str(i), 'user.a', b'x' * 3900)"`,
			"the extended attributes of all files take more than 16777216 bytes", unlimited,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			th := newThread(t)
			o, mount := th.open()
			shell(t, mount, `parts() { python3 -c "
import os
f = os.open('$1', os.O_CREAT | os.O_WRONLY)
for i in range($2): os.pwrite(f, b'x', i * 8192)"; }
setxattr() { python3 -c "import os; os.setxattr('$2', 'user.a', bytes($1))"; }; `+test.script)
			_, _, err := encodeDiff(t.Context(), o, test.limits, th.objects.store)
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("%v", err)
			}
			if limited := test.limits != unlimited; errors.Is(err, layer.ErrLimit) != limited {
				t.Errorf("a limit: %v", err)
			}
		})
	}
}

func FuzzApply(f *testing.F) {
	leave := layer.Entry{Kind: layer.Leave}
	for _, l := range []parts{
		build(f, []string{"dir/sub"}, layer.Entry{Kind: layer.Dir, Name: "n", Base: layer.Moved}, leave),
		build(f, nil, layer.Entry{Kind: layer.File, Name: "a", Size: 4, Group: 1, Extents: []layer.Extent{{Len: 4}}},
			layer.Entry{Kind: layer.Link, Name: "b", Group: 1}),
		build(f, nil, layer.Entry{Kind: layer.Delete, Name: "dir"},
			layer.Entry{Kind: layer.Symlink, Name: "link", Target: "/"}),
	} {
		f.Add(l.index, l.pack)
	}
	f.Fuzz(func(t *testing.T, index, pack []byte) {
		outside, dir := newDir(t), newDir(t)
		check(t, os.WriteFile(outside+"/file", nil, 0o644), os.Symlink(outside, dir+"/link"),
			os.MkdirAll(dir+"/dir/sub", 0o755))
		before := digest(t, outside)
		_ = applyWith(dir, parts{pack, index}, layer.Limits{Bytes: mib, Entries: 100}, objects{}.fetch)
		if digest(t, outside) != before {
			t.Error("a directory outside was modified")
		}
	})
}
