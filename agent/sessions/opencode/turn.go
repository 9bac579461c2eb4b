package opencode

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

const (
	// settleTime is how long an idle session is observed before its turn ends, if more events are likely:
	// after an error or an abort, OpenCode reports twice that the session is idle.
	settleTime = time.Second
	// rejectTime is how long OpenCode may take to begin a turn after an error. Some errors, such as that
	// of a missing attachment, do not prevent the turn.
	rejectTime = 3 * time.Second
	// maxAttempts is how often OpenCode may fail to reach the model before the turn is aborted, and
	// maxDelay how long it may wait between. It has no limits of its own.
	maxAttempts = 5
	maxDelay    = time.Minute
	// firstRetry and lastRetry are the waits between attempts to reconnect to the event stream. After
	// lostAfter the program is given up.
	firstRetry = 100 * time.Millisecond
	lastRetry  = 2 * time.Second
	lostAfter  = 30 * time.Second
	// maxPolls is how often a turn is looked for in the state of the program after a reconnection.
	maxPolls = 30
	// maxKnown bounds each kind of what is remembered of a turn.
	maxKnown = 10_000
	// recent is the number of messages that are read after a reconnection.
	recent = 100
)

// turn is the state of the turn in progress.
type turn struct {
	running bool
	// busy is set once OpenCode has begun the turn. Reports before it are about earlier turns.
	busy        bool
	interrupted bool
	idles       int               // how often OpenCode has reported the end of the turn
	failure     *sessions.Failure // that the turn ends with; nil for none
	polls       int               // since a reconnection; 0 if the event stream is complete
	prompt      string            // id of the user's message; empty if not known yet
	answered    bool              // whether the last message of the assistant is complete
	messages    map[string]bool   // the assistant's messages, by id
	texts       map[string]bool   // the assistant's texts, by the id of the part
	calls       map[string]bool   // reported tool calls, by the id of the part
	text        string            // id of the last text
	diffs       map[string]string // of the file changes that the user was asked about, by the id of the call
	// permissions and questions are those without an answer. The values are ids of sessions, because
	// subagents have sessions of their own.
	permissions, questions map[string]string
	asked                  map[string]int // number of parts of each question
	rejected               []string       // permissions whose rejection waits for other answers
}

// begin begins a turn.
func (c *conversation) begin(m *sessions.Message) {
	c.turn = turn{
		running: true, messages: map[string]bool{}, texts: map[string]bool{}, calls: map[string]bool{},
		diffs: map[string]string{}, permissions: map[string]string{}, questions: map[string]string{}, asked: map[string]int{},
	}
	c.model, c.variant = cmp.Or(m.Model, c.model), cmp.Or(m.Variant, c.variant)
	err := c.ready()
	if err == nil && c.unknownAgent() {
		c.fail("unknown_agent", fmt.Sprintf("OpenCode has no agent %q", c.start.Session.AgentMode))
		return
	}
	if err == nil {
		err = c.call(http.MethodPost, c.path("prompt_async"), c.prompt(m), nil)
	}
	if err != nil {
		c.unreachable(err)
	}
}

// path returns the path of a resource of the session.
func (c *conversation) path(resource string) string {
	return "/session/" + url.PathEscape(c.native) + "/" + resource
}

// prompt returns the request for a turn.
func (c *conversation) prompt(m *sessions.Message) object {
	parts := []object{{"type": "text", "text": m.Text}}
	for i := range m.Attachments {
		a := &m.Attachments[i]
		file := a.Path
		if !path.IsAbs(file) {
			file = path.Join(c.start.Sandbox.Dir(), file)
		}
		location := url.URL{Scheme: "file", Path: file}
		parts = append(parts, object{
			"type": "file", "mime": cmp.Or(a.MIME, mediaType(file)), "filename": cmp.Or(a.Filename, path.Base(file)),
			"url": location.String(),
		})
	}
	body := object{
		"agent": c.start.Session.AgentMode, "model": object{"providerID": provider, "modelID": c.model}, "parts": parts,
	}
	if c.variant != "" {
		body["variant"] = c.variant
	}
	return body
}

// mediaType returns the media type of a file for OpenCode, which reads files of type text/plain itself.
func mediaType(file string) string {
	switch extension := strings.ToLower(path.Ext(file)); extension {
	case ".png", ".jpg", ".jpeg", ".gif", ".webp", ".pdf": // are in the table of package mime
		return mime.TypeByExtension(extension)
	default:
		return "text/plain"
	}
}

