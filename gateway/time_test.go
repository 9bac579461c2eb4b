package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// bubble runs a test with its own clock. The clock stands still while a goroutine works, and jumps
// when all goroutines wait.
func bubble(t *testing.T, f func(t *testing.T, h *harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { f(t, newHarness(t)) })
}

// begin sends a request in the background. The channel receives the answer.
func (h *harness) begin(r *http.Request) <-chan *reply {
	answers := make(chan *reply, 1)
	go func() { answers <- h.send(r) }()
	return answers
}

func (h *harness) executeRequest(body string, headers ...string) *http.Request {
	return h.request(http.MethodPost, "/v1/sandbox/execute", body, headers...)
}

var waitingModes = map[string][]string{"inline": {"Accept", web.TypeJSON}, "streaming": {"Accept", web.TypeNDJSON}}

func TestQueueWait(t *testing.T) {
	for name, headers := range waitingModes {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *harness) {
				h.stub.stats = func(context.Context) (proto.QueueStats, error) {
					return proto.QueueStats{Workers: 1, Slots: 8, Interactive: 13, StartRate: 2}, nil
				}
				start := time.Now()
				a := h.execute(hello, append(headers, "Idempotency-Key", "k")...).want(503, "service_unavailable", "withdrawn")
				if took := time.Since(start); took != h.server.QueueWait {
					t.Errorf("took %s", took)
				}
				if a.header.Get("Retry-After") != "7" { // 13 wait, and 2 start per second
					t.Errorf("Retry-After %q", a.header.Get("Retry-After"))
				}
				if r := h.stub.record(a.trace()); !r.ExpiredInQueue() || r.Status != proto.StatusFailed {
					t.Errorf("record %+v", r)
				}
				if h.stub.bound() != 0 {
					t.Error("the idempotency key stays bound")
				}
			})
		})
		t.Run(name+", while slots are kept for others", func(t *testing.T) {
			bubble(t, func(t *testing.T, h *harness) {
				h.stub.stats = func(context.Context) (proto.QueueStats, error) {
					return proto.QueueStats{Workers: 1, Slots: 8, FreeSlots: 1, StartRate: 2, AtShare: []string{"acme"}}, nil
				}
				a := h.execute(hello, headers...).want(503, "service_unavailable", "other organisations", "withdrawn")
				if a.header.Get("Retry-After") != "30" {
					t.Errorf("Retry-After %q", a.header.Get("Retry-After"))
				}
			})
		})
		t.Run(name+", withdrawn by the queue itself", func(t *testing.T) {
			bubble(t, func(t *testing.T, h *harness) {
				answers := h.begin(h.executeRequest(hello, append(headers, "Idempotency-Key", "k")...))
				h.stub.finish(<-h.stub.submitted, proto.Failure(proto.CodeExpiredInQueue, "m"))
				(<-answers).want(503, "service_unavailable")
				if h.stub.bound() != 0 {
					t.Error("the idempotency key stays bound")
				}
			})
		})
		t.Run(name+", started at the last moment", func(t *testing.T) {
			bubble(t, func(t *testing.T, h *harness) {
				answers := h.begin(h.executeRequest(hello, headers...))
				id := <-h.stub.submitted
				time.Sleep(h.server.QueueWait - time.Millisecond)
				h.stub.start(id)
				time.Sleep(time.Minute)
				h.stub.finish(id, proto.Exited(0))
				(<-answers).want(200, "")
			})
		})
	}
}

