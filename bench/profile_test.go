package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/pprof"
	"testing"
)

func TestFlameGraphIsSelfContained(t *testing.T) {
	var kept [][]byte
	for range 100 { // more than the allocation sampling interval
		kept = append(kept, make([]byte, 1<<20))
	}
	runtime.GC() // allocations appear in the profile after a complete GC cycle
	runtime.GC()
	var made bytes.Buffer
	if err := pprof.Lookup("allocs").WriteTo(&made, 0); err != nil {
		t.Fatal(err)
	}
	runtime.KeepAlive(kept)
	// Allocations are sampled.
	if total, err := sum(made.Bytes(), "alloc_space"); err != nil || total < 50<<20 {
		t.Errorf("allocations add up to %d bytes, %v", total, err)
	}
	if _, err := sum(made.Bytes(), "cpu"); err == nil {
		t.Error("allocations have processor time")
	}
	file := filepath.Join(t.TempDir(), "allocs.pprof")
	if err := os.WriteFile(file, made.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	page, err := flameGraph(file, "alloc_space")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(page, []byte("TestFlameGraphIsSelfContained")) {
		t.Error("the flame graph does not have this function")
	}
	if fetched := regexp.MustCompile(`(src|<link[^>]*href)="[^"]*"`).Find(page); fetched != nil {
		t.Errorf("the page fetches %s", fetched)
	}
	if err := os.WriteFile(file, []byte("no profile"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := flameGraph(file, "alloc_space"); err == nil {
		t.Error("what is no profile was drawn")
	}
}
