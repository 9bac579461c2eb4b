package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNewestNode(t *testing.T) {
	for list, want := range map[string]string{
		`{"version":"25.9.0","dist.integrity":"sha512-a"}`:                                           "25.9.0",
		`[{"version":"25.9.0"},{"version":"25.10.0"},{"version":"25.2.1"},{"version":"25.10.0-rc"}]`: "25.10.0",
		"":         "the registry has no such version",
		"[]":       "the registry has no such version",
		"not json": "npm's answer is not understood",
	} {
		got, err := newest([]byte(list))
		if err != nil && !strings.Contains(err.Error(), want) || err == nil && got.Version != want {
			t.Errorf("%s: %+v, %v", list, got, err)
		}
	}
}

func TestNodeIsChecked(t *testing.T) {
	file := filepath.Join(t.TempDir(), "node.tgz")
	if err := os.WriteFile(file, []byte("node"), 0o600); err != nil {
		t.Fatal(err)
	}
	const right = "sha512-GDjjPPdoyvYprfEf/0UGB28Qnt95i2sUqeTFirVatiCY0dgsPQg9dp1f/LluvwaIVydtS0kPw2AFs43WFC6+Pg=="
	if err := checkIntegrity(file, right); err != nil {
		t.Error(err)
	}
	for _, wrong := range []string{"", "sha1-x", right[:len(right)-3] + "A=="} {
		if err := checkIntegrity(file, wrong); err == nil {
			t.Errorf("%q was taken", wrong)
		}
	}
}
