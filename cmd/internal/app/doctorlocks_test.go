package app

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDoctorChecksSplitLocks(t *testing.T) {
	for name, test := range map[string]struct {
		cpuinfo, cmdline, mitigate string
		found, remedy              string // without a remedy it is well
	}{
		"another architecture": {"Features\t: fp asimd\n", "", "", "not on this architecture", ""},
		"no detection": {
			"flags\t\t: fpu sse\n", "split_lock_detect=fatal", "1\n", "does not detect",
			"processors with split_lock_detect or bus_lock_detect",
		},
		"default":              {"flags\t\t: fpu split_lock_detect\n", "quiet", "1\n", "split_lock_detect=warn", ""},
		"default of Linux 6.1": {"flags\t\t: fpu split_lock_detect\n", "quiet", "", "split_lock_detect=warn", ""},
		"not mitigated": {
			"flags\t\t: split_lock_detect bus_lock_detect\n", "", "0\n",
			"split_lock_detect=warn with kernel.split_lock_mitigate=0", "set kernel.split_lock_mitigate=1",
		},
		"off": {
			"flags\t\t: split_lock_detect\n", "split_lock_detect=fatal split_lock_detect=off", "1\n",
			"split_lock_detect=off", "boot with split_lock_detect=fatal",
		},
		"fatal": {
			"flags\t\t: split_lock_detect\n", "split_lock_detect=fatal", "0\n",
			"split_lock_detect=fatal", "",
		},
		"bus locks, only noted": {
			"flags\t\t: bus_lock_detect\n", "", "1\n", "split_lock_detect=warn",
			"split_lock_detect=ratelimit:10",
		},
		"bus locks, limited": {
			"flags\t\t: bus_lock_detect\n", "split_lock_detect=ratelimit:5", "1\n",
			"split_lock_detect=ratelimit", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if err := os.MkdirAll(filepath.Join(root, "proc/sys/kernel"), 0o755); err != nil {
				t.Fatal(err)
			}
			for file, text := range map[string]string{
				"cpuinfo": test.cpuinfo, "cmdline": test.cmdline, "sys/kernel/split_lock_mitigate": test.mitigate,
			} {
				if err := os.WriteFile(filepath.Join(root, "proc", file), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			check := checkSplitLocks(root)
			if check.OK != (test.remedy == "") || !strings.Contains(check.Found, test.found) ||
				!check.OK && !strings.Contains(check.Remedy, test.remedy) {
				t.Errorf("%+v", check)
			}
		})
	}
}
