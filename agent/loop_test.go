package agent_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/script"
	"github.com/bullpen-run/bullpen/agent/upstream"
	"github.com/bullpen-run/bullpen/proto"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a scripted upstream and a log of events.
type world struct {
	t      *testing.T
	up     *upstream.Client
	mu     sync.Mutex
	bodies []string // of the requests
	events []agent.Event
	failAt int // the number of the event that the log refuses
}

var errLog = errors.New("the log refuses")

func (w *world) Append(_ context.Context, e agent.Event) error {
	w.events = append(w.events, e)
	if len(w.events) == w.failAt {
		return errLog
	}
	return nil
}

// eachProtocol runs a test with a scripted upstream of each protocol.
func eachProtocol(t *testing.T, rules string, test func(w *world)) {
	for _, p := range []upstream.Protocol{upstream.OpenAI, upstream.Anthropic} {
		t.Run(string(p), func(t *testing.T) {
			t.Parallel()
			s, err := script.Parse([]byte(rules))
			if err != nil {
				t.Fatal(err)
			}
			w := &world{t: t}
			server := httptest.NewServer(&script.Server{Script: s, Requests: func(_ http.Header, body []byte) {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.bodies = append(w.bodies, string(body))
			}})
			t.Cleanup(server.Close)
			client := &http.Client{Transport: &http.Transport{}}
			t.Cleanup(client.CloseIdleConnections)
			w.up = &upstream.Client{
				Protocol: p, URL: server.URL, Key: func() (string, error) { return "", nil },
				Timeout: time.Minute, HTTP: client,
			}
			test(w)
		})
	}
}

// say is a conversation that the user begins.
func say(text string, more ...agent.Item) []agent.Item {
	return append([]agent.Item{{Role: agent.RoleUser, Text: text}}, more...)
}

// run returns a run with the tool double of this side, and the tool ask of the client.
func run(items []agent.Item) *agent.Run {
	n := 0
	schema := json.RawMessage(`{"type":"object"}`)
	return &agent.Run{
		Turn: agent.Turn{Model: "m", Items: items, MaxTokens: 1000}, Steps: 4, Wall: time.Minute,
		Reserve:   func(int64) error { return nil },
		NewCallID: func(*agent.Tool) string { n++; return fmt.Sprint("id", n) },
		Tools: []agent.Tool{{
			Definition: agent.Definition{Name: "double", Schema: schema},
			Execute: func(_ context.Context, call *agent.Call) (*agent.Outcome, error) {
				var in struct{ N int }
				if err := json.Unmarshal(call.Arguments, &in); err != nil {
					return nil, err
				}
				return &agent.Outcome{Text: fmt.Sprint("doubled ", 2*in.N)}, nil
			},
			Malformed: func(*agent.Call) *agent.Outcome { return &agent.Outcome{Text: "malformed", Failed: true} },
		}, {Definition: agent.Definition{Name: "ask", Schema: schema}}},
	}
}

// trace returns the events in short form.
func (w *world) trace() string {
	var list []string
	for _, e := range w.events {
		switch e.Kind {
		case agent.EventText, agent.EventTurn:
		case agent.EventTextEnd:
			list = append(list, fmt.Sprintf("%d:%q", e.Item, e.Text))
		case agent.EventCall:
			side := "client"
			if e.Server {
				side = "server"
			}
			list = append(list, fmt.Sprintf("%d:%s %s=%s(%s)", e.Item, side, e.Call.ID, e.Call.Name, e.Call.Arguments))
		case agent.EventResult:
			list = append(list, fmt.Sprintf("%d:%s->%s", e.Item, e.Call.ID, e.Outcome.Text))
		case agent.EventEnd:
			list = append(list, string(e.End.Reason))
		}
	}
	return strings.Join(list, " ")
}

func (w *world) want(trace string) {
	w.t.Helper()
	if got := w.trace(); got != trace {
		w.t.Errorf("events:\n got %s\nwant %s", got, trace)
	}
}

