package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/webhook/guard"
	"github.com/bullpen-run/bullpen/webhook/send"
)

// listening is a running `bullpen webhook listen`.
type listening struct {
	t      *testing.T
	cmd    *exec.Cmd
	out    *bufio.Reader
	intro  string // the instructions on standard error
	url    string
	errors *bufio.Reader
}

// listen starts the command and waits until it listens.
func listen(t *testing.T, secrets string, args ...string) *listening {
	t.Helper()
	program, err := build()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, append([]string{"webhook", "listen", "--port", "0"}, args...)...)
	cmd.Env = append(os.Environ(), "TZ=UTC", secretVariable+"="+secrets)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	errs, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	l := &listening{t: t, cmd: cmd, out: bufio.NewReader(out), errors: bufio.NewReader(errs)}
	first, err := l.errors.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	l.intro = first
	for !strings.Contains(l.intro, "bullpen key webhook set ") {
		l.intro += l.errorLine()
	}
	l.url = regexp.MustCompile(`http://\S+/`).FindString(first)
	t.Cleanup(func() {
		if l.cmd.ProcessState == nil {
			l.stop()
		}
	})
	return l
}

// errorLine reads a line of standard error.
func (l *listening) errorLine() string {
	l.t.Helper()
	line, err := l.errors.ReadString('\n')
	if err != nil {
		l.t.Fatal(err)
	}
	return line
}

// stop interrupts the command and returns the rest of its standard output.
func (l *listening) stop() string {
	l.t.Helper()
	if err := l.cmd.Process.Signal(syscall.SIGINT); err != nil {
		l.t.Fatal(err)
	}
	rest, err := io.ReadAll(l.out)
	if err != nil {
		l.t.Error(err)
	}
	if _, err := io.Copy(io.Discard, l.errors); err != nil {
		l.t.Error(err)
	}
	if err := l.cmd.Wait(); err != nil {
		l.t.Errorf("after SIGINT: %v", err)
	}
	return string(rest)
}

// send sends a webhook as a server does.
func (l *listening) send(id string, body []byte, w proto.Webhook) send.Outcome {
	l.t.Helper()
	u, err := url.Parse(l.url)
	if err != nil {
		l.t.Fatal(err)
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		l.t.Fatal(err)
	}
	g, err := guard.New(guard.Config{
		AllowCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, AllowHTTP: true,
		AllowPorts: []guard.PortRange{{First: port, Last: port}},
	})
	if err != nil {
		l.t.Fatal(err)
	}
	defer g.Transport().CloseIdleConnections()
	sender := &send.Sender{Guard: g, UserAgent: "bullpen/test"}
	o := sender.Send(l.t.Context(), send.Post{URL: l.url, ID: id, Body: body, Settings: w})
	if o.Status == 0 {
		l.t.Fatalf("sent to %s: %+v", l.url, o)
	}
	return o
}

// next reads a line of --json.
func (l *listening) next() (h received) {
	l.t.Helper()
	line, err := l.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &h)
	}
	if err != nil {
		l.t.Fatalf("%q: %v", line, err)
	}
	for _, r := range strings.TrimSuffix(string(line), "\n") {
		if !unicode.IsPrint(r) {
			l.t.Errorf("the line has %q: %q", r, line)
		}
	}
	return h
}

func signedBy(secret string) proto.Webhook {
	w := proto.DefaultWebhook()
	w.Secret = secret
	return w
}

// controls has escape sequences and other characters that change what a terminal shows.
const controls = "\x1b[31mred\x1b]0;title\x07\x1b[2J\u009b31m\rover\b\x7f\u202eback\u2028"

