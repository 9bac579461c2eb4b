package proto

import (
	"errors"
	"strings"
	"testing"
)

func TestCleanFilePath(t *testing.T) {
	const home = "/home/baponi"
	for name, want := range map[string]string{
		"": "", "/": "", ".": "", "./": "", "//": "", home: "", home + "/": "", "/home/baponi/.": "",
		"a": "a", "./a": "a", "/a": "a", "//a//b/": "a/b", "a/./b": "a/b", home + "/a": "a", "//home//baponi/./a/b": "a/b",
		"/home/baponie": "home/baponie", "/home/baponi2/a": "home/baponi2/a", "home/baponi/a": "home/baponi/a",
		home + home: "home/baponi",
		"..a":       "..a", "a..": "a..", "...": "...", "a\\..\\b": "a\\..\\b", "-rf": "-rf", "a\nb": "a\nb",
		"%2e%2e/a":               "%2e%2e/a",
		strings.Repeat("a", 255): strings.Repeat("a", 255), strings.Repeat("a/./", 512): strings.Repeat("a/", 511) + "a",
	} {
		if got, err := CleanFilePath(home, name); err != nil || got != want {
			t.Errorf("%.40q is %.40q, %v; want %.40q", name, got, err, want)
		}
	}
	for _, name := range []string{
		"..", "../a", "a/..", "a/../b", "/..", home + "/..", home + "/../baponi/a", "a/b/../../..", "a\x00b", "\x00",
		strings.Repeat("a", 256), "a/" + strings.Repeat("é", 128), strings.Repeat("a/", 512) + "a",
		strings.Repeat("./", 2048) + "a",
	} {
		got, err := CleanFilePath(home, name)
		if field, ok := errors.AsType[*FieldError](err); !ok || field.Field != "path" {
			t.Errorf("%.40q is %.40q, %v", name, got, err)
		}
	}
	for _, name := range []string{"", "/", ".", home, "a/", "a/.", "./", "../a"} {
		if got, err := CleanFileName(home, name); err == nil {
			t.Errorf("%q names the file %q", name, got)
		}
	}
	if got, err := CleanFileName(home, "./a/b"); err != nil || got != "a/b" {
		t.Errorf("%q, %v", got, err)
	}
}

// A cleaned path never leaves the home.
func FuzzCleanFilePath(f *testing.F) {
	for _, seed := range []string{"a/../b", "/home/baponi/a", "//a/./b", "a\x00", "..", "home/baponi/..", "/home/baponi"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, name string) {
		clean, err := CleanFilePath("/home/baponi", name)
		if err != nil {
			return
		}
		for part := range strings.SplitSeq(clean, "/") {
			if clean != "" && (part == "" || part == "." || part == ".." || len(part) > MaxFileNameBytes) ||
				strings.ContainsRune(part, 0) {
				t.Errorf("%q is %q", name, clean)
			}
		}
		if again, err := CleanFilePath("/home/baponi", clean); err != nil || again != clean {
			t.Errorf("%q is %q, and that %q, %v", name, clean, again, err)
		}
	})
}
