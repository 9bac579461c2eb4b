package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/mock"
	"github.com/bullpen-run/bullpen/agent/sessions/rest"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// chatHost implements [rest.Host] for all requests. Its embedded interface has the methods of files.
type chatHost struct {
	rest.Host
	r *http.Request
}

func (chatHost) Caller() (org, key string) { return sessionstest.Org, "key" }

func (chatHost) AllowStored(context.Context, bool) error { return nil }

func (chatHost) Profile(context.Context) (proto.Profile, error) { return proto.Profile{}, nil }

func (chatHost) CheckCaller() error { return nil }

func (chatHost) UntilDrain(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithCancel(ctx)
}

func (chatHost) ReleaseMemory() {}

func (chatHost) CleanPath(name string) (string, error) { return name, nil }

func (h chatHost) ReadBody(_ http.ResponseWriter, decode func([]byte) error) error {
	body, err := io.ReadAll(h.r.Body)
	if err != nil {
		return err
	}
	return decode(body)
}

// puppet is an agent whose turns a test plays.
type puppet struct{ play func(t *puppetTurn) }

// puppetTurn is a turn of a puppet.
type puppetTurn struct {
	text    string // of the message
	report  func(sessions.EventType, any)
	answers chan *sessions.Answer
	// done is closed when the conversation ends, and stop receives a value when the turn must end.
	done chan struct{}
	stop chan struct{}
}

func (*puppet) Info() *sessions.Info {
	return &sessions.Info{
		ID: "puppet", Modes: []sessions.Mode{{ID: "build"}}, PermissionModes: []string{sessions.PermissionDefault},
	}
}

func (p *puppet) Start(_ context.Context, s *sessions.Start) (sessions.Conversation, error) {
	return &puppetConversation{puppetTurn: puppetTurn{
		answers: make(chan *sessions.Answer, 10), done: make(chan struct{}), stop: make(chan struct{}, 1),
		report: func(kind sessions.EventType, data any) { _ = s.Report(sessions.Native{Type: kind, Data: data}) },
	}, play: p.play, ended: make(chan struct{}, 100)}, nil
}

type puppetConversation struct {
	puppetTurn
	play  func(t *puppetTurn)
	turns int
	ended chan struct{} // receives a value at the end of each turn
}

func (*puppetConversation) Resumed() bool { return false }

func (c *puppetConversation) Send(_ context.Context, m *sessions.Message) error {
	c.turns++
	turn := c.puppetTurn
	turn.text = m.Text
	go func() {
		c.play(&turn)
		turn.report(sessions.TurnEnded, nil)
		c.ended <- struct{}{}
	}()
	return nil
}

func (c *puppetConversation) Answer(_ context.Context, a *sessions.Answer) error {
	c.answers <- a
	return nil
}

func (c *puppetConversation) Interrupt(context.Context) error {
	select {
	case c.stop <- struct{}{}:
	default:
	}
	return nil
}

func (c *puppetConversation) Close() {
	close(c.done)
	for range c.turns {
		<-c.ended
	}
}

// answer waits for the user's answer.
func (t *puppetTurn) answer() *sessions.Answer {
	select {
	case a := <-t.answers:
		return a
	case <-t.done:
	case <-t.stop:
	}
	return &sessions.Answer{}
}

// item reports a complete item.
func (t *puppetTurn) item(id string, kind sessions.ItemKind, role sessions.Role, content ...sessions.Part) {
	t.report(sessions.ItemCompleted, sessions.ItemData{Item: sessions.Item{
		NativeID: &id, Kind: kind, Role: &role, Content: content, Status: sessions.Completed,
	}})
}

func (t *puppetTurn) say(id, text string) {
	t.report(sessions.ItemDelta, sessions.Delta{NativeItemID: &id, Delta: text})
}

func (t *puppetTurn) permission(id, action string, metadata any) {
	encoded, err := json.Marshal(metadata)
	if err != nil {
		panic(err)
	}
	t.report(sessions.PermissionRequested, sessions.Permission{
		ID: id, Action: action, Status: sessions.PermissionPending, Metadata: encoded,
	})
}