func hookJSON(t *testing.T, stdout, stderr string) []byte {
	t.Helper()
	r := proto.Exited(3)
	r.Stdout, r.Stderr, r.DurationMS, r.StderrTruncated = stdout, stderr, 1234, true
	at := time.Now()
	rec := &proto.Record{Status: proto.StatusFailed, Result: &r, CompletedAt: &at}
	rec.TraceID, rec.Metadata = "trc_AbCdEfGhIjKlMnOpQrSt", map[string]string{"order": "4711" + controls}
	body, err := proto.WebhookBody(rec, "https://bullpen.example/v1/executions/x", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	return body
}

func TestListenPretty(t *testing.T) {
	secret := proto.NewWebhookSecret()
	l := listen(t, secret, "--answer", "202")
	port := regexp.MustCompile(`:(\d+)/`).FindStringSubmatch(l.url)[1]
	for _, want := range []string{
		"answering 202", "bullpen serve --webhook-allow-http --webhook-allow-cidrs 127.0.0.0/8 --webhook-allow-ports " +
			port + "\n",
		"bullpen key webhook set http://127.0.0.1:" + port + "/\n",
	} {
		if !strings.Contains(l.intro, want) {
			t.Errorf("the instructions do not contain %q: %q", want, l.intro)
		}
	}
	body := hookJSON(t, strings.Repeat("a line\n", 12)+"no end", "\tE: "+controls+"\n")
	for range 2 {
		if o := l.send("msg_1", body, signedBy(secret)); o.Status != 202 {
			t.Errorf("got %+v", o)
		}
	}
	l.send("msg_2"+controls[len(controls)-3:], []byte("not JSON"+controls), signedBy(proto.NewWebhookSecret()))
	text := l.stop()
	if strings.Contains(l.intro+text, secret) {
		t.Error("the output has the secret")
	}
	for _, r := range text {
		if !unicode.IsPrint(r) && r != '\n' {
			t.Errorf("it prints %q", r)
		}
	}
	text = regexp.MustCompile(`(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC`).ReplaceAllString(text, "TIME")
	const odd = "\ufffd[31mred\ufffd]0;title\ufffd\ufffd[2J\ufffd31m\ufffdover\ufffd\ufffd\ufffdback\ufffd"
	one := `  trace       trc_AbCdEfGhIjKlMnOpQrSt
  status      failed
  exit code   3
  duration    1.234s
  stdout      a line
` + strings.Repeat("              a line\n", 9) + `              … 3 more lines
  stderr          E: ` + odd + `
              … output is truncated
  metadata    order = 4711` + odd + `

`
	want := "TIME  execution.completed, verified\n  webhook id  msg_1\n" + one +
		"TIME  execution.completed, verified\n  webhook id  msg_1\n  duplicate   this webhook id arrived 2 times\n" + one +
		"TIME  no event, NOT VERIFIED\n  problem     Webhook-Signature: " + mismatch +
		"\n  problem     X-Baponi-Signature: " + mismatch +
		"\n  problem     X-Bullpen-Signature: " + mismatch +
		"\n  problem     invalid body: invalid character 'o' in literal null (expecting 'u')\n  webhook id  msg_2\ufffd\n\n"
	if text != want {
		t.Errorf("got:\n%s\nwant:\n%s", text, want)
	}
}

func TestListenJSON(t *testing.T) {
	secret, old := proto.NewWebhookSecret(), "correct horse battery staple"
	l := listen(t, secret, "--json", "--answer", "503")
	body := hookJSON(t, "out"+controls+"\U000e0001", "")
	rotated := signedBy(secret)
	rotated.OldSecret, rotated.OldUntil = old, time.Now().Add(time.Hour)
	unsignedHook := proto.DefaultWebhook()
	mine := signedBy(secret)
	mine.SignatureHeaders = []string{"X-Mine"}
	standard, first, second := "Webhook-Signature: ", "X-Baponi-Signature: ", "X-Bullpen-Signature: "
	for i, test := range []struct {
		settings proto.Webhook
		problems []string
	}{
		{signedBy(secret), nil},
		{rotated, nil},
		{signedBy(old), []string{standard + mismatch, first + mismatch, second + mismatch}},
		{unsignedHook, []string{standard + noSignature, first + noSignature, second + noSignature}},
		{mine, []string{first + noSignature, second + noSignature}},
	} {
		id := "msg_" + strconv.Itoa(i)
		for times := 1; times <= 2; times++ {
			if o := l.send(id, body, test.settings); o.Status != 503 {
				t.Errorf("got %+v", o)
			}
			h := l.next()
			if h.Verified != (test.problems == nil) || strings.Join(h.Problems, "|") != strings.Join(test.problems, "|") {
				t.Errorf("%s: %v %q, want %q", id, h.Verified, h.Problems, test.problems)
			}
			if h.WebhookID != id || h.Times != times || h.Answer != 503 || h.Event != "execution.completed" ||
				h.TraceID != "trc_AbCdEfGhIjKlMnOpQrSt" ||
				h.Status != "failed" || h.Duration == nil || *h.Duration != 1234 {
				t.Errorf("got %+v", h)
			}
			var hook hookBody
			if err := json.Unmarshal(*h.Body, &hook); err != nil || hook.Result.Stdout != "out"+controls+"\U000e0001" {
				t.Errorf("the body is %s: %v", *h.Body, err)
			}
		}
	}
	l.send("msg_x", []byte("{"), signedBy(secret))
	if h := l.next(); !h.Verified || h.Body != nil || len(h.Problems) != 1 {
		t.Errorf("got %+v", h)
	}
}

// During a rotation, a receiver with the old secret verifies the signature of Standard Webhooks,
// one with both secrets verifies all.
func TestListenRotation(t *testing.T) {
	secret, old := proto.NewWebhookSecret(), proto.NewWebhookSecret()
	rotated := signedBy(secret)
	rotated.OldSecret, rotated.OldUntil = old, time.Now().Add(time.Hour)
	file := filepath.Join(t.TempDir(), "secrets")
	if err := os.WriteFile(file, []byte(secret+"\r\n\n"+old+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	both := listen(t, "", "--json", "--secret-file", file)
	for _, w := range []proto.Webhook{rotated, signedBy(old), signedBy(secret)} {
		both.send("msg_1", []byte("{}"), w)
		if h := both.next(); !h.Verified {
			t.Errorf("got %+v", h)
		}
	}
	late := listen(t, old, "--json", "--signature-headers", "")
	late.send("msg_1", []byte("{}"), rotated)
	if h := late.next(); !h.Verified {
		t.Errorf("got %+v", h)
	}
}

func TestListenWithoutSecret(t *testing.T) {
	l := listen(t, "", "--json")
	intro := l.intro
	for !strings.Contains(intro, "--secret-file webhook.secret") {
		intro += l.errorLine()
	}
	l.send("msg_1", []byte("{}"), signedBy(proto.NewWebhookSecret()))
	if h := l.next(); h.Verified || h.Problems[0] != "no secret is configured here" {
		t.Errorf("got %+v", h)
	}
}

// Other requests are refused and reported.
func TestListenRefuses(t *testing.T) {
	l := listen(t, proto.NewWebhookSecret())
	wantError := func(want string) {
		t.Helper()
		line := l.errorLine()
		for line == "\n" {
			line = l.errorLine()
		}
		if line != want {
			t.Errorf("standard error has %q, want %q", line, want)
		}
	}
	resp, err := http.Get(l.url)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("GET: %s", resp.Status)
	}
	wantError("bullpen: refused a GET request: webhooks are POST requests\n")
	if o := l.send("msg_1", bytes.Repeat([]byte("a"), maxHookBytes+1),
		proto.DefaultWebhook()); o.Status != http.StatusRequestEntityTooLarge {
		t.Errorf("got %+v", o)
	}
	wantError("bullpen: refused a webhook larger than 16 MiB\n")
	if text := l.stop(); text != "" {
		t.Errorf("it prints %q", text)
	}
}

// The timestamp of a webhook may differ from the receiver's clock by five minutes.
func TestWebhookTolerance(t *testing.T) {
	const secret = "correct horse battery staple"
	now := time.Unix(946684800, 0)
	h := http.Header{"Webhook-Id": {"msg_1"}, "Webhook-Timestamp": {"946684800"}}
	h.Set("Webhook-Signature", "v1a,x v1,AAAA v1,N5uyiQ/24s93uS7st8SWsmFcFwQg20bLJvWG4Dgv/ds=")
	for after, want := range map[time.Duration]bool{
		0: true, 5 * time.Minute: true, -5 * time.Minute: true, 5*time.Minute + time.Second: false,
		-5*time.Minute - time.Second: false,
	} {
		problems := verifyWebhook(h, []byte("{}"), []string{secret}, nil, now.Add(after))
		if (len(problems) == 0) != want {
			t.Errorf("after %s: %q", after, problems)
		}
	}
	for _, timestamp := range []string{"", "now", "1e9", "99999999999999999999"} {
		h.Set("Webhook-Timestamp", timestamp)
		if verifyWebhook(h, []byte("{}"), []string{secret}, nil, now) == nil {
			t.Errorf("the time %q is accepted", timestamp)
		}
	}
}
