package gateway

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	contentPath = "/v1/files/content/"
	uploadsPath = "/v1/files/uploads/"
)

// grant is what a signed URL allows.
type grant struct {
	method, key, org string
	source           proto.FileSource
	id, upload, path string
	size             int64
	expiresAt        time.Time
}

// token returns the signed form of g, as servers of any version since the form was introduced make it.
func (g *grant) token(secret [32]byte) string {
	return web.SignedText(secret, strings.Join([]string{
		"bullpen-file-2", g.method, g.key, g.org, string(g.source), g.id, strconv.FormatInt(g.size, 10),
		strconv.FormatInt(g.expiresAt.Unix(), 10), g.upload, g.path,
	}, "\n"))
}

// upload asks for a URL, sends content to it, and returns the answer to the upload.
func (h *harness) upload(path, content string) *reply {
	h.t.Helper()
	return h.send(h.put(h.sign("upload", path, len(content)), content))
}

// sign asks for a signed URL for a file in the thread t, and returns its path and query.
func (h *harness) sign(kind, path string, size int) string {
	h.t.Helper()
	more := ""
	if kind == "upload" {
		more = fmt.Sprintf(`,"content_length":%d`, size)
	}
	a := h.do("POST", "/v1/files/"+kind+"_url", fmt.Sprintf(`{"source":"thread","id":"t","path":%q%s}`, path, more)).want(
		200, "").json()
	method := map[string]string{"upload": "PUT", "download": "GET"}[kind]
	if a["method"] != method {
		h.t.Errorf("method %v", a["method"])
	}
	u, err := url.Parse(a["url"].(string))
	if err != nil || u.Host != strings.TrimPrefix(h.http.URL, "http://") {
		h.t.Errorf("url %s, %v", u, err)
	}
	return u.RequestURI()
}

// put returns an upload request without a key, as plain clients send it.
func (h *harness) put(at, content string, headers ...string) *http.Request {
	return h.request("PUT", at, content, append(headers, "Authorization", "")...)
}

func (h *harness) get(at string, headers ...string) *reply {
	h.t.Helper()
	return h.do("GET", at, "", append(headers, "Authorization", "")...)
}

func TestFiles(t *testing.T) {
	h := newHarness(t)
	list := func(more string) string {
		return strings.TrimSpace(
			string(h.do("POST", "/v1/files/list", `{"source":"thread","id":"t"`+more+`}`).want(200, "").body))
	}
	if got := list(""); got != `{"files":[]}` {
		t.Errorf("unknown thread: %s", got)
	}
	h.threads.files["acme/t/dir"] = nil
	h.threads.files["other/t/theirs"] = []byte("theirs")
	// This also works while an execution holds the thread.
	h.execute(inThread, "Prefer", "respond-async").want(202, "")
	if a := h.upload("/home/baponi/dir/./a.txt", "hello").want(200, ""); strings.TrimSpace(
		string(a.body)) != `{"path":"dir/a.txt","size":5}` {
		t.Errorf("uploaded: %s", a.body)
	}
	h.upload("empty", "").want(200, "")
	const dir = `{"name":"dir","path":"dir","size":0,"modified":"1970-01-01T00:00:01.000Z","is_directory":true,` +
		`"type":"directory"}`
	const empty = `{"name":"empty","path":"empty","size":0,"modified":"1970-01-01T00:00:01.000Z","is_directory":false,` +
		`"type":"file"}`
	const file = `{"name":"a.txt","path":"dir/a.txt","size":5,"modified":"1970-01-01T00:00:01.000Z",` +
		`"is_directory":false,"type":"file"}`
	for more, want := range map[string]string{
		``:                             dir + `,` + empty,
		`,"path":null`:                 dir + `,` + empty,
		`,"path":"/home/baponi"`:       dir + `,` + empty,
		`,"recursive":true`:            dir + `,` + file + `,` + empty,
		`,"path":"./dir/"`:             file,
		`,"path":"dir/a.txt"`:          file,
		`,"path":"nothing"`:            ``,
		`,"path":"/nothing/../../etc"`: `400`,
		`,"path":"a\u0000b"`:           `400`,
		`,"path":"` + strings.Repeat("a", 256) + `"`: `400`,
	} {
		if want == `400` {
			h.do("POST", "/v1/files/list", `{"source":"thread","id":"t"`+more+`}`).want(400, "validation_error", "path")
		} else if got := list(more); got != `{"files":[`+want+`]}` {
			t.Errorf("%s:\n%s, want\n%s", more, got, want)
		}
	}
	at := h.sign("download", "dir/a.txt", 0)
	a := h.get(at).want(200, "")
	for name, want := range map[string]string{
		"Content-Type": "application/octet-stream", "Content-Disposition": "attachment; filename=a.txt",
		"X-Content-Type-Options":  "nosniff",
		"Content-Security-Policy": web.ContentPolicy, "Content-Length": "5", "Accept-Ranges": "bytes", "ETag": `"5-h"`,
		"Cache-Control": "private, no-store", "Last-Modified": "Thu, 01 Jan 1970 00:00:01 GMT",
	} {
		if got := a.header.Get(name); got != want {
			t.Errorf("%s %q, want %q", name, got, want)
		}
	}
	if string(a.body) != "hello" {
		t.Errorf("content %q", a.body)
	}
	head := h.do("HEAD", at, "", "Authorization", "", "Range", "bytes=1-2").want(200, "")
	if head.header.Get("Content-Length") != "5" || len(head.body) != 0 {
		t.Errorf("HEAD: %v, %q", head.header, head.body)
	}
	if a := h.get(h.sign("download", "empty", 0), "Range", "bytes=0-").want(200, ""); len(a.body) != 0 {
		t.Errorf("empty file %q", a.body)
	}
	for _, body := range []string{
		`{"source":"thread","id":"t","path":"nothing"}`, `{"source":"thread","id":"u","path":"dir/a.txt"}`,
		`{"source":"thread","id":"t","path":"theirs"}`,
		`{"source":"thread","id":"t","path":"dir"}`,
	} {
		h.do("POST", "/v1/files/download_url", body).want(404, "not_found", "no file at this path")
	}
	// A URL is useless once its file is deleted.
	h.server.Drain()
	h.get(at).want(200, "")
	delete(h.threads.files, "acme/t/dir/a.txt")
	h.get(at).want(404, "not_found")
}

