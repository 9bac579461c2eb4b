package upstream_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/script"
	"github.com/bullpen-run/bullpen/agent/upstream"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const key = "sk-very-secret"

func client(t *testing.T, p upstream.Protocol, handler http.Handler) *upstream.Client {
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	c := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(c.CloseIdleConnections)
	return &upstream.Client{
		Protocol: p, URL: server.URL, Key: func() (string, error) { return key, nil },
		Timeout: time.Minute, HTTP: c,
	}
}

func scripted(t *testing.T, rules string) *script.Server {
	t.Helper()
	s, err := script.Parse([]byte(rules))
	if err != nil {
		t.Fatal(err)
	}
	return &script.Server{Script: s}
}

// ask sends a turn and returns the text of the reply.
func ask(t *testing.T, c *upstream.Client) (text string, reply *agent.Reply, err error) {
	turn := &agent.Turn{Model: "m", Items: []agent.Item{{Role: agent.RoleUser, Text: "hello"}}, MaxTokens: 100}
	reply, err = c.Stream(t.Context(), turn, func(part string) error { text += part; return nil })
	return text, reply, err
}

func each(t *testing.T, test func(t *testing.T, p upstream.Protocol)) {
	for _, p := range []upstream.Protocol{upstream.OpenAI, upstream.Anthropic} {
		t.Run(string(p), func(t *testing.T) { t.Parallel(); test(t, p) })
	}
}

func TestFailures(t *testing.T) {
	for name, c := range map[string]struct {
		rules string
		kind  agent.UpstreamKind
	}{
		"a refused request": {
			`rules: [{status: 400, text: "too long, says sk-very-secret"}]`,
			agent.UpstreamRejected,
		},
		"a wrong key": {
			`rules: [{status: 401, text: "not your key: sk-very-secret"}]`,
			agent.UpstreamDenied,
		},
		"no such model": {`rules: [{status: 404, text: "no model"}]`, agent.UpstreamNoModel},
		"too many requests": {
			`rules: [{status: 429, text: "slower", retry_after: 100}]`, agent.UpstreamRateLimited,
		},
		"an overload":                    {`rules: [{status: 529, text: "overloaded"}]`, agent.UpstreamOverloaded},
		"a broken reply":                 {`rules: [{text: "I am", fault: drop}]`, agent.UpstreamFailed},
		"an unsuitable answer":           {`rules: [{status: 204}]`, agent.UpstreamFailed},
		"a server that is asked in vain": {`rules: [{match: never}]`, agent.UpstreamRejected},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, p upstream.Protocol) {
				_, _, err := ask(t, client(t, p, scripted(t, c.rules)))
				e, ok := errors.AsType[*agent.UpstreamError](err)
				if !ok || e.Kind != c.kind {
					t.Fatalf("%v", err)
				}
				if strings.Contains(err.Error(), key) {
					t.Errorf("the key is in the error: %v", err)
				}
			})
		})
	}
}

// A message is cut after the key is removed: half of a key is a secret too.
func TestNoPartOfTheKeyIsInAMessage(t *testing.T) {
	each(t, func(t *testing.T, p upstream.Protocol) {
		const shown = 400
		text := strings.Repeat("x", shown) + strings.Repeat(" "+key, 20)
		_, _, err := ask(t, client(t, p, scripted(t, fmt.Sprintf(`rules: [{status: 400, text: "%s"}]`, text))))
		e, ok := errors.AsType[*agent.UpstreamError](err)
		if !ok || strings.Contains(e.Message, key[:4]) || !strings.Contains(e.Message, text[:shown]) ||
			len(e.Message) > shown+200 {
			t.Errorf("%v", err)
		}
	})
}

func TestASilentServerIsLeft(t *testing.T) {
	each(t, func(t *testing.T, p upstream.Protocol) {
		c := client(t, p, scripted(t, `rules: [{text: "I am", fault: hang}]`))
		c.Timeout, c.Retries = 50*time.Millisecond, 5
		_, _, err := ask(t, c)
		if e, ok := errors.AsType[*agent.UpstreamError](err); !ok || e.Kind != agent.UpstreamTimeout {
			t.Errorf("%v", err)
		}
	})
}

