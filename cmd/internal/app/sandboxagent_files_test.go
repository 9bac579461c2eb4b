package app

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

func testSessionFiles(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/files", `{"agent":"mock","directory":"/home/user/work"}`).want(200, "")
	const in = "&session_id=files"
	octets := []string{"Content-Type", "application/octet-stream"}
	g.do("PUT", "/v1/fs/file?path=a%20b/hello.txt"+in, "hello", octets...).want(200,
		`{"bytesWritten":5,"path":"/home/user/work/a b/hello.txt"}`)
	r := g.do("GET", "/v1/fs/file?path=/home/user/work/a%20b/hello.txt&sessionId=files", "").want(200, "hello")
	if r.header.Get("Content-Type") != "application/octet-stream" || r.header.Get("Content-Length") != "5" {
		t.Errorf("%v", r.header)
	}
	g.do("GET", "/v1/fs/entries?path=."+in, "").want(200,
		`[{"name":"a b","path":"/home/user/work/a b","entryType":"directory","size":0,"modified":"`)
	g.do("GET", "/v1/fs/entries?path=a%20b"+in, "").want(200,
		`[{"name":"hello.txt","path":"/home/user/work/a b/hello.txt","entryType":"file","size":5,"modified":"`)
	g.do("GET", "/v1/fs/stat?path=a%20b"+in, "").
		want(200, `{"path":"/home/user/work/a b","entryType":"directory","size":0,`)
	g.do("GET", "/v1/fs/stat?path=a%20b/hello.txt"+in, "").want(200,
		`{"path":"/home/user/work/a b/hello.txt","entryType":"file","size":5,"modified":"`)
	g.do("GET", "/v1/fs/stat?path=/home/user"+in, "").
		want(200, `{"path":"/home/user","entryType":"directory","size":0}`)
	g.do("GET", "/v1/fs/entries?path=none"+in, "").want(400, "path not found: /home/user/work/none")
	g.do("GET", "/v1/fs/entries?path=a%20b/hello.txt"+in, "").want(400, "path is not a directory: ")
	g.do("GET", "/v1/fs/file?path=a%20b"+in, "").want(400, "path is not a file: ")
	g.do("POST", "/v1/fs/mkdir?path=deep/er"+in, "").want(200, `{"path":"/home/user/work/deep/er"}`)
	g.do("POST", "/v1/fs/mkdir?path=deep/er"+in, "").want(200, "")
	g.do("GET", "/v1/fs/entries?path=deep/er"+in, "").want(200, "[]")
	g.do("PUT", "/v1/fs/file?path=second"+in, "2", octets...).want(200, "")
	move := func(body string) *reply { return g.do("POST", "/v1/fs/move?session_id=files", body) }
	move(`{"from":"second","to":"a b/hello.txt"}`).want(400, "destination already exists: /home/user/work/a b/hello.txt")
	move(`{"from":"second","to":"a b/hello.txt","overwrite":true}`).want(200,
		`{"from":"/home/user/work/second","to":"/home/user/work/a b/hello.txt"}`)
	g.do("GET", "/v1/fs/file?path=a%20b/hello.txt"+in, "").want(200, "2")
	move(`{"from":"none","to":"x"}`).want(400, "path not found: /home/user/work/none")
	move(`{"from":"a b","to":"/tmp/x"}`).want(400, "invalid path")
	move(`{"from":"a b","to":"new/place"}`).want(200, "")
	move(`{"from":"new/place/hello.txt","to":"new","overwrite":true}`).want(400, "destination contains the source")
	g.do("GET", "/v1/fs/file?path=new/place/hello.txt"+in, "").want(200, "2")
	g.do("DELETE", "/v1/fs/entry?path=new"+in, "").want(409, `"urn:sandbox-agent:error:conflict"`)
	g.do("DELETE", "/v1/fs/entry?path=new&recursive=true"+in, "").want(200, `{"path":"/home/user/work/new"}`)
	g.do("DELETE", "/v1/fs/entry?path=new&recursive=true"+in, "").want(400, "path not found")
	g.do("GET", "/v1/fs/stat?path=new"+in, "").want(400, "path not found")
	g.do("DELETE", "/v1/fs/entry?path=/home/user&recursive=true"+in, "").want(400, "is the home itself")
	for _, path := range []string{"/etc/passwd", "/home/user/../x", "/home/user2/x", "../x", "a/../../x", "%00", "/"} {
		for _, route := range []string{
			"GET /v1/fs/file", "PUT /v1/fs/file", "GET /v1/fs/stat", "DELETE /v1/fs/entry", "POST /v1/fs/mkdir",
		} {
			method, at, _ := strings.Cut(route, " ")
			g.do(method, at+"?path="+path+in, "").want(400, "invalid")
		}
	}
	// A body of unknown length is stored, too.
	body, to := io.Pipe()
	go func() { _, _ = io.WriteString(to, "piped"); _ = to.Close() }()
	where := g.base + "/sandbox-agent/v1/fs/file?path=piped" + in
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, where, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+g.key)
	resp, err := g.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	answer, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK || !strings.Contains(string(answer), `"bytesWritten":5`) {
		t.Errorf("%d %s", resp.StatusCode, answer)
	}
	g.do("GET", "/v1/fs/file?path=piped"+in, "").want(200, "piped")
	// Without a session, each key has files of its own.
	g.do("PUT", "/v1/fs/file?path=mine", "mine", octets...).want(200, `{"bytesWritten":4,"path":"/home/user/mine"}`)
	g.do("GET", "/v1/fs/entries", "").want(200, `"name":"mine"`)
	other := g.newKey("acme", "files")
	g.do("GET", "/v1/fs/entries", "", "Authorization", "Bearer "+other).want(200, "[]")
	g.do("GET", "/v1/fs/entries?path=/home/user"+in, "").want(200, `"name":"work"`)
}

