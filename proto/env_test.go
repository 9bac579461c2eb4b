package proto

import (
	"strings"
	"testing"
)

func TestReservedEnv(t *testing.T) {
	for name := range strings.FieldsSeq(reservedEnv + " BULLPEN_X BAPONI_X NSJAIL_X LD_X LC_ALL XDG_X _ _X") {
		if !ReservedEnv(name) {
			t.Errorf("%s is not reserved", name)
		}
	}
	for _, name := range []string{
		"", " ", "PATH HOME", "PAT", "PATHS", "TZ", "LDX", "BULLPEN", "GLIBC_TUNABLES",
		"OMP_NUM_THREADS", "PIP_INDEX_URL",
	} {
		if ReservedEnv(name) {
			t.Errorf("%q is reserved", name)
		}
	}
}

func TestCheckEnvDoesNotQuoteValues(t *testing.T) {
	for _, value := range []string{"secret\x00", "secret" + strings.Repeat("x", MaxEnvValueRunes)} {
		if err := CheckEnv("env_vars", "TOKEN", value); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%v", err)
		}
	}
}

func TestMergeEnv(t *testing.T) {
	got, err := MergeEnv(map[string]string{"A": "sandbox", "B": "sandbox", "C": "sandbox"}, nil,
		map[string]string{"B": "key", "C": "key"}, map[string]string{"C": "request"})
	if err != nil || len(got) != 3 || got["A"] != "sandbox" || got["B"] != "key" || got["C"] != "request" {
		t.Errorf("%v, %v", got, err)
	}
	level := func(prefix string, n int, value string) map[string]string {
		m := map[string]string{}
		for i := range n {
			m[prefix+strings.Repeat("X", i)] = value
		}
		return m
	}
	if _, err := MergeEnv(level("A", 25, ""), level("B", 25, "")); err != nil {
		t.Error(err)
	}
	if _, err := MergeEnv(level("A", 25, ""), level("B", 26, "")); err == nil {
		t.Error("51 variables of two levels are accepted")
	}
	half := strings.Repeat("x", MaxEnvBytes/2-1)
	if _, err := MergeEnv(map[string]string{"A": half}, map[string]string{"A": half, "B": half}); err != nil {
		t.Error(err)
	}
	if _, err := MergeEnv(map[string]string{"A": half}, map[string]string{"B": half + "x"}); err == nil {
		t.Error("a byte too many is accepted")
	}
}
