package app

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// cgroups returns the version of control groups to use, and its controllers. It prefers version 1
// if that has all needed controllers. The version is 0 if neither has them. root is the root of the
// file system.
func cgroups(root string) (version int, controllers []string, err error) {
	f, err := os.Open(filepath.Join(root, "proc/self/mountinfo"))
	if err != nil {
		return 0, nil, fmt.Errorf("find control groups: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	var v1, v2 []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// id parent major:minor root point options [tags] - fstype source superoptions
		before, after, _ := strings.Cut(lines.Text(), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if len(left) < 5 || len(right) < 3 {
			continue
		}
		switch right[0] {
		case "cgroup":
			v1 = append(v1, strings.Split(right[2], ",")...)
		case "cgroup2":
			text, err := os.ReadFile(filepath.Join(root, left[4], "cgroup.controllers"))
			if err == nil {
				v2 = strings.Fields(string(text))
			}
		}
	}
	if err := lines.Err(); err != nil {
		return 0, nil, fmt.Errorf("find control groups: %w", err)
	}
	switch {
	case hasControllers(v1):
		return 1, neededControllers(), nil
	case hasControllers(v2):
		return 2, neededControllers(), nil
	default:
		return 0, append(v1, v2...), nil
	}
}

func neededControllers() []string { return []string{"memory", "pids", "cpu"} }

func hasControllers(found []string) bool {
	return !slices.ContainsFunc(neededControllers(), func(c string) bool { return !slices.Contains(found, c) })
}

func checkCgroups(root string) Check {
	check := Check{
		Name:   "cgroups",
		Remedy: "mount cgroup2 on /sys/fs/cgroup, or the version 1 controllers memory, pids and cpu",
	}
	version, controllers, err := cgroups(root)
	switch {
	case err != nil:
		check.Found = err.Error()
	case version == 0:
		check.Found = "memory, pids and cpu are needed, found: " + strings.Join(controllers, " ")
	default:
		check.OK, check.Found = true, fmt.Sprintf("version %d: %s", version, strings.Join(controllers, " "))
	}
	return check
}

// checkUIDs checks that this user namespace has the ids of jails. Containers may have few.
func checkUIDs(uidMap string, r UIDRange) Check {
	check := Check{
		Name: "user ids", Found: r.String(),
		Remedy: "set --uid-range to a range that this container has, two ids per slot",
	}
	text, err := os.ReadFile(uidMap)
	if err != nil {
		check.Found = err.Error()
		return check
	}
	for line := range strings.Lines(string(text)) {
		var inside, outside, count int
		if n, err := fmt.Sscan(line, &inside, &outside, &count); err != nil || n != 3 {
			continue
		}
		if inside <= r.First && r.First+r.Count <= inside+count {
			check.OK = true
		}
	}
	if !check.OK {
		check.Found += " is not in " + uidMap
	}
	return check
}