// Without Prefer, a request waits no longer than its timeout, so that the program can end before
// the answer is due. With it, the answer is due that much later.
func TestPatience(t *testing.T) {
	for name, tt := range map[string]struct {
		timeout, prefer string
		wait, answer    time.Duration // for a worker, and for the answer if one is found at the last moment
	}{
		"default":       {"60", "", 30 * time.Second, 68 * time.Second},
		"short":         {"10", "", 10 * time.Second, 18 * time.Second},
		"very short":    {"1", "", 5 * time.Second, 9 * time.Second},
		"patient":       {"10", "wait=100", 100 * time.Second, 115 * time.Second},
		"impatient":     {"10", "handling=lenient, Wait=2; x=y, wait=50", 2 * time.Second, 18 * time.Second},
		"quoted number": {"10", `wait="4"`, 4 * time.Second, 19 * time.Second},
	} {
		for mode, headers := range waitingModes {
			if tt.prefer != "" {
				headers = append(headers, "Prefer", tt.prefer)
			}
			body := `{"code":"1","timeout":` + tt.timeout + `}`
			t.Run(name+", "+mode, func(t *testing.T) {
				bubble(t, func(t *testing.T, h *harness) {
					h.server.QueueWait = 30 * time.Second
					h.remount()
					start := time.Now()
					h.execute(body, headers...).want(503, "service_unavailable")
					if took := time.Since(start); took != tt.wait {
						t.Errorf("waited %s for a worker, want %s", took, tt.wait)
					}
				})
				if mode == "streaming" {
					return
				}
				bubble(t, func(t *testing.T, h *harness) {
					h.server.QueueWait = 30 * time.Second
					h.remount()
					start := time.Now()
					answers := h.begin(h.executeRequest(body, headers...))
					id := <-h.stub.submitted
					time.Sleep(tt.wait - time.Millisecond)
					h.stub.start(id)
					(<-answers).want(504, "gateway_timeout")
					if took := time.Since(start); took != tt.answer {
						t.Errorf("the answer took %s, want %s", took, tt.answer)
					}
				})
			})
		}
	}
}

func TestPatienceIsApplied(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	if a := h.execute(hello, "Prefer", "wait=9").want(200, ""); a.header.Get("Preference-Applied") != "wait=9" {
		t.Errorf("Preference-Applied %q", a.header.Get("Preference-Applied"))
	}
	if a := h.execute(hello, "Prefer", "wait=9, respond-async").want(202, ""); a.header.Get(
		"Preference-Applied") != "respond-async" {
		t.Errorf("Preference-Applied %q", a.header.Get("Preference-Applied"))
	}
	for _, value := range []string{
		"wait", "wait=", "wait=0", "wait=-1", "wait=1.5", "wait=3601",
		"wait=99999999999999999999", "wait=x",
	} {
		h.execute(hello, "Prefer", value).want(400, "validation_error", "Prefer: wait", "1 to 3600")
	}
}

func TestGatewayTimeout(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		start := time.Now()
		answers := h.begin(h.executeRequest(`{"code":"1","timeout":5}`))
		id := <-h.stub.submitted
		h.stub.start(id)
		a := (<-answers).want(504, "gateway_timeout", "/v1/executions/"+string(id))
		if took := time.Since(start); took != 13*time.Second {
			t.Errorf("took %s, want timeout + 8 s", took)
		}
		if a.trace() != id {
			t.Errorf("X-Trace-Id %s", a.trace())
		}
		h.stub.finish(id, proto.Exited(0)) // it is recorded nevertheless
		h.do("GET", "/v1/executions/"+string(id), "").want(200, "")
	})
}

func TestKeepalive(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		answers := h.begin(h.executeRequest(hello, "Accept", web.TypeNDJSON))
		id := <-h.stub.submitted
		h.stub.start(id)
		time.Sleep(web.Keepalive - time.Millisecond)
		synctest.Wait()
		h.stub.output(id, proto.Stdout, "a")
		time.Sleep(2*web.Keepalive + time.Millisecond)
		synctest.Wait()
		h.stub.finish(id, proto.Exited(0))
		var types []string
		for line := range strings.Lines(string((<-answers).want(200, "").body)) {
			kind, _, _ := strings.Cut(strings.TrimPrefix(line, `{"type":"`), `"`)
			if kind == "keepalive" && line != `{"type":"keepalive","seq":2}`+"\n" {
				t.Errorf("keepalive %q, want the seq of the event before it", line)
			}
			types = append(types, kind)
		}
		if got := strings.Join(types, " "); got != "status output keepalive keepalive result" {
			t.Errorf("events %s", got)
		}
	})
}

func TestKeepaliveBeforeTheFirstEvent(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		id := h.execute(hello, "Prefer", "respond-async").trace()
		answers := h.begin(h.request("GET", "/v1/executions/"+string(id)+"/output", "", "Accept", web.TypeSSE))
		time.Sleep(web.Keepalive + time.Millisecond)
		synctest.Wait()
		h.stub.finish(id, proto.Cancelled())
		if got := string((<-answers).body); !strings.HasPrefix(
			got, "id: 0\ndata: {\"type\":\"keepalive\",\"seq\":0}\n\nid: 1\ndata: {\"type\":\"result\"") {
			t.Errorf("events\n%s", got)
		}
	})
}