func (t *puppetTurn) question(id, prompt string, options ...string) {
	t.report(sessions.QuestionRequested, sessions.Question{
		ID: id, Prompt: prompt, Options: append([]string{}, options...), Status: sessions.QuestionPending,
	})
}

// chatWorld is a server of sessions.
type chatWorld struct {
	*sessionstest.World
	url string
}

// newChatWorld starts a server with the mock agent and a puppet. wrap may be nil.
func newChatWorld(t *testing.T, play func(*puppetTurn), wrap func(http.Handler) http.Handler) *chatWorld {
	t.Helper()
	w := sessionstest.New(t, storetest.Open(t, storetest.Server(t)), &mock.Agent{}, &puppet{play})
	api := &rest.Server{
		Service: w.Service, Host: func(r *http.Request) rest.Host { return chatHost{r: r} }, Log: storetest.Log(t),
	}
	router := chi.NewRouter()
	for _, route := range api.Routes(false) {
		router.MethodFunc(route.Method, route.Path, func(w http.ResponseWriter, r *http.Request) {
			if err := route.Handle(w, r); err != nil && r.Context().Err() == nil {
				t.Errorf("%s %s: %v", r.Method, r.URL, err)
			}
		})
	}
	handler := http.Handler(router)
	if wrap != nil {
		handler = wrap(router)
	}
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	w.Lead()
	return &chatWorld{w, server.URL}
}

// command returns the command that chats.
func (w *chatWorld) command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	program, err := build()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, append([]string{"agent", "chat"}, args...)...)
	cmd.Env = append(os.Environ(), "BULLPEN_URL="+w.url, "BULLPEN_API_KEY="+stubKey, "NO_COLOR=", "TERM=xterm")
	return cmd
}

// chatTerminal is a chat in a terminal.
type chatTerminal struct {
	*terminal
	t    *testing.T
	cmd  *exec.Cmd
	seen int // bytes of what was shown that the test has read
}

// chat starts a chat in a terminal.
func (w *chatWorld) chat(t *testing.T, args ...string) *chatTerminal {
	t.Helper()
	c := &chatTerminal{terminal: openTerminal(t), t: t, cmd: w.command(t, args...)}
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = c.File, c.File, c.File
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return c
}

// expect waits until a text is shown behind the last expected one. Then it types.
func (c *chatTerminal) expect(text, typed string) {
	c.t.Helper()
	limit := time.After(time.Minute)
	for {
		if shown := readable(c.shown.String()); strings.Contains(shown[c.seen:], text) {
			c.seen += strings.Index(shown[c.seen:], text) + len(text)
			break
		}
		select {
		case <-c.change:
		case <-limit:
			c.t.Fatalf("%q was not shown in\n%s", text, readable(c.shown.String()))
		}
	}
	if _, err := io.WriteString(c.keyboard, typed); err != nil {
		c.t.Fatal(err)
	}
}

// end returns what was shown and the exit code, once the command has ended.
func (c *chatTerminal) end() (shown string, code int) {
	c.t.Helper()
	_ = c.cmd.Wait() // the exit code tells
	return readable(c.content(c.t)), c.cmd.ProcessState.ExitCode()
}

var (
	sessionID = regexp.MustCompile(`ses_[A-Z0-9]+`)
	styles    = strings.NewReplacer("\x1b[0m", "}", "\x1b[1m", "{bold:", "\x1b[2m", "{dim:", "\x1b[31m", "{red:",
		"\x1b[32m", "{green:", "\x1b[36m", "{cyan:", "\x1b[1;33m", "{prompt:", "\r\n", "\n")
)

// readable returns what was shown with names for the styles and for the session.
func readable(shown string) string {
	return sessionID.ReplaceAllString(styles.Replace(shown), "SESSION")
}

// checkShown compares what was shown.
func checkShown(t *testing.T, got, want string) {
	t.Helper()
	if want = strings.TrimPrefix(want, "\n"); got != want {
		t.Errorf("shown is\n%s\nwant\n%s", got, want)
	}
}

const (
	forMessage    = "{prompt:> }"
	forPermission = "[n] no: }"
	forAnswer     = "or /reject: }"
)

