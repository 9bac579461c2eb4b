package codex

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"path"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

// program is a process of Codex.
type program struct {
	*conversation
	process sessions.Process

	// c.mu guards these.

	open  bool   // whether Codex has the conversation's thread open
	model string // Codex's default; empty until open is set

	// The reader alone uses these.

	raw    json.RawMessage
	cursor string
}

// maxRaw is the size of the largest line that an event repeats.
const maxRaw = 64 << 10

// line is a message of Codex: a request or a notification, or the response to a request.
type line struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *rpcError       `json:"error"`
}

type rpcError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// The requests that Codex receives. The method of each is its id, too, because none is sent again before the
// response to it.
const (
	methodInitialize = "initialize"
	methodStart      = "thread/start"
	methodResume     = "thread/resume"
	methodTurn       = "turn/start"
	methodInterrupt  = "turn/interrupt"
)

func (p *program) write(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode a line for Codex: %w", err)
	}
	return p.process.WriteLine(text)
}

func (p *program) request(method string, params any) error {
	return p.write(map[string]any{"id": method, "method": method, "params": params})
}

// respond answers a request of Codex.
func (p *program) respond(id json.RawMessage, result any) error {
	return p.write(map[string]any{"id": id, "result": result})
}

func (p *program) initialize() error {
	err := p.request(methodInitialize, map[string]any{
		"clientInfo":   map[string]any{"name": "bullpen", "title": "bullpen", "version": "1"},
		"capabilities": map[string]any{"experimentalApi": true},
	})
	if err != nil {
		return err
	}
	return p.write(map[string]any{"method": "initialized"})
}

// openThread opens a thread, or a new one if id is empty. Codex stores none of these settings with a thread.
func (p *program) openThread(id string) error {
	params := map[string]any{
		"modelProvider": "bullpen", "cwd": p.dir, "approvalPolicy": p.approvalPolicy(), "sandbox": "danger-full-access",
	}
	if p.turn.model != "" {
		params["model"] = p.turn.model
	}
	// Codex asks only before the use of those MCP tools that call themselves destructive.
	if len(p.servers) > 0 && !p.turn.plan {
		params["config"] = map[string]any{"mcp_servers": p.servers}
	}
	if id == "" {
		return p.request(methodStart, params)
	}
	params["threadId"] = id
	return p.request(methodResume, params)
}

// approvalPolicy returns when Codex must ask. Only untrusted asks in a thread without Codex's own sandbox.
func (p *program) approvalPolicy() string {
	if p.session.PermissionMode == sessions.PermissionBypass && !p.turn.plan {
		return "never"
	}
	return "untrusted"
}

// startTurn passes the input of the turn to Codex. It requires c.mu.
func (p *program) startTurn() error {
	t := p.turn
	settings := map[string]any{"model": t.model, "reasoning_effort": nil, "developer_instructions": nil}
	if t.model == "" {
		settings["model"] = p.model
	}
	if t.effort != "" {
		settings["reasoning_effort"] = t.effort
	}
	mode := "default"
	if t.plan {
		mode = "plan"
	}
	return p.request(methodTurn, map[string]any{
		"threadId": p.thread, "input": t.input, "approvalPolicy": p.approvalPolicy(),
		"collaborationMode": map[string]any{"mode": mode, "settings": settings},
	})
}

func textInput(text string) map[string]any {
	return map[string]any{"type": "text", "text": text, "text_elements": []any{}}
}

// inputOf returns a message as the input of a turn. Codex reads the images, and tells the model about those that it
// cannot read.
func inputOf(m *sessions.Message) []map[string]any {
	rest := *m
	rest.Attachments = nil
	var images []map[string]any
	for _, a := range m.Attachments {
		kind := a.MIME
		if kind == "" {
			kind = mime.TypeByExtension(path.Ext(a.Path))
		}
		if strings.HasPrefix(kind, "image/") {
			images = append(images, map[string]any{"type": "localImage", "path": a.Path})
		} else {
			rest.Attachments = append(rest.Attachments, a)
		}
	}
	return append([]map[string]any{textInput(rest.Prompt())}, images...)
}

// interruptTurn asks Codex to end the turn. It requires c.mu. If the write fails, the program has ended, which the
// reader reports.
func (p *program) interruptTurn() {
	_ = p.request(methodInterrupt, map[string]any{"threadId": p.thread, "turnId": p.turn.native})
}

// stop ends the program with all that it has started. The reader calls it, and returns after its next report.
func (p *program) stop() {
	p.process.Close()
	p.mu.Lock()
	p.program = nil
	p.mu.Unlock()
}

// read reports the output of Codex until the program ends.
func (p *program) read() {
	for {
		text, cursor, err := p.process.ReadLine()
		if errors.Is(err, io.EOF) {
			p.exited()
			return
		}
		if err != nil {
			p.raw = nil
			p.stop()
			p.fail("agent_unavailable", "the output of Codex could not be read")
			return
		}
		p.raw, p.cursor = nil, cursor
		if len(text) <= maxRaw {
			p.raw = slices.Clone(text)
		}
		var l line
		if err := json.Unmarshal(text, &l); err != nil {
			p.raw = nil
			p.send(sessions.Unparsed, sessions.UnparsedOutput{Error: "a line is no JSON object", Location: "codex.stdout"})
			continue
		}
		if !p.handle(&l) {
			return
		}
	}
}

