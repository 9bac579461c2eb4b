package proto

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestCleanFilePath(t *testing.T) {
	const home = "/home/baponi"
	for name, want := range map[string]string{
		"": "", "/": "", ".": "", "./": "", "//": "", home: "", home + "/": "", "/home/baponi/.": "",
		"a": "a", "./a": "a", "/a": "a", "//a//b/": "a/b", "a/./b": "a/b", home + "/a": "a", "//home//baponi/./a/b": "a/b",
		"/home/baponie": "home/baponie", "/home/baponi2/a": "home/baponi2/a", "home/baponi/a": "home/baponi/a", home + home: "home/baponi",
		"..a": "..a", "a..": "a..", "...": "...", "a\\..\\b": "a\\..\\b", "-rf": "-rf", "a\nb": "a\nb", "%2e%2e/a": "%2e%2e/a",
		strings.Repeat("a", 255): strings.Repeat("a", 255), strings.Repeat("a/./", 512): strings.Repeat("a/", 511) + "a",
	} {
		if got, err := CleanFilePath(home, name); err != nil || got != want {
			t.Errorf("%.40q is %.40q, %v; want %.40q", name, got, err, want)
		}
	}
	for _, name := range []string{
		"..", "../a", "a/..", "a/../b", "/..", home + "/..", home + "/../baponi/a", "a/b/../../..", "a\x00b", "\x00",
		strings.Repeat("a", 256), "a/" + strings.Repeat("é", 128), strings.Repeat("a/", 512) + "a", strings.Repeat("./", 2048) + "a",
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

// Whatever a path is, what is made of it stays below the home.
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
			if clean != "" && (part == "" || part == "." || part == ".." || len(part) > MaxFileNameBytes) || strings.ContainsRune(part, 0) {
				t.Errorf("%q is %q", name, clean)
			}
		}
		if again, err := CleanFilePath("/home/baponi", clean); err != nil || again != clean {
			t.Errorf("%q is %q, and that %q, %v", name, clean, again, err)
		}
	})
}

func TestFileRequests(t *testing.T) {
	list, err := DecodeFileList([]byte(`{"source":"thread","id":"t","path":"a","recursive":true,"more":1}`))
	if err != nil || *list != (FileRequest{Source: SourceThread, ID: "t", Path: "a", Recursive: true}) {
		t.Errorf("%+v, %v", list, err)
	}
	upload, err := DecodeUpload([]byte(`{"source":"thread","id":"t","path":"a","content_length":10737418240,"content_type":"text/plain"}`))
	if err != nil || *upload != (FileRequest{Source: SourceThread, ID: "t", Path: "a", Size: MaxFileBytes}) {
		t.Errorf("%+v, %v", upload, err)
	}
	if volume, err := DecodeDownload([]byte(`{"source":"volume","id":"a.slug","path":"a"}`)); err != nil || volume.Source != SourceVolume {
		t.Errorf("%+v, %v", volume, err)
	}
	for _, test := range []struct {
		decode      func([]byte) (*FileRequest, error)
		body, field string
	}{
		{DecodeFileList, ``, "body"},
		{DecodeFileList, `{"id":"t"}`, "source"},
		{DecodeFileList, `{"source":"disk","id":"t"}`, "source"},
		{DecodeFileList, `{"source":"thread","id":null}`, "id"},
		{DecodeFileList, `{"source":"thread","id":"-t"}`, "id"},
		{DecodeFileList, `{"source":"thread","id":"t","path":1}`, "path"},
		{DecodeFileList, `{"source":"thread","id":"t","recursive":"yes"}`, "recursive"},
		{DecodeDownload, `{"source":"thread","id":"t"}`, "path"},
		{DecodeUpload, `{"source":"thread","id":"t","path":"a"}`, "content_length"},
		{DecodeUpload, `{"source":"thread","id":"t","path":"a","content_length":-1}`, "content_length"},
		{DecodeUpload, `{"source":"thread","id":"t","path":"a","content_length":1.5}`, "content_length"},
		{DecodeUpload, `{"source":"thread","id":"t","path":"a","content_length":10737418241}`, "content_length"},
		{DecodeUpload, `{"source":"thread","id":"t","path":"a","content_length":1,"content_type":2}`, "content_type"},
	} {
		_, err := test.decode([]byte(test.body))
		if field, ok := errors.AsType[*FieldError](err); !ok || field.Field != test.field {
			t.Errorf("%s: %v", test.body, err)
		}
	}
}

func TestThreadRequests(t *testing.T) {
	if f, err := DecodeFork([]byte(`{"id":"new","version":3}`)); err != nil || f != (Fork{"new", 3}) {
		t.Errorf("%+v, %v", f, err)
	}
	if f, err := DecodeFork([]byte(`{"id":"new","version":null}`)); err != nil || f != (Fork{"new", 0}) {
		t.Errorf("%+v, %v", f, err)
	}
	for _, body := range []string{`{}`, `{"id":"_"}`, `{"id":"a","version":0}`, `{"id":"a","version":"1"}`} {
		if f, err := DecodeFork([]byte(body)); err == nil {
			t.Errorf("%s is %+v", body, f)
		}
	}
	for body, want := range map[string]time.Duration{`{}`: DefaultSafeAge, `{"safe_age":7200}`: MinSafeAge, `{"safe_age":7200.5}`: MinSafeAge + 500*time.Millisecond} {
		if age, err := DecodeCollect([]byte(body)); err != nil || age != want {
			t.Errorf("%s is %s, %v", body, age, err)
		}
	}
	for _, body := range []string{`{"safe_age":0}`, `{"safe_age":7199}`, `{"safe_age":"1h"}`, `{"safeage":1}`, ``} {
		if age, err := DecodeCollect([]byte(body)); err == nil {
			t.Errorf("%s is %s", body, age)
		}
	}
}
