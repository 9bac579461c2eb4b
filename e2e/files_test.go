package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// listedFile is a file as the Files API returns it.
type listedFile struct {
	Name        string    `json:"name"`
	Path        string    `json:"path"`
	Size        int64     `json:"size"`
	Modified    time.Time `json:"modified"`
	IsDirectory bool      `json:"is_directory"`
}

// files lists files of a thread. Each entry is a path with its size; a directory ends in /.
func (a *api) files(thread, dir string, recursive bool) []string {
	a.t.Helper()
	r := a.do(http.MethodPost, "/v1/files/list",
		request{"source": "thread", "id": thread, "path": dir, "recursive": recursive})
	if r.status != http.StatusOK {
		a.t.Fatalf("list: %s", r)
	}
	var list struct{ Files []listedFile }
	r.into(a.t, &list)
	names := []string{}
	for _, f := range list.Files {
		if !strings.HasSuffix("/"+f.Path, "/"+f.Name) {
			a.t.Errorf("%q has the name %q", f.Path, f.Name)
		}
		if f.IsDirectory {
			names = append(names, f.Path+"/")
		} else {
			names = append(names, fmt.Sprint(f.Path, " ", f.Size))
		}
	}
	slices.Sort(names)
	return names
}

// checkListing checks a list of files.
func (a *api) checkListing(t testing.TB, thread, dir string, recursive bool, want ...string) {
	t.Helper()
	if diff := cmp.Diff(append([]string{}, want...), a.files(thread, dir, recursive)); diff != "" {
		t.Errorf("files of %s in %q (-want +got):\n%s", thread, dir, diff)
	}
}

// signed is a signed URL as the Files API returns it.
type signed struct {
	URL     string
	Method  string
	Headers []struct{ Name, Value string }
}

func (a *api) downloadURL(thread, path string) *reply {
	return a.do(http.MethodPost, "/v1/files/download_url", request{"source": "thread", "id": thread, "path": path})
}

func (a *api) uploadURL(thread, path string, size int) *reply {
	return a.do(http.MethodPost, "/v1/files/upload_url",
		request{"source": "thread", "id": thread, "path": path, "content_length": size})
}

// signed reads a signed URL.
func (r *reply) signed(t testing.TB) signed {
	t.Helper()
	if r.status != http.StatusOK {
		t.Fatalf("no URL but %s", r)
	}
	var s signed
	r.into(t, &s)
	return s
}

// useSigned makes a request with a signed URL and no other credentials.
func (a *api) useSigned(s signed, method string, body []byte, headers ...string) *reply {
	a.t.Helper()
	for _, h := range s.Headers {
		headers = append(headers, h.Name, h.Value)
	}
	var content any
	if method == http.MethodPut {
		content = body
	}
	return (&api{a.t, "", "", a.http}).do(method, s.URL, content, headers...)
}

// upload uploads a file.
func (a *api) upload(t testing.TB, thread, path string, content []byte) {
	t.Helper()
	s := a.uploadURL(thread, path, len(content)).signed(t)
	if r := a.useSigned(s, s.Method, content); r.status != http.StatusOK || s.Method != http.MethodPut {
		t.Fatalf("%s %s of %s: %s", s.Method, path, thread, r)
	}
}

// download downloads a file, or the part of it that the headers request.
func (a *api) download(t testing.TB, thread, path string, headers ...string) *reply {
	t.Helper()
	s := a.downloadURL(thread, path).signed(t)
	return a.useSigned(s, s.Method, nil, headers...)
}

// checkDownload checks a download.
func (a *api) checkDownload(t testing.TB, thread, path string, want []byte) {
	t.Helper()
	if r := a.download(t, thread, path); r.status != http.StatusOK || !bytes.Equal(r.body, want) {
		t.Errorf("%s of %s: HTTP %d, %d bytes that begin with %q; want %d bytes", path, thread, r.status, len(r.body),
			short(string(r.body)), len(want))
	}
}

// randomBytes returns n pseudo-random bytes, which depend only on n.
func randomBytes(n int) []byte {
	b := make([]byte, 0, n+sha256.Size)
	for i := 0; len(b) < n; i++ {
		sum := sha256.Sum256([]byte(strconv.Itoa(i)))
		b = append(b, sum[:]...)
	}
	return b[:n]
}