// A person talks to an agent, leaves, and comes back to the session after the command was killed.
func TestAgentChat(t *testing.T) {
	w := newChatWorld(t, nil, nil)
	c := w.chat(t, "mock", "--title", "Demo")
	c.expect(forMessage, "say hello\n")
	c.expect(forMessage, "tool\n")
	c.expect(forMessage, "permission\n")
	c.expect(forPermission, "what?\n")
	c.expect(forPermission, "y\n")
	c.expect(forPermission, "n\n")
	c.expect(forMessage, "question\n")
	c.expect(forAnswer, "3\n")
	c.expect(forAnswer, "2, 1\n")
	c.expect(forAnswer, "/reject\n")
	c.expect(forMessage, "error\n")
	c.expect(forMessage, "Answer briefly and include your reasoning.\n")
	c.expect(forMessage, "\"\"\"say one\n")
	c.expect("{prompt:. }", "two\"\"\"\n")
	c.expect(forMessage, "\n")
	c.expect(forMessage, "\x04")
	id := sessionID.FindString(c.shown.String())
	shown, code := c.end()
	checkShown(t, shown, `
{dim:mock, session SESSION. Ctrl-C interrupts the agent, Ctrl-D leaves, /help helps.}
{prompt:> }say hello
  hello
{prompt:> }tool
  {bold:• mock.search  query: example}
    {red:failed: mock search results}
    {bold:read mock_2/readme.md}
    {bold:write mock_2/output.txt}
    {green:+mock output}
    {bold:patch mock_2/patch.txt}
    {cyan:@@ -1,1 +1,1 @@}
    {red:-old}
    {green:+new}
{prompt:> }permission
{prompt:The agent asks for a permission:}
    command_execution
    {bold:$ echo mock}
{prompt:[y] once  [a] always in this session  [n] no: }what?
{prompt:[y] once  [a] always in this session  [n] no: }y
{prompt:The agent asks for a permission:}
    file_change
    path: mock_3/deny.txt
{prompt:[y] once  [a] always in this session  [n] no: }n
{prompt:> }question
{prompt:The agent asks:}
    Choose a color
    1) Red
    2) Blue
{prompt:Number, several as 1,3, your own words, or /reject: }3
{prompt:Number, several as 1,3, your own words, or /reject: }2, 1
{prompt:The agent asks:}
    Allow mock experiment?
    1) Yes
    2) No
{prompt:Number, several as 1,3, your own words, or /reject: }/reject
{prompt:> }error
  {red:error: Mock error event.}
  {dim:unknown output of the agent: unsupported payload}
{prompt:> }Answer briefly and include your reasoning.
  Mock assistant streaming delta.
  {dim:thinking: Public reasoning for display.}
  {dim:{"stage":"analysis","ok":true}}
{prompt:> }"""say one
{prompt:. }two"""
  one two
{prompt:> }
{prompt:> }
{dim:To continue: bullpen agent chat mock --session SESSION}
`)
	if code != exitOK {
		t.Errorf("exit code %d", code)
	}
	x, err := w.Get(t.Context(), sessionstest.Org, id)
	if err != nil || x.Title != "Demo" || x.Ended != "" || len(x.Pending) > 0 {
		t.Errorf("the session is %+v, %v", x, err)
	}

	c = w.chat(t, "mock", "permission", "--session", id)
	c.expect(forPermission, "")
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	shown, _ = c.end()
	checkShown(t, shown, `
{dim:mock, session SESSION, continued. Ctrl-C interrupts the agent, Ctrl-D leaves, /help helps.}
  {dim:> say one}
  {dim:two}
  one two
{prompt:> permission}
{prompt:The agent asks for a permission:}
    command_execution
    {bold:$ echo mock}
{prompt:[y] once  [a] always in this session  [n] no: }`)

	c = w.chat(t, "mock", "--session", id)
	c.expect(forPermission, "a\n")
	c.expect(forPermission, "\x03")
	c.expect(forMessage, "permission\n") // one of the two has been granted
	c.expect(forPermission, "y\n")
	c.expect(forMessage, "\x03")
	c.expect(forMessage, "\x03")
	shown, code = c.end()
	checkShown(t, shown, `
{dim:mock, session SESSION, continued. Ctrl-C interrupts the agent, Ctrl-D leaves, /help helps.}
  {dim:> permission}
{prompt:The agent asks for a permission:}
    command_execution
    {bold:$ echo mock}
{prompt:[y] once  [a] always in this session  [n] no: }a
{prompt:The agent asks for a permission:}
    file_change
    path: mock_8/deny.txt
{prompt:[y] once  [a] always in this session  [n] no: }^C
{dim:Interrupting the agent. Ctrl-C again leaves.}
  {dim:rejected: file_change mock_8/deny.txt}
  {dim:interrupted}
{prompt:> }permission
  {dim:allowed for the session: command_execution echo mock}
{prompt:The agent asks for a permission:}
    file_change
    path: mock_9/deny.txt
{prompt:[y] once  [a] always in this session  [n] no: }y
{prompt:> }^C
{dim:Ctrl-C again leaves, and so does Ctrl-D.}
{prompt:> }^C
{dim:To continue: bullpen agent chat mock --session SESSION}
`)
	if code != exitInterrupted {
		t.Errorf("exit code %d", code)
	}
}