// Events must reach the client when they happen, not when a buffer is full.
func TestEventsAreFlushed(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		h.stub.onSubmit = func(job *proto.Job) { h.stub.start(job.TraceID) }
		resp, err := h.client.Do(h.executeRequest(hello, "Accept", web.TypeNDJSON))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		id, lines := <-h.stub.submitted, bufio.NewScanner(resp.Body)
		for i := range 3 {
			if !lines.Scan() {
				t.Fatalf("event %d: %v", i, lines.Err())
			}
			h.stub.output(id, proto.Stdout, "x\n")
		}
		h.stub.finish(id, proto.Exited(0))
	})
}

func TestClientGoes(t *testing.T) {
	for name, headers := range waitingModes {
		for _, started := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, started %t", name, started), func(t *testing.T) {
				bubble(t, func(t *testing.T, h *harness) {
					ctx, cancel := context.WithCancel(t.Context())
					gone := make(chan error, 1)
					r := h.executeRequest(hello, append(headers, "Idempotency-Key", "k")...).WithContext(ctx)
					go func() {
						resp, err := h.client.Do(r)
						if err == nil {
							_, err = io.Copy(io.Discard, resp.Body)
							_ = resp.Body.Close()
						}
						gone <- err
					}()
					id := <-h.stub.submitted
					if started {
						h.stub.start(id)
						time.Sleep(5 * time.Second) // longer than the wait for a worker
					}
					cancel()
					if err := <-gone; !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
					synctest.Wait()
					record := h.stub.record(id)
					if started && record.Status != proto.StatusRunning {
						t.Errorf("a started execution was ended: %+v", record)
					}
					if !started && (!record.ExpiredInQueue() || h.stub.bound() != 0) {
						t.Errorf("a queued execution was not withdrawn: %+v", record)
					}
				})
			})
		}
	}
}

func TestWaitForTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		id := h.execute(hello, "Prefer", "respond-async").trace()
		h.stub.start(id)
		start := time.Now()
		if a := h.do("GET", "/v1/executions/"+string(id)+"?wait=60", "").want(200, ""); a.json()["status"] != "running" {
			t.Errorf("execution %s", a.body)
		}
		if took := time.Since(start); took != time.Minute {
			t.Errorf("waited %s", took)
		}
		answers := h.begin(h.request("GET", "/v1/executions/"+string(id)+"?wait=60", ""))
		time.Sleep(time.Second)
		h.stub.finish(id, proto.Exited(0))
		if a := (<-answers).want(200, ""); a.json()["status"] != "success" {
			t.Errorf("execution %s", a.body)
		}
	})
}

func TestSlowBody(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		start := time.Now()
		resp := h.raw("Content-Length: 100\r\n\r\n{")
		text, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusRequestTimeout || !resp.Close ||
			!strings.Contains(string(text), "body did not arrive within 30s") {
			t.Errorf("%v, %s, %v", resp, text, err)
		}
		if took := time.Since(start); took != web.BodyTimeout {
			t.Errorf("took %s", took)
		}
	})
}

// A client that stops reading loses its connection. The execution and the server are not affected.
func TestSlowReader(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		h.stub.finishAtOnce(proto.Exited(0), strings.Repeat("x", 4<<20))
		for _, accept := range []string{web.TypeJSON, web.TypeNDJSON} {
			start := time.Now()
			resp, err := h.client.Do(h.executeRequest(hello, "Accept", accept))
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(web.WriteTimeout + time.Second)
			if n, err := io.Copy(io.Discard, resp.Body); err == nil || n > 1<<20 {
				t.Errorf("%s: read %d bytes, %v after %s", accept, n, err, time.Since(start))
			}
			_ = resp.Body.Close()
		}
	})
}

// A deadline that passes on an idle connection must not affect its next request.
func TestIdleConnectionIsGood(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		dialed := 0
		h.client.Transport.(*http.Transport).DialContext = func(context.Context, string, string) (conn net.Conn, err error) {
			dialed++
			return h.dial()
		}
		h.stub.finishAtOnce(proto.Exited(0))
		for range 3 {
			h.execute(hello, "Expect", "100-continue").want(200, "")
			time.Sleep(2 * web.WriteTimeout)
		}
		if dialed != 1 {
			t.Errorf("%d connections", dialed)
		}
	})
}

func TestReadyzWithinASecond(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		h.stub.stats = func(ctx context.Context) (proto.QueueStats, error) {
			<-ctx.Done()
			return proto.QueueStats{}, ctx.Err()
		}
		start := time.Now()
		a := h.do("GET", "/readyz", "").want(503, "service_unavailable")
		if took := time.Since(start); took != time.Second || a.json()["missing"] != "queue" {
			t.Errorf("%s after %s", a.body, took)
		}
	})
}

