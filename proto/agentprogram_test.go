package proto

import (
	"slices"
	"strings"
	"testing"
)

func TestCompareAgentVersions(t *testing.T) {
	ordered := []string{
		"0.0.1771243550-geaf318", "0.0.1771243551-gaaaaaa", "0.9.0", "0.116.0-alpha.2", "0.116.0-alpha.10", "0.116.0",
		"1.18.33", "2.1.9", "2.1.112", "2.1.112.1", "10.0.0", "18446744073709551616.0.0",
	}
	shuffled := slices.Clone(ordered)
	slices.Reverse(shuffled)
	if slices.SortFunc(shuffled, CompareAgentVersions); !slices.Equal(shuffled, ordered) {
		t.Errorf("sorted as %q", shuffled)
	}
}

func TestValidAgentVersion(t *testing.T) {
	for version, want := range map[string]bool{
		"2.1.112": true, "0.0.1771243550-geaf318": true, "1.0.0+x": true,
		"": false, "latest": false, "..": false, "1/2": false, "1 2": false, "-1": false, "1@2": false, "1\n": false,
		strings.Repeat("1", 65): false,
	} {
		if got := ValidAgentVersion(version); got != want {
			t.Errorf("%q: %t", version, got)
		}
	}
}

func TestAgentProgramFile(t *testing.T) {
	codex, _ := FindAgentProgram("codex")
	claude, _ := FindAgentProgram("claude")
	if codex.File("amd64") == codex.File("arm64") || codex.File("riscv64") != "" || claude.File("riscv64") != "cli.js" {
		t.Error(codex.File("amd64"), codex.File("arm64"), codex.File("riscv64"), claude.File("riscv64"))
	}
	if _, ok := FindAgentProgram("mock"); ok {
		t.Error("mock has a program")
	}
}