// The agent answers what the user has typed: answers of several words, a plan, edits.
func TestAgentChatAnswers(t *testing.T) {
	got := make(chan *sessions.Answer, 10)
	long := strings.Repeat("line\n", 100)
	w := newChatWorld(t, func(p *puppetTurn) {
		p.item("plan", sessions.KindToolCall, sessions.RoleAssistant, sessions.Part{
			Type: sessions.PartToolCall, Name: "ExitPlanMode", Arguments: `{"plan":"# Plan\n\n1. Do it."}`,
		})
		p.question("plan", "Approve plan execution?", "approve", "reject")
		got <- p.answer()
		p.question("free", "What is your name?")
		got <- p.answer()
		p.question("several", "Which ones?", "A", "B", "C")
		got <- p.answer()
		p.permission("edit", "Edit", map[string]any{"toolName": "Edit", "input": map[string]any{
			"file_path": "a.go", "old_string": "x := 1\ny", "new_string": "x := 2\ny", "replace_all": false,
		}})
		got <- p.answer()
		p.permission("write", "Write", map[string]any{"input": map[string]any{"content": long + "the end\n"}})
		got <- p.answer()
		p.permission("list", "commandExecution", map[string]any{"command": []string{"bash", "-lc", "it's"}, "cwd": "/w"})
		got <- p.answer()
	}, nil)
	c := w.chat(t, "puppet", "go")
	c.expect("or say what to change: }", "first the tests\n")
	c.expect("Your answer, or /reject: }", "3\n")
	c.expect(forAnswer, "none, really\n")
	c.expect(forPermission, "YES\n")
	c.expect("[n] no  [d] show all of it: }", "d\n")
	c.expect(forPermission, "n\n")
	c.expect(forPermission, "always\n")
	c.expect(forMessage, "/exit\n")
	shown, code := c.end()
	full := strings.Repeat("    {green:+line}\n", 100) + "    {green:+the end}\n"
	if !strings.Contains(shown, full) {
		t.Errorf("the whole text was not shown: %s", shown)
	}
	checkShown(t, strings.Replace(shown, full, "(all)\n", 1), `
{dim:puppet, session SESSION. Ctrl-C interrupts the agent, Ctrl-D leaves, /help helps.}
{prompt:> go}
  {bold:• ExitPlanMode}
    # Plan
    
    1. Do it.
{prompt:The agent asks:}
    Approve plan execution?
{prompt:[y] approve  [n] reject, or say what to change: }first the tests
{prompt:The agent asks:}
    What is your name?
{prompt:Your answer, or /reject: }3
{prompt:The agent asks:}
    Which ones?
    1) A
    2) B
    3) C
{prompt:Number, several as 1,3, your own words, or /reject: }none, really
{prompt:The agent asks for a permission:}
    Edit
    file_path: a.go
    replace_all: false
    {red:-x := 1}
    {red:-y}
    {green:+x := 2}
    {green:+y}
{prompt:[y] once  [a] always in this session  [n] no: }YES
{prompt:The agent asks for a permission:}
    Write
`+strings.Repeat("    {green:+line}\n", 27)+"    … 61 more lines …\n"+strings.Repeat("    {green:+line}\n", 12)+
		`    {green:+the end}
{prompt:[y] once  [a] always in this session  [n] no  [d] show all of it: }d
{prompt:The agent asks for a permission:}
    Write
(all)
{prompt:[y] once  [a] always in this session  [n] no: }n
{prompt:The agent asks for a permission:}
    commandExecution
    {bold:$ bash '-lc' 'it'\''s'}
    cwd: /w
{prompt:[y] once  [a] always in this session  [n] no: }always
{prompt:> }/exit
{dim:To continue: bullpen agent chat puppet --session SESSION}
`)
	var answers []string
	for len(got) > 0 {
		a := <-got
		if a.Permission != nil {
			answers = append(answers, a.Permission.ID+" "+string(a.Permission.Status))
		} else {
			answers = append(answers, fmt.Sprintf("%s %q", a.Question.ID, a.Answers))
		}
	}
	want := `plan [["first the tests"]], free [["3"]], several [["none, really"]], ` +
		`edit accept, write reject, list accept_for_session`
	if text := strings.Join(answers, ", "); text != want || code != exitOK {
		t.Errorf("exit code %d, answers %s, want %s", code, text, want)
	}
}

