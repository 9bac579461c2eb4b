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
		mode  os.FileMode
		owner uint32
		ok    bool
	}{
		"a user's own":                  {0o600, other, true},
		"a user's own, read by a group": {0o640, other, false},
		"root's":                        {0o600, 0, true},
		"root's, for a group":           {0o640, 0, true},
		"root's, read-only for a group": {0o440, 0, true},
		"root's, written by a group":    {0o660, 0, false},
		"root's, read by everybody":     {0o644, 0, false},
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
			info.Sys().(*syscall.Stat_t).Uid = test.owner
			if err := blob.CheckKeyFile(info); (err == nil) != test.ok {
				t.Errorf("%v", err)
			}
		})
	}
}