// The content type of an upload is one of the headers that the client sends, as with other stores.
func TestUploadHasItsContentType(t *testing.T) {
	h := newHarness(t)
	const request = `{"source":"thread","id":"t","path":"a","content_length":1`
	answer := h.do("POST", "/v1/files/upload_url", request+`,"content_type":"text/csv; charset=utf-8"}`).want(200, "")
	var signed api.SignedURL
	if err := json.Unmarshal(answer.body, &signed); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(signed.Headers, api.Header{Name: "Content-Type", Value: "text/csv; charset=utf-8"}) {
		t.Errorf("headers %v", signed.Headers)
	}
	for _, bad := range []string{
		"text", "text/csv\\r\\nX: y", "text/csv; charset", strings.Repeat("x", 300) + "/y", "té/xt",
	} {
		h.do("POST", "/v1/files/upload_url", request+`,"content_type":"`+bad+`"}`).want(400, "validation_error",
			"content_type")
	}
}

func TestFileRequestsThatAreRefused(t *testing.T) {
	h := newHarness(t)
	for _, kind := range []string{"list", "upload_url", "download_url"} {
		path := "/v1/files/" + kind
		rest := `"path":"a"}`
		if kind == "upload_url" {
			rest = `"path":"a","content_length":1}`
		}
		h.do("POST", path, `{"source":"volume","id":"v",`+rest).want(404, "not_found", "no storage connection")
		h.do("POST", path, `{"source":"disk","id":"v",`+rest).want(400, "validation_error", "source")
		h.do("POST", path, `{"source":"thread","id":"../t",`+rest).want(400, "validation_error", "id")
		h.do("POST", path, `{"source":"thread","id":"t",`+strings.Replace(rest, `"a"`, `"../a"`, 1)).want(
			400, "validation_error", "path")
		h.do("POST", path, `no`).want(400, "validation_error", "body")
		h.do("POST", path, "", "Authorization", "").want(401, "unauthorized")
		h.do("GET", path, "").want(405, "method_not_allowed")
	}
	for _, name := range []string{"", "/", ".", "/home/baponi/", "dir/"} {
		h.do("POST", "/v1/files/upload_url", fmt.Sprintf(`{"source":"thread","id":"t","path":%q,"content_length":1}`, name)).
			want(400, "validation_error", "path")
		h.do("POST", "/v1/files/download_url", fmt.Sprintf(`{"source":"thread","id":"t","path":%q}`, name)).want(
			400, "validation_error", "path")
	}
	most := int64(h.admission.Default.Disk.Home)
	ask := func(size int64) *reply {
		return h.do("POST", "/v1/files/upload_url",
			fmt.Sprintf(`{"source":"thread","id":"t","path":"a","content_length":%d}`, size))
	}
	ask(most).want(200, "")
	ask(most+1).want(400, "validation_error", fmt.Sprint(most+1), fmt.Sprint(most))
	h.admission.Default.Disk.Home = 100 * proto.GiB
	ask(proto.MaxFileBytes).want(200, "")
	ask(proto.MaxFileBytes+1).want(400, "validation_error", "content_length")
}