func TestRuns(t *testing.T) {
	for name, c := range map[string]struct {
		rules string
		items []agent.Item
		want  string
	}{
		"a text": {`rules: [{text: "Hello, world", chunk: 3}]`, say("x"), `0:"Hello, world" done`},
		"calls, one after another": {
			`rules: [{role: user, text: "Now:", calls: [{name: double, arguments: {n: 4}}, {name: double, arguments: {n: ` +
				`5}}], chunk: 2}, {match: '.*doubled (\d+)', text: "It is ${1}"}]`,
			say("x"), `0:"Now:" 1:server id1=double({"n":4}) 2:server id2=double({"n":5}) 3:id1->doubled 8 4:id2->doubled 10 ` +
				`5:"It is 10" done`,
		},
		"calls without ids": {
			`rules: [{role: user, calls: [{name: double, arguments: {n: 1}, no_id: true}, {name: double, arguments: {n: 2}, ` +
				`no_id: true}]}, {text: ok}]`,
			say("x"), `0:server id1=double({"n":1}) 1:server id2=double({"n":2}) 2:id1->doubled 2 3:id2->doubled 4 4:"ok" done`,
		},
		"arguments that are no JSON": {
			`rules: [{role: user, calls: [{name: double, raw: '{"n": oops'}]}, {match: malformed, text: "sorry"}]`,
			say("x"), `0:server id1=double({}) 1:id1->malformed 2:"sorry" done`,
		},
		"arguments that are no object": {
			`rules: [{role: user, calls: [{name: double, raw: '[1]'}]}, {match: malformed, text: "sorry"}]`,
			say("x"), `0:server id1=double({}) 1:id1->malformed 2:"sorry" done`,
		},
		"a reply that is cut off": {
			`rules: [{text: "I", calls: [{name: double, raw: '{"n": 1'}], finish: length}]`, say("x"), `0:"I" length`,
		},
		"a call that is complete in a reply that is cut off": {
			`rules: [{text: "I", calls: [{name: double, arguments: {n: 1}}], finish: length}]`, say("x"), `0:"I" length`,
		},
		"a tool that does not exist": {
			`rules: [{role: user, calls: [{name: sudo}]}, {match: 'no tool "sudo"', text: "sorry"}]`, say("x"), `0:"sorry" done`,
		},
		"a client's tool with arguments that nobody can read": {
			`rules: [{role: user, calls: [{name: ask, raw: '{{'}]}, {match: 'not a JSON object', text: "sorry"}]`, say("x"),
			`0:"sorry" done`,
		},
		"calls without end": {
			`rules: [{calls: [{name: double, arguments: {n: 1}}]}]`, say("x"),
			`0:server id1=double({"n":1}) 1:id1->doubled 2 2:server id2=double({"n":1}) 3:id2->doubled 2 4:server ` +
				`id3=double({"n":1}) 5:id3->doubled 2 6:server id4=double({"n":1}) 7:id4->doubled 2 paused`,
		},
		"a client's call beside one of this side": {
			`rules: [{calls: [{name: double, arguments: {n: 3}}, {name: ask, arguments: {q: why}}]}]`, say("x"),
			`0:server id1=double({"n":3}) 1:id1->doubled 6 2:client id2=ask({"q":"why"}) calls`,
		},
		"deferred: a client's call beside one of this side": {
			`rules: [{calls: [{name: double, arguments: {n: 3}}, {name: ask, arguments: {q: why}}]}]`, say("x"),
			`0:server id1=double({"n":3}) 1:client id2=ask({"q":"why"}) calls`,
		},
		"the client's result, and then this side's": {
			`rules: [{match: 'doubled 6', role: tool, text: "both"}, {text: "one is missing"}]`,
			say(
				"x", agent.Item{Call: &agent.Call{ID: "s", Name: "double", Arguments: json.RawMessage(`{"n":3}`)}},
				agent.Item{Call: &agent.Call{ID: "c", Name: "ask", Arguments: json.RawMessage(`{}`)}},
				agent.Item{Result: &agent.Result{CallID: "c", Text: "because"}},
			), `0:s->doubled 6 1:"one is missing" done`,
		},
		"a call of long ago": {
			`rules: [{match: again, text: "no"}]`,
			say("x", agent.Item{Call: &agent.Call{ID: "s", Name: "double", Arguments: json.RawMessage(`{"n":3}`)}},
				agent.Item{Role: agent.RoleUser, Text: "hm"},
				agent.Item{Role: agent.RoleAssistant, Text: "hm"}, agent.Item{Role: agent.RoleUser, Text: "again"}),
			`0:"no" done`,
		},
		"a refusal": {`rules: [{text: "No.", finish: refused}]`, say("x"), `0:"No." refused`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachProtocol(t, c.rules, func(w *world) {
				r := run(c.items)
				r.Defer = strings.HasPrefix(name, "deferred")
				if err := agent.Continue(t.Context(), w.up, r, w); err != nil {
					t.Fatal(err)
				}
				want := c.want
				if name == "the client's result, and then this side's" && w.up.Protocol == upstream.Anthropic {
					want = `0:s->doubled 6 1:"both" done` // both results are in the last message
				}
				w.want(want)
			})
		})
	}
}

