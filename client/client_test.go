package client

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

var program = api.ExecuteRequest{Code: "x"}

const id = proto.TraceID("trc_aaaaaaaaaaaaaaaaaaaa")

// answers is a server that returns prepared answers in order.
type answers struct {
	t        *testing.T
	list     []answer
	requests []*http.Request
	at       []time.Duration // since the start
	start    time.Time
}

type answer struct {
	status     int
	retryAfter string
	body       string
	etag       string
	after      time.Duration // how long the answer takes
	err        error         // instead of an answer
	broken     bool          // the body ends with an error rather than in order
	hangs      bool          // the body never ends
}

func (a *answers) RoundTrip(r *http.Request) (*http.Response, error) {
	if a.start.IsZero() {
		a.start = time.Now()
	}
	if len(a.list) == 0 {
		a.t.Errorf("one request too many: %s %s", r.Method, r.URL)
		return nil, errors.New("no more answers")
	}
	a.requests, a.at = append(a.requests, r), append(a.at, time.Since(a.start))
	next := a.list[0]
	a.list = a.list[1:]
	<-time.After(next.after)
	if next.err != nil {
		return nil, next.err
	}
	header := http.Header{"X-Trace-Id": {string(id)}}
	if next.etag != "" {
		header.Set("ETag", next.etag)
	}
	if next.retryAfter != "" {
		header.Set("Retry-After", next.retryAfter)
	}
	return &http.Response{
		StatusCode: next.status, Header: header, Request: r,
		Body: &body{Reader: strings.NewReader(next.body), answer: next, ctx: r.Context()},
	}, nil
}

type body struct {
	io.Reader
	answer answer
	ctx    context.Context
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if errors.Is(err, io.EOF) {
		if b.answer.hangs {
			<-b.ctx.Done()
			return n, b.ctx.Err()
		}
		if b.answer.broken {
			return n, io.ErrUnexpectedEOF
		}
	}
	return n, err
}

func (b *body) Close() error { return nil }

