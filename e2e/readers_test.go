package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// testIdleStreams opens many streams of a program that prints nothing. It checks their cost and
// that all of them end with the program's result.
func testIdleStreams(t *testing.T, p *programs) {
	const (
		streams = 1000
		most    = 150 * proto.MiB // half more than expected, because garbage collection lags
	)
	sys, h := newSystem(t, p, topology{}, 1), newHold()
	id := sys.submit(bash("sleep " + h.seconds))
	h.reached(t, 1)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	before := sys.front.status(t, "VmRSS")
	var readers [streams]*bufio.Reader
	callers(streams, func(i int) {
		kind := []string{ndjson, sse}[i%2]
		r, err := sys.open(ctx, http.MethodGet, execution(id, "output"), nil, accept, kind)
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { _ = r.Body.Close() })
		readers[i] = bufio.NewReader(r.Body)
		for line := ""; err == nil && !strings.Contains(line, `"type":"status"`); {
			line, err = readers[i].ReadString('\n')
		}
		if err != nil {
			t.Errorf("stream %d: %s, %v", i, r.Status, err)
		}
	})
	if t.Failed() {
		return
	}
	after := sys.front.status(t, "VmRSS")
	t.Logf("%d idle streams use %d MiB, of %d in all", streams, (after-before)/proto.MiB, after/proto.MiB)
	if after-before > most {
		t.Errorf("%d idle streams use %s", streams, after-before)
	}
	h.release(t)
	callers(streams, func(i int) {
		rest, err := io.ReadAll(readers[i])
		if err != nil || !strings.Contains(string(rest), `"type":"result"`) {
			t.Errorf("stream %d ends with %q, %v", i, short(string(rest)), err)
		}
	})
}

// testSlowReader has a program print a lot while one follower reads nothing. Neither the program
// nor another reader may wait for it. The server closes a stalled connection only after a minute;
// if the program waited that long, it would time out.
func testSlowReader(t *testing.T, p *programs) {
	const bytes, line, timeout = 20_000_000, 1000, 45
	sys := newSystem(t, p, topology{}, 2)
	gate := newHold()
	id := sys.submit(bash(fmt.Sprintf("sleep %s\nyes %s | head -c %d\n", gate.seconds, strings.Repeat("x", line-1),
		bytes)).and("timeout", timeout))
	gate.reached(t, 1)
	slow := sys.connectOutput(t, id)
	fast := sys.follow(id, 0)
	head, err := slow.ReadString('\n') // the response has started
	if err != nil || !strings.Contains(head, "200") {
		t.Fatalf("%q, %v", head, err)
	}
	gate.release(t)

	rec := sys.ended(id)
	if rec.Status != "success" || rec.Stdout == nil {
		t.Fatalf("got %s", rec)
	}
	stdout, last := printed(t, fast.answer(t).events(t))
	if !*last.OutputTruncated && stdout != bytes {
		t.Errorf("the other reader got %d bytes of %d", stdout, bytes)
	}
	// The slow reader gets the rest when it reads at last.
	resp, err := http.ReadResponse(bufio.NewReader(io.MultiReader(strings.NewReader(head), slow)), nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("after %d bytes: %v", len(body), err)
	}
	stdout, last = printed(t, (&reply{resp.StatusCode, resp.Header, body}).events(t))
	if stdout < len(*rec.Stdout) || *last.OutputTruncated != (stdout < bytes) {
		t.Errorf("the slow reader got %d bytes of %d, the result holds %d, truncated: %v", stdout, bytes, len(*rec.Stdout),
			*last.OutputTruncated)
	}
}

// testStalledReaders has many clients of one organisation request a large result and read nothing.
// Each call of another organisation must succeed meanwhile.
func testStalledReaders(t *testing.T, p *programs) {
	const readers, calls, size = 600, 50, 16_000_000
	sys := newSystem(t, p, topology{}, 2, "--output-limit", "16MiB", "--memory", "1GiB")
	id := sys.submit(bash(fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x", size)))
	if rec := sys.ended(id); rec.Status != "success" || rec.Stdout == nil || len(*rec.Stdout) != size {
		t.Fatalf("got %s", rec)
	}
	key, _ := sys.newKey("neighbour", "pro")
	neighbour := sys.with(key)
	var answers [readers]string // the status line of each response
	var group sync.WaitGroup
	for i := range answers {
		response := sys.request(t, execution(id))
		group.Go(func() { answers[i], _ = response.ReadString('\n') })
	}
	answered := make(chan struct{})
	go func() {
		group.Wait()
		close(answered)
	}()
	made := 0
	for all := false; !all || made < calls; made++ {
		if r := neighbour.execute(bash("echo answered")); r.status != http.StatusOK || r.result(t).Stdout != "answered\n" {
			t.Errorf("call %d of the neighbour: %s", made, r)
		}
		select {
		case <-answered:
			all = true
		default:
		}
	}
	served := 0
	for i, line := range answers {
		switch {
		case strings.Contains(line, "200"):
			served++
		case !strings.Contains(line, "503"):
			t.Errorf("reader %d: %q", i, line)
		}
	}
	t.Logf("%d calls beside %d readers, of which %d were served", made, readers, served)
	if served == 0 {
		t.Error("no reader was served")
	}
}

// printed checks that events are in order and end with the result. It returns the amount of output.
func printed(t testing.TB, all []event) (stdout int, last event) {
	t.Helper()
	seq := int64(0)
	for _, e := range all {
		if e.Seq <= seq && e.Type != "keepalive" { // which reports events that are gone
			t.Fatalf("event %d after %d", e.Seq, seq)
		}
		seq = e.Seq
		if e.Stream == "stdout" {
			stdout += len(e.Data)
		}
	}
	if len(all) == 0 || all[len(all)-1].Type != "result" {
		t.Fatalf("the last of %d events is no result", len(all))
	}
	return stdout, all[len(all)-1]
}

// connectOutput requests the output of an execution on its own connection, which buffers a few MB
// until it is read.
func (sys *system) connectOutput(t *testing.T, id string) *bufio.Reader {
	t.Helper()
	return sys.request(t, execution(id, "output"), "Accept: "+ndjson)
}

// request sends a request on its own connection. The response is not read.
func (sys *system) request(t *testing.T, path string, headers ...string) *bufio.Reader {
	t.Helper()
	u, err := url.Parse(sys.base)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	lines := append([]string{
		"GET " + path + " HTTP/1.1", "Host: " + u.Host, "Authorization: Bearer " + sys.key,
	}, headers...)
	if _, err := fmt.Fprintf(conn, "%s\r\n\r\n", strings.Join(lines, "\r\n")); err != nil {
		t.Fatal(err)
	}
	return bufio.NewReader(conn)
}