// An upstream gets a conversation in which every call has its result in the next message.
func TestConversationsAreComplete(t *testing.T) {
	items := say("x", agent.Item{Role: agent.RoleAssistant, Text: "t"}, agent.Item{Call: &agent.Call{ID: "a"}},
		agent.Item{Call: &agent.Call{ID: "b"}},
		agent.Item{Result: &agent.Result{CallID: "b", Text: "rb"}}, agent.Item{Role: agent.RoleUser, Text: "y"},
		agent.Item{Result: &agent.Result{CallID: "a", Text: "ra"}},
		agent.Item{Role: agent.RoleAssistant, Text: "u"}, agent.Item{Call: &agent.Call{ID: "lost"}},
		agent.Item{Role: agent.RoleUser, Text: "z"})
	var got []string
	for _, x := range agent.Exchanges(items) {
		text := string(x.Role)
		for _, r := range x.Results {
			text += fmt.Sprintf(" %s=%s", r.Result.CallID, r.Result.Text)
		}
		for _, item := range x.Items {
			if text += " " + item.Text; item.Call != nil {
				text += item.Call.ID
			}
		}
		got = append(got, text)
	}
	want := "user x|assistant t a b|user a=ra b=rb y|assistant u lost|user lost=The call was not carried out. z"
	if text := strings.Join(got, "|"); text != want {
		t.Errorf("got  %s\nwant %s", text, want)
	}
}

// A run ends when its log refuses an event, such as because the client has left.
func TestARunEndsWithItsLog(t *testing.T) {
	eachProtocol(t, `rules: [{text: "abc", chunk: 1, fault: hang}]`, func(w *world) {
		w.failAt = 2
		if err := agent.Continue(t.Context(), w.up, run(say("x")), w); !errors.Is(err, errLog) {
			t.Errorf("%v", err)
		}
	})
}

func TestARunEndsWithItsContext(t *testing.T) {
	eachProtocol(t, `rules: [{role: user, calls: [{name: double, arguments: {n: 1}}]}]`, func(w *world) {
		ctx, cancel := context.WithCancel(t.Context())
		r := run(say("x"))
		r.Tools[0].Execute = func(ctx context.Context, _ *agent.Call) (*agent.Outcome, error) {
			cancel()
			<-ctx.Done()
			return nil, ctx.Err()
		}
		if err := agent.Continue(ctx, w.up, r, w); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	})
}

// After the time of a run no further turn and no further call begins. The run that continues it
// carries out the calls.
func TestARunPausesAfterItsTime(t *testing.T) {
	eachProtocol(t, `rules: [{role: user, calls: [{name: double, arguments: {n: 1}}, {name: double, arguments: {n: `+
		`2}}]}, {text: ok}]`, func(w *world) {
		r := run(say("x"))
		r.Wall = 0
		if err := agent.Continue(t.Context(), w.up, r, w); err != nil {
			t.Fatal(err)
		}
		w.want(`0:server id1=double({"n":1}) 1:server id2=double({"n":2}) paused`)

		items := say("x")
		for _, e := range w.events {
			if e.Call != nil {
				items = append(items, agent.Item{Call: e.Call})
			}
		}
		w.events, r = nil, run(items)
		r.Wall = 0
		if err := agent.Continue(t.Context(), w.up, r, w); err != nil {
			t.Fatal(err)
		}
		w.want(`paused`)
		w.events, r.Wall = nil, time.Minute
		if err := agent.Continue(t.Context(), w.up, r, w); err != nil {
			t.Fatal(err)
		}
		w.want(`0:id1->doubled 2 1:id2->doubled 4 2:"ok" done`)
	})
}

