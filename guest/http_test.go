package main_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"mime/multipart"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func filesURL(user, path string) string {
	query := url.Values{"path": {path}}
	if user != "" {
		query.Set("username", user)
	}
	return "/files?" + query.Encode()
}

// upload writes a file from a body.
func (s *sandbox) upload(user, path, content string, headers ...string) (int, string) {
	s.t.Helper()
	r := s.request("POST", filesURL(user, path), strings.NewReader(content),
		append([]string{"Content-Type", "application/octet-stream"}, headers...)...)
	code, _, body := s.do(r)
	return code, body
}

// form returns a form with files, and its content type.
func form(t *testing.T, files ...string) (*bytes.Buffer, string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i < len(files); i += 2 {
		part, err := w.CreateFormFile("file", files[i])
		check(t, err)
		_, err = part.Write([]byte(files[i+1]))
		check(t, err)
	}
	check(t, w.Close())
	return &b, w.FormDataContentType()
}

func (s *sandbox) download(user, path string, headers ...string) (int, map[string][]string, string) {
	s.t.Helper()
	return s.do(s.request("GET", filesURL(user, path), nil, headers...))
}

func TestUpload(t *testing.T) {
	s := newSandbox(t)
	code, body := s.upload("", "dir/sub/file", "Hello")
	if want := `[{"name":"file","path":"` + s.home + `/dir/sub/file","type":"file"}]` + "\n"; code != 200 || body != want {
		t.Fatalf("%d %s", code, body)
	}
	for _, path := range []string{"dir", "dir/sub", "dir/sub/file"} {
		if owner(t, filepath.Join(s.home, path)) != 1000 {
			t.Errorf("%s is not the user's", path)
		}
	}
	if e, err := s.stat("", "dir/sub/file"); err != nil || e.GetPermissions() != "-rw-r--r--" || e.GetSize() != 5 {
		t.Errorf("%v, %v", e, err)
	}
	s.upload("", "dir/sub/file", "new")
	if _, _, got := s.download("", "dir/sub/file"); got != "new" {
		t.Errorf("overwritten: %q", got)
	}
	// In a directory that the user may not change, and over a file of root's.
	s.upload("root", "file", "root's")
	for _, path := range []string{"/made", "/file"} {
		if code, body := s.upload("", s.root+path, "user's"); code != 200 || owner(t, s.root+path) != 1000 {
			t.Errorf("%d %s", code, body)
		}
	}
}

func TestForm(t *testing.T) {
	s := newSandbox(t)
	b, contentType := form(t, "one", "1", s.home+"/dir/two", "2", "~/a \"b\"", "3")
	code, _, body := s.do(s.request("POST", "/files", b, "Content-Type", contentType))
	var got []struct{ Name, Path, Type string }
	check(t, json.Unmarshal([]byte(body), &got))
	if code != 200 || len(got) != 3 || got[1].Path != s.home+"/dir/two" || got[1].Name != "two" || got[1].Type != "file" {
		t.Fatalf("%d %s", code, body)
	}
	for path, want := range map[string]string{"one": "1", "dir/two": "2", "a \"b\"": "3"} {
		if _, _, got := s.download("", path); got != want {
			t.Errorf("%s: %q", path, got)
		}
	}
	b, contentType = form(t, "ignored", "by path")
	if code, _, body := s.do(s.request("POST", filesURL("", "named"), b, "Content-Type", contentType)); code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	if _, _, got := s.download("", "named"); got != "by path" {
		t.Errorf("%q", got)
	}
	b, contentType = form(t)
	if code, _, body := s.do(s.request("POST", "/files", b, "Content-Type", contentType)); code != 200 || body != "[]\n" {
		t.Errorf("no file: %d %s", code, body)
	}
}

func TestGzip(t *testing.T) {
	s := newSandbox(t)
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := w.Write([]byte("content"))
	check(t, err)
	check(t, w.Close())
	if code, body := s.upload("", "file", b.String(), "Content-Encoding", "gzip"); code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	if _, _, got := s.download("", "file"); got != "content" {
		t.Errorf("%q", got)
	}
}