// Only a holder of the secret can create a URL. A URL is valid only for its purpose.
func TestSignedURLs(t *testing.T) {
	h := newHarness(t)
	h.upload("a", "hello").want(200, "")
	down, up := h.sign("download", "a", 0), h.sign("upload", "a", 5)
	h.send(h.put(down, "hello")).want(403, "forbidden", "not made by this server for this method")
	h.get(up).want(403, "forbidden")
	if a := h.do("HEAD", up, "", "Authorization", ""); a.status != 403 {
		t.Errorf("HEAD of an upload: %d", a.status)
	}
	h.do("POST", down, "").want(405, "method_not_allowed")
	good := func(s *Server) *grant {
		return &grant{
			method: "GET", key: "key_1", org: "acme", source: proto.SourceThread, id: "t", path: "a",
			expiresAt: time.Now().Add(time.Minute),
		}
	}
	if a := h.get(contentPath+good(h.server).token(*h.server.URLSecret)).want(200, ""); string(a.body) != "hello" {
		t.Errorf("content %q", a.body)
	}
	token := strings.TrimPrefix(down, contentPath)
	body, sum, _ := strings.Cut(token, ".")
	text, err := base64.RawURLEncoding.DecodeString(body)
	if err != nil {
		t.Fatal(err)
	}
	forged := map[string]string{
		"no signature": body, "empty signature": body + ".", "half a signature": body + "." + sum[:21],
		"signature twice": token + "." + sum,
		"empty":           ".", "no base64": "!." + sum, "padding": body + "=." + sum,
		"other secret": good(nil).token([32]byte{1}),
		"old signature": base64.RawURLEncoding.EncodeToString(
			[]byte(strings.Replace(string(text), "\nt\n", "\nu\n", 1))) + "." + sum,
	}
	for i := range text { // every byte is signed
		other := []byte(string(text))
		other[i] ^= 1
		forged[fmt.Sprintf("byte %d", i)] = base64.RawURLEncoding.EncodeToString(other) + "." + sum
	}
	for name, token := range forged {
		t.Run(name, func(t *testing.T) { h.in(t).get(contentPath+token).want(403, "forbidden", "not made by this server") })
	}
	// A token of an unknown form is rejected even if its signature is valid.
	for _, text := range []string{
		"bullpen-file-2\nGET\nkey_1\nacme\nt\n0\n99999999999\na", "bullpen-file-1\nGET\nkey_1\nacme\nt",
	} {
		token := base64.RawURLEncoding.EncodeToString([]byte(text)) + "." + base64.RawURLEncoding.EncodeToString(
			web.Signature(*h.server.URLSecret, text))
		h.get(contentPath+token).want(403, "forbidden")
	}
	h.do("GET", contentPath, "").want(404, "not_found")
	if strings.Contains(h.log.String(), body) {
		t.Error("a signed URL is in the log")
	}
	// Without a secret, nothing is signed and no URL is accepted.
	h.server.URLSecret = nil
	h.remount()
	h.get(contentPath+good(nil).token([32]byte{})).want(500, "internal")
	h.do("POST", "/v1/files/download_url", `{"source":"thread","id":"t","path":"a"}`).want(500, "internal")
}

// A URL allows nothing that its key no longer allows.
func TestSignedURLsAreOfTheirKey(t *testing.T) {
	h := newHarness(t)
	h.upload("a", "hello").want(200, "")
	admin, _ := h.key, h.stub.addKey("acme", "pro", asUser)
	h.key = h.stub.addKey("acme", "pro", asUser)
	down, up := h.sign("download", "a", 0), h.sign("upload", "b", 1)
	h.get(down).want(200, "")
	h.key = admin
	h.do("DELETE", "/v1/admin/keys/key_3", "").want(200, "")
	h.get(down).want(403, "forbidden", "revoked")
	h.send(h.put(up, "x")).want(403, "forbidden", "revoked")
	for _, key := range []string{"", "key_9", "key_3"} {
		g := &grant{
			method: "GET", key: key, org: "acme", source: proto.SourceThread, id: "t", path: "a",
			expiresAt: time.Now().Add(time.Minute),
		}
		h.get(contentPath+g.token(*h.server.URLSecret)).want(403, "forbidden")
	}
	other := &grant{
		method: "GET", key: "key_1", org: "other", source: proto.SourceThread, id: "t", path: "a",
		expiresAt: time.Now().Add(time.Minute),
	}
	h.get(contentPath+other.token(*h.server.URLSecret)).want(403, "forbidden")
}

