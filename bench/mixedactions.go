package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

func bash(code string) asked {
	return asked{Language: proto.Bash, Code: code, Timeout: programTimeout}
}

func (m *mixed) streaming(ctx context.Context, token string) error {
	want := strings.Repeat(token+"\n", 20) //nolint:mnd // as in the program
	return m.expect(ctx, token,
		job{asked: bash("for i in {1..20}; do echo " + token + "; sleep 0.05; done"), stream: true}, outcome{Stdout: want})
}

func (m *mixed) failing(ctx context.Context, token string) error {
	return m.expect(ctx, token, job{asked: bash("echo " + token + " >&2; exit 3")},
		outcome{Stderr: token + "\n", ExitCode: 3})
}

func (m *mixed) large(ctx context.Context, token string) error {
	return m.expect(ctx, token, job{asked: bash(fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x", mixedLarge))},
		outcome{Stdout: strings.Repeat("x", mixedLarge)})
}

func (m *mixed) timeout(ctx context.Context, token string) error {
	j := job{asked: bash("sleep 100"), async: true}
	j.Timeout = 1
	code := "timeout"
	return m.expect(ctx, token, j, outcome{ExitCode: -1, ErrorCode: &code})
}

func (m *mixed) burst(ctx context.Context, token string) error {
	return m.expect(ctx, token, job{asked: bash("echo " + token), async: true, MaxAttempts: 3},
		outcome{Stdout: token + "\n"})
}

func (m *mixed) webhook(ctx context.Context, token string) error {
	j := job{
		asked: asked{Language: proto.Python, Code: fmt.Sprintf("print(%q)", token), Timeout: programTimeout},
		async: true, MaxAttempts: 3, Webhook: m.hookURL,
	}
	o, trace, err := m.execute(ctx, token, j)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.expected[trace] = true
	m.mu.Unlock()
	if !o.equal(outcome{Stdout: token + "\n"}) {
		return fmt.Errorf("execution %s: %s", trace, o)
	}
	return nil
}

func (m *mixed) cancelled(ctx context.Context, token string) error {
	j := job{asked: bash("echo " + token + "; sleep 50"), async: true}
	began := time.Now()
	trace, _, err := m.submit(ctx, token, j)
	if err != nil {
		return err
	}
	if _, err = m.call(ctx, http.MethodGet, "/v1/executions/"+trace+"?wait=1", nil); err != nil {
		return err
	}
	r, err := m.call(ctx, http.MethodPost, "/v1/executions/"+trace+"/cancel", nil)
	if err != nil {
		return err
	}
	var state struct{ Status string }
	if err := r.into(&state); err != nil {
		return fmt.Errorf("cancel %s: %w", trace, err)
	}
	o, err := m.record(ctx, trace)
	if err == nil && o.code() != "cancelled" && !m.lostWithWorker(j, o, began) {
		err = fmt.Errorf("execution %s: %s", trace, o)
	}
	return errors.Join(err, m.once(ctx, token, trace))
}

// useThread returns the thread that is used by a token, locked.
func (m *mixed) useThread(kind, token string) (string, *mixedThread) {
	n, _ := strconv.Atoi(token[1:])
	name := fmt.Sprintf("%s-%d-%d", kind, time.Now().UnixNano()/int64(threadsFor), n%mixedThreads)
	m.mu.Lock()
	if m.threads[name] == nil {
		m.threads[name] = new(mixedThread)
	}
	t := m.threads[name]
	m.mu.Unlock()
	t.mu.Lock()
	return name, t
}

// thread appends a line to a thread's log, which must have those of all earlier executions.
func (m *mixed) thread(ctx context.Context, token string) error {
	name, t := m.useThread("home", token)
	defer t.mu.Unlock()
	j := job{asked: bash("echo " + token +
		" >> log; head -c 50000 /dev/urandom > data; sort log | uniq -d | wc -l; wc -l < log")}
	j.ThreadID = name
	began := time.Now()
	o, trace, err := m.execute(ctx, token, j)
	if err != nil {
		t.lost++
		return err
	}
	if m.lostWithWorker(j, o, began) {
		t.lost++
		return nil
	}
	var twice, lines int
	if _, err := fmt.Sscan(o.Stdout, &twice, &lines); err != nil || twice != 0 || lines <= t.lines ||
		lines > t.lines+t.lost+1 {
		return fmt.Errorf("execution %s in thread %s, with %d lines before: %s", trace, name, t.lines, o)
	}
	t.lost -= lines - t.lines - 1
	t.lines = lines
	return nil
}

// file uploads a file to a thread, has a program change it, and downloads it.
func (m *mixed) file(ctx context.Context, token string) error {
	name, t := m.useThread("files", token)
	defer t.mu.Unlock()
	content := []byte(strings.Repeat(token, 10_000)) //nolint:mnd // a few blocks
	if _, err := m.signed(ctx, "upload_url", name, http.MethodPut, content); err != nil {
		return fmt.Errorf("upload to thread %s: %w", name, err)
	}
	j := job{asked: bash("echo >> upload; wc -c < upload")}
	j.ThreadID = name
	began := time.Now()
	o, trace, err := m.execute(ctx, token, j)
	if err != nil || m.lostWithWorker(j, o, began) {
		return err
	}
	if want := fmt.Sprintln(len(content) + 1); o.Stdout != want {
		return fmt.Errorf("execution %s in thread %s: %s", trace, name, o)
	}
	got, err := m.signed(ctx, "download_url", name, http.MethodGet, nil)
	if err == nil && string(got) != string(content)+"\n" {
		err = fmt.Errorf("%d bytes, not those of the program", len(got))
	}
	if err != nil {
		return fmt.Errorf("download from thread %s: %w", name, err)
	}
	return nil
}

// signed gets a signed URL for a file and uses it. Both are repeated if the gateway that made the
// URL no longer answers.
func (m *mixed) signed(ctx context.Context, route, thread, method string, content []byte) ([]byte, error) {
	ask := map[string]any{"source": "thread", "id": thread, "path": "upload"}
	if method == http.MethodPut {
		ask["content_length"] = len(content)
	}
	body, err := json.Marshal(ask)
	if err != nil {
		return nil, err
	}
	for {
		r, err := m.call(ctx, http.MethodPost, "/v1/files/"+route, body)
		if err != nil {
			return nil, err
		}
		var s struct {
			URL     string
			Headers []struct{ Name, Value string }
		}
		if err := r.into(&s); err != nil {
			return nil, err
		}
		var headers []string
		for _, h := range s.Headers {
			headers = append(headers, h.Name, h.Value)
		}
		r, err = m.callOnce(ctx, method, s.URL, content, headers...)
		switch {
		case err == nil && r.status == http.StatusOK:
			return r.body, nil
		case err == nil && r.status != http.StatusServiceUnavailable:
			return nil, fmt.Errorf("HTTP %d: %.300s", r.status, r.body)
		case ctx.Err() != nil:
			return nil, err
		}
	}
}

// batch runs a batch and checks the output of each item.
func (m *mixed) batch(ctx context.Context, token string) error {
	var lines bytes.Buffer
	_, _ = fmt.Fprintf(&lines, `{"batch":{"request":{"language":"bash","max_attempts":3,"code":"echo %s-$1"}}}`+
		"\n", token)
	for i := range mixedBatch {
		_, _ = fmt.Fprintf(&lines, `{"args":["%d"]}`+"\n", i)
	}
	r, err := m.call(ctx, http.MethodPost, "/v1/batches", lines.Bytes(), "Content-Type", "application/jsonl",
		"Idempotency-Key", token)
	if err != nil {
		return err
	}
	var b struct {
		ID          string
		CompletedAt *time.Time `json:"completed_at"`
	}
	for err = r.into(&b); err == nil && b.CompletedAt == nil; {
		time.Sleep(mixedPause)
		if r, err = m.call(ctx, http.MethodGet, "/v1/batches/"+b.ID, nil); err == nil {
			err = r.into(&b)
		}
	}
	if err != nil {
		return fmt.Errorf("batch %s: %w", b.ID, err)
	}
	if r, err = m.call(ctx, http.MethodGet, "/v1/batches/"+b.ID+"/results", nil); err != nil {
		return err
	}
	seen := map[int]bool{}
	for line := range bytes.Lines(r.body) {
		var item struct {
			outcome
			Index int
		}
		if err := json.Unmarshal(line, &item); err != nil || seen[item.Index] ||
			item.Stdout != fmt.Sprintf("%s-%d\n", token, item.Index) {
			return fmt.Errorf("batch %s: result %.300s", b.ID, line)
		}
		seen[item.Index] = true
	}
	if len(seen) != mixedBatch {
		return fmt.Errorf("batch %s: %d results of %d", b.ID, len(seen), mixedBatch)
	}
	m.mu.Lock()
	m.executions += mixedBatch
	m.mu.Unlock()
	return nil
}