// A request is repeated if that may help, and if nobody else can do it: a client repeats its request
// itself when a server is busy.
func TestRequestsAreRepeated(t *testing.T) {
	for _, c := range []struct {
		status, times   int
		patient, answer bool
	}{
		{http.StatusInternalServerError, 1, false, true},
		{http.StatusServiceUnavailable, 1, true, true},
		{http.StatusServiceUnavailable, 1, false, false},
		{http.StatusTooManyRequests, 1, true, true},
		{http.StatusTooManyRequests, 1, false, false},
		{http.StatusUnauthorized, 1, true, false},
		{http.StatusForbidden, 1, true, false},
		{http.StatusBadRequest, 1, true, false},
	} {
		each(t, func(t *testing.T, p upstream.Protocol) {
			client := client(t, p, scripted(
				t, fmt.Sprintf(`rules: [{status: %d, times: %d}, {text: hello}]`, c.status, c.times)))
			client.Retries = 1
			turn := &agent.Turn{
				Model: "m", Items: []agent.Item{{Role: agent.RoleUser, Text: "hello"}}, MaxTokens: 100,
				Patient: c.patient,
			}
			text := ""
			_, err := client.Stream(t.Context(), turn, func(part string) error { text += part; return nil })
			if (err == nil) != c.answer || c.answer && text != "hello" {
				t.Errorf("%+v: %q, %v", c, text, err)
			}
		})
	}
}

// A reply that has begun is the client's already.
func TestRepliesAreNotRepeated(t *testing.T) {
	each(t, func(t *testing.T, p upstream.Protocol) {
		c := client(t, p, scripted(t, `rules: [{text: once, fault: drop, times: 1}, {text: twice}]`))
		c.Retries = 3
		if text, _, err := ask(t, c); err == nil || text != "once" {
			t.Errorf("%q, %v", text, err)
		}
	})
}

func TestTheRequestEndsWithItsContext(t *testing.T) {
	each(t, func(t *testing.T, p upstream.Protocol) {
		ctx, cancel := context.WithCancel(t.Context())
		left := make(chan struct{})
		c := client(t, p, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body) // only then does the server notice that a client leaves
			cancel()
			<-r.Context().Done()
			close(left)
		}))
		_, err := c.Stream(ctx, &agent.Turn{Items: []agent.Item{{Role: agent.RoleUser, Text: "x"}}}, func(string) error {
			return nil
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		<-left
	})
}

func TestModelsAndKeysAreSent(t *testing.T) {
	each(t, func(t *testing.T, p upstream.Protocol) {
		var seen atomic.Value
		s := scripted(t, `rules: [{text: hi}]`)
		s.Requests = func(h http.Header, body []byte) {
			seen.Store(fmt.Sprint(h.Get("Authorization"), h.Get("X-Api-Key"), strings.Contains(string(body), `"model":"small"`)))
		}
		c := client(t, p, s)
		c.Models = map[string]string{"m": "small"}
		if _, _, err := ask(t, c); err != nil {
			t.Fatal(err)
		}
		want := map[upstream.Protocol]string{upstream.OpenAI: "Bearer " + key + "true", upstream.Anthropic: key + "true"}
		if seen.Load() != want[p] {
			t.Errorf("%v", seen.Load())
		}
		c.Models = map[string]string{"other": "small"}
		_, _, err := ask(t, c)
		if e, ok := errors.AsType[*agent.UpstreamError](err); !ok || e.Kind != agent.UpstreamNoModel {
			t.Errorf("%v", err)
		}
	})
}

func TestSchemasAreSent(t *testing.T) {
	each(t, func(t *testing.T, p upstream.Protocol) {
		var seen atomic.Value
		s := scripted(t, `rules: [{text: hi}]`)
		s.Requests = func(_ http.Header, body []byte) { seen.Store(string(body)) }
		turn := &agent.Turn{
			Model: "m", Items: []agent.Item{{Role: agent.RoleUser, Text: "x"}},
			Format: &agent.Format{Name: "n", Schema: json.RawMessage(`{"type":"object"}`)},
		}
		if _, err := client(t, p, s).Stream(t.Context(), turn, func(string) error { return nil }); err != nil {
			t.Fatal(err)
		}
		want := map[upstream.Protocol]string{
			upstream.OpenAI:    `"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"}}}`,
			upstream.Anthropic: `"output_config":{"format":{"type":"json_schema","schema":{"type":"object"}}}`,
		}[p]
		if body, _ := seen.Load().(string); !strings.Contains(body, want) {
			t.Errorf("%s", body)
		}
	})
}

func TestEmptyArguments(t *testing.T) {
	each(t, func(t *testing.T, p upstream.Protocol) {
		_, reply, err := ask(t, client(t, p, scripted(t, `rules: [{calls: [{name: f, arguments: {list: [], object: {}}}]}]`)))
		if err != nil || string(reply.Calls[0].Arguments) != `{"list":[],"object":{}}` {
			t.Errorf("%+v %v", reply, err)
		}
	})
}