// archive returns a tar.
func archive(t *testing.T, entries ...*tar.Header) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		h.Mode = 0o644
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(bytes.Repeat([]byte("x"), int(h.Size))); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func testSessionTars(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/tars", `{"agent":"mock","directory":"work"}`).want(200, "")
	upload := func(path, body string) *reply {
		return g.do("POST", "/v1/fs/upload-batch?session_id=tars&path="+path, body, "Content-Type", "application/x-tar")
	}
	upload("in", archive(t, &tar.Header{Name: "a.txt", Size: 5}, &tar.Header{Name: "nested/b.txt", Size: 3},
		&tar.Header{Name: "./", Typeflag: tar.TypeDir},
		&tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "a.txt"})).want(200,
		`{"paths":["/home/user/work/in/a.txt","/home/user/work/in/nested/b.txt","/home/user/work/in/l"],`+
			`"truncated":false}`)
	g.do("GET", "/v1/fs/file?session_id=tars&path=in/nested/b.txt", "").want(200, "xxx")
	g.do("GET", "/v1/fs/file?session_id=tars&path=in/l", "").want(400, "path is not a file") // links are not followed
	many := make([]*tar.Header, 0, 1030)
	for i := range 1030 {
		many = append(many, &tar.Header{Name: fmt.Sprintf("file_%d.txt", i)})
	}
	var answer struct {
		Paths     []string `json:"paths"`
		Truncated bool     `json:"truncated"`
	}
	upload("many", archive(t, many...)).want(200, "").into(&answer)
	if len(answer.Paths) != 1024 || !answer.Truncated {
		t.Errorf("%d paths, truncated: %t", len(answer.Paths), answer.Truncated)
	}
	for name, h := range map[string]*tar.Header{
		"a parent":          {Name: "../x", Size: 1},
		"an absolute path":  {Name: "/etc/x", Size: 1},
		"a link out":        {Name: "x", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"},
		"a link up":         {Name: "x", Typeflag: tar.TypeSymlink, Linkname: "../../../etc"},
		"a hard link":       {Name: "x", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"},
		"a device":          {Name: "x", Typeflag: tar.TypeBlock, Devmajor: 8},
		"a pipe":            {Name: "x", Typeflag: tar.TypeFifo},
		"the home's parent": {Name: "a/../../../x", Size: 1},
	} {
		if r := upload("bad", archive(t, h)); r.status != 400 || !strings.Contains(r.body, "invalid_request") {
			t.Errorf("%s: %d %s", name, r.status, r.body)
		}
	}
	if r := upload("bad", "no tar"); r.status != 400 {
		t.Errorf("%d %s", r.status, r.body)
	}
	upload("/etc", archive(t, &tar.Header{Name: "x"})).want(400, "invalid path")
	// A bomb: files of more bytes than a home has room for, in a small body.
	var bomb bytes.Buffer
	w := tar.NewWriter(&bomb)
	if err := w.WriteHeader(&tar.Header{Name: "x", Size: 1 << 40, Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	upload("bad", bomb.String()).want(409, "exceeds what the sandbox of this API key has room for")
	g.do("GET", "/v1/fs/stat?session_id=tars&path=bad", "").want(400, "path not found")
}