// testFileUploads uploads to a new thread, to one in use, and over existing files.
func testFileUploads(t *testing.T, a *api) {
	a.checkListing(t, "uploads", "", true)
	a.upload(t, "uploads", "new/deep/er/file.txt", []byte("first"))
	a.upload(t, "uploads", "/home/baponi/new/zero", nil)
	a.upload(t, "uploads", "./large", randomBytes(20<<20))
	list := []string{"large 20971520", "new/", "new/deep/", "new/deep/er/", "new/deep/er/file.txt 5", "new/zero 0"}
	a.checkListing(t, "uploads", "", true, list...)
	a.checkListing(t, "uploads", "", false, "large 20971520", "new/")
	a.checkListing(t, "uploads", "new", false, "new/deep/", "new/zero 0")
	a.checkListing(t, "uploads", "/home/baponi/new/deep/er/file.txt", false, "new/deep/er/file.txt 5")
	a.checkListing(t, "uploads", "nothing", true)
	a.checkDownload(t, "uploads", "new/deep/er/file.txt", []byte("first"))
	a.checkDownload(t, "uploads", "new/zero", []byte{})
	a.checkDownload(t, "uploads", "large", randomBytes(20<<20))

	// The first execution finds the files as if a program had written them. More can be uploaded
	// while it runs.
	h, sum := newHold(), sha256.Sum256(randomBytes(20<<20))
	look := bash(
		`find * -type f -printf '%p %m %s\n' | sort; find * -not -user $UID; sha256sum < large; cat new/deep/er/file.txt
echo >> new/zero; echo own > own
` + h.code()).of("uploads")
	id := a.submit(look)
	h.reached(t, 1)
	a.checkListing(t, "uploads", "", true, list...) // the last complete version
	a.upload(t, "uploads", "new/deep/er/file.txt", []byte("second"))
	a.upload(t, "uploads", "own", []byte("uploaded meanwhile"))
	a.upload(t, "uploads", "own", []byte("uploaded again"))
	a.checkDownload(t, "uploads", "own", []byte("uploaded again"))
	h.release(t)
	rec := a.ended(id)
	want := fmt.Sprintf("large 644 20971520\nnew/deep/er/file.txt 644 5\nnew/zero 644 0\n%s  -\nfirstheld\nwoken\n",
		hex.EncodeToString(sum[:]))
	rec.succeeded(t, want)
	list = []string{
		"large 20971520", "new/", "new/deep/", "new/deep/er/", "new/deep/er/file.txt 6",
		"new/zero 1", "own 14",
	}
	a.checkListing(t, "uploads", "", true, list...)
	if r := a.inline(bash("cat new/deep/er/file.txt own").of("uploads")); r.Stdout != "seconduploaded again" {
		t.Errorf("the next execution found %+v", r)
	}
	a.checkListing(t, "uploads", "", true, list...)
	a.checkDownload(t, "uploads", "large", randomBytes(20<<20))

	// A file replaces whatever is at its path or at a parent's path. Links are not followed.
	a.inline(bash("ln -s /etc link; ln -s new/zero into; mkdir directory; touch directory/in").of("uploads"))
	a.upload(t, "uploads", "link/passwd", []byte("in the home"))
	a.upload(t, "uploads", "into", []byte("no link"))
	if r := a.inline(bash("cat link/passwd into; test -L link -o -L into; echo $?; wc -c < new/zero").of(
		"uploads")); r.Stdout != "in the homeno link1\n1\n" {
		t.Errorf("files put where links were: %+v", r)
	}
}