func TestModels(t *testing.T) {
	each(t, func(t *testing.T, p upstream.Protocol) {
		var sent atomic.Value
		answer := `{"data": [{"id": "a/b", "object": "model"}, {"id": "c"}], "has_more": false}`
		c := client(t, p, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			sent.Store(r.Method + " " + r.URL.String() + " " + r.Header.Get("Authorization") + r.Header.Get("X-Api-Key"))
			if answer == "" {
				w.WriteHeader(http.StatusNotFound)
			}
			_, _ = io.WriteString(w, answer) // the client may be gone
		}))
		names, others, err := c.ListModels(t.Context())
		if strings.Join(names, " ") != "a/b c" || others || err != nil {
			t.Errorf("the server's: %v %v %v", names, others, err)
		}
		want := map[upstream.Protocol]string{
			upstream.OpenAI: "GET /models Bearer " + key, upstream.Anthropic: "GET /v1/models?limit=1000 " + key,
		}
		if sent.Load() != want[p] {
			t.Errorf("%v", sent.Load())
		}
		for _, answer = range []string{"", "{", `{"data": [{"id": "a"}], "has_more": true}`} {
			_, _, err := c.ListModels(t.Context())
			if e, ok := errors.AsType[*agent.UpstreamError](err); !ok || e.Kind != agent.UpstreamFailed ||
				!strings.Contains(e.Message, "list") {
				t.Errorf("%q: %v", answer, err)
			}
		}
		c.Models = map[string]string{"b": "x", "a": "y"}
		if names, others, err := c.ListModels(t.Context()); strings.Join(names, " ") != "a b" || others || err != nil {
			t.Errorf("those of the map: %v %v %v", names, others, err)
		}
		c.Models["*"] = "z"
		if names, others, err := c.ListModels(t.Context()); strings.Join(names, " ") != "a b z" || !others || err != nil {
			t.Errorf("with all others: %v %v %v", names, others, err)
		}
	})
}

// stream answers with events that are written down here.
func stream(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(text)) })
}

// Servers of the same protocol differ.
func TestVariantsOfChatCompletions(t *testing.T) {
	chunk := func(delta string) string { return `data: {"choices":[{"delta":` + delta + `}]}` + "\n\n" }
	const end = `data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}` + "\n\ndata: [DONE]\n\n"
	for name, c := range map[string]struct{ stream, want string }{
		"no indexes": {
			chunk(`{"tool_calls":[{"id":"1","function":{"name":"a","arguments":"{\"x\":1}"}}]}`) +
				chunk(`{"tool_calls":[{"id":"2","function":{"name":"b","arguments":"{}"}}]}`) + end, `a{"x":1} b{}`,
		},
		"the same index": {
			chunk(`{"tool_calls":[{"index":0,"id":"1","function":{"name":"a","arguments":"{}"}}]}`) +
				chunk(`{"tool_calls":[{"index":0,"id":"2","function":{"name":"b","arguments":"{}"}}]}`) + end, `a{} b{}`,
		},
		"parts in turns": {
			chunk(`{"tool_calls":[{"index":0,"id":"1","function":{"name":"a","arguments":"{"}},{"index":1,"id":"2",`+
				`"function":{"name":"b","arguments":"{"}}]}`) +
				chunk(`{"tool_calls":[{"index":0,"function":{"arguments":"}"}},{"index":1,"function":{"arguments":"}"}}]}`) +
				end, `a{} b{}`,
		},
		"the name repeated": {chunk(`{"tool_calls":[{"index":0,"function":{"name":"a","arguments":"{"}}]}`) +
			chunk(`{"tool_calls":[{"index":0,"function":{"name":"a","arguments":"}"}}]}`) + end, `a{}`},
		"no arguments": {chunk(`{"tool_calls":[{"index":0,"function":{"name":"a"}}]}`) + end, `a{}`},
		"comments, CRLF and no last end": {
			": wait\r\n\r\n" + strings.ReplaceAll(chunk(`{"tool_calls":[{"index":0,"function":{"name":"a"}}]}`), "\n", "\r\n") +
				"data: [DONE]", `a{}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, reply, err := ask(t, client(t, upstream.OpenAI, stream(c.stream)))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, call := range reply.Calls {
				got = append(got, call.Name+string(call.Arguments))
			}
			if text := strings.Join(got, " "); text != c.want {
				t.Errorf("got %s, want %s", text, c.want)
			}
		})
	}
}

func TestEndlessRepliesAreCut(t *testing.T) {
	c := client(t, upstream.OpenAI, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		part := []byte(`data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"a","arguments":"` +
			strings.Repeat("x", 1<<20) + `"}}]}}]}` + "\n\n")
		for r.Context().Err() == nil {
			if _, err := w.Write(part); err != nil {
				return
			}
		}
	}))
	if _, _, err := ask(t, c); err == nil {
		t.Error("no error")
	}
}