func TestMetadata(t *testing.T) {
	s := newSandbox(t)
	if err := unix.Setxattr(s.home, "user.test", nil, 0); err != nil {
		t.Fatalf("the file system of %s has no extended attributes: %v", s.home, err)
	}
	metadata := func(path string) string {
		e, err := s.stat("", path)
		check(t, err)
		b, err := json.Marshal(e.GetMetadata())
		check(t, err)
		return string(b)
	}
	code, body := s.upload("", "file", "x", "X-Metadata-Author", "mish", "X-Metadata-Purpose", "upload")
	const both = `{"author":"mish","purpose":"upload"}`
	if code != 200 || !strings.Contains(body, `"metadata":`+both) || metadata("file") != both {
		t.Errorf("%d %s %s", code, body, metadata("file"))
	}
	_, err := s.move("", "file", "moved")
	check(t, err)
	if got := metadata("moved"); got != both {
		t.Errorf("moved: %s", got)
	}
	s.upload("", "moved", "x", "X-Metadata-Author", "other")
	if got := metadata("moved"); got != `{"author":"other"}` {
		t.Errorf("replaced: %s", got)
	}
	s.upload("", "moved", "x")
	if got := metadata("moved"); got != `null` {
		t.Errorf("removed: %s", got)
	}
	check(t, unix.Setxattr(s.home+"/moved", "user.e2b.own", []byte("1"), 0))
	if got := metadata("moved"); got != `{"own":"1"}` {
		t.Errorf("of a program: %s", got)
	}
	for name, headers := range map[string][]string{
		"246 bytes": {"X-Metadata-" + strings.Repeat("a", 247), "x"},
		"printable": {"X-Metadata-A", "\xe4"},
		"4096":      {"X-Metadata-A", strings.Repeat("a", 4096)},
	} {
		if code, body := s.upload("", "refused", "x", headers...); code != 400 || !strings.Contains(body, name) {
			t.Errorf("%s: %d %s", name, code, body)
		}
	}
	if _, err := os.Lstat(s.home + "/refused"); err == nil {
		t.Error("a refused upload has created the file")
	}
}

func TestUploadErrors(t *testing.T) {
	s := newSandbox(t)
	check(t, os.Mkdir(s.home+"/dir", 0o755))
	check(t, unix.Mkfifo(s.home+"/pipe", 0o666))
	check(t, os.Chown(s.home+"/pipe", 1000, 1000))
	owned(t, 1000, s.home+"/file", "")
	const octets = "application/octet-stream"
	twice, twiceType := form(t, "same", "1", "~/same", "2")
	unnamed, unnamedType := form(t, "", "1")
	for _, test := range []struct {
		name, url, contentType, encoding, body string
		code                                   int
		words                                  string
	}{
		{"directory", filesURL("", "dir"), octets, "", "", 400, "directory"},
		{"below file", filesURL("", "file/x"), octets, "", "", 400, "not a directory"},
		{"pipe", filesURL("", "pipe"), octets, "", "", 400, ""},
		{"no path", "/files", octets, "", "", 400, "path is missing"},
		{"unknown user", filesURL("nobody", "x"), octets, "", "", 401, "nobody"},
		{"content type", filesURL("", "x"), "text/plain", "", "", 400, "content type"},
		{"encoding", filesURL("", "x"), octets, "br", "", 415, "gzip"},
		{"not gzip", filesURL("", "x"), octets, "gzip", "no", 400, "gzip"},
		{"twice", "/files", twiceType, "", twice.String(), 400, "twice"},
		{"unnamed", "/files", unnamedType, "", unnamed.String(), 400, "no file name"},
		{"cut form", "/files", twiceType, "", twice.String()[:20], 400, "read the form"},
		{"guest's memory", filesURL("root", "/proc/self/mem"), octets, "", "x", 403, "/proc"},
		{"guest's memory as user", filesURL("", "/proc/self/mem"), octets, "", "x", 403, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := s.request("POST", test.url, strings.NewReader(test.body), "Content-Type", test.contentType)
			if test.encoding != "" {
				r.Header.Set("Content-Encoding", test.encoding)
			}
			code, header, body := s.do(r)
			var e struct {
				Code    int
				Message string
			}
			check(t, json.Unmarshal([]byte(body), &e))
			if code != test.code || e.Code != code || !strings.Contains(e.Message, test.words) ||
				header.Get("Content-Type") != "application/json" {
				t.Fatalf("%d %s", code, body)
			}
		})
	}
}

