package send_test

import (
	"bufio"
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/webhook/guard"
	"github.com/bullpen-run/bullpen/webhook/send"
)

const secretVariable = "BULLPEN_WEBHOOK_SECRET"

// documented returns the named code blocks of docs/guides/webhooks.md, as in "```go receiver.go".
func documented(t *testing.T) map[string]string {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "guides", "webhooks.md"))
	if err != nil {
		t.Fatal(err)
	}
	blocks := map[string]string{}
	for _, m := range regexp.MustCompile("(?ms)^```([a-z]+) *(\\S*)\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
		if m[1] == "sh" || m[1] == "output" {
			continue // package e2e runs these against a server
		}
		if m[2] == "" {
			t.Errorf("the block of %s has no name:\n%s", m[1], m[3])
		}
		blocks[m[2]] = m[3]
	}
	return blocks
}

// program is a documented program, ready to run.
type program struct {
	t    *testing.T
	path string
	args []string // the command
}

// programs writes the documented programs to files, and compiles those in Go.
func programs(t *testing.T) map[string]program {
	dir, all := t.TempDir(), map[string]program{}
	for name, text := range documented(t) {
		p := program{t: t, path: filepath.Join(dir, name)}
		if err := os.WriteFile(p.path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		switch filepath.Ext(name) {
		case ".go":
			p.args = []string{strings.TrimSuffix(p.path, ".go")}
			build := exec.Command("go", "build", "-o", p.args[0], p.path)
			build.Env, build.Dir = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS="), dir
			if out, err := build.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", name, err, out)
			}
		case ".py":
			p.args = []string{"python3", p.path}
		case ".mjs":
			p.args = []string{"node", p.path}
		case ".cgi", ".sh":
			p.args = []string{"bash", p.path}
		default:
			continue
		}
		all[name] = p
	}
	return all
}

// command returns the command that runs the program with secrets.
func (p program) command(secrets string, args ...string) *exec.Cmd {
	cmd := exec.Command(p.args[0], append(p.args[1:], args...)...)
	cmd.Env = append(os.Environ(), secretVariable+"="+secrets, "PORT=0")
	return cmd
}

// receiver returns a handler that passes requests to the program.
func (p program) receiver(secrets string) http.Handler {
	switch filepath.Ext(p.path) {
	case ".cgi":
		bash, err := exec.LookPath(p.args[0])
		if err != nil {
			p.t.Fatal(err)
		}
		return &cgi.Handler{Path: bash, Args: p.args[1:], Env: []string{secretVariable + "=" + secrets}}
	default:
		return p.start(secrets)
	}
}

// start starts a program that listens, and returns a handler that forwards requests to it.
func (p program) start(secrets string) http.Handler {
	p.t.Helper()
	cmd := p.command(secrets)
	out, err := cmd.StdoutPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	url := strings.TrimSpace(strings.TrimPrefix(line, "listening on "))
	if err != nil || !strings.HasPrefix(url, "http://") {
		p.t.Fatalf("the first line of %s is %q: %v", p.path, line, err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req, err := http.NewRequestWithContext(r.Context(), r.Method, url, r.Body)
		if err != nil {
			p.t.Error(err)
			return
		}
		req.Header, req.ContentLength = r.Header, r.ContentLength
		resp, err := client.Do(req)
		if err != nil {
			p.t.Error(err)
			return
		}
		_ = resp.Body.Close()
		w.WriteHeader(resp.StatusCode)
	})
}

// verifier returns a handler for a program that takes the hexadecimal signature and the body.
func (p program) verifier(secrets string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		cmd := p.command(secrets, r.Header.Get("X-Bullpen-Signature"))
		cmd.Stdin = r.Body
		out, err := cmd.CombinedOutput()
		switch text := strings.TrimSpace(string(out)); {
		case err == nil && text == "verified":
			w.WriteHeader(http.StatusNoContent)
		case err != nil && strings.HasSuffix(text, "not verified"):
			w.WriteHeader(http.StatusUnauthorized)
		default:
			p.t.Errorf("%s: %v: %s", p.path, err, text)
		}
	})
}

// post sends a webhook to a handler as the server would, and returns the status. change, if not
// nil, modifies the request on the way.
func post(t *testing.T, to http.Handler, w proto.Webhook, body []byte, change func(r *http.Request)) int {
	t.Helper()
	server := newRelay(t, to, change)
	return postTo(t, server.URL, w, body)
}