// ready makes the program serve the model and the session of the conversation.
func (c *conversation) ready() error {
	if c.server != nil && c.server.model != c.model {
		c.stop() // a running program cannot get more models
	}
	if c.server == nil {
		if err := c.spawn(c.model); err != nil {
			return err
		}
	}
	if err := c.server.connect(c.context, c.start.Sandbox); err != nil {
		return err
	}
	if c.events != nil {
		return nil
	}
	events, err := c.server.listen()
	if err != nil {
		return err
	}
	if err := c.open(); err != nil {
		if isRefused(err) {
			c.stop()
		}
		return err
	}
	c.events = events
	return nil
}

// call sends a request to the program.
func (c *conversation) call(method, path string, in, out any) error {
	if c.server == nil {
		return errExited
	}
	return c.server.call(c.context, method, path, in, out)
}

// open opens OpenCode's session, or creates it.
func (c *conversation) open() error {
	if c.native != "" {
		err := c.resume()
		if !isNotFound(err) {
			return err
		}
		c.status("conversation lost", "OpenCode no longer has the earlier messages of this session")
	}
	x := c.start.Session
	var created struct {
		ID string `json:"id"`
	}
	err := c.call(http.MethodPost, "/session", object{
		"title": cmp.Or(x.Title, x.ID), "permission": c.sessionRules(), // without a title, the model is asked for one
	}, &created)
	if err != nil {
		return err
	}
	if created.ID == "" || len(created.ID) > maxID {
		return errors.New("it returned no id of a session")
	}
	c.native, c.previous = created.ID, ""
	c.report(&sessions.Native{Type: sessions.SessionStarted, NativeSession: c.native})
	return nil
}

// resume continues the session in a new process.
func (c *conversation) resume() error {
	var session struct {
		Permission []json.RawMessage `json:"permission"`
	}
	if err := c.call(http.MethodGet, "/session/"+url.PathEscape(c.native), nil, &session); err != nil {
		return err
	}
	var last []message
	if err := c.call(http.MethodGet, c.path("message?limit=1"), nil, &last); err != nil {
		return err
	}
	for i := range last {
		c.previous = cmp.Or(last[i].Info.Parent, last[i].Info.ID)
	}
	if c.hasRules(session.Permission) {
		return nil
	}
	return c.call(http.MethodPatch, "/session/"+url.PathEscape(c.native),
		object{"permission": c.sessionRules()}, nil) // they are appended
}

// hasRules reports whether rules end with those of the session's mode, which may have changed.
func (c *conversation) hasRules(rules []json.RawMessage) bool {
	want := c.sessionRules()
	if len(rules) < len(want) {
		return false
	}
	return slices.EqualFunc(rules[len(rules)-len(want):], want, func(raw json.RawMessage, rule object) bool {
		var got object
		return json.Unmarshal(raw, &got) == nil && got["permission"] == rule["permission"] &&
			got["pattern"] == rule["pattern"] && got["action"] == rule["action"]
	})
}

// unknownAgent reports whether OpenCode does not have the agent of the session's mode. OpenCode itself
// reports that only after it has accepted a message.
func (c *conversation) unknownAgent() bool {
	mode := c.start.Session.AgentMode
	if mode == modeBuild || mode == modePlan {
		return false
	}
	var agents []struct {
		Name string `json:"name"`
	}
	err := c.call(http.MethodGet, "/agent", nil, &agents)
	for i := range agents {
		if agents[i].Name == mode {
			return false
		}
	}
	return err == nil
}

// unreachable ends the turn because a request of this side failed.
func (c *conversation) unreachable(err error) {
	if c.context.Err() != nil {
		return
	}
	if !isRefused(err) && c.server != nil {
		select { // a program that has ended is reported as such
		case <-c.server.exited:
			c.reportExit()
			return
		case <-time.After(settleTime):
		case <-c.context.Done():
			return
		}
		c.stop() // the next turn starts another program
	}
	c.fail("agent_unavailable", "OpenCode could not be reached: "+shorten(err.Error(), maxMessage))
}

// fail ends the turn with an error of this side.
func (c *conversation) fail(code, text string) {
	c.turn.failure = &sessions.Failure{Message: text, Code: &code}
	c.end()
}

// end ends the turn.
func (c *conversation) end() {
	t := &c.turn
	c.timer.Stop()
	c.dropPending()
	c.previous = cmp.Or(t.prompt, c.previous)
	t.running = false
	var ended any
	switch {
	case t.interrupted:
		ended = sessions.Turn{Metadata: json.RawMessage(`{"interrupted":true}`)}
	case t.failure != nil:
		c.report(&sessions.Native{Type: sessions.ErrorEvent, Data: *t.failure})
	}
	c.report(&sessions.Native{Type: sessions.TurnEnded, Data: ended})
}