func FuzzReplies(f *testing.F) {
	f.Add("data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\ndata: [DONE]\n\n", true)
	f.Add("event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}}\n\n", false)
	f.Fuzz(func(t *testing.T, text string, chat bool) {
		p := upstream.Anthropic
		if chat {
			p = upstream.OpenAI
		}
		c := &upstream.Client{
			Protocol: p, Key: func() (string, error) { return "", nil }, Timeout: time.Minute,
			HTTP: &http.Client{Transport: answer(text)},
		}
		_, _, _ = ask(t, c) // it neither panics nor hangs
	})
}

// answer is a transport that answers with a text.
type answer string

func (a answer) RoundTrip(r *http.Request) (*http.Response, error) {
	rec := httptest.NewRecorder()
	_, _ = rec.WriteString(string(a))
	resp := rec.Result()
	resp.Request = r
	return resp, nil
}

// Tokens from a cache are part of the usage in both protocols.
func TestCachedTokens(t *testing.T) {
	each(t, func(t *testing.T, p upstream.Protocol) {
		events := map[upstream.Protocol]string{
			upstream.OpenAI: `data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}` + "\n\n" +
				`data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":2,` +
				`"prompt_tokens_details":{"cached_tokens":60}}}` + "\n\n" + "data: [DONE]\n\n",
			upstream.Anthropic: `data: {"type":"message_start","message":{"usage":{"input_tokens":30,` +
				`"cache_read_input_tokens":60,"cache_creation_input_tokens":10}}}` + "\n\n" +
				`data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hi"}}` + "\n\n" +
				`data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":2}}` + "\n\n" +
				`data: {"type":"message_stop"}` + "\n\n",
		}[p]
		_, reply, err := ask(t, client(t, p, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, events)
		})))
		want := agent.Usage{Input: 100, Output: 2, CacheRead: 60}
		if p == upstream.Anthropic {
			want.CacheWrite = 10
		}
		if err != nil || reply.Usage != want {
			t.Errorf("%+v, %v", reply, err)
		}
	})
}

// What a model thinks is reported where it comes, and sent back as it was.
func TestThinking(t *testing.T) {
	var asked string
	c := client(t, upstream.Anthropic, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		asked = string(body)
		w.Header().Set("Content-Type", "text/event-stream")
		for _, data := range []string{
			`{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}`,
			`{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Hm"}}`,
			`{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"."}}`,
			`{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"sig"}}`,
			`{"type":"content_block_stop","index":0}`,
			`{"type":"content_block_start","index":1,"content_block":{"type":"redacted_thinking","data":"secret"}}`,
			`{"type":"content_block_stop","index":1}`,
			`{"type":"content_block_delta","index":2,"delta":{"type":"text_delta","text":"hi"}}`,
			`{"type":"message_delta","delta":{"stop_reason":"end_turn"}}`, `{"type":"message_stop"}`,
		} {
			_, _ = fmt.Fprintf(w, "data: %s\n\n", data)
		}
	}))
	got := ""
	turn := &agent.Turn{
		Model: "m", MaxTokens: 9, Thinking: []byte(`{"type":"enabled","budget_tokens":1024}`),
		Items: []agent.Item{
			{Role: agent.RoleUser, Document: &agent.Document{Name: "a.pdf", MediaType: "application/pdf", Base64: "eA=="}},
			{Role: agent.RoleAssistant, Thinking: &agent.Thinking{Text: "Hm", Signature: "s"}},
			{Role: agent.RoleAssistant, Thinking: &agent.Thinking{Redacted: "r"}},
		}, OnThinking: func(v *agent.Thinking) error { got += fmt.Sprintf("%+v ", *v); return nil },
	}
	if _, err := c.Stream(t.Context(), turn, func(part string) error { got += part; return nil }); err != nil ||
		got != "{Text:Hm. Signature:sig Redacted:} {Text: Signature: Redacted:secret} hi" {
		t.Errorf("%q, %v", got, err)
	}
	for _, part := range []string{
		`"thinking":{"type":"enabled","budget_tokens":1024}`, `{"type":"thinking","thinking":"Hm","signature":"s"}`,
		`{"type":"redacted_thinking","data":"r"}`,
		`{"type":"document","source":{"type":"base64","media_type":"application/pdf","data":"eA=="},"title":"a.pdf"}`,
	} {
		if !strings.Contains(asked, part) {
			t.Errorf("%s is not in %s", part, asked)
		}
	}
}