// newClient returns a client of a server that returns the answers.
func newClient(t *testing.T, a *answers) *Client {
	t.Helper()
	c, err := New(Config{URL: "http://server/", Key: "k", HTTP: &http.Client{Transport: a}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// with runs f in a bubble with a client of a server that returns the answers in list. It checks
// that all of them were requested.
func with(t *testing.T, list []answer, f func(t *testing.T, c *Client, a *answers)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		a := &answers{t: t, list: list}
		f(t, newClient(t, a), a)
		if len(a.list) > 0 {
			t.Errorf("%d answers were not asked for", len(a.list))
		}
	})
}

func output(seq int64, text string) string {
	return string(proto.AppendOutputEvent(nil, proto.Stdout, []byte(text), seq))
}

func keepalive(seq int64) string { return string(proto.AppendKeepaliveEvent(nil, seq)) }

func status() string { return string(proto.AppendStatusEvent(nil, id)) }

func end(t *testing.T, seq int64) string {
	r := proto.Exited(0)
	var line strings.Builder
	err := proto.WriteResultEvent(
		&line, &proto.Record{Meta: proto.Meta{TraceID: id}, Status: proto.StatusSuccess, Result: &r, ResultSeq: seq})
	if err != nil {
		t.Fatal(err)
	}
	return line.String()
}

// events returns events in short form, and the error at their end.
func events(stream iter.Seq2[*Event, error]) (got []string, err error) {
	for e, err := range stream {
		if err != nil {
			return got, err
		}
		got = append(got, string(e.Type)+":"+e.Data)
	}
	return got, nil
}

var (
	errReset   = &net.OpError{Op: "read", Err: syscall.ECONNRESET}
	errRefused = &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
)

const busy = `{"error":"service_unavailable","message":"no worker is free"}`

func TestStreamResumes(t *testing.T) {
	with(t, []answer{
		{status: 200, body: status() + output(2, "a") + keepalive(2) + output(3, "b")[:20], broken: true},
		{err: errRefused},
		{status: 503, retryAfter: "3", body: busy},
		{status: 200, body: output(2, "a") + output(3, "b")}, // ends in order, but too early
		{status: 200, body: keepalive(3), hangs: true},       // silent from then on
		{status: 200, body: output(4, "c") + end(t, 5)},
	}, func(t *testing.T, c *Client, a *answers) {
		got, err := events(c.Stream(t.Context(), program))
		if err != nil {
			t.Fatal(err)
		}
		if want := "status: output:a output:b output:c result:"; strings.Join(got, " ") != want {
			t.Errorf("got %s, want %s", got, want)
		}
		for i, want := range []string{"", "after_seq=2", "after_seq=2", "after_seq=2", "after_seq=3", "after_seq=3"} {
			if got := a.requests[i].URL.RawQuery; got != want {
				t.Errorf("request %d asks for %q, want %q", i, got, want)
			}
		}
		if wait := a.at[3] - a.at[2]; wait < 3*time.Second {
			t.Errorf("came back after %s, the server asked for 3 s", wait)
		}
		if wait := a.at[5] - a.at[4]; wait < silence || wait > silence+longestPause {
			t.Errorf("took a silent stream for broken after %s, want %s", wait, silence)
		}
	})
}

func TestStreamEndsWithTheResultAtOrBeforeTheStart(t *testing.T) {
	with(t, []answer{{status: 200, body: end(t, 5)}}, func(t *testing.T, c *Client, _ *answers) {
		if got, err := events(c.Follow(t.Context(), id, 9)); err != nil || len(got) != 1 {
			t.Errorf("got %s, %v; want the result", got, err)
		}
	})
}

func TestStreamGivesUp(t *testing.T) {
	broken := answer{status: 200, body: status(), broken: true}
	list := []answer{broken}
	for range 40 {
		list = append(list, broken)
	}
	synctest.Test(t, func(t *testing.T) {
		a := &answers{t: t, list: list}
		c := newClient(t, a)
		start := time.Now()
		_, err := events(c.Stream(t.Context(), program))
		var lost *LostError
		if !errors.As(err, &lost) || lost.ID != id || lost.After != 1 {
			t.Errorf("error is %v, want one that names the last event", err)
		}
		if took := time.Since(start); took > 2*defaultPatience {
			t.Errorf("took %s", took)
		}
	})
}

// A server may disappear before it has begun to answer. Patience starts then, however long the wait
// was before.
func TestServerLostBeforeTheStream(t *testing.T) {
	started := answer{status: 200, body: status() + end(t, 2)}
	with(t, []answer{{after: time.Minute, err: errReset}, {err: errRefused}, {err: errRefused}, started},
		func(t *testing.T, c *Client, a *answers) {
			if got, err := events(c.Stream(t.Context(), program)); err != nil || len(got) != 2 {
				t.Errorf("got %s, %v", got, err)
			}
			for _, r := range a.requests {
				if key := r.Header.Get("Idempotency-Key"); key == "" || key != a.requests[0].Header.Get("Idempotency-Key") {
					t.Errorf("sent again under %q", key)
				}
			}
		})
	synctest.Test(t, func(t *testing.T) {
		a := &answers{t: t, list: []answer{{after: time.Minute, err: errReset}}}
		for range 40 {
			a.list = append(a.list, answer{err: errRefused})
		}
		c := newClient(t, a)
		_, err := events(c.Stream(t.Context(), program))
		var unreachable *UnreachableError
		last := a.at[len(a.at)-1] - time.Minute
		if !errors.As(err, &unreachable) || !errors.Is(err, ErrUnknownOutcome) || last < defaultPatience-2*longestPause ||
			last > defaultPatience {
			t.Errorf("error is %v, %s after it was lost", err, last)
		}
	})
}

// A client that loses the server learns the id of the execution, and the event from which to
// resume.
func TestServerLostWhileFollowing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &answers{t: t, list: []answer{{status: 200, body: status() + output(2, "a"), broken: true}}}
		for range 40 {
			a.list = append(a.list, answer{err: errRefused})
		}
		var reasons []string
		c := newClient(t, a)
		c.cfg.OnRetry = func(err error) { reasons = append(reasons, err.Error()) }
		_, err := events(c.Stream(t.Context(), program))
		var lost *LostError
		var unreachable *UnreachableError
		if !errors.As(err, &lost) || lost.ID != id || lost.After != 2 || !errors.As(err, &unreachable) {
			t.Errorf("error is %v", err)
		}
		if len(reasons) < 2 || !strings.Contains(reasons[0], string(id)) || !strings.Contains(reasons[1], "cannot reach") {
			t.Errorf("reasons of retries: %q", reasons)
		}
	})
}