// dropPending rejects the permissions and questions without an answer. Otherwise they stay in OpenCode's
// lists after an abort.
func (c *conversation) dropPending() {
	for id := range c.turn.permissions {
		_ = c.replyPermission(id, object{"reply": "reject"}) // it may be gone
	}
	for id := range c.turn.questions {
		_ = c.replyQuestion(id, nil) // it may be gone
	}
}

// interrupt aborts the turn.
func (c *conversation) interrupt() {
	if c.turn.running {
		c.turn.interrupted = true
		c.abort()
	}
}

// abort makes OpenCode end the turn. It reports the end as usual.
func (c *conversation) abort() {
	if err := c.call(http.MethodPost, c.path("abort"), nil, nil); err != nil {
		c.unreachable(err)
	}
}

// started handles the report that OpenCode works on the turn.
func (c *conversation) started() {
	t := &c.turn
	first := !t.busy
	t.busy, t.polls = true, 0
	if !first {
		return
	}
	c.timer.Stop()
	t.failure = nil // it did not prevent the turn, or was of an earlier one
	if t.interrupted {
		c.abort() // the first one came too early
	}
}

// idle handles the report that OpenCode has ended a turn.
func (c *conversation) idle() {
	t := &c.turn
	if !t.busy {
		return
	}
	if t.idles++; t.idles > 1 || t.answered && t.failure == nil && !t.interrupted {
		c.end()
		return
	}
	c.timer.Reset(settleTime)
}

// timeout ends the turn if OpenCode no longer works on it.
func (c *conversation) timeout() {
	if !c.turn.running {
		return
	}
	if c.turn.polls > 0 {
		c.reconcile()
		return
	}
	busy, err := c.isBusy()
	switch {
	case err != nil:
		c.unreachable(err)
	case busy:
	case c.turn.busy:
		c.end()
	case c.isAccepted(): // OpenCode is slow
		c.timer.Reset(rejectTime)
	default:
		c.end()
	}
}

// isAccepted reports whether OpenCode has stored the message of the turn. It then begins the turn.
func (c *conversation) isAccepted() bool {
	var last []message
	err := c.call(http.MethodGet, c.path("message?limit=1"), nil, &last)
	return err == nil && len(last) > 0 && last[0].Info.Role == roleUser && last[0].Info.ID != c.previous
}

// isBusy reports whether OpenCode works on a turn.
func (c *conversation) isBusy() (bool, error) {
	var all map[string]status
	err := c.call(http.MethodGet, "/session/status", nil, &all)
	s, ok := all[c.native]
	return ok && s.Type != statusIdle, err
}

// failed handles an error of OpenCode.
func (c *conversation) failed(e *failure) {
	t := &c.turn
	if t.failure != nil || t.interrupted && e.Name == "MessageAbortedError" {
		return
	}
	t.failure = e.report()
	if !t.busy {
		c.timer.Reset(rejectTime)
	}
}

// retry handles the report that OpenCode could not reach the model, and tries again.
func (c *conversation) retry(s *status) {
	t := &c.turn
	reason := shorten(s.Message, maxMessage)
	c.status("retry", fmt.Sprintf("attempt %d failed: %s", s.Attempt, reason))
	delay := time.Until(time.UnixMilli(s.Next))
	if t.failure != nil || s.Attempt < maxAttempts && delay <= maxDelay {
		return
	}
	t.failure = &sessions.Failure{
		Code: new("model_unavailable"), Message: fmt.Sprintf("the model failed %d times: %s", s.Attempt, reason),
	}
	c.abort()
}

// answer delivers the answer to a permission or question.
func (c *conversation) answer(a *sessions.Answer) {
	t := &c.turn
	if !t.running {
		return
	}
	id := (&sessions.Pending{Question: a.Question, Permission: a.Permission}).ID()
	var err error
	if a.Question != nil {
		if _, ok := t.questions[id]; !ok {
			return
		}
		delete(t.questions, id)
		var answers [][]string
		if a.Question.Status != sessions.QuestionRejected {
			answers = complete(a.Answers, t.asked[id])
		}
		err = c.replyQuestion(id, answers)
	} else if session, ok := t.permissions[id]; ok {
		err = c.answerPermission(id, session, a.Permission.Status)
	}
	if err != nil && !isNotFound(err) { // OpenCode has dropped it
		c.unreachable(err)
	}
}

