package gateway

import (
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// download asks for a signed URL with more members in the request, and returns its path and query.
func (h *harness) download(path, more string) string {
	h.t.Helper()
	quoted, err := json.Marshal(path)
	if err != nil {
		h.t.Fatal(err)
	}
	body := fmt.Sprintf(`{"source":"thread","id":"t","path":%s%s}`, quoted, more)
	u, err := url.Parse(h.do("POST", "/v1/files/download_url", body).want(200, "").json()["url"].(string))
	if err != nil {
		h.t.Fatal(err)
	}
	return u.RequestURI()
}

// A file is shown as what its name says, or as text, or it is saved. Whatever is in it, a browser
// runs nothing, loads nothing, and lets only pages of this server frame it.
func TestInlineContent(t *testing.T) {
	h := newHarness(t)
	const script = `<script>fetch("/v1/session")</script>`
	const svg = `<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>alert(1)</script></svg>`
	text, html := "text/plain; charset=utf-8", "text/html; charset=utf-8"
	for name, f := range map[string]struct{ content, want string }{
		"x.html":              {script, html},
		"X.HTM":               {script, html},
		"x.svg":               {svg, "image/svg+xml"},
		"x.png":               {script, "image/png"},
		"x.jpeg":              {"", "image/jpeg"},
		"x.pdf":               {"%PDF-1.7\n1 0 obj<</S/JavaScript/JS(app.alert(1))>>", "application/pdf"},
		"x.json":              {`{"a":1}`, text},
		"x.csv":               {"=cmd()", "text/csv; charset=utf-8"},
		"x.mp4":               {"m\x00\x01", "video/mp4"},
		"x.mp3":               {"m\x00\x01", "audio/mpeg"},
		"x.xhtml":             {script, text},
		"x.js":                {"alert(1)", text},
		"x.html.bak":          {script, text},
		"README":              {"Grüße\x1b[1m", text},
		"empty":               {"", text},
		"cut":                 {strings.Repeat("a", web.SniffBytes-1) + "ü" + "\x00", text},
		"x.exe":               {"MZ\x00\x01", ""},
		"latin1":              {"Gr\xfc\xdfe", ""},
		"evil\u202Egnp.html":  {script, html},
		"a\r\nSet-Cookie: a":  {script, text},
		`q"uo\te;filename=.x`: {script, text},
		"100%41%22.html":      {script, html},
		"überall":             {script, text},
	} {
		t.Run(fmt.Sprintf("%q", name), func(t *testing.T) {
			h := h.in(t)
			h.threads.mu.Lock()
			h.threads.files["acme/t/"+name] = []byte(f.content)
			h.threads.mu.Unlock()
			at := h.download(name, `,"inline":true`)
			for _, asked := range []string{"", "bytes=0-1"} {
				a := h.get(at, "Range", asked)
				if want := map[bool]int{true: 200, false: 206}[asked == "" || f.content == ""]; a.status != want {
					t.Fatalf("status %d, want %d: %s", a.status, want, a.body)
				}
				disposition, p, err := mime.ParseMediaType(a.header.Get("Content-Disposition"))
				if err != nil || strings.ContainsAny(p["filename"], "\r\n\"\\\u202E") || len(p) != 1 {
					t.Errorf("disposition %q: %q, %v", a.header.Get("Content-Disposition"), p, err)
				}
				want := map[string]string{
					"Content-Type": f.want, "Content-Security-Policy": web.InlinePolicy, "X-Content-Type-Options": "nosniff",
					"Cross-Origin-Resource-Policy": "same-origin", "Referrer-Policy": "no-referrer", "X-Frame-Options": "SAMEORIGIN",
				}
				switch kind, _, _ := strings.Cut(f.want, "/"); {
				case f.want == "":
					want = map[string]string{
						"Content-Type": "application/octet-stream", "Content-Security-Policy": web.ContentPolicy,
						"X-Content-Type-Options": "nosniff",
					}
				case kind == "audio" || kind == "video":
					want["Content-Security-Policy"] += "; media-src 'self'"
				}
				for header, value := range want {
					if got := a.header.Values(header); len(got) != 1 || got[0] != value {
						t.Errorf("%s %q, want %q", header, got, value)
					}
				}
				if (disposition == "inline") != (f.want != "") || a.header.Get("Set-Cookie") != "" {
					t.Errorf("%s, %v", disposition, a.header)
				}
			}
			// Without inline, the same file is saved.
			saved := h.get(h.download(name, "")).want(200, "")
			if !strings.HasPrefix(saved.header.Get("Content-Disposition"), "attachment; ") ||
				saved.header.Get("Content-Type") != "application/octet-stream" ||
				saved.header.Get("Content-Security-Policy") != web.ContentPolicy || string(saved.body) != f.content {
				t.Errorf("saved: %v, %q", saved.header, saved.body)
			}
		})
	}
	head := h.do("HEAD", h.download("x.svg", `,"inline":true`), "", "Authorization", "").want(200, "")
	if head.header.Get("Content-Type") != "image/svg+xml" || len(head.body) != 0 {
		t.Errorf("HEAD: %v", head.header)
	}
	for _, word := range []string{"script-src", "allow-", "http", "'self' ", "*"} {
		if strings.Contains(web.InlinePolicy, word) {
			t.Errorf("the policy has %s", word)
		}
	}
	h.do("POST", "/v1/files/download_url", `{"source":"thread","id":"t","path":"x.svg","inline":1}`).want(
		400, "validation_error", "inline")
}

// The files of an earlier version are listed and downloaded, in ranges and to show too.
func TestFilesOfVersions(t *testing.T) {
	h := newHarness(t)
	h.do("PUT", "/v1/admin/secrets/KEYS", `{"value":"value"}`).want(200, "")
	h.do("POST", "/v1/admin/connections", `{"slug":"work","kind":"volume","bytes":"1GiB"}`).want(201, "")
	h.do("POST", "/v1/admin/connections", bucket).want(201, "")
	h.mount("key_1", proto.KeyMount{Connection: "work", Prefix: "part"}, proto.KeyMount{Connection: "data"})
	for at, content := range map[string]string{
		"acme/t/a.txt": "now", "acme/t@1/a.txt": "first", "acme/t@1/gone.html": "<p>", "acme/volume=work/part/a": "v now",
		"acme/volume=work@2/part/a": "v second", "other/t@3/a.txt": "theirs",
	} {
		h.threads.files[at] = []byte(content)
	}
	h.threads.files["acme/volume=work@2/part"] = nil // a directory
	list := func(rest string) string {
		var names []string
		for _, f := range h.do("POST", "/v1/files/list", rest).want(200, "").json()["files"].([]any) {
			names = append(names, f.(map[string]any)["path"].(string))
		}
		return strings.Join(names, " ")
	}
	for body, want := range map[string]string{
		`{"source":"thread","id":"t"}`:                                               "a.txt",
		`{"source":"thread","id":"t","version":1}`:                                   "a.txt gone.html",
		`{"source":"thread","id":"t","version":1,"path":"gone.html"}`:                "gone.html",
		`{"source":"volume","id":"work","version":2,"recursive":true,"path":"part"}`: "part/a",
	} {
		if got := list(body); got != want {
			t.Errorf("%s: %s, want %s", body, got, want)
		}
	}
	if a := h.get(h.download("a.txt", `,"version":1`), "Range", "bytes=1-2").want(206, ""); string(a.body) != "ir" {
		t.Errorf("range %q", a.body)
	}
	if a := h.get(h.download("a.txt", "")).want(200, ""); string(a.body) != "now" {
		t.Errorf("newest %q", a.body)
	}
	if a := h.get(h.download("gone.html", `,"version":1,"inline":true`)).want(200, ""); string(a.body) != "<p>" ||
		!strings.HasPrefix(a.header.Get("Content-Type"), "text/html") {
		t.Errorf("inline %q, %v", a.body, a.header)
	}
	volume := h.do("POST", "/v1/files/download_url", `{"source":"volume","id":"work","path":"part/a","version":2}`).want(
		200, "").json()["url"].(string)
	if a := h.get(strings.TrimPrefix(volume, h.http.URL)).want(200, ""); string(a.body) != "v second" {
		t.Errorf("volume %q", a.body)
	}
	for _, route := range []string{"list", "download_url"} {
		path := "/v1/files/" + route
		h.do("POST", path, `{"source":"thread","id":"t","path":"a.txt","version":3}`).want(404, "not_found", "no version 3")
		h.do("POST", path, `{"source":"thread","id":"none","path":"a.txt","version":1}`).want(404, "not_found", "version 1")
		h.do("POST", path, `{"source":"volume","id":"work","path":"part/a","version":3}`).want(
			404, "not_found", "work", "version 3")
		h.do("POST", path, `{"source":"volume","id":"data","path":"a","version":1}`).want(400, "validation_error", "version")
		for _, version := range []string{"0", "-1", "1.5", `"1"`} {
			h.do("POST", path, `{"source":"thread","id":"t","path":"a.txt","version":`+version+`}`).want(
				400, "validation_error", "version")
		}
	}
	h.do("POST", "/v1/files/download_url", `{"source":"thread","id":"t","path":"b","version":1}`).want(404, "not_found")
	// A version that leaves the history takes its URLs with it.
	at := h.download("a.txt", `,"version":1`)
	delete(h.threads.files, "acme/t@1/a.txt")
	delete(h.threads.files, "acme/t@1/gone.html")
	h.get(at).want(404, "not_found", "no version 1")
}

// No answer of any route can act as a page of this server, whatever tenants have put into it.
func TestNoAnswerActsAsPage(t *testing.T) {
	h, fill := newAccessHarness(t)
	h.sandboxes.answers(t, func(w http.ResponseWriter, _ *http.Request) { // a guest that the tenant has replaced
		for name, value := range map[string]string{
			"Content-Type": "text/html", "Content-Security-Policy": "script-src *", "Set-Cookie": "bullpen_session=x",
			"X-Content-Type-Options": "sniff", "Content-Disposition": "inline", "Access-Control-Allow-Origin": "*",
		} {
			w.Header().Set(name, value)
		}
		_, _ = w.Write([]byte("<script>alert(1)</script>"))
	})
	table := accessTable()
	for _, route := range api.Routes() {
		row, ok := table[route.ID]
		if !ok {
			continue // a page of this server's own, or a signed URL
		}
		path := row.path
		if path == "" {
			path = route.Path
		}
		t.Run(route.ID, func(t *testing.T) {
			// Only the head is read, since some answers do not end.
			resp, err := h.client.Do(h.in(t).request(route.Method, fill.Replace(path), row.body))
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close() // there may be more
			policy, sniffing := resp.Header.Values("Content-Security-Policy"), resp.Header.Values("X-Content-Type-Options")
			if len(policy) != 1 || policy[0] != web.ContentPolicy || len(sniffing) != 1 || sniffing[0] != "nosniff" ||
				resp.Header.Get("Set-Cookie") != "" {
				t.Errorf("%s: %v", resp.Status, resp.Header)
			}
		})
	}
}