// An upload too large for a home is refused before it is sent. If the space shrinks later, the
// upload itself is refused.
func TestUploadsAreCheckedAgainstTheHomeLimit(t *testing.T) {
	h := newHarness(t)
	h.threads.most = proto.Space{Bytes: int64(h.admission.Default.Disk.Home), Files: h.admission.Default.Disk.Inodes}
	late := h.sign("upload", "b", 5)
	h.upload("a", "hello").want(200, "")
	h.threads.refuse = &proto.SpaceError{
		Thread: "t", Home: proto.Space{Bytes: 11, Files: 12}, Waiting: proto.Space{Bytes: 13, Files: 14},
		New:  proto.Space{Bytes: 15, Files: 16},
		Most: proto.Space{Bytes: 17, Files: 18},
	}
	numbers := []string{"11 bytes in 12", "13 bytes and 14", "15 bytes and 16", "17 bytes and 18", "remove files"}
	h.do("POST", "/v1/files/upload_url", `{"source":"thread","id":"t","path":"b","content_length":5}`).want(
		409, "conflict", numbers...)
	h.send(h.put(late, "hello")).want(409, "conflict", numbers...)
}

func TestSignedURLsExpire(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		h.upload("a", "hello").want(200, "")
		a := h.do("POST", "/v1/files/download_url", `{"source":"thread","id":"t","path":"a"}`).want(200, "").json()
		expires, err := time.Parse(time.RFC3339, a["expires_at"].(string))
		if err != nil || time.Until(expires) != web.URLLife {
			t.Errorf("expires %v, %v", a["expires_at"], err)
		}
		u, _ := url.Parse(a["url"].(string))
		time.Sleep(time.Until(expires) - time.Millisecond)
		h.get(u.Path).want(200, "")
		time.Sleep(time.Millisecond)
		h.get(u.Path).want(403, "forbidden", "expired")
	})
}

func TestURLsAreAbsolute(t *testing.T) {
	h := newHarness(t)
	ask := func(host string, change func(*http.Request)) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), "POST", "/v1/files/upload_url",
			strings.NewReader(`{"source":"thread","id":"t","path":"a","content_length":1}`))
		r.Host = host
		r.Header.Set("Authorization", "Bearer "+h.key)
		// Any client can send these headers.
		r.Header.Set("X-Forwarded-Host", "evil.example")
		r.Header.Set("X-Forwarded-Proto", "gopher")
		r.Header.Set("Forwarded", "host=evil.example;proto=gopher")
		change(r)
		w := httptest.NewRecorder()
		h.http.Config.Handler.ServeHTTP(w, r)
		return w
	}
	starts := func(w *httptest.ResponseRecorder, with string) {
		t.Helper()
		if !strings.HasPrefix(w.Body.String(), `{"url":"`+with+contentPath) {
			t.Errorf("%s, want %s", w.Body, with)
		}
	}
	starts(ask("box.example:8080", func(*http.Request) {}), "http://box.example:8080")
	starts(ask("box.example", func(r *http.Request) { r.TLS = new(tls.ConnectionState) }), "https://box.example")
	if w := ask("", func(*http.Request) {}); w.Code != 400 {
		t.Errorf("no host: %d %s", w.Code, w.Body)
	}
	// A proxy that terminates TLS sends the scheme of its client.
	from := func(sent ...string) func(*http.Request) {
		return func(r *http.Request) { r.Header["X-Forwarded-Proto"] = sent } // from 192.0.2.1
	}
	starts(ask("box.example", from("https")), "http://box.example")
	h.server.TrustedProxies = []netip.Prefix{
		netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("192.0.2.0/24"),
	}
	starts(ask("box.example", from("HTTPS")), "https://box.example")
	starts(ask("box.example", from("http", "http, https")), "https://box.example") // what the nearest one added
	starts(ask("box.example", from("https, http")), "http://box.example")
	starts(ask("box.example", func(*http.Request) {}), "http://box.example") // not a scheme
	starts(ask("box.example", func(r *http.Request) { from("https")(r); r.RemoteAddr = "[::ffff:192.0.2.1]:5" }),
		"https://box.example")
	starts(ask("box.example", func(r *http.Request) { from("https")(r); r.RemoteAddr = "203.0.113.1:5" }),
		"http://box.example")
	h.server.PublicURL = "https://public.example/bullpen"
	starts(ask("box.example", func(*http.Request) {}), "https://public.example/bullpen")
}

