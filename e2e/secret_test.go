package e2e

import (
	"bytes"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto"
)

// testSecrets gives programs secrets, and looks for them wherever bullpen stores, logs or traces
// something.
func testSecrets(t *testing.T, p *programs, in topology) {
	const variable, file, own = "canary-variable-5f1c", "canary-file-a90e", "canary-of-another-77"
	hooks := startReceiver(t)
	sys := newSystem(t, p.exportingSpans(), in, 2, append(hooks.flags, "--log-level", "debug")...)
	a := sys.api
	put := func(path, value string) {
		t.Helper()
		if r := a.do(http.MethodPut, "/v1/admin/secrets/"+path, request{"value": value}); r.status != http.StatusOK ||
			strings.Contains(string(r.body), value) {
			t.Fatalf("store a secret: %s", r)
		}
	}
	put("TOKEN?org=acme", variable)
	put("cert?org=acme", file)
	put("TOKEN?org=other", own)
	a.newProfile("with-secret", request{"secrets": []string{"cert"}})
	key := func(org string) *api {
		t.Helper()
		r := a.do(http.MethodPost, "/v1/admin/keys", request{
			"name": "n", "org": org, "plan": "pro", "profile": "with-secret", "secrets": []string{"TOKEN=GH_TOKEN!"},
			"scopes": []string{"execute", "read", "admin"}, // admin for the webhook
		})
		var made struct{ Key string }
		r.into(t, &made)
		return a.with(made.Key)
	}
	acme := key("acme")
	code := "echo ${#GH_TOKEN} $GH_TOKEN; cd /run/bullpen/job/secrets; ls; wc -c < cert; (echo x > cert) 2> /dev/null " +
		"|| echo read-only"
	want := "20 ***\ncert\n16\nread-only\n"
	acme.ended(acme.submit(bash(code))).succeeded(t, want)
	signing := acme.settings(http.MethodPut, "/v1/webhook", request{"url": hooks.url + "/200"})
	last := acme.submit(python(
		"import os; print(os.environ['GH_TOKEN'][:6], open('/run/bullpen/job/secrets/cert').read()[:6])"))
	acme.ended(last).succeeded(t, "canary canary\n")
	acme.delivered(last).check(t, proto.DeliveryDelivered, 1)
	if r := acme.do(http.MethodPost, executePath,
		bash(code).and("env_vars", request{"GH_TOKEN": "mine"})); r.status != http.StatusBadRequest {
		t.Errorf("a request that sets a secret: %s", r)
	}
	// Another organisation has its own secret of the same name, and lacks the other one.
	if r := key("other").do(http.MethodPost, executePath, bash(code)); r.status != http.StatusConflict ||
		!strings.Contains(string(r.body), "cert") {
		t.Errorf("a missing secret: %s", r)
	}
	backup := filepath.Join(t.TempDir(), "backup")
	if exit, output := p.run(t, []string{"BULLPEN_URL=" + sys.base, "BULLPEN_API_KEY=" + sys.key}, "backup",
		backup); exit != 0 {
		t.Fatal(output)
	}
	dirs, stored := []string{sys.data}, decompressed(t, backup)
	if in.separate {
		dirs = append(dirs, sys.broker.store)
	}
	if !bytes.Contains(stored, []byte("with-secret")) {
		t.Errorf("the backup, of %d bytes without compression, lacks the sandbox profile", len(stored))
	}
	sys.exported(t, last)
	for _, canary := range []string{variable, file, own, strings.TrimPrefix(signing, "whsec_"), acme.key} {
		if bytes.Contains(stored, []byte(canary)) {
			t.Errorf("%s is in the backup", canary)
		}
		for _, dir := range dirs {
			if found := filesWith(t, dir, canary); found != nil {
				t.Errorf("%s is in %s", canary, found)
			}
		}
		for _, proc := range []*process{sys.front, sys.worker} {
			if strings.Contains(proc.text(t), canary) {
				t.Errorf("%s is in a log or a span", canary)
			}
		}
	}
}

// decompressed returns the content of a file that is compressed with zstd.
func decompressed(t *testing.T, name string) []byte {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	r, err := zstd.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	content, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// filesWith returns the files below a directory that contain a text.
func filesWith(t *testing.T, dir, text string) (found []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil //nolint:nilerr // the file was removed meanwhile
		}
		if content, err := os.ReadFile(path); err == nil && bytes.Contains(content, []byte(text)) {
			found = append(found, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}
