package app

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// checkSplitLocks checks that the kernel stops or slows down programs that make split locks: atomic
// operations across two cache lines, for which an x86 processor stops all others. Its modes are in
// the kernel's Documentation/arch/x86/buslock.rst, and kernel.split_lock_mitigate in
// Documentation/admin-guide/sysctl/kernel.rst.
func checkSplitLocks(root string) Check {
	check := Check{Name: "split locks", Optional: true}
	flags := processorFlags(root)
	if flags == nil {
		check.OK, check.Found = true, "not on this architecture"
		return check
	}
	split, bus := slices.Contains(flags, "split_lock_detect"), slices.Contains(flags, "bus_lock_detect")
	if !split && !bus {
		check.Found = "this processor does not detect them, so a program can slow down all others"
		check.Remedy = "run workers on processors with split_lock_detect or bus_lock_detect in /proc/cpuinfo; few virtual " +
			"machines have it"
		return check
	}
	mode, mitigated := "warn", true // the defaults
	for word := range strings.FieldsSeq(readText(root, "proc/cmdline")) {
		if value, ok := strings.CutPrefix(word, "split_lock_detect="); ok {
			mode, _, _ = strings.Cut(value, ":")
		}
	}
	check.Found = "split_lock_detect=" + mode
	if mode == "warn" && split {
		// Linux 5.19 to 6.1 lack the setting and always mitigate.
		mitigated = strings.TrimSpace(readText(root, "proc/sys/kernel/split_lock_mitigate")) != "0"
		if !mitigated {
			check.Found += " with kernel.split_lock_mitigate=0"
		}
	}
	check.OK = mode == "fatal" || mode == "warn" && split && mitigated || mode == "ratelimit" && bus
	check.Remedy = "a program can slow down all others: boot with split_lock_detect=fatal"
	if split {
		check.Remedy += ", or with split_lock_detect=warn and set kernel.split_lock_mitigate=1"
	} else {
		check.Remedy += " or split_lock_detect=ratelimit:10"
	}
	return check
}

// processorFlags returns the flags of an x86 processor, and nil for others.
func processorFlags(root string) []string {
	for line := range strings.Lines(readText(root, "proc/cpuinfo")) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "flags" {
			return strings.Fields(value)
		}
	}
	return nil
}

// readText returns the content of a file, and nothing if it cannot be read.
func readText(root, name string) string {
	b, _ := os.ReadFile(filepath.Join(root, name))
	return string(b)
}