// What a hostile agent prints neither controls the terminal nor looks like a prompt, and what the user types before a
// prompt is no answer to it.
func TestAgentChatWithAHostileAgent(t *testing.T) {
	const evil = "\x1b[2J\x1b]0;title\a\x9b31m\u202e\u2066\u200b\r\b\x00"
	const fake = "[y] once  [a] always in this session  [n] no: "
	lure := strings.Repeat("x", 76) + fake + "\n" + fake
	typed := make(chan struct{})
	w := newChatWorld(t, func(p *puppetTurn) {
		part := sessions.Part{
			Type: sessions.PartToolCall, Name: evil + lure, CallID: "c",
			Arguments: `{"` + "\u202e" + `command":"\u001b[2J\r> "}`,
		}
		p.item(evil, sessions.KindToolCall, sessions.RoleAssistant, part)
		part.Arguments = evil + "no JSON"
		p.item("other", sessions.KindToolCall, sessions.RoleAssistant, part)
		diff := "@@\n+" + evil + lure + "\n-" + evil
		p.item("result", sessions.KindToolResult, sessions.RoleTool,
			sessions.Part{Type: sessions.PartToolResult, CallID: "c", Output: evil + lure + evil},
			sessions.Part{Type: sessions.PartFileRef, Path: evil + lure, Action: evil, Diff: &diff},
			sessions.Part{Type: sessions.PartReasoning, Text: evil + lure},
			sessions.Part{Type: sessions.PartStatus, Label: evil, Detail: new(lure)},
			sessions.Part{Type: sessions.PartImage, Path: evil + lure},
			sessions.Part{Type: sessions.PartJSON, JSON: json.RawMessage(`"\u2028` + lure[:100] + `"`)},
		)
		p.item("user", sessions.KindMessage, sessions.RoleUser, sessions.Text(evil+lure))
		p.report(sessions.ErrorEvent, sessions.Failure{Message: evil + lure})
		p.report(sessions.Unparsed, sessions.UnparsedOutput{Error: evil + lure})
		p.say("text", evil+"\n"+lure[:40])
		p.say("text", lure[40:])
		p.say("end", "\nDo you agree?")
		<-typed
		p.permission("p", evil+lure, map[string]any{
			"command": evil + lure, evil: evil, "diff": lure + evil, "path": evil + lure,
		})
		p.answer()
		p.question("q", evil+lure, evil+lure)
		p.answer()
	}, nil)
	c := w.chat(t, "puppet", "go")
	c.expect("Do you agree?", "y\n1\n")
	c.expect("y\n1\n", "")
	close(typed)
	c.expect("{prompt:"+fake+"}", "n\n")
	c.expect("{prompt:Number", "/reject\n")
	c.expect(forMessage, "\x04")
	id := sessionID.FindString(c.shown.String())
	shown, code := c.end()
	if code != exitOK {
		t.Errorf("exit code %d", code)
	}
	ours := regexp.MustCompile(`^(\{dim:puppet, session|\{prompt:|\{dim:To continue|1$|$)`) // 1 is what the user has typed
	for line := range strings.SplitSeq(shown, "\n") {
		if !strings.HasPrefix(line, "  ") && !ours.MatchString(line) {
			t.Errorf("a line of the agent begins in the first column: %q", line)
		}
		if strings.ContainsFunc(line, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("control characters in %q", line)
		}
	}
	for _, e := range w.Until(id, 1, sessionstest.Is(sessions.TurnEnded)) {
		switch e.Type {
		case sessions.PermissionResolved:
			if p, err := sessions.DataOf[sessions.Permission](&e); err != nil || p.Status != sessions.PermissionRejected {
				t.Errorf("what was typed before the prompt is an answer: %+v, %v", p, err)
			}
		case sessions.QuestionResolved:
			if q, err := sessions.DataOf[sessions.Question](&e); err != nil || q.Status != sessions.QuestionRejected {
				t.Errorf("what was typed before the prompt is an answer: %+v, %v", q, err)
			}
		}
	}
}

