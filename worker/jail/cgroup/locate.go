package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// location describes this process's own groups.
type location struct {
	version int
	dirs    []string
	ctl     controllers
	freezer string // version 1: in the hierarchy of the freezer; empty if that is not mounted, or is read-only
	mount   string // version 2: mount point of the hierarchy
	session bool   // version 2: in a login session of systemd
	// contained is true on version 2 if no group above ours is visible: ours is a container's, or
	// the root.
	contained bool
}

// mount is a cgroup file system.
type mount struct {
	root   string // the mounted directory of the hierarchy
	point  string
	fstype string
	opts   []string // options of the superblock; on version 1 the controllers
}

// locate reads /proc/self. It prefers version 1 if that has all controllers, otherwise version 2.
// Controllers must not be split between both.
func locate(root string) (location, error) {
	mounts, err := mounts(root)
	if err != nil {
		return location{}, err
	}
	own, err := ownPaths(root)
	if err != nil {
		return location{}, err
	}
	var v1 location
	var missing []string
	find := func(controller string) int {
		return slices.IndexFunc(mounts, func(m mount) bool {
			return m.fstype == "cgroup" && slices.Contains(m.opts, controller)
		})
	}
	index := func(controller string) int {
		i := find(controller)
		if i < 0 {
			missing = append(missing, controller)
			return 0
		}
		dir := filepath.Join(root, mounts[i].dir(own[controller]))
		if j := slices.Index(v1.dirs, dir); j >= 0 {
			return j
		}
		v1.dirs = append(v1.dirs, dir)
		return len(v1.dirs) - 1
	}
	v1.version = 1
	v1.ctl = controllers{memory: index("memory"), pids: index("pids"), cpu: index("cpu"), cpuacct: index("cpuacct")}
	if len(missing) == 0 {
		if i := find("freezer"); i >= 0 {
			dir := filepath.Join(root, mounts[i].dir(own["freezer"]))
			if unix.Access(dir, unix.W_OK) == nil {
				v1.freezer = dir
			}
		}
		return v1, nil
	}
	if len(missing) == 4 {
		for _, m := range mounts {
			if m.fstype == "cgroup2" {
				dir := filepath.Join(root, m.dir(own[""]))
				// Started by a worker that is in its leaf.
				if filepath.Base(dir) == leafName {
					dir = filepath.Dir(dir)
				}
				return location{
					version: 2, dirs: []string{dir}, mount: filepath.Join(root, m.point),
					session:   m.root == "/" && strings.HasPrefix(own[""], "/user.slice/"),
					contained: own[""] == "/",
				}, nil
			}
		}
	}
	return location{}, fmt.Errorf(
		"cgroup: controller %s is not mounted: mount a cgroup2 file system, or all of the version 1 "+
			"controllers memory, pids, cpu and cpuacct, on /sys/fs/cgroup", strings.Join(missing, ", "))
}

// dir returns the directory of the group at path below the mount. In a container, the path may be
// the host's; then the mount's root is our group.
func (m mount) dir(path string) string {
	if rel, ok := strings.CutPrefix(path, m.root); ok && !strings.Contains(rel, "..") {
		return filepath.Join(m.point, rel)
	}
	return m.point
}

// mounts returns the cgroup mounts in mountinfo:
// id parent major:minor root point options [tags] - fstype source superoptions.
func mounts(root string) ([]mount, error) {
	b, err := os.ReadFile(filepath.Join(root, "proc/self/mountinfo"))
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	var ms []mount
	for line := range strings.Lines(string(b)) {
		before, after, ok := strings.Cut(strings.TrimSpace(line), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 6 || len(right) < 3 || !strings.HasPrefix(right[0], "cgroup") {
			continue
		}
		ms = append(ms, mount{root: left[3], point: left[4], fstype: right[0], opts: strings.Split(right[2], ",")})
	}
	return ms, nil
}

// ownPaths returns this process's group in each hierarchy by controller. The name of version 2 is
// empty.
func ownPaths(root string) (map[string]string, error) {
	b, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	own := map[string]string{}
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		for c := range strings.SplitSeq(f[1], ",") {
			own[c] = f[2]
		}
	}
	return own, nil
}