func TestDownload(t *testing.T) {
	s := newSandbox(t)
	owned(t, 1000, s.home+"/file", "0123456789")
	owned(t, 0, s.root+"/secret", "root's")
	owned(t, 1000, s.home+"/empty", "")
	check(t, os.Mkdir(s.home+"/dir", 0o755))
	check(t, unix.Mkfifo(s.home+"/pipe", 0o666))
	_, header, _ := s.download("", "file")
	for _, test := range []struct {
		name, user, path string
		headers          []string
		code             int
		body, length     string
	}{
		{"whole", "", "file", nil, 200, "0123456789", "10"},
		{"range", "", "file", []string{"Range", "bytes=2-4"}, 206, "234", "3"},
		{"wrong range", "", "file", []string{"Range", "bytes=20-"}, 416, "invalid range: failed to overlap\n", ""},
		{"unchanged", "", "file", []string{"If-None-Match", header["Etag"][0]}, 304, "", ""},
		{"not modified", "", "file", []string{"If-Modified-Since", header["Last-Modified"][0]}, 304, "", ""},
		{"empty", "", "empty", nil, 200, "", "0"},
		{"with the guest's rights", "", s.root + "/secret", nil, 200, "root's", "6"},
		{"root's home", "root", "secret", nil, 200, "root's", "6"},
		{"gzip accepted", "", "file", []string{"Accept-Encoding", "gzip"}, 200, "0123456789", "10"},
	} {
		t.Run(test.name, func(t *testing.T) {
			code, header, body := s.download(test.user, test.path, test.headers...)
			if code != test.code || body != test.body || test.length != "" && header["Content-Length"][0] != test.length {
				t.Fatalf("%d %q %v", code, body, header)
			}
		})
	}
	for _, test := range []struct {
		name, path string
		headers    []string
		code       int
	}{
		{"missing", "missing", nil, 404},
		{"directory", "dir", nil, 400},
		{"pipe", "pipe", nil, 400},
		{"device", "/dev/zero", nil, 400},
		{"identity refused", "file", []string{"Accept-Encoding", "gzip, identity;q=0"}, 406},
		{"everything else refused", "file", []string{"Accept-Encoding", "gzip, *;q=0.0"}, 406},
	} {
		t.Run(test.name, func(t *testing.T) {
			code, _, body := s.download("", test.path, test.headers...)
			if code != test.code || !strings.Contains(body, `"message":`) {
				t.Fatalf("%d %s", code, body)
			}
		})
	}
	if code, _, body := s.download("", "/proc/meminfo"); code != 200 || !strings.Contains(body, "MemTotal") {
		t.Errorf("%d %s", code, body)
	}
}

func TestPlainRoutes(t *testing.T) {
	s := newSandbox(t)
	for _, test := range []struct {
		method, path string
		code         int
		words        string
	}{
		{"GET", "/health", 204, ""},
		{"GET", "/envs", 200, `{"E2B_SANDBOX":"true","SHARED":"sandbox"}`},
		{"GET", "/metrics", 200, `"cpu_count":`},
		{"GET", "/", 404, `"message":"there is no route GET /"`},
		{"POST", "/init", 404, `"code":404`},
		{"POST", "/process.Process/No", 404, `"code":404`},
		{"POST", "/other.Service/No", 404, `"code":404`},
		{"DELETE", "/files", 405, `"code":405`},
	} {
		code, _, body := s.do(s.request(test.method, test.path, nil))
		if code != test.code || !strings.Contains(body, test.words) {
			t.Errorf("%s %s: %d %s", test.method, test.path, code, body)
		}
	}
	_, _, body := s.do(s.request("GET", "/metrics", nil))
	var m map[string]float64
	check(t, json.Unmarshal([]byte(body), &m))
	for _, name := range []string{"ts", "cpu_count", "mem_total", "mem_used", "disk_used", "disk_total"} {
		if m[name] <= 0 {
			t.Errorf("%s: %s", name, body)
		}
	}
	if pct, ok := m["cpu_used_pct"]; !ok || pct < 0 || pct > 100 {
		t.Error(body)
	}
}