// send reports data. It returns false if the conversation is closed.
func (p *program) send(kind sessions.EventType, data any) bool {
	return p.report(sessions.Native{Type: kind, Data: data, Raw: p.raw, Cursor: p.cursor}) == nil
}

// handle handles a line. It returns false if the reader must end.
func (p *program) handle(l *line) bool {
	switch {
	case l.Method == "":
		return p.handleResponse(l)
	case l.ID != nil:
		return p.handleRequest(l)
	default:
		return p.handleNotification(l)
	}
}

// handleResponse handles the response to a request.
func (p *program) handleResponse(l *line) bool {
	var method string
	if json.Unmarshal(l.ID, &method) != nil {
		return true
	}
	switch {
	case l.Error == nil && (method == methodStart || method == methodResume):
		return p.threadOpened(l.Result)
	case l.Error == nil && method == methodTurn:
		var result struct {
			Turn struct {
				ID string `json:"id"`
			} `json:"turn"`
		}
		_ = json.Unmarshal(l.Result, &result) // turn/started has the id, too
		p.turnStarted(result.Turn.ID)
	case l.Error != nil && method == methodResume:
		return p.restartThread(l.Error)
	case l.Error != nil && slices.Contains([]string{methodInitialize, methodStart, methodTurn}, method):
		return p.fail("agent_error", "Codex refused "+method+": "+l.Error.Message)
	}
	return true
}

// threadOpened starts the turn that has waited for the thread.
func (p *program) threadOpened(raw json.RawMessage) bool {
	var result struct {
		Thread struct {
			ID string `json:"id"`
		} `json:"thread"`
		Model string `json:"model"`
	}
	if json.Unmarshal(raw, &result) != nil || result.Thread.ID == "" {
		return p.fail("agent_error", "Codex has opened no thread")
	}
	p.mu.Lock()
	p.open, p.model, p.thread = true, result.Model, result.Thread.ID
	started, stopped := p.turn != nil && !p.turn.interrupted, p.turn != nil && p.turn.interrupted
	var err error
	if started {
		err = p.startTurn()
	}
	p.mu.Unlock()
	if p.report(sessions.Native{
		Type: sessions.SessionStarted, NativeSession: result.Thread.ID, Cursor: p.cursor,
	}) != nil {
		return false
	}
	if err != nil {
		return p.fail("agent_unavailable", "Codex does not read its input")
	}
	return !stopped || p.endTurn(interrupted)
}

// restartThread opens a new thread, because Codex cannot open the old one. That is so if the home was saved last before
// the thread's first turn.
func (p *program) restartThread(cause *rpcError) bool {
	p.mu.Lock()
	var err error
	if p.turn != nil {
		err = p.openThread("")
	}
	p.mu.Unlock()
	if err != nil {
		return p.fail("agent_unavailable", "Codex does not read its input")
	}
	return p.status("Codex has lost the earlier turns of this session", cause.Message)
}

// turnStarted notes Codex's id of the turn. Without it, the turn cannot be interrupted.
func (p *program) turnStarted(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t := p.turn; t != nil && t.native == "" {
		if t.native = id; t.interrupted && id != "" {
			p.interruptTurn()
		}
	}
}

// current returns the turn in progress; nil if there is none.
func (p *program) current() *turn {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.turn
}

// endTurn reports the end of the turn.
func (p *program) endTurn(data any) bool {
	t := p.current()
	if t == nil {
		return true
	}
	if !p.closeItems(t) {
		return false
	}
	p.mu.Lock()
	p.turn = nil
	p.mu.Unlock()
	return p.send(sessions.TurnEnded, data)
}

// fail ends the turn in progress with an error.
func (p *program) fail(code, message string) bool {
	return p.current() == nil ||
		p.send(sessions.ErrorEvent, sessions.Failure{Message: message, Code: &code}) && p.endTurn(nil)
}

// exited reports the end of the program. Between turns it is not reported: the next turn starts another.
func (p *program) exited() {
	exit := p.process.Exit()
	p.raw = nil
	p.mu.Lock()
	t := p.turn
	p.program = nil
	stopped := t != nil && t.interrupted
	p.mu.Unlock()
	switch {
	case t == nil:
	case stopped:
		p.endTurn(interrupted)
	default:
		ended := sessions.Ended{
			Reason: sessions.EndError, TerminatedBy: sessions.FromAgent, Message: "Codex ended", ExitCode: &exit.Code,
		}
		if exit.Stderr.Head != "" {
			ended.Stderr = &exit.Stderr
		}
		p.mu.Lock()
		p.turn = nil
		p.mu.Unlock()
		p.send(sessions.SessionEnded, ended)
	}
}
