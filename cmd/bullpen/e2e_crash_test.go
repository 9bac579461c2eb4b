package main

import (
	"bytes"
	"os"
	"slices"
	"testing"

	"github.com/bullpen-run/bullpen/proto/fault"
)

// testNoFaults checks that what people run cannot be told to crash or to have a bug.
func testNoFaults(t *testing.T, p *programs) {
	words := []string{"BULLPEN_CRASH_AT", "BULLPEN_PLANTED_BUG"}
	for _, point := range fault.Points() {
		words = append(words, string(point))
	}
	for _, bug := range fault.Bugs() {
		words = append(words, string(bug))
	}
	in := func(program string) []string {
		raw, err := os.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		return slices.DeleteFunc(slices.Clone(words), func(w string) bool { return !bytes.Contains(raw, []byte(w)) })
	}
	if found := in(p.bullpen); len(found) > 0 {
		t.Errorf("bullpen has %q in it", found)
	}
	if found := in(p.faulty(t).bullpen); len(found) != len(words) {
		t.Errorf("bullpen with faults has only %q of %q in it", found, words)
	}
}