// newRelay starts a server that changes requests and passes them to a handler.
func newRelay(t *testing.T, to http.Handler, change func(r *http.Request)) *httptest.Server {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if change != nil {
			change(r)
		}
		to.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return server
}

func postTo(t *testing.T, url string, w proto.Webhook, body []byte) int {
	t.Helper()
	port, err := strconv.Atoi(url[strings.LastIndex(url, ":")+1:])
	if err != nil {
		t.Fatal(err)
	}
	g, err := guard.New(guard.Config{
		AllowCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, AllowHTTP: true,
		AllowPorts: []guard.PortRange{{First: port, Last: port}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Transport().CloseIdleConnections()
	sender := &send.Sender{Guard: g, UserAgent: "bullpen/test"}
	o := sender.Send(t.Context(), send.Post{URL: url + "/cgi", ID: "msg_AbCdEfGhIjKlMnOpQrSt", Body: body, Settings: w})
	if o.Status == 0 {
		t.Errorf("got %+v", o)
	}
	return o.Status
}

// replace replaces old in the body of r. Both have the same length.
func replace(t *testing.T, r *http.Request, old, by string) {
	body, err := io.ReadAll(r.Body)
	if err != nil || !bytes.Contains(body, []byte(old)) || len(old) != len(by) {
		t.Errorf("the body is %q: %v", body, err)
	}
	r.Body = io.NopCloser(bytes.NewReader(bytes.Replace(body, []byte(old), []byte(by), 1)))
}

func with(secret, old string, until time.Time) proto.Webhook {
	w := proto.DefaultWebhook()
	w.Secret, w.OldSecret, w.OldUntil = secret, old, until
	return w
}

// The documented receivers accept what the server sends, and nothing else.
func TestDocumentedReceivers(t *testing.T) {
	all := programs(t)
	secret, other := proto.NewWebhookSecret(), proto.NewWebhookSecret()
	// Longer than a block of SHA-256, and not ASCII.
	phrase := "bättery staple " + strings.Repeat("correct horse ", 6)
	later, before := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
	body := []byte(`{"event":"execution.completed","trace_id":"trc_AbCdEfGhIjKlMnOpQrSt","result":{"stdout":"a\\nb ` +
		`\u0000 ü%s $(id)"}}`)
	const good, bad = http.StatusNoContent, http.StatusUnauthorized
	type attempt struct {
		settings proto.Webhook
		change   func(r *http.Request)
		want     int
	}
	none := time.Time{}
	shared := map[string]attempt{
		"good":         {with(secret, "", none), nil, good},
		"wrong secret": {with(other, "", none), nil, bad},
		"not signed":   {with("", "", none), nil, bad},
		"changed body": {with(secret, "", none), func(r *http.Request) { replace(t, r, "completed", "cancelled") }, bad},
		"empty signatures": {with(secret, "", none), func(r *http.Request) {
			r.Header.Set("Webhook-Signature", "v1,")
			r.Header.Set("X-Bullpen-Signature", "sha256=")
		}, bad},
		"rotated, both known":    {with(phrase, secret, later), nil, good},
		"rotated, old one alone": {with(other, secret, later), nil, good},
		"rotation over":          {with(other, secret, before), nil, bad},
	}
	header := func(name, value string) func(r *http.Request) {
		return func(r *http.Request) { r.Header.Set(name, value) }
	}
	earlier := func(r *http.Request) {
		seconds, err := strconv.ParseInt(r.Header.Get("Webhook-Timestamp"), 10, 64)
		if err != nil {
			t.Error(err)
		}
		r.Header.Set("Webhook-Timestamp", strconv.FormatInt(seconds-1, 10))
	}
	standard := map[string]attempt{
		"changed id":           {with(secret, "", none), header("Webhook-Id", "msg_x"), bad},
		"changed time":         {with(secret, "", none), earlier, bad},
		"malformed time":       {with(secret, "", none), header("Webhook-Timestamp", "a[$(id)]"), bad},
		"no signature":         {with(secret, "", none), func(r *http.Request) { r.Header.Del("Webhook-Signature") }, bad},
		"signature of another": {with(secret, "", none), header("Webhook-Signature", "* v2,AAAA v1,AAAA v1a,AAAA"), bad},
		"characters of the other": {with(secret, "", none), func(r *http.Request) {
			r.Header.Set("Webhook-Signature", r.Header.Get("X-Bullpen-Signature"))
		}, bad},
	}
	for name, p := range all {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p.t = t
			hexadecimal := strings.HasPrefix(name, "verify_hex.")
			start := p.receiver
			if hexadecimal {
				start = p.verifier
			}
			one, two := start(secret), start(phrase+"\n"+secret+"\n")
			for what, a := range shared {
				want := a.want
				// The hexadecimal signature uses the current secret as soon as it is changed.
				if hexadecimal && a.settings.OldSecret != "" {
					want = bad
				}
				to := one
				if a.settings.Secret == phrase {
					to, want = two, good
				}
				if got := post(t, to, a.settings, body, a.change); got != want {
					t.Errorf("%s: %d, want %d", what, got, want)
				}
			}
			for _, known := range []string{phrase, secret} {
				if got := post(t, two, with(known, "", none), body, nil); got != good {
					t.Errorf("signed with one of two: %d", got)
				}
			}
			if got := post(t, two, with(other, "", none), body, nil); got != bad {
				t.Errorf("signed with neither of two: %d", got)
			}
			if hexadecimal {
				return
			}
			for what, a := range standard {
				if got := post(t, one, a.settings, body, a.change); got != a.want {
					t.Errorf("%s: %d, want %d", what, got, a.want)
				}
			}
			// Sent by a server whose clock is in the year 2000: correctly signed, but too old.
			relay := newRelay(t, one, nil)
			synctest.Test(t, func(t *testing.T) {
				if got := postTo(t, relay.URL, with(secret, "", none), body); got != bad {
					t.Errorf("old time: %d", got)
				}
			})
		})
	}
	want := []string{
		"receiver.cgi", "receiver.go", "receiver.mjs", "receiver.py", "verify_hex.go", "verify_hex.mjs", "verify_hex.py",
		"verify_hex.sh",
	}
	for _, name := range want {
		if all[name].args == nil {
			t.Errorf("%s is not in the documentation", name)
		}
	}
	if len(all) != len(want) {
		t.Errorf("there are %d programs, want %d", len(all), len(want))
	}
}

// Without a valid secret no request may be accepted: anybody can sign with an empty key.
func TestDocumentedReceiversNeedSecrets(t *testing.T) {
	body := []byte(`{"event":"execution.completed"}`)
	for name, p := range programs(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p.t = t
			for _, secrets := range []string{"", "\n", "whsec_", "whsec_AAAA", "short"} {
				switch {
				case strings.HasPrefix(name, "verify_hex."):
					mac := hmac.New(sha256.New, []byte(strings.TrimSpace(secrets)))
					mac.Write(body)
					forge := func(r *http.Request) { r.Header.Set("X-Bullpen-Signature", "sha256="+hex.EncodeToString(mac.Sum(nil))) }
					if got := post(t, p.verifier(secrets), proto.DefaultWebhook(), body, forge); got != http.StatusUnauthorized {
						t.Errorf("%q: %d", secrets, got)
					}
				case name == "receiver.cgi":
					if got := post(t, p.receiver(secrets), with(proto.NewWebhookSecret(), "", time.Time{}), body,
						nil); got != http.StatusInternalServerError {
						t.Errorf("%q: %d", secrets, got)
					}
				default:
					if out, err := p.command(secrets).CombinedOutput(); err == nil || bytes.Contains(out, []byte("listening")) {
						t.Errorf("%q: %v: %s", secrets, err, out)
					}
				}
			}
		})
	}
}

// The documented body is the one that is sent.
func TestDocumentedBody(t *testing.T) {
	result := proto.Exited(0)
	result.Stdout, result.DurationMS = "late\n", 2097
	at := time.Date(2026, 11, 21, 0, 40, 23, 955e6, time.UTC)
	rec := &proto.Record{Status: proto.StatusSuccess, Result: &result, CompletedAt: &at}
	rec.TraceID, rec.Metadata = "trc_Dh--7j-V0wlyHpZI_3sX", map[string]string{"order": "4711"}
	want, err := proto.WebhookBody(rec, "", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if err := json.Compact(&got, []byte(documented(t)["body.json"])); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got.Bytes(), want) {
		t.Errorf("the documentation has\n%s\nand sent is\n%s", &got, want)
	}
}