// An interrupt ends the turn, also one that does nothing, and a second one leaves.
func TestAgentChatInterrupt(t *testing.T) {
	w := newChatWorld(t, func(p *puppetTurn) {
		p.say("text", "Working ")
		select {
		case <-p.stop:
		case <-p.done:
		}
		if p.text == "stubborn" {
			<-p.done
		}
	}, nil)
	c := w.chat(t, "puppet")
	c.expect(forMessage, "work\n")
	c.expect("Working", "\x03")
	c.expect(forMessage, "stubborn\n")
	c.expect("Working", "\x03")
	c.expect("Ctrl-C again leaves.", "\x03")
	shown, code := c.end()
	checkShown(t, shown, `
{dim:puppet, session SESSION. Ctrl-C interrupts the agent, Ctrl-D leaves, /help helps.}
{prompt:> }work
  Working ^C
{dim:Interrupting the agent. Ctrl-C again leaves.}
{prompt:> }stubborn
  Working ^C
{dim:Interrupting the agent. Ctrl-C again leaves.}
^C
{dim:To continue: bullpen agent chat puppet --session SESSION}
`)
	if code != exitInterrupted {
		t.Errorf("exit code %d", code)
	}
}

// Several lines that are pasted are one message, and the session goes on when the agent has ended, but not when it was
// terminated.
func TestAgentChatPasteAndEnd(t *testing.T) {
	w := newChatWorld(t, nil, nil)
	c := w.chat(t, "mock")
	c.expect(forMessage, "say one\n two\nthree")
	c.expect("{prompt:. }", "") // for " two"
	c.expect("{prompt:. }", " and four\n\"\"\"\n")
	c.expect("three and four", "")
	c.expect(forMessage, "end\n")
	c.expect("the agent ended: completed", "")
	c.expect(forMessage, "say again\n")
	c.expect("  again", "")
	c.expect(forMessage, "")
	id := sessionID.FindString(c.shown.String())
	if err := w.Terminate(t.Context(), sessionstest.Org, id); err != nil {
		t.Fatal(err)
	}
	shown, code := c.end()
	const over = "bullpen: session SESSION has ended\n"
	if code != exitFailure || !strings.HasSuffix(shown, "the agent ended: terminated}\n"+over) {
		t.Errorf("exit code %d: %s", code, shown)
	}
	c = w.chat(t, "mock", "--session", id)
	shown, code = c.end()
	if code != exitFailure || !strings.Contains(shown, "{dim:> say again}\n  again\n") ||
		!strings.HasSuffix(shown, over) {
		t.Errorf("exit code %d: %s", code, shown)
	}
}