func TestRanges(t *testing.T) {
	h := newHarness(t)
	h.upload("a", "0123456789").want(200, "")
	at := h.sign("download", "a", 0)
	for header, want := range map[string]string{ // the Content-Range and the content
		"bytes=0-0": "0-0 0", "bytes=3-5": "3-5 345", "bytes=7-": "7-9 789", "bytes=7-99": "7-9 789", "bytes=-3": "7-9 789",
		"bytes=-99": "0-9 0123456789",
		"bytes=0-":  "0-9 0123456789", "bytes= 3-5 ": "3-5 345", "bytes=10-": "", "bytes=10-12": "", "bytes=-0": "",
		"bytes=99999999999-": "",
		// Ignored.
		"bytes=5-3": "all", "bytes=a-": "all", "bytes=-": "all", "bytes=": "all", "bytes=1": "all", "items=0-1": "all",
		"bytes=0-1,3-4": "all",
		"bytes=+1-2":    "all", "bytes=1--2": "all", "bytes=--1": "all", "bytes=0-99999999999999999999": "all",
	} {
		a := h.get(at, "Range", header)
		switch want {
		case "":
			a.want(416, "range_not_satisfiable")
			if got := a.header.Get("Content-Range"); got != "bytes */10" || a.header.Get("Content-Disposition") != "" {
				t.Errorf("%s: %v", header, a.header)
			}
		case "all":
			if a.want(200, ""); string(a.body) != "0123456789" || a.header.Get("Content-Range") != "" {
				t.Errorf("%s: %q, %v", header, a.body, a.header)
			}
		default:
			part, content, _ := strings.Cut(want, " ")
			a.want(206, "")
			if string(a.body) != content || a.header.Get("Content-Range") != "bytes "+part+"/10" ||
				a.header.Get("Content-Length") != fmt.Sprint(len(content)) {
				t.Errorf("%s: %q, %v", header, a.body, a.header)
			}
		}
	}
	for tag, status := range map[string]int{
		`"10-0"`: 206, `"10-1"`: 200, `W/"10-0"`: 200, "Thu, 01 Jan 1970 00:00:01 GMT": 200,
	} {
		h.get(at, "Range", "bytes=1-2", "If-Range", tag).want(status, "")
	}
}

// A file name from a tenant remains a name.
func TestAttachment(t *testing.T) {
	for name, want := range map[string]string{
		"a.html": "attachment; filename=a.html", "a b": `attachment; filename="a b"`,
		"é€":                "attachment; filename*=utf-8''%C3%A9%E2%82%AC",
		"a\"; filename=\"b": `attachment; filename="a_; filename=_b"`,
		"a\r\nX-Evil: 1":    `attachment; filename="a__X-Evil: 1"`, `..\..\a`: `attachment; filename=.._.._a`,
		"\x00\x1b\x7f": "attachment; filename=___",
	} {
		if got := web.Attachment(name); got != want {
			t.Errorf("%q: %s, want %s", name, got, want)
		}
	}
}

// Content that differs from what was stored is not sent, or its answer is broken off.
func TestBrokenContent(t *testing.T) {
	h := newHarness(t)
	h.upload("small", "hello").want(200, "")
	h.upload("large", strings.Repeat("x", 10*web.SmallOutput)).want(200, "")
	small, large := h.sign("download", "small", 0), h.sign("download", "large", 0)
	if a := h.get(large).want(200, ""); len(a.body) != 10*web.SmallOutput {
		t.Errorf("%d bytes", len(a.body))
	}
	h.threads.broken = true
	if a := h.get(small).want(500, "internal"); a.header.Get("Content-Disposition") != "" || a.header.Get("ETag") != "" {
		t.Errorf("headers %v", a.header)
	}
	resp, err := h.client.Do(h.request("GET", large, ""))
	if err == nil {
		_, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
	}
	if err == nil {
		t.Error("a broken file came whole")
	}
	h.threads.fail = errors.New("the store is gone")
	h.get(small).want(500, "internal")
	h.do("POST", "/v1/files/list", `{"source":"thread","id":"t"}`).want(500, "internal")
	h.do("POST", "/v1/files/list", `{"source":"thread","id":"u"}`).want(500, "internal")
	h.send(h.put(h.server.signedPut("b", 1), "x")).want(500, "internal")
	h.threads.fail = nil
	h.threads.heads["acme/t"].Staged = make([]proto.StagedFile, proto.MaxStaged)
	h.send(h.put(h.server.signedPut("b", 1), "x")).want(409, "conflict", "run one first")
}

// signedPut returns a path and query to upload a file of the thread t.
func (s *Server) signedPut(path string, size int64) string {
	g := &grant{
		method: "PUT", key: "key_1", org: "acme", source: proto.SourceThread, id: "t", path: path, size: size,
		expiresAt: time.Now().Add(time.Hour),
	}
	return contentPath + g.token(*s.URLSecret)
}