func TestOutputEndsWhereTheEventsEnd(t *testing.T) {
	broken := answer{status: 200, body: status() + output(2, "a"), broken: true}
	with(t, []answer{broken, {status: 200, body: output(3, "b")}}, func(t *testing.T, c *Client, a *answers) {
		if got, err := events(c.Output(t.Context(), id, 0)); err != nil || len(got) != 3 {
			t.Errorf("got %s, %v", got, err)
		}
		if q := a.requests[1].URL.RawQuery; q != "after_seq=2&follow=false" {
			t.Errorf("asked for %s", q)
		}
	})
}

// A caller that stops reading gets nothing more, and no other connection is made.
func TestStreamEndsWithItsReader(t *testing.T) {
	with(t, []answer{{status: 200, body: status() + output(2, "a") + end(t, 3)}},
		func(t *testing.T, c *Client, _ *answers) {
			for e, err := range c.Stream(t.Context(), program) {
				if err != nil || e.Type != proto.EventStatus {
					t.Errorf("%+v, %v", e, err)
				}
				break
			}
		})
}

func TestRetry(t *testing.T) {
	ok := answer{status: 200, body: `{"success":true,"stdout":"","stderr":"","exit_code":0}`}
	for name, test := range map[string]struct {
		list  []answer
		after time.Duration // at least, until the last request
		want  string        // in the error; empty for none
	}{
		"at once":            {list: []answer{ok}},
		"later":              {list: []answer{{status: 503, retryAfter: "4", body: busy}, ok}, after: 4 * time.Second},
		"rate":               {list: []answer{{status: 429, retryAfter: "2", body: busy}, ok}, after: 2 * time.Second},
		"503 without a time": {list: []answer{{status: 503, body: busy}, ok}},
		"plan": {
			list: []answer{{status: 429, body: `{"error":"rate_limited","message":"upgrade"}`}},
			want: "upgrade (HTTP 429, rate_limited, " + string(id) + ")",
		},
		"lost answer":  {list: []answer{{err: errReset}, ok}},
		"nobody there": {list: []answer{{err: errRefused}}, want: "cannot reach http://server: "},
		"starts again": {list: []answer{{err: errReset}, {err: errRefused}, {err: errReset}, {err: errRefused}, ok}},
		"leaves": {list: []answer{
			{status: 503, retryAfter: "2", body: busy},
			{err: errRefused},
			{err: errRefused},
			ok,
		}, after: 2 * time.Second},
		"wrong": {
			list: []answer{{status: 400, body: `{"error":"validation_error","message":"code must be"}`}},
			want: "code must be",
		},
		"another server": {list: []answer{{status: 502, body: "<html>"}}, want: "not one of bullpen's"},
		"longer than we have": {
			list: []answer{{status: 503, retryAfter: "31", body: busy}}, want: "no worker is free",
		},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, test.list, func(t *testing.T, c *Client, a *answers) {
				_, err := c.Execute(t.Context(), program)
				if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
					t.Errorf("error is %v, want %q", err, test.want)
				}
				if last := a.at[len(a.at)-1]; last < test.after {
					t.Errorf("last request after %s, want %s at least", last, test.after)
				}
				key := a.requests[0].Header.Get("Idempotency-Key")
				for _, r := range a.requests {
					if got := r.Header.Get("Idempotency-Key"); key == "" || got != key {
						t.Errorf("sent again under %q, first under %q", got, key)
					}
				}
			})
		})
	}
}

// What would happen twice, or lose a secret that is shown once, is not sent again.
func TestNotSentAgain(t *testing.T) {
	for name, send := range map[string]func(*Client) error{
		"key": func(c *Client) error {
			_, err := c.Admin().Keys.Create(t.Context(), &api.KeyRequest{Org: "o"})
			return err
		},
		"rotated key": func(c *Client) error { _, err := c.Admin().RotateKey(t.Context(), "key_1", 0); return err },
		"webhook": func(c *Client) error {
			_, err := c.PutWebhook(t.Context(), "", &api.WebhookRequest{})
			return err
		},
		"rotated webhook": func(c *Client) error { _, err := c.RotateWebhook(t.Context(), "", "", nil); return err },
		"schedule": func(c *Client) error {
			_, err := c.CreateSchedule(t.Context(), &api.ScheduleRequest{})
			return err
		},
		"run": func(c *Client) error {
			_, err := c.StartPipeline(t.Context(), &api.PipelineRequest{})
			return err
		},
		"retry": func(c *Client) error { _, err := c.RetryBatch(t.Context(), "bat_1", false); return err },
		"other": func(c *Client) error {
			_, err := c.Do(t.Context(), http.MethodPost, "/v1/x", nil, nil, nil)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, []answer{{err: errReset}}, func(t *testing.T, c *Client, _ *answers) {
				if err := send(c); !errors.Is(err, ErrUnknownOutcome) {
					t.Errorf("error is %v, want one that wraps ErrUnknownOutcome", err)
				}
			})
		})
	}
}