// A stream that breaks again and again is resumed without losing or repeating text.
func TestAgentChatResumesItsStream(t *testing.T) {
	var streams atomic.Int32
	w := newChatWorld(t, nil, func(api http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/sse") && streams.Add(1) < 6 {
				w = &breakingWriter{ResponseWriter: w, left: 700}
			}
			api.ServeHTTP(w, r)
		})
	})
	cmd := w.command(t, "mock", "markdown")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, errs.String())
	}
	events := w.Until(sessionID.FindString(errs.String()), 1, sessionstest.Is(sessions.TurnEnded))
	message, err := sessions.DataOf[sessions.ItemData](&events[len(events)-2])
	if want := sessions.TextOf(message.Item.Content) + "\n"; err != nil || len(want) < 100 || string(out) != want {
		t.Errorf("%v: printed %q, want %q", err, out, want)
	}
	if n := streams.Load(); n < 6 {
		t.Errorf("%d streams", n)
	}
}

// breakingWriter breaks the connection after some bytes.
type breakingWriter struct {
	http.ResponseWriter
	left int
}

func (w *breakingWriter) Write(p []byte) (int, error) {
	if w.left -= len(p); w.left < 0 {
		_ = http.NewResponseController(w.ResponseWriter).Flush()
		panic(http.ErrAbortHandler)
	}
	return w.ResponseWriter.Write(p)
}

func (w *breakingWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Without a terminal, the input is one message, and nobody can be asked.
func TestAgentChatWithoutATerminal(t *testing.T) {
	w := newChatWorld(t, nil, nil)
	const next = "To continue: bullpen agent chat mock --session SESSION\n"
	for _, c := range []struct {
		args         []string
		in           string
		code         int
		out, errText string
	}{
		{args: []string{"mock"}, in: "say hello\n\nworld\n", out: "hello world\n", errText: next},
		{args: []string{"mock", "say", "hello"}, in: "ignored", out: "hello\n", errText: next},
		{args: []string{"mock", "-"}, in: "say \x1b[2J", out: "\ufffd[2J\n", errText: next},
		{args: []string{"mock", "error"}, code: 1, errText: next + "bullpen: the agent failed: Mock error event.\n"},
		{args: []string{"mock", "permission"}, code: 1, errText: "rejected, because there is no terminal to ask on: " +
			"command_execution echo mock\n"},
		{args: []string{"mock", "question"}, code: 1, errText: "2 requests of the agent were rejected"},
		{args: []string{"mock", "tool"}, errText: "    @@ -1,1 +1,1 @@\n    -old\n    +new\n"},
		{args: []string{"mock", "--json", "say hi"}, out: `"type":"turn.ended"`, errText: next},
		{args: []string{"mock"}, code: 2, errText: "there is no message"},
		{args: []string{"mock", "--session", "x", "--title", "x", "hi"}, code: 2, errText: "continues a session as it is"},
		{args: []string{"mock", "--session", "x", "hi"}, code: 1, errText: "session not found: x"},
		{args: []string{"nobody", "hi"}, code: 1, errText: "unsupported agent: nobody"},
		{args: []string{"mock", "--mcp", "/no/such", "hi"}, code: 1, errText: "read the MCP servers: open /no/such"},
	} {
		cmd := w.command(t, c.args...)
		var errs bytes.Buffer
		cmd.Stdin, cmd.Stderr = strings.NewReader(c.in), &errs
		out, _ := cmd.Output() // the exit code tells
		if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(out), c.out) ||
			!strings.Contains(readable(errs.String()), c.errText) || strings.Contains(errs.String(), "\x1b") {
			t.Errorf("%q: exit code %d, %q, %s", c.args, code, out, errs.String())
		}
	}
}

// The servers of a file have the form of the API.
func TestAgentMCPServers(t *testing.T) {
	for file, want := range map[string]string{
		`{"mcpServers":{"a":{"command":"x","args":["y"]},"b":{"url":"http://h"},"c":{"type":"sse","url":"http://h"}}}`: `{` +
			`"a":{"args":["y"],"command":"x","type":"local"},"b":{"type":"remote","url":"http://h"},` +
			`"c":{"transport":"sse","type":"remote","url":"http://h"}}`,
		`{"a":{"type":"http","url":"http://h"}}`: `{"a":{"type":"http","url":"http://h"}}`,
	} {
		if got, err := mcpServers([]byte(file)); err != nil || string(got) != want {
			t.Errorf("%s: %s, %v", file, got, err)
		}
	}
	if got, err := mcpServers([]byte(`{"a":"b"}`)); err == nil {
		t.Errorf("got %s", got)
	}
}