// An upload must have exactly the length that its URL names. Otherwise nothing is stored.
func TestUploadLength(t *testing.T) {
	h := newHarness(t)
	at := h.sign("upload", "a", 5)
	h.send(h.put(at, "1234")).want(400, "validation_error", "4", "5 bytes")
	h.send(h.put(at, "123456")).want(413, "payload_too_large", "5 bytes")
	h.send(h.put(at, "12345", "Content-Encoding", "gzip")).want(415, "unsupported_media_type")
	chunked := h.put(at, "")
	chunked.Body, chunked.ContentLength = io.NopCloser(strings.NewReader("12345")), -1
	h.send(chunked).want(411, "length_required", "Content-Length")
	if len(h.threads.files) != 0 {
		t.Errorf("files %v", h.threads.files)
	}
	// The body ends early.
	conn, err := h.dial()
	if err != nil {
		t.Fatal(err)
	}
	ctx, gone := context.WithCancel(t.Context())
	h.server.Files = &staging{threadFiles{h.threads}, gone}
	h.remount()
	if _, err := fmt.Fprintf(conn, "PUT %s HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n123", at); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	<-ctx.Done()
	h.threads.mu.Lock()
	defer h.threads.mu.Unlock()
	if len(h.threads.files) != 0 {
		t.Errorf("files %v", h.threads.files)
	}
}

// staging calls done when an attempt to stage a file has ended.
type staging struct {
	threadFiles
	done func()
}

func (s *staging) Stage(
	ctx context.Context, org, thread, path string, size int64, most proto.Space, body io.Reader,
) error {
	defer s.done()
	return s.threadFiles.Stage(ctx, org, thread, path, size, most, body)
}

// slowStage takes a long time to store what it has read.
type slowStage struct{ threadFiles }

func (s slowStage) Stage(
	ctx context.Context, org, thread, path string, size int64, most proto.Space, body io.Reader,
) error {
	err := s.threadFiles.Stage(ctx, org, thread, path, size, most, body)
	time.Sleep(2 * web.BodyTimeout)
	return errors.Join(err, ctx.Err())
}

// An upload and its storage may take any time in total, as long as data keeps arriving.
func TestSlowUpload(t *testing.T) {
	for stall, status := range map[time.Duration]int{
		web.BodyTimeout - time.Second: 200, web.BodyTimeout + time.Second: 408,
	} {
		bubble(t, func(t *testing.T, h *harness) {
			h.server.Files = slowStage{threadFiles{h.threads}}
			h.remount()
			body, in := io.Pipe()
			sent := make(chan struct{})
			go func() {
				defer close(sent)
				for range 200 { // more than an hour
					time.Sleep(stall)
					if _, err := io.WriteString(in, "x"); err != nil {
						return
					}
				}
			}()
			r := h.put(h.server.signedPut("a", 200), "")
			r.Body, r.ContentLength = io.NopCloser(io.LimitReader(body, 200)), 200
			resp, err := h.client.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != status {
				t.Errorf("stalling %s: %s, want %d", stall, resp.Status, status)
			}
			_ = errors.Join(resp.Body.Close(), body.Close())
			<-sent
			h.client.CloseIdleConnections()
			synctest.Wait()
		})
	}
}

// A download continues for a client that reads slowly, and ends for a client that stops reading.
func TestSlowDownload(t *testing.T) {
	for stall, whole := range map[time.Duration]bool{
		web.WriteTimeout - time.Second: true, web.WriteTimeout + time.Second: false,
	} {
		bubble(t, func(t *testing.T, h *harness) {
			const size = 20 * web.SmallOutput
			h.threads.files["acme/t/a"] = bytes.Repeat([]byte("x"), size)
			resp, err := h.client.Do(h.request("GET", h.sign("download", "a", 0), "", "Authorization", ""))
			if err != nil {
				t.Fatal(err)
			}
			var got int64
			for err == nil {
				time.Sleep(stall)
				var n int64
				n, err = io.CopyN(io.Discard, resp.Body, web.SmallOutput)
				got += n
			}
			if (errors.Is(err, io.EOF) && got == size) != whole {
				t.Errorf("reading every %s: %d bytes, %v", stall, got, err)
			}
			_ = resp.Body.Close()
		})
	}
}

