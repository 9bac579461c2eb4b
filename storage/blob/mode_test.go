package blob_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/bullpen-run/bullpen/storage/blob"
)

func TestModeOfKeyFile(t *testing.T) {
	const other = 65532
	for name, test := range map[string]struct {
		mode        os.FileMode
		owner, euid int
		ok          bool
	}{
		"the user's own":                            {0o600, other, other, true},
		"the user's own, read by a group":           {0o640, other, other, false},
		"root's, for a group of the user":           {0o640, 0, other, true},
		"root's, read-only for a group of the user": {0o440, 0, other, true},
		"root's, written by a group":                {0o660, 0, other, false},
		"root's, read by everybody":                 {0o644, 0, other, false},
		"root's, for root":                          {0o600, 0, 0, true},
		"root's, for root, read by a group":         {0o640, 0, 0, false},
		"another user's, read by a group":           {0o640, 1000, other, false},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "key")
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(file, test.mode); err != nil {
				t.Fatal(err)
			}
			info, err := os.Stat(file)
			if err != nil {
				t.Fatal(err)
			}
			info.Sys().(*syscall.Stat_t).Uid = uint32(test.owner)
			if err := blob.CheckKeyFile(info, test.euid); (err == nil) != test.ok {
				t.Errorf("%v", err)
			}
		})
	}
}