// complete returns answers to n parts of a question.
func complete(answers [][]string, n int) [][]string {
	list := make([][]string, n)
	for i := range list {
		list[i] = []string{}
		if i < len(answers) && answers[i] != nil {
			list[i] = answers[i]
		}
	}
	return list
}

// answerPermission grants or rejects a permission. It never sends OpenCode's always, which would grant more
// than the user was asked about. OpenCode rejects all other permissions of the session together with one,
// so a rejection waits for the other answers.
func (c *conversation) answerPermission(id, session string, s sessions.PermissionStatus) error {
	t := &c.turn
	if s != sessions.PermissionRejected {
		delete(t.permissions, id)
		if err := c.replyPermission(id, object{"reply": "once"}); err != nil {
			return err
		}
	} else if !slices.Contains(t.rejected, id) {
		t.rejected = append(t.rejected, id)
	}
	for other, of := range t.permissions {
		if of == session && !slices.Contains(t.rejected, other) {
			return nil
		}
	}
	for _, id := range t.rejected {
		if t.permissions[id] != session {
			continue
		}
		delete(t.permissions, id)
		// With a message, the model goes on.
		err := c.replyPermission(id, object{"reply": "reject", "message": "the user refused the permission"})
		if err != nil && !isNotFound(err) {
			return err
		}
	}
	return nil
}

func (c *conversation) replyPermission(id string, reply object) error {
	return c.call(http.MethodPost, "/permission/"+url.PathEscape(id)+"/reply", reply, nil)
}

// replyQuestion answers a question, or rejects it if answers is nil.
func (c *conversation) replyQuestion(id string, answers [][]string) error {
	resource := "/question/" + url.PathEscape(id)
	if answers == nil {
		return c.call(http.MethodPost, resource+"/reject", nil, nil)
	}
	return c.call(http.MethodPost, resource+"/reply", object{"answers": answers}, nil)
}

// reconnect opens the event stream again after it was cut.
func (c *conversation) reconnect() {
	c.events = nil
	deadline := time.Now().Add(lostAfter)
	for wait := firstRetry; ; wait = min(2*wait, lastRetry) {
		select {
		case <-c.server.exited:
			return
		case <-c.context.Done():
			return
		case <-time.After(wait):
		}
		events, err := c.server.listen()
		if err == nil {
			c.events = events
			break
		}
		if time.Now().After(deadline) {
			c.stop()
			if c.turn.running {
				c.unreachable(err)
			}
			return
		}
	}
	if c.turn.running {
		c.reconcile()
	}
}

// reconcile brings the turn up to the state of the program, because events may have been lost.
func (c *conversation) reconcile() {
	t := &c.turn
	t.polls++
	list, busy, err := c.readState()
	if c.context.Err() != nil || !t.running {
		return
	}
	if err == nil {
		c.reportMessages(list)
		if busy {
			c.started()
			return
		}
		if t.busy && t.answered {
			c.end()
			return
		}
	}
	if t.polls > maxPolls {
		c.fail("agent_unavailable", "OpenCode ended the turn without an answer")
		return
	}
	c.timer.Reset(settleTime)
}

// readState reads what is known of the turn from the program. It reports the permissions and questions
// that are not known yet.
func (c *conversation) readState() (list []message, busy bool, err error) {
	var permissions []permission
	if err = c.call(http.MethodGet, "/permission", nil, &permissions); err != nil {
		return nil, false, err
	}
	for i := range permissions {
		c.askPermission(&permissions[i])
	}
	var questions []question
	if err = c.call(http.MethodGet, "/question", nil, &questions); err != nil {
		return nil, false, err
	}
	for i := range questions {
		c.askQuestion(&questions[i])
	}
	// The status comes first: if the turn ends in between, its messages are read again.
	if busy, err = c.isBusy(); err != nil {
		return nil, false, err
	}
	err = c.call(http.MethodGet, c.path(fmt.Sprintf("message?limit=%d", recent)), nil, &list)
	return list, busy, err
}

// reportMessages reports the messages of the turn.
func (c *conversation) reportMessages(list []message) {
	t := &c.turn
	for i := range list {
		if list[i].Info.Role == roleUser {
			t.prompt = list[i].Info.ID
		}
	}
	if t.prompt == c.previous { // the message of the turn is not stored yet
		t.prompt = ""
	}
	for i := range list {
		m := &list[i]
		if m.Info.Role != roleAssistant || t.prompt == "" || m.Info.Parent != t.prompt {
			continue
		}
		t.busy = true
		c.updateMessage(&m.Info)
		for j := range m.Parts {
			c.updatePart(&m.Parts[j], nil)
		}
		if m.Info.Error != nil {
			c.failed(m.Info.Error)
		}
	}
}