func TestChangeFiles(t *testing.T) {
	h := newHarness(t)
	h.threads.most = proto.Space{Bytes: int64(h.admission.Default.Disk.Home), Files: h.admission.Default.Disk.Inodes}
	h.addThread("acme", "t")
	for _, name := range []string{"a", "dir", "dir/b", "dir/c"} {
		h.threads.files["acme/t/"+name] = []byte(name)
	}
	h.threads.files["acme/t/dir"] = nil
	change := func(kind, more string) *reply {
		h.t.Helper()
		return h.do("POST", "/v1/files/"+kind, `{"source":"thread","id":"t"`+more+`}`)
	}
	number := h.threads.heads["acme/t"].Number() + 1
	for more, want := range map[string]string{
		`"/home/baponi/a","to":"./new//name"`: "new/name", `"dir/b","to":"/home/baponi/b"`: "b",
	} {
		a := change("rename", `,"path":`+more).want(200, "")
		if got := strings.TrimSpace(string(a.body)); got != fmt.Sprintf(`{"path":%q,"version":%d}`, want, number) {
			t.Errorf("rename of %s: %s", more, got)
		}
	}
	change("delete", `,"path":"dir"`).want(409, "conflict", `"dir" is not empty`)
	change("delete", `,"path":"/dir/","recursive":true`).want(200, "")
	if names := (threadFiles{h.threads}).names("acme", "t"); !slices.Equal(names, []string{"b", "new/name"}) {
		t.Errorf("%q", names)
	}
	change("delete", `,"path":"dir"`).want(404, "not_found", `there is nothing at "dir"`)
	h.do("POST", "/v1/files/delete", `{"source":"thread","id":"u","path":"a"}`).want(
		404, "not_found", "no thread of that id")
	h.do("POST", "/v1/files/rename", `{"source":"thread","id":"u","path":"a","to":"b"}`).want(
		404, "not_found", "no thread of that id")
	for _, bad := range []string{
		`""`, `"/"`, `"/home/baponi"`, `"a/../b"`, `"a\u0000"`, `"` + strings.Repeat("a", 256) + `"`,
	} {
		change("delete", `,"path":`+bad).want(400, "validation_error", "path must")
		change("rename", `,"path":`+bad+`,"to":"x"`).want(400, "validation_error", "path must")
		change("rename", `,"path":"b","to":`+bad).want(400, "validation_error", "to must")
	}
	change("rename", `,"path":"b"`).want(400, "validation_error", "to")
	for kind, more := range map[string]string{"delete": `"path":"b"`, "rename": `"path":"b","to":"c"`} {
		h.do("POST", "/v1/files/"+kind, `{"source":"volume","id":"v",`+more+`}`).want(404, "not_found")
	}
	h.threads.refuse = &proto.SpaceError{Thread: "t", Most: proto.Space{Bytes: 17}}
	change("rename", `,"path":"b","to":"c"`).want(409, "conflict", "has room for 17 bytes")
	h.execute(inThread, "Prefer", "respond-async").want(202, "")
	change("delete", `,"path":"new"`).want(409, "conflict", "thread t is in use by execution")
	change("rename", `,"path":"new","to":"n"`).want(409, "conflict", "thread t is in use by execution")
}

func TestArchiveOfDirectory(t *testing.T) {
	h := newHarness(t)
	h.addThread("acme", "t")
	if a := h.do("GET", "/v1/threads/t/archive?path=/home/baponi/x/", "").want(200, ""); !strings.Contains(
		string(a.body), "x") {
		t.Errorf("archive %q", a.body)
	}
	h.do("GET", "/v1/threads/t/archive?path=nothing", "").want(404, "not_found", `there is no directory "nothing"`)
	h.do("GET", "/v1/threads/t/archive?path=a/../..", "").want(400, "validation_error", "path must not contain")
}