// testFileChanges unpacks a tar into a thread, changes single files, and checks that programs see
// all of it, on workers that have an older version of the home too.
func testFileChanges(t *testing.T, a *api) {
	at := func(path string) string { return "/v1/threads/changes/archive" + path }
	change := func(kind string, body request, want int) {
		t.Helper()
		body["source"], body["id"] = "thread", "changes"
		if r := a.do(http.MethodPost, "/v1/files/"+kind, body); r.status != want {
			t.Errorf("%s %v: %s", kind, body, r)
		}
	}
	large := randomBytes(6 << 20)
	pack := func(headers ...tar.Header) []byte {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		w := tar.NewWriter(z)
		for _, h := range headers {
			if h.Mode == 0 {
				h.Mode = 0o644
			}
			h.ModTime = time.Unix(1_000_000_000, 0)
			if err := w.WriteHeader(&h); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(large[:h.Size]); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(w.Close(), z.Close()); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	unpack := func(path string, want int, words string, headers ...tar.Header) {
		t.Helper()
		r := a.do(http.MethodPut, at(path), pack(headers...), "Content-Encoding", "gzip", "Content-Type", "application/x-tar")
		if r.status != want || !strings.Contains(string(r.body), words) {
			t.Errorf("unpack: %s", r)
		}
	}
	unpack("?path=in", http.StatusOK, `"version":1`, tar.Header{Name: "run", Mode: 0o755, Size: 10},
		tar.Header{Name: "d/large", Size: 6 << 20},
		tar.Header{Name: "d/link", Typeflag: tar.TypeSymlink, Linkname: "../run"},
		tar.Header{Name: "d/again", Typeflag: tar.TypeLink, Linkname: "run"})
	look := bash("cd in; find * -printf '%p %y %m %s %n %T@\\n' | grep -v ' d ' | sort; find ~ -not -user $UID; cmp " +
		"run d/again; cmp d/link run; sha256sum < d/large").of("changes")
	sum := sha256.Sum256(large)
	want := "d/again f 755 10 2 1000000000.0000000000\nd/large f 644 6291456 1 1000000000.0000000000\nd/link l 777 6 1 " +
		"1000000000.0000000000\n" +
		"run f 755 10 2 1000000000.0000000000\n" + hex.EncodeToString(sum[:]) + "  -\n"
	if r := a.inline(look); r.Stdout != want {
		t.Fatalf("a program found %+v, want\n%s", r, want)
	}
	unpack("", http.StatusBadRequest, `bad`, tar.Header{Name: "good", Size: 1}, tar.Header{Name: "../bad"})

	h := newHold()
	id := a.submit(bash("echo kept > in/new\n" + h.code()).of("changes"))
	h.reached(t, 1)
	change("delete", request{"path": "in/run"}, http.StatusConflict)
	change("rename", request{"path": "in", "to": "out"}, http.StatusConflict)
	unpack("", http.StatusConflict, "in use by execution "+id, tar.Header{Name: "good", Size: 1})
	h.release(t)
	a.ended(id).succeeded(t, "held\nwoken\n")
	a.upload(t, "changes", "in/d/staged", []byte("uploaded"))
	change("rename", request{"path": "in/d", "to": "deep/er"}, http.StatusOK)
	change("rename", request{"path": "/home/baponi/in/run", "to": "run"}, http.StatusOK)
	change("delete", request{"path": "deep/er/link"}, http.StatusOK)
	change("delete", request{"path": "in"}, http.StatusConflict)
	change("delete", request{"path": "in", "recursive": true}, http.StatusOK)
	change("delete", request{"path": "in", "recursive": true}, http.StatusNotFound)
	list := []string{"deep/", "deep/er/", "deep/er/again 10", "deep/er/large 6291456", "deep/er/staged 8", "run 10"}
	a.checkListing(t, "changes", "", true, list...)
	r := a.inline(bash("find * -type f -printf '%p %n\\n' | sort; cmp run deep/er/again; sha256sum < deep/er/large; " +
		"cat deep/er/staged").of("changes"))
	if want := "deep/er/again 2\ndeep/er/large 1\ndeep/er/staged 1\nrun 2\n" + hex.EncodeToString(sum[:]) +
		"  -\nuploaded"; r.Stdout != want {
		t.Errorf("after the changes a program found %+v, want\n%s", r, want)
	}
	archive := a.do(http.MethodGet, at("?path=deep/er"), nil)
	var names []string
	for in := tar.NewReader(bytes.NewReader(archive.body)); ; {
		h, err := in.Next()
		if err != nil {
			break
		}
		names = append(names, h.Name)
	}
	if !slices.Equal(names, []string{"./", "again", "large", "staged"}) {
		t.Errorf("the archive of a directory has %q: HTTP %d", names, archive.status)
	}
	if r := a.do(http.MethodGet, at("?path=in&version=1"), nil); r.status != http.StatusOK ||
		!bytes.Contains(r.body, large[:1<<20]) {
		t.Errorf("the first version: HTTP %d, %d bytes", r.status, len(r.body))
	}
}

// testFileDownloads reads files as a program left them, completely and in parts.
func testFileDownloads(t *testing.T, a *api) {
	content := func(name string) []byte {
		switch name {
		case "small":
			return []byte("0123456789")
		case "large":
			return randomBytes(6 << 20)
		case "staged":
			return randomBytes(5 << 20)
		default:
			b := make([]byte, 12<<20)
			copy(b[5<<20:], "in the middle")
			return b
		}
	}
	a.upload(t, "downloads", "large", content("large"))
	r := a.inline(python(`
import os
open('small', 'w').write('0123456789')
for n in range(200): open(f'other{n}', 'w').write(str(n) * 1000)
f = open('sparse', 'wb'); f.truncate(12 << 20); f.seek(5 << 20); f.write(b'in the middle'); f.close()
data = open('large', 'rb').read(); os.unlink('large'); open('large', 'wb').write(data)
os.symlink('/etc/passwd', 'out'); os.symlink('small', 'link'); os.symlink('/etc', 'dir'); os.mkdir('empty')`).of(
		"downloads"))
	if !r.Success {
		t.Fatalf("got %+v", r)
	}
	a.upload(t, "downloads", "staged", content("staged"))
	for _, name := range []string{"small", "large", "staged", "sparse"} {
		want := content(name)
		a.checkDownload(t, "downloads", name, want)
		whole := a.download(t, "downloads", name)
		tag, size := whole.header.Get("ETag"), len(want)
		head := a.useSigned(a.downloadURL("downloads", name).signed(t), http.MethodHead, nil)
		if head.status != http.StatusOK || head.header.Get("Content-Length") != strconv.Itoa(size) ||
			head.header.Get("ETag") != tag || len(head.body) > 0 {
			t.Errorf("HEAD %s: %d %v", name, head.status, head.header)
		}
		for _, c := range []struct {
			asked    string
			from, to int
		}{
			{"bytes=0-0", 0, 1},
			{"bytes=3-", 3, size},
			{"bytes=-4", size - 4, size},
			{fmt.Sprintf("bytes=%d-%d", size/2-3, size/2+2), size/2 - 3, size/2 + 3},
			{"bytes=5-99999999999", 5, size},
		} {
			r := a.download(t, "downloads", name, "Range", c.asked, "If-Range", tag)
			if contentRange := fmt.Sprintf("bytes %d-%d/%d", c.from, c.to-1, size); r.status != http.StatusPartialContent ||
				!bytes.Equal(r.body, want[c.from:c.to]) || r.header.Get("Content-Range") != contentRange {
				t.Errorf("%s of %s: %d, %q, %d bytes", c.asked, name, r.status, r.header.Get("Content-Range"), len(r.body))
			}
		}
		if r := a.download(t, "downloads", name, "Range", "bytes=1-2", "If-Range", `"another"`); r.status != http.StatusOK ||
			len(r.body) != size {
			t.Errorf("a range of what is no more: %d, %d bytes", r.status, len(r.body))
		}
		a.download(t, "downloads", name, "Range", fmt.Sprintf("bytes=%d-", size)).rejection(
			t, http.StatusRequestedRangeNotSatisfiable, "range_not_satisfiable")
	}
	// A link is not a file and is not followed.
	for _, path := range []string{"out", "link", "dir/passwd", "dir", "empty", "nothing", "small/in"} {
		a.downloadURL("downloads", path).rejection(t, http.StatusNotFound, "not_found")
	}
	a.checkListing(t, "downloads", "dir", true)
	a.downloadURL("no-such-thread", "small").rejection(t, http.StatusNotFound, "not_found")
	for _, path := range []string{
		"../x", "a/../../x", "/../etc/passwd", "..", "a/..", "", "x\x00y", "x/", "/",
		"/home/baponi", strings.Repeat("x", 256),
	} {
		a.downloadURL("downloads", path).rejection(t, http.StatusBadRequest, "validation_error")
		a.uploadURL("downloads", path, 1).rejection(t, http.StatusBadRequest, "validation_error")
	}
	a.uploadURL("downloads", "x", -1).rejection(t, http.StatusBadRequest, "validation_error")
	// larger than the sandbox's home
	a.uploadURL("downloads", "x", 1<<30).rejection(t, http.StatusBadRequest, "validation_error")
}

// testSignedURLs misuses signed URLs.
func testSignedURLs(t *testing.T, a *api) {
	a.upload(t, "signed", "mine", []byte("mine"))
	a.upload(t, "signed", "other", []byte("other"))
	up, down := a.uploadURL("signed", "up", 4).signed(t), a.downloadURL("signed", "mine").signed(t)
	altered := func(s signed, at int) signed {
		b := []byte(s.URL)
		b[at] ^= 1
		return signed{URL: string(b), Method: s.Method}
	}
	token := strings.LastIndex(down.URL, "/") + 1
	sum := strings.LastIndex(down.URL, ".") + 1
	foreign := strings.LastIndex(up.URL, ".") + 1
	refused := map[string]*reply{
		"another signature":             a.useSigned(altered(down, sum), http.MethodGet, nil),
		"another text":                  a.useSigned(altered(down, token+20), http.MethodGet, nil),
		"no signature":                  a.useSigned(signed{URL: down.URL[:sum-1]}, http.MethodGet, nil),
		"the signature of another file": a.useSigned(signed{URL: down.URL[:sum] + up.URL[foreign:]}, http.MethodGet, nil),
		"PUT to a download":             a.useSigned(down, http.MethodPut, []byte("evil")),
		"GET of an upload":              a.useSigned(up, http.MethodGet, nil),
		"nothing":                       a.useSigned(signed{URL: down.URL[:token] + "x"}, http.MethodGet, nil),
		"PUT of another one":            a.useSigned(altered(up, foreign+3), http.MethodPut, []byte("evil")),
	}
	for what, r := range refused {
		if message := r.rejection(t, http.StatusForbidden, "forbidden"); strings.Contains(message, "mine") {
			t.Errorf("%s: %s", what, r)
		}
	}
	if r := a.useSigned(signed{URL: up.URL}, http.MethodHead, nil); r.status != http.StatusForbidden {
		t.Errorf("HEAD of an upload: %s", r)
	}
	for _, method := range []string{http.MethodPost, http.MethodDelete, http.MethodPatch} {
		a.useSigned(signed{URL: up.URL}, method, nil).rejection(t, http.StatusMethodNotAllowed, "method_not_allowed")
	}
	plain := signed{URL: up.URL, Method: up.Method}
	a.useSigned(plain, http.MethodPut, []byte("longer")).rejection(t, http.StatusRequestEntityTooLarge,
		"payload_too_large")
	a.useSigned(plain, http.MethodPut, []byte("sho")).rejection(t, http.StatusBadRequest, "validation_error")
	a.useSigned(plain, http.MethodPut, []byte("four"), "Content-Encoding", "gzip").rejection(
		t, http.StatusUnsupportedMediaType, "unsupported_media_type")
	a.checkListing(t, "signed", "", true, "mine 4", "other 5")
	if r := a.useSigned(plain, http.MethodPut, []byte("four")); r.status != http.StatusOK {
		t.Errorf("what it is for: %s", r)
	}
	a.checkDownload(t, "signed", "up", []byte("four"))
	if r := a.useSigned(down, http.MethodGet, nil); string(r.body) != "mine" ||
		r.header.Get("Content-Type") != "application/octet-stream" ||
		!strings.Contains(r.header.Get("Content-Security-Policy"), "default-src 'none'") ||
		!strings.HasPrefix(r.header.Get("Content-Disposition"), "attachment") {
		t.Errorf("got %s with %v", r, r.header)
	}
}

// testFilesInTheWay uploads over existing files, directories and links. The listing before the
// execution must match what the execution finds.
func testFilesInTheWay(t *testing.T, a *api) {
	a.inline(bash(`mkdir -p d/e l; touch f d/f d/e/f l/f; ln -s d s; ln -s nowhere x; ln f h`).of("in-the-way"))
	for n, paths := range [][]string{
		{"d"},
		{"d/e"},
		{"f/g"},
		{"f/g/h", "f"},
		{"s/f"},
		{"x"},
		{"d/f/g", "d"},
		{"d", "d/e/f"},
		{"new/a", "new", "new/a/b"},
		{"h"},
		{"l/f/f/f", "l/f/f"},
	} {
		thread := fmt.Sprintf("in-the-way-%d", n)
		if r := a.do(http.MethodPost, "/v1/threads/in-the-way/fork", request{"id": thread}); r.status != http.StatusCreated {
			t.Fatalf("fork: %s", r)
		}
		for i, path := range paths {
			a.upload(t, thread, path, randomBytes(i+1))
		}
		output := a.files(thread, "", true)
		r := a.inline(bash(`find * -type d -printf '%p/\n' -o -printf '%p %s\n'`).of(thread))
		found := strings.Split(strings.TrimSuffix(r.Stdout, "\n"), "\n")
		slices.Sort(found)
		if diff := cmp.Diff(output, found); diff != "" || !r.Success {
			t.Errorf("after uploads to %v (-list +program): %+v\n%s", paths, r, diff)
		}
		a.checkListing(t, thread, "", true, output...)
	}
}