// HTTP/2 deadlines belong to a stream. The stream ends when one passes, even if nothing is being
// written.
func TestHTTP2(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		protocols := new(http.Protocols)
		protocols.SetUnencryptedHTTP2(true)
		h.client.Transport.(*http.Transport).Protocols = protocols

		stream := h.begin(h.executeRequest(`{"code":"1","timeout":3600}`, "Accept", web.TypeNDJSON))
		streamed := <-h.stub.submitted
		h.stub.start(streamed)
		inline := h.begin(h.executeRequest(`{"code":"1","timeout":3600}`))
		waited := <-h.stub.submitted
		h.stub.start(waited)
		time.Sleep(10 * time.Minute)
		h.stub.output(streamed, proto.Stdout, strings.Repeat("x", 1<<20))
		h.stub.finish(streamed, proto.Exited(0))
		h.stub.finish(waited, proto.Exited(0))
		(<-inline).want(200, "")
		if a := (<-stream).want(200, ""); !strings.Contains(string(a.body), `{"type":"result"`) {
			t.Errorf("%d bytes with no result", len(a.body))
		}

		body, end := io.Pipe()
		defer func() { _ = end.Close() }()
		r := h.executeRequest("")
		r.Body, r.ContentLength = body, -1
		h.send(r).want(408, "request_timeout", "body", "30s")
		h.execute(hello+strings.Repeat(" ", web.DefaultMaxBody)).want(413, "payload_too_large")
	})
}

// TestLeave checks that a server that shuts down answers clients that would wait longer than it
// leaveGrace is how long a stream goes on without an event after Leave.
const leaveGrace = time.Second

// lives.
func TestLeave(t *testing.T) {
	for name, headers := range waitingModes {
		t.Run(name+", queued", func(t *testing.T) {
			bubble(t, func(t *testing.T, h *harness) {
				answers := h.begin(h.executeRequest(hello, append(headers, "Idempotency-Key", "k")...))
				<-h.stub.submitted
				start := time.Now()
				h.server.Drain()
				h.server.Leave()
				a := (<-answers).want(503, "service_unavailable", "send it again")
				if took := time.Since(start); took != 0 || a.header.Get("Retry-After") == "" {
					t.Errorf("answered after %s with %v", took, a.header)
				}
				if r := h.stub.record(a.trace()); !r.ExpiredInQueue() || !strings.Contains(*r.Result.ErrorMessage, "shut down") {
					t.Errorf("record %+v", r)
				}
				if h.stub.bound() != 0 {
					t.Error("the idempotency key stays bound")
				}
			})
		})
	}
	t.Run("inline, running", func(t *testing.T) {
		bubble(t, func(t *testing.T, h *harness) {
			answers := h.begin(h.executeRequest(hello))
			id := <-h.stub.submitted
			h.stub.start(id)
			synctest.Wait()
			h.server.Leave()
			if a := (<-answers).want(504, "gateway_timeout", "/v1/executions/"+string(id)); a.trace() != id {
				t.Errorf("X-Trace-Id %s", a.trace())
			}
		})
	})
	t.Run("asked for", func(t *testing.T) {
		bubble(t, func(t *testing.T, h *harness) {
			id := h.execute(hello, "Prefer", "respond-async").trace()
			answers := h.begin(h.request(http.MethodGet, "/v1/executions/"+string(id)+"?wait=20", ""))
			synctest.Wait()
			h.server.Leave()
			(<-answers).want(200, "")
		})
	})
	t.Run("streamed", func(t *testing.T) {
		bubble(t, func(t *testing.T, h *harness) {
			id := h.execute(hello, "Prefer", "respond-async").trace()
			h.stub.start(id)
			resp, err := h.client.Do(h.request(http.MethodGet, "/v1/executions/"+string(id)+"/output", ""))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = resp.Body.Close() }()
			start := time.Now()
			h.server.Leave()
			time.Sleep(leaveGrace / 2)
			h.stub.output(id, proto.Stdout, "late")
			body, err := io.ReadAll(resp.Body)
			if !errors.Is(err, io.ErrUnexpectedEOF) || !strings.HasSuffix(string(body), `"data":"late","seq":2}`+"\n") {
				t.Errorf("read %q, %v: it must be broken off after the last event", body, err)
			}
			if took := time.Since(start); took != leaveGrace*3/2 {
				t.Errorf("broken off after %s", took)
			}
		})
	})
}
