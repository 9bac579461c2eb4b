package mount_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
	"github.com/bullpen-run/bullpen/worker/mount"
)

// A program sees the part of a volume that its mount names, or nothing: no link in the volume leads
// elsewhere.
func TestPartOfAVolume(t *testing.T) {
	const user = 70_001
	dir := tempDir(t, "/var/tmp")
	version := filepath.Join(dir, "version")
	must(t, os.MkdirAll(version+"/d/e", 0o755))
	must(t, os.WriteFile(version+"/d/e/file", []byte("content"), 0o644))
	must(t, os.Mkdir(version+"/closed", 0o500))
	for name, target := range map[string]string{
		"root": "/", "up": "../..", "d/up": "../../../..", "same": "d",
		"proc": "/proc/self/root",
	} {
		must(t, os.Symlink(target, version+"/"+name))
	}
	pool, err := disk.Open(disk.Config{Dir: filepath.Join(dir, "volumes")})
	must(t, err)
	t.Cleanup(func() { must(t, pool.Close()) })
	owner, err := home.NewOwner(user, user)
	must(t, err)
	t.Cleanup(func() { must(t, owner.Close()) })

	// of returns a volume as the worker mounts it.
	of := func(t *testing.T, readOnly bool) mount.Volume {
		if readOnly {
			return func(_, _ int, open func(int) (int, error)) (*os.File, error) {
				root, err := unix.Open(version, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
				must(t, err)
				defer func() { _ = unix.Close(root) }()
				part, err := open(root)
				if err != nil {
					return nil, err
				}
				defer func() { _ = unix.Close(part) }()
				return owner.Mapped(part)
			}
		}
		changes, err := pool.Get(t.Context(), disk.Size{Bytes: 8 << 20, Inodes: 1000}, 0, 0)
		must(t, err)
		t.Cleanup(func() { must(t, changes.Close()) })
		overlay := &home.Overlay{Lower: version, Volume: changes.Path(), Owner: owner}
		return func(_, _ int, open func(int) (int, error)) (*os.File, error) {
			whole, part, err := overlay.MountPart(open)
			if err == nil {
				t.Cleanup(func() { must(t, whole.Close()) })
			}
			return part, err
		}
	}
	for _, tt := range []struct {
		prefix, at string
		readOnly   bool
		want       string // what is in the part, or "" if it cannot be mounted
	}{
		{"", "", false, "[closed d proc root same up]"},
		{"", "", true, "[closed d proc root same up]"},
		{"d", "d", false, "[e up]"},
		{"d/e", "e", false, "[file]"},
		{"d/e", "d/e", true, "[file]"},
		{"new/er", "new/er", false, "[]"},
		{"d/new", "new", false, "[]"},
		{"new", "new", true, ""},
		{"d/new", "new", true, ""},
		{"root", "root", false, ""},
		{"root/etc", "root/etc", false, ""},
		{"root/etc", "etc", true, ""},
		{"up", "up", false, ""},
		{"d/up/etc", "etc", true, ""},
		{"same", "same", false, ""},
		{"same/e", "e", true, ""},
		{"proc/etc", "etc", false, ""},
		{"d/e/file", "file", false, ""},
		{"d/e/file/x", "x", false, ""},
		{"closed/new", "new", false, ""},
	} {
		t.Run(fmt.Sprintf("%s-%v", strings.ReplaceAll(tt.prefix, "/", "-"), tt.readOnly), func(t *testing.T) {
			m := proto.Mount{
				Slug: "v", Kind: proto.MountVolume, Prefix: tt.prefix, At: tt.at, ReadOnly: tt.readOnly,
				Bytes: 1 << 20,
			}
			set, err := new(mount.Opener).Open([]proto.Mount{m})
			must(t, err)
			set.SetVolumes(map[string]mount.Volume{"v": of(t, tt.readOnly)})
			mounts, err := set.Mount(user, user)
			failed := new(mount.Error)
			if tt.want == "" {
				if len(mounts) > 0 || !errors.As(err, &failed) || failed.Slug != "v" || strings.Contains(failed.Message, version) {
					t.Errorf("mounted %v, %v", mounts, err)
				}
				return
			}
			must(t, err)
			part := mounts[0].Mount
			t.Cleanup(func() { must(t, part.Close()) })
			if want := strings.TrimSuffix("v/"+tt.at, "/"); len(mounts) != 1 || mounts[0].Name != want {
				t.Errorf("%+v", mounts)
			}
			names, err := os.ReadDir(fmt.Sprintf("/proc/self/fd/%d", part.Fd()))
			must(t, err)
			var got []string
			for _, e := range names {
				got = append(got, e.Name())
			}
			if fmt.Sprint(got) != tt.want {
				t.Errorf("it has %v, want %s", got, tt.want)
			}
			var st unix.Stat_t
			var fs unix.Statfs_t
			must(t, errors.Join(unix.Fstat(int(part.Fd()), &st), unix.Fstatfs(int(part.Fd()), &fs)))
			if st.Uid != user || st.Gid != user || fs.Flags&unix.ST_NOSUID == 0 || fs.Flags&unix.ST_NODEV == 0 ||
				fs.Flags&unix.ST_RDONLY != 0 != tt.readOnly {
				t.Errorf("it belongs to %d:%d, mounted with %#x", st.Uid, st.Gid, fs.Flags)
			}
			if _, err := unix.Openat(int(part.Fd()), "../version", unix.O_PATH|unix.O_CLOEXEC, 0); !errors.Is(err, unix.ENOENT) {
				t.Errorf("a way out of the part: %v", err)
			}
		})
	}
}

// noHomes are homes that cannot be fetched.
type noHomes struct{ err error }

func (h noHomes) CheckOut(context.Context, proto.CheckoutRequest) (worker.Home, error) {
	return nil, h.err
}

func (h noHomes) Read(context.Context, string, string) (worker.VolumeVersion, error) {
	return nil, h.err
}

func TestVolumeThatCannotBeFetched(t *testing.T) {
	w := newWorld(t)
	w.homes = noHomes{errors.New("the store at 10.0.0.1 is gone")}
	m := proto.Mount{Slug: "v", Kind: proto.MountVolume, Bytes: 1 << 20}
	var all []*proto.Job
	for _, m := range []proto.Mount{m, readOnly(m)} {
		j := job("print('ran')")
		j.SetMounts([]proto.Mount{m})
		all = append(all, j)
	}
	results, log := w.execute(all...)
	for _, r := range results {
		if r.ErrorCode == nil || *r.ErrorCode != string(proto.CodeVolumeMount) ||
			!strings.Contains(*r.ErrorMessage, "volume v could not be made ready") ||
			strings.Contains(*r.ErrorMessage, "10.0.0.1") || r.Stdout != "" {
			t.Errorf("%+v", r)
		}
	}
	if !strings.Contains(log, "10.0.0.1") {
		t.Errorf("the log lacks the cause: %s", log)
	}
	w.nothingLeft()
}

func TestUploadsThatDoNotFitIntoAVolume(t *testing.T) {
	w := newWorld(t)
	uploads := &proto.UploadsError{Bytes: 3, Files: 1, MaxBytes: 2, MaxFiles: 1}
	w.homes = noHomes{fmt.Errorf("stage: %w", uploads)}
	j := job("print('ran')")
	j.SetMounts([]proto.Mount{{Slug: "v", Kind: proto.MountVolume, Bytes: 1 << 20}})
	results, _ := w.execute(j)
	if r := results[0]; r.ErrorCode == nil || *r.ErrorCode != string(proto.CodeVolumeMount) ||
		!strings.Contains(*r.ErrorMessage, uploads.Error()) {
		t.Errorf("%+v", r)
	}
	w.nothingLeft()
}
