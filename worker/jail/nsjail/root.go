package nsjail

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
)

// maxAccounts is the maximum size in bytes of an image's /etc/passwd and /etc/group.
const maxAccounts = 1 << 20

// makeRoot creates the writable root file system: the image under a volume for the changes. attach replaces
// the jail's read-only root, and moves the mounts in it.
func (s *sandbox) makeRoot(ctx context.Context) (attach func(pidfd int, target string) error, err error) {
	if !s.spec.Guest || s.spec.Root == "" {
		return nil, errors.New("a writable root needs a live sandbox with an image")
	}
	pool, err := s.m.pool()
	if err != nil {
		return nil, err
	}
	v, err := pool.Get(ctx, changesSize(proto.Space{Bytes: s.spec.RootBytes, Files: s.spec.Inodes}), 0, 0)
	if err != nil {
		return nil, err
	}
	s.volumes = append(s.volumes, v)
	owner, err := home.NewOwners(s.uids.first, s.uids.size-1)
	if err != nil {
		return nil, err
	}
	defer func() { _ = owner.Close() }()
	s.root, err = (&home.Overlay{Lower: s.spec.Root, Volume: v.Path(), Owner: owner, Fill: s.fillRoot}).Mount()
	if err != nil {
		return nil, fmt.Errorf("make the root writable: %w", err)
	}
	return func(pidfd int, _ string) error {
		return disk.ReplaceRoot(s.root, pidfd, proto.MountsDir, s.ownMountPoints())
	}, nil
}

// ownMountPoints returns the paths at which the jail has mounts of its own, without those below others.
func (s *sandbox) ownMountPoints() []string {
	points := []string{"/proc"}
	for _, d := range devicesOf(s.spec) {
		points = append(points, "/dev/"+d)
	}
	l := layout{home: s.m.cfg.Home, uids: s.uids, proc: &proc{}, spec: s.spec}
	for _, m := range l.own("") {
		points = append(points, m.target)
	}
	return points
}

// fillRoot adds what every jail has to the upper directory of a writable root.
func (s *sandbox) fillRoot(upper string) error {
	if err := (&skeleton{dir: upper}).addOwn(s.m.cfg.Home, s.rootKey()); err != nil {
		return err
	}
	if err := s.mergeAccounts(filepath.Join(upper, "etc")); err != nil {
		return err
	}
	return filepath.WalkDir(upper, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, s.uids.first, s.uids.first) //nolint:gosec // nothing else can reach the directory yet
	})
}

// mergeAccounts adds the image's users and groups to those of a live sandbox, whose names take precedence.
// Packages that are installed expect those of their system.
func (s *sandbox) mergeAccounts(etc string) error {
	image, err := os.OpenRoot(s.spec.Root)
	if err != nil {
		return err
	}
	defer func() { _ = image.Close() }()
	for name, own := range map[string]string{
		// With *, the user needs no line in the image's /etc/shadow.
		"passwd": fmt.Sprintf("root:x:0:0:root:/root:/bin/bash\n%s:*:%d:%d:%[1]s:%[4]s:/bin/bash\n",
			jail.GuestUser, jail.ProgramID, jail.ProgramID, proto.SandboxHome),
		"group": fmt.Sprintf("root:x:0:\n%s:x:%d:\n", jail.GuestUser, jail.ProgramID),
	} {
		theirs, err := readAccounts(image, "etc/"+name)
		if err == nil {
			err = writeFile(filepath.Join(etc, name), append([]byte(own), without(theirs, own)...))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readAccounts reads a file of the image, which may be absent.
func readAccounts(image *os.Root, name string) ([]byte, error) {
	f, err := image.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the image's /%s: %w", name, err)
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, maxAccounts+1))
	if err == nil && len(b) > maxAccounts {
		err = fmt.Errorf("it has more than %d bytes", maxAccounts)
	}
	if err != nil {
		return nil, fmt.Errorf("read the image's /%s: %w", name, err)
	}
	return b, nil
}

// without returns the lines of accounts whose names are not among those of others.
func without(accounts []byte, others string) (left []byte) {
	name := func(line string) string {
		before, _, _ := strings.Cut(line, ":")
		return before
	}
	var known []string
	for line := range strings.Lines(others) {
		known = append(known, name(line))
	}
	for line := range bytes.Lines(accounts) {
		if line = bytes.TrimSpace(line); len(line) > 0 && !slices.Contains(known, name(string(line))) {
			left = append(append(left, line...), '\n')
		}
	}
	return left
}