// A body that can be read once is sent once, also if the server asks to try again.
func TestStreamedUploadIsSentOnce(t *testing.T) {
	with(t, []answer{{status: 503, retryAfter: "1", body: busy}}, func(t *testing.T, c *Client, _ *answers) {
		_, err := c.UnpackThread(t.Context(), "t", "", strings.NewReader("tar"))
		if failed, ok := errors.AsType[*Error](err); !ok || failed.Status != http.StatusServiceUnavailable ||
			failed.RetryAfter != time.Second {
			t.Errorf("error is %v", err)
		}
	})
}

func TestListReadsPages(t *testing.T) {
	list := []answer{
		{status: 200, body: `{"batches":[{"id":"bat_1"},{"id":"bat_2"}],"next_cursor":"c d"}`},
		{status: 200, body: `{"batches":[],"next_cursor":"e"}`},
		{status: 200, body: `{"batches":[{"id":"bat_3"}],"next_cursor":null}`},
	}
	with(t, append(slices.Clone(list), list[0]), func(t *testing.T, c *Client, a *answers) {
		batches := c.Batches(t.Context())
		all, err := Collect(batches)
		if err != nil || len(all) != 3 || all[2].ID != "bat_3" {
			t.Errorf("%+v, %v", all, err)
		}
		for b, err := range batches { // again, from the start
			if err != nil || b.ID != "bat_1" {
				t.Errorf("began with %s, %v", b.ID, err)
			}
			break
		}
		for i, want := range []string{"limit=100", "cursor=c+d&limit=100", "cursor=e&limit=100", "limit=100"} {
			if got := a.requests[i].URL.RawQuery; got != want {
				t.Errorf("request %d has %s, want %s", i, got, want)
			}
		}
	})
	with(t, []answer{list[0], {status: 400, body: `{"error":"validation_error","message":"cursor"}`}},
		func(t *testing.T, c *Client, _ *answers) {
			if all, err := Collect(c.Batches(t.Context())); err == nil || all != nil {
				t.Errorf("%v, %v", all, err)
			}
		})
}

// Settings are stored only in place of those that were read.
func TestEdit(t *testing.T) {
	org := answer{status: 200, body: `{"name":"acme","title":"Acme","plan":"pro"}`, etag: `"7"`}
	with(t, []answer{org, {status: 412, body: `{"error":"conflict","message":"changed"}`}},
		func(t *testing.T, c *Client, a *answers) {
			_, err := c.Admin().Orgs.Edit(t.Context(), "acme", func(o *api.OrgRequest) { o.Suspended = true })
			if failed, ok := errors.AsType[*Error](err); !ok || failed.Status != http.StatusPreconditionFailed {
				t.Errorf("error is %v", err)
			}
			body, err := io.ReadAll(a.requests[1].Body)
			if want := `{"title":"Acme","plan":"pro","suspended":true}`; err != nil || string(body) != want ||
				a.requests[1].Header.Get("If-Match") != `"7"` {
				t.Errorf("stored %s, want %s", body, want)
			}
		})
}

func TestNew(t *testing.T) {
	for _, address := range []string{
		"", "server:80", "ftp://server", "http://", "http://server?x=1", "http://server#x",
		"http://ser ver",
	} {
		if _, err := New(Config{URL: address, Key: "k"}); err == nil {
			t.Errorf("accepted %q", address)
		}
	}
	if _, err := New(Config{URL: "http://server"}); err == nil {
		t.Error("accepted an empty key")
	}
}

func TestCancelledWhileWaiting(t *testing.T) {
	with(t, []answer{{status: 503, retryAfter: "20", body: busy}}, func(t *testing.T, c *Client, _ *answers) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		if _, err := c.Get(ctx, id); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error is %v", err)
		}
		if took := time.Since(start); took != time.Second {
			t.Errorf("took %s", took)
		}
	})
}

func TestRequestLeavesOutWhatIsNotSet(t *testing.T) {
	got, err := json.Marshal(program)
	if err != nil || string(got) != `{"code":"x"}` {
		t.Errorf("got %s, %v", got, err)
	}
}