// A client that sends calls without end has none of them carried out.
func TestTooManyPendingCallsAreRefused(t *testing.T) {
	for _, c := range []struct {
		calls   int
		refused bool
	}{{agent.MaxCalls, false}, {agent.MaxCalls + 1, true}} {
		eachProtocol(t, `rules: [{text: ok}]`, func(w *world) {
			items := say("x")
			for i := range c.calls {
				items = append(items, agent.Item{
					Call: &agent.Call{ID: fmt.Sprint("c", i), Name: "double", Arguments: json.RawMessage(`{"n":3}`)},
				})
			}
			err := agent.Continue(t.Context(), w.up, run(items), w)
			if field, ok := errors.AsType[*proto.FieldError](err); ok != c.refused ||
				ok && !strings.Contains(field.Message, "129 calls") || !ok && err != nil {
				t.Errorf("%d: %v", c.calls, err)
			}
			if c.refused && len(w.events) > 0 {
				w.want("")
			}
		})
	}
}

// A turn with too many calls has the first of them carried out, and the model is told of the others.
func TestTooManyCallsInATurn(t *testing.T) {
	for _, n := range []int{agent.MaxCalls, agent.MaxCalls + 1, 3 * agent.MaxCalls} {
		calls := strings.Repeat(`{name: double, arguments: {n: 1}}, `, n)
		eachProtocol(t, `rules: [{role: user, calls: [`+calls+`]}, {match: "at most 128 calls", text: sorry}, {text: ok}]`,
			func(w *world) {
				if err := agent.Continue(t.Context(), w.up, run(say("x")), w); err != nil {
					t.Fatal(err)
				}
				results, text := 0, ""
				for _, e := range w.events {
					if e.Kind == agent.EventResult {
						results++
					}
					text += e.Text
				}
				if results != agent.MaxCalls || strings.HasPrefix(text, "sorry") != (n > agent.MaxCalls) {
					t.Errorf("%d calls: %d results, %q", n, results, text)
				}
			})
	}
}

// The memory of all that a run keeps is reserved. A run that gets none ends.
func TestRunsReserveMemory(t *testing.T) {
	errFull := errors.New("full")
	eachProtocol(t, `rules: [{role: user, text: 12345678, calls: [{name: double, arguments: {n: 4}}]}, {text: ok}]`,
		func(w *world) {
			all := int64(len(`12345678`) + len(`double{"n":4}`) + len(`doubled 8`) + len(`ok`))
			for limit := range all + 1 {
				w.events = nil
				r := run(say("x"))
				left := limit
				r.Reserve = func(n int64) error {
					if left -= n; left < 0 {
						return errFull
					}
					return nil
				}
				if err := agent.Continue(t.Context(), w.up, r, w); errors.Is(err, errFull) != (limit < all) ||
					limit == all && err != nil {
					t.Errorf("%d: %v", limit, err)
				}
			}
		})
}

// A call that was forced is made once: the next turn is free.
func TestAForcedCallIsMadeOnce(t *testing.T) {
	eachProtocol(t, `rules: [{role: user, calls: [{name: double, arguments: {n: 1}}]}, {text: ok}]`, func(w *world) {
		r := run(say("x"))
		r.Turn.Choice = agent.Choice{Mode: "tool", Name: "double"}
		if err := agent.Continue(t.Context(), w.up, r, w); err != nil {
			t.Fatal(err)
		}
		if len(w.bodies) != 2 || !strings.Contains(w.bodies[0], `"tool_choice"`) ||
			strings.Contains(w.bodies[1], `"tool_choice"`) {
			t.Errorf("requests: %q", w.bodies)
		}
	})
}
