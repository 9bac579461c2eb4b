package app

import "testing"

func TestInstallTools(t *testing.T) {
	for missing, want := range map[string]string{
		"missing: python3": "install the packages python3",
		"missing: python3, missing: head, missing: wc":     "install the packages coreutils, python3",
		"missing: GNU grep":                                "install the packages grep",
		"missing: grep, missing: GNU grep, missing: mkdir": "install the packages coreutils, grep",
	} {
		if got := installTools(missing); got != want {
			t.Errorf("%s: %s", missing, got)
		}
	}
}