func compressed(t *testing.T, coding, content string) string {
	t.Helper()
	var b bytes.Buffer
	var w io.WriteCloser
	switch coding {
	case "gzip":
		w = gzip.NewWriter(&b)
	case "zstd":
		var err error
		if w, err = zstd.NewWriter(&b); err != nil {
			t.Fatal(err)
		}
	default:
		return content
	}
	if _, err := io.WriteString(w, content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestUnpack(t *testing.T) {
	h := newHarness(t)
	h.threads.most = proto.Space{Bytes: int64(h.admission.Default.Disk.Home), Files: h.admission.Default.Disk.Inodes}
	content := strings.Repeat("tar", 100_000)
	put := func(path, coding, body string) *reply {
		h.t.Helper()
		return h.do("PUT", "/v1/threads/t/archive"+path, body, "Content-Type", "application/x-tar",
			"Content-Encoding", coding)
	}
	for _, coding := range []string{"", "identity", "gzip", "GZIP", "zstd"} {
		delete(h.threads.files, "acme/t/data")
		a := put("?path=/home/baponi/./data/", coding, compressed(t, strings.ToLower(coding), content)).want(200, "")
		if got := strings.TrimSpace(string(a.body)); got != `{"path":"data","version":5}` ||
			string(h.threads.files["acme/t/data"]) != content {
			t.Errorf("%s: %s, %d bytes", coding, got, len(h.threads.files["acme/t/data"]))
		}
	}
	for _, coding := range []string{"gzip", "zstd"} {
		whole := compressed(t, coding, content)
		for name, body := range map[string]string{"cut off": whole[:len(whole)-3], "plain": content, "empty": ""} {
			if coding == "zstd" && name == "empty" {
				continue // an empty stream is one of no frames; what is unpacked has no end then
			}
			a := put("", coding, body).want(400, "validation_error", "body cannot be decompressed")
			if !a.closed {
				t.Errorf("%s %s: the connection stays open", name, coding)
			}
		}
	}
	for _, coding := range []string{"br", "gzip, gzip", "gzip, zstd"} {
		if a := put("", coding, content).want(415, "unsupported_media_type", "gzip or zstd"); a.header.Get(
			"Accept-Encoding") != "gzip, zstd" {
			t.Errorf("%s: %v", coding, a.header)
		}
	}
	put("?path=a/../b", "", content).want(400, "validation_error", `path must not contain ".."`)
	h.do("PUT", "/v1/threads/a%2Fb/archive", content).want(400, "validation_error", "id must be")
	h.threads.refuse = proto.FieldErrorf("body", `has the entry "x", which is bad`)
	put("", "", content).want(400, "validation_error", `body has the entry "x", which is bad`)
	h.threads.refuse = nil
	full := "the disk is full"
	h.server.DiskFull = func() string { return full }
	put("", "", content).want(503, "disk_full")
	full = ""
	h.server.Memory = 2 * (web.UploadMemory(h.threads.most.Bytes) + 3*web.RequestCost)
	put("", "", strings.Repeat("x", 1<<20)).want(503, "service_unavailable", "too many requests are open")
	put("", "", "little").want(503, "service_unavailable", "too many requests are open") // a step more than there is
	h.server.Memory = 1 << 30
	h.execute(inThread, "Prefer", "respond-async").want(202, "")
	put("", "", content).want(409, "conflict", "thread t is in use by execution")
}

// A body of zeros is unpacked, whatever its encoding, but for one that expands more than gzip can.
func TestExpansion(t *testing.T) {
	h := newHarness(t)
	h.threads.most = proto.Space{Bytes: int64(h.admission.Default.Disk.Home), Files: h.admission.Default.Disk.Inodes}
	put := func(coding, body string) *reply {
		return h.do("PUT", "/v1/threads/t/archive?path=data", body, "Content-Encoding", coding)
	}
	codings := []string{"", "identity", "gzip", "zstd"}
	if testing.Short() { // the others only take longer with the race detector
		codings = codings[2:]
	}
	for _, coding := range codings {
		for _, size := range []int{web.FreeExpansion, 2 * web.FreeExpansion} {
			delete(h.threads.files, "acme/t/data")
			a := put(coding, compressed(t, coding, strings.Repeat("\x00", size)))
			if coding == "zstd" && size > web.FreeExpansion {
				a.want(400, "validation_error", "body", "1032 times its size", "gzip")
				continue
			}
			if a.want(200, ""); len(h.threads.files["acme/t/data"]) != size {
				t.Errorf("%q: %d bytes of %d", coding, len(h.threads.files["acme/t/data"]), size)
			}
		}
	}
	const header = "\x28\xb5\x2f\xfd\x00\x38" // of a frame of zstd with a window of 128 KiB
	const block = "\x02\x00\x10\x00"          // repeats a zero for 128 KiB
	for name, body := range map[string]string{
		"one frame": header + strings.Repeat(block, 8192),
		"frames":    strings.Repeat(header+"\x03\x00\x10\x00", 4096), // each has one block, its last
	} {
		if a := put("zstd", body).want(400, "validation_error", "1032 times its size"); !a.closed {
			t.Errorf("%s: the connection stays open", name)
		}
	}
	h.nothingReserved()
	if held, waiting := h.server.Turns.Counts(); held != 0 || waiting != 0 {
		t.Errorf("%d turns are held", held)
	}
}

// A body may take long, but may not stall, and a client that leaves ends the upload.
func TestUnpackStalls(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		begin := func() (*io.PipeWriter, <-chan *reply) {
			body, in := io.Pipe()
			r := h.request("PUT", "/v1/threads/t/archive", "")
			r.Body, r.ContentLength = body, -1
			return in, h.begin(r)
		}
		in, answer := begin()
		for range 5 {
			_, _ = io.WriteString(in, "part")
			time.Sleep(web.BodyTimeout - time.Second)
		}
		_ = in.Close()
		(<-answer).want(200, "")
		in, answer = begin()
		_, _ = io.WriteString(in, "part")
		(<-answer).want(408, "request_timeout", "body did not arrive within 30s")
		_ = in.Close()
		synctest.Wait()
		h.checkNothingHeld()
	})
}
