package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// maxTurnText limits the bytes of text in one turn, to stop a model that repeats itself endlessly.
const maxTurnText = 4 << 20

// MaxCalls limits the calls in a turn of the model, and the pending calls of a conversation.
const MaxCalls = 128

// Continue continues a conversation until the model has finished or a limit is reached, and appends
// every event to log. The last event is [EventEnd], unless an error is returned: an error of log,
// of a tool, of the upstream, or ctx.Err().
//
// Pending calls of this server's tools at the end of the conversation are carried out first. The
// previous run has left them, because the same turn had calls of the client's tools or because its
// time was over. More than [MaxCalls] of them are a [*proto.FieldError].
//
// A run with a history replays it, using its replies and outcomes instead of the model and
// executions, and continues from its end. If the history ends within a turn, the model is asked for
// the turn again; the interrupted text is a separate item and not part of the conversation.
func Continue(ctx context.Context, up Upstream, run *Run, log Log) error {
	began := run.Began
	if began.IsZero() {
		began = time.Now()
	}
	l := &loop{up: up, run: run, log: log, history: run.History, turn: run.Turn, deadline: began.Add(run.Wall)}
	l.turn.Items = slices.Clone(run.Turn.Items)
	for i := range run.Tools {
		l.turn.Tools = append(l.turn.Tools, run.Tools[i].Definition)
	}
	reason, err := l.executePending(ctx)
	for step := 1; err == nil && reason == ""; step++ {
		if reason, err = l.step(ctx); reason == "" && (step >= run.Steps || l.late()) {
			reason = ReasonPaused
		}
	}
	if err != nil {
		return err
	}
	l.end.Reason = reason
	return l.log.Append(ctx, Event{Kind: EventEnd, Item: l.item, End: &l.end})
}

// loop is the state of a run.
type loop struct {
	up       Upstream
	run      *Run
	log      Log
	history  []Event // what is left of it
	turn     Turn    // the next one
	deadline time.Time
	item     int // the number of items in the output
	made     int // calls of this side's tools
	passed   int // calls of the turn that were passed on as they arrived
	end      End
}

// late reports whether the time of the run is over. It was not while the history was made.
func (l *loop) late() bool { return len(l.history) == 0 && !time.Now().Before(l.deadline) }

// replay returns the next event of the history if it is of a kind, otherwise nil.
func (l *loop) replay(kind EventKind) *Event {
	if len(l.history) == 0 || l.history[0].Kind != kind {
		return nil
	}
	e := &l.history[0]
	l.history = l.history[1:]
	return e
}

// appendItem appends an event that is a whole item, unless the history has it. It returns the
// logged event.
func (l *loop) appendItem(ctx context.Context, e Event) (*Event, error) {
	if recorded := l.replay(e.Kind); recorded != nil {
		l.item++
		return recorded, nil
	}
	e.Item = l.item
	l.item++
	return &e, l.log.Append(ctx, e)
}

func (l *loop) tool(name string) *Tool {
	i := slices.IndexFunc(l.run.Tools, func(t Tool) bool { return t.Name == name })
	if i < 0 {
		return nil
	}
	return &l.run.Tools[i]
}

// executePending carries out the last turn's pending calls of this server's tools.
func (l *loop) executePending(ctx context.Context) (Reason, error) {
	done := map[string]bool{}
	end := len(l.turn.Items)
	for ; end > 0; end-- {
		item := &l.turn.Items[end-1]
		if item.Result != nil {
			done[item.Result.CallID] = true
		} else if item.Role != RoleUser {
			break
		}
	}
	start := end
	for start > 0 && l.turn.Items[start-1].Result == nil && l.turn.Items[start-1].Role != RoleUser {
		start--
	}
	var pending []*Call
	for _, item := range l.turn.Items[start:end] {
		if item.Call == nil || done[item.Call.ID] {
			continue
		}
		if t := l.tool(item.Call.Name); t != nil && t.Execute != nil {
			pending = append(pending, item.Call)
		}
	}
	if len(pending) > MaxCalls {
		return "", proto.FieldErrorf(
			"messages", "have %d calls without a result in the last message of the assistant; at most %d are carried out",
			len(pending), MaxCalls)
	}
	return l.execute(ctx, pending)
}

// step asks for one turn and carries out its calls. reason is empty if another turn must follow.
func (l *loop) step(ctx context.Context) (reason Reason, err error) {
	reply, err := l.recordedReply(ctx)
	if reply == nil && err == nil {
		reply, err = l.ask(ctx)
	}
	if err != nil {
		return "", err
	}
	l.end.Usage.add(reply.Usage)
	switch reply.Finish {
	case FinishLength: // the last call may be incomplete, and none is worth the risk
		return ReasonLength, nil
	case FinishStop:
		l.end.Stop = reply.Stop
		return ReasonStop, nil
	case FinishRefused:
		return ReasonRefused, nil
	case FinishDone:
	}
	reason, err = l.calls(ctx, reply.Calls)
	if l.run.Turn.MaxTokens > 0 {
		if l.turn.MaxTokens -= reply.Usage.Output; err == nil && reason == "" && l.turn.MaxTokens < 1 {
			reason = ReasonLength
		}
	}
	return reason, err
}

// ask asks the model for a turn.
func (l *loop) ask(ctx context.Context) (*Reply, error) {
	l.turn.Patient = l.run.Patient || l.end.Calls > 0
	text := &textItem{loop: l}
	l.turn.OnThinking = func(thought *Thinking) error {
		if err := l.run.Reserve(int64(len(thought.Text) + len(thought.Signature) + len(thought.Redacted))); err != nil {
			return err
		}
		if err := text.end(ctx); err != nil { // a model may think again after saying something
			return err
		}
		l.turn.Items = append(l.turn.Items, Item{Role: RoleAssistant, Thinking: thought})
		_, err := l.appendItem(ctx, Event{Kind: EventThought, Thought: thought})
		return err
	}
	calls := &passedCalls{loop: l, text: text}
	l.turn.OnThinkingPart, l.turn.OnCallPart = nil, nil
	if l.run.Parts {
		l.turn.OnThinkingPart = func(part string) error { return l.thinkingPart(ctx, text, part) }
	}
	if l.run.Parts && !slices.ContainsFunc(l.run.Tools, func(t Tool) bool { return t.Execute != nil }) {
		l.turn.OnCallPart = func(part *CallPart) error { return calls.add(ctx, part) }
	}
	l.passed = 0
	before := len(l.turn.Items)
	reply, err := l.up.Stream(ctx, &l.turn, func(part string) error {
		if calls.open() { // the item of a text cannot begin within another one
			calls.later = append(calls.later, part)
			return nil
		}
		return text.add(ctx, part)
	})
	if err != nil {
		l.turn.Items = l.turn.Items[:before]
		return nil, err
	}
	if err := calls.finish(ctx, reply); err != nil {
		return nil, err
	}
	if err := text.end(ctx); err != nil {
		return nil, err
	}
	// One surplus call is kept: its outcome informs the model about all of them.
	reply.Calls = reply.Calls[:min(len(reply.Calls), MaxCalls+1)]
	for i := range reply.Calls {
		call := &reply.Calls[i]
		if l.passed == 0 { // the parts of others have their memory
			if err := l.run.Reserve(int64(len(call.Name) + len(call.Arguments))); err != nil {
				return nil, err
			}
		}
		if !isObject(call.Arguments) {
			call.Arguments, call.Malformed = json.RawMessage("{}"), true
		}
	}
	return reply, l.log.Append(ctx, Event{Kind: EventTurn, Item: l.item, Reply: reply})
}

// addText makes a text of the model part of the conversation.
func (l *loop) addText(text string) {
	if text != "" {
		l.turn.Items = append(l.turn.Items, Item{Role: RoleAssistant, Text: text})
	}
}

// recordedReply returns the reply of the next turn if the history has it, otherwise nil. It ends a
// text left unfinished by the history.
func (l *loop) recordedReply(ctx context.Context) (*Reply, error) {
	var thoughts []Item // of the turn
	for len(l.history) > 0 {
		left, text, whole := len(l.history), &textItem{loop: l}, ""
		if e := l.replay(EventThought); e != nil {
			l.item++
			thoughts = append(thoughts, Item{Role: RoleAssistant, Thinking: e.Thought})
			continue
		}
		for e := l.replay(EventText); e != nil; e = l.replay(EventText) {
			text.text.WriteString(e.Text)
		}
		if e := l.replay(EventTextEnd); e != nil {
			whole = e.Text
			l.item++
		} else if err := text.finish(ctx); err != nil {
			return nil, err
		}
		if err := l.run.Reserve(int64(len(whole))); err != nil {
			return nil, err
		}
		if e := l.replay(EventTurn); e != nil {
			l.turn.Items = append(l.turn.Items, thoughts...)
			l.addText(whole)
			return e.Reply, nil
		}
		// after a text of the same turn, or of one that was interrupted
		if len(l.history) > 0 && l.history[0].Kind == EventThought {
			thoughts = append(thoughts, Item{Role: RoleAssistant, Text: whole})
		} else {
			thoughts = nil
		}
		if len(l.history) == left {
			return nil, fmt.Errorf("continue a run: its log has a %s in place of a turn", l.history[0].Kind)
		}
	}
	return nil, nil
}

// calls carries out a turn's calls of this server's tools, unless they are deferred because of
// calls of the client's tools. Those come last, so that clients first get each result from this
// server.
func (l *loop) calls(ctx context.Context, calls []Call) (Reason, error) {
	if len(calls) == 0 {
		return ReasonDone, nil
	}
	if l.passed > 0 { // the client has them
		return ReasonCalls, nil
	}
	l.turn.Choice = Choice{} // a forced call was made; another one would never end
	var own []*Call
	var clients []Call
	for i, made := range calls {
		t := l.tool(made.Name)
		switch {
		case i == MaxCalls:
			l.reject(&made, fmt.Sprintf(
				"this call and those after it were not carried out: a turn may have at most %d calls; make them again in the "+
					"next turn", MaxCalls))
		case t != nil && t.Execute != nil && l.run.MaxCalls > 0 && l.made >= l.run.MaxCalls:
			l.reject(&made, fmt.Sprintf(
				"this call was not carried out: the request allows %d calls of tools; answer without more", l.run.MaxCalls))
		case t == nil:
			l.reject(&made, fmt.Sprintf("there is no tool %q", made.Name))
		case t.Execute == nil && made.Malformed:
			l.reject(&made, "the arguments are not a JSON object; call the tool again")
		case t.Execute == nil && !l.run.Defer:
			clients = append(clients, made)
		default:
			call, err := l.appendCall(ctx, &made, t)
			if err != nil {
				return "", err
			}
			if t.Execute != nil {
				l.made++
			}
			switch {
			case t.Execute == nil:
				clients = append(clients, *call)
			case !call.Malformed:
				own = append(own, call)
			}
		}
	}
	if len(clients) > 0 && l.run.Defer {
		return ReasonCalls, nil
	}
	reason, err := l.execute(ctx, own)
	if err != nil || len(clients) == 0 {
		return reason, err
	}
	for _, made := range clients {
		if _, err := l.appendCall(ctx, &made, l.tool(made.Name)); err != nil {
			return "", err
		}
	}
	return ReasonCalls, nil
}

// appendCall makes a call of a tool part of the output and of the conversation. One of this side's tools
// with malformed arguments has its result then.
func (l *loop) appendCall(ctx context.Context, made *Call, t *Tool) (*Call, error) {
	made.ID = l.run.NewCallID(t)
	e, err := l.appendItem(ctx, Event{Kind: EventCall, Call: made, Server: t.Execute != nil})
	if err != nil {
		return nil, err
	}
	call := e.Call
	l.turn.Items = append(l.turn.Items, Item{Call: call})
	if call.Malformed {
		err = l.result(ctx, call, t.Malformed(call))
	}
	return call, err
}

// reject answers a call that is not carried out, on neither side. Only the model sees it.
func (l *loop) reject(call *Call, message string) {
	call.ID, call.Arguments = l.run.NewCallID(&Tool{}), json.RawMessage("{}")
	l.turn.Items = append(l.turn.Items, Item{Call: call},
		Item{Result: &Result{CallID: call.ID, Text: message, Failed: true}})
}

// execute carries out calls of this server's tools while there is time.
func (l *loop) execute(ctx context.Context, calls []*Call) (Reason, error) {
	for _, call := range calls {
		if l.late() {
			return ReasonPaused, nil
		}
		outcome, err := l.outcome(ctx, call)
		if err != nil {
			return "", err
		}
		l.end.Calls++
		if err := l.result(ctx, call, outcome); err != nil {
			return "", err
		}
	}
	return "", nil
}

// outcome returns the outcome of a call, from the history or by carrying it out.
func (l *loop) outcome(ctx context.Context, call *Call) (*Outcome, error) {
	recorded := l.replay(EventChange)
	if len(l.history) > 0 && l.history[0].Kind == EventResult {
		return l.history[0].Outcome, nil
	}
	t := l.tool(call.Name)
	if recorded == nil {
		outcome, err := t.Execute(ctx, call)
		if err != nil || outcome.Change == nil {
			return outcome, err
		}
		recorded = &Event{Kind: EventChange, Item: l.item, Outcome: outcome}
		if err := l.log.Append(ctx, *recorded); err != nil {
			return nil, err
		}
	}
	outcome, err := t.Apply(ctx, call, recorded.Outcome)
	fault.Here(fault.AfterAgentChangeBeforeResult)
	return outcome, err
}

func (l *loop) result(ctx context.Context, call *Call, outcome *Outcome) error {
	size := len(outcome.Text)
	for _, p := range outcome.Pictures {
		size += len(p.Base64)
	}
	if err := l.run.Reserve(int64(size)); err != nil {
		return err
	}
	l.turn.Items = append(l.turn.Items, Item{Result: &Result{
		CallID: call.ID, Text: outcome.Text, Failed: outcome.Failed, Pictures: outcome.Pictures,
	}})
	_, err := l.appendItem(ctx, Event{Kind: EventResult, Call: call, Server: true, Outcome: outcome})
	return err
}

// isObject reports whether text is a JSON object.
func isObject(text json.RawMessage) bool {
	return json.Valid(text) && bytes.HasPrefix(bytes.TrimLeft(text, " \t\r\n"), []byte("{"))
}

// textItem collects the text of a turn.
type textItem struct {
	loop *loop
	text strings.Builder
}

func (t *textItem) add(ctx context.Context, part string) error {
	if part == "" {
		return nil
	}
	if t.text.Len()+len(part) > maxTurnText {
		return &UpstreamError{
			Kind:    UpstreamFailed,
			Message: fmt.Sprintf("the model's reply is longer than %d bytes", maxTurnText),
		}
	}
	if err := t.loop.run.Reserve(int64(len(part))); err != nil {
		return err
	}
	t.text.WriteString(part)
	return t.loop.log.Append(ctx, Event{Kind: EventText, Item: t.loop.item, Text: part})
}

// end ends the item, and makes it part of the conversation. More text would be another item.
func (t *textItem) end(ctx context.Context) error {
	if err := t.finish(ctx); err != nil {
		return err
	}
	t.loop.addText(t.text.String())
	t.text.Reset()
	return nil
}

// finish appends the end of the item, if the turn had text.
func (t *textItem) finish(ctx context.Context) error {
	if t.text.Len() == 0 {
		return nil
	}
	_, err := t.loop.appendItem(ctx, Event{Kind: EventTextEnd, Text: t.text.String()})
	return err
}

// Exchange is the part of one role between two of the other, as model protocols require. The
// results are what the calls of the previous exchange returned.
type Exchange struct {
	Role    Role
	Items   []Item // texts, images and calls
	Results []Item // each with a Result
}

// Exchanges returns a conversation in the form required by model protocols: the roles alternate,
// and the results of all calls of an exchange follow it. Later results are moved there. A call
// without a result gets a placeholder, since models would refuse the conversation otherwise.
func Exchanges(items []Item) []Exchange {
	results := map[string]*Item{}
	for i := range items {
		if r := items[i].Result; r != nil {
			results[r.CallID] = &items[i]
		}
	}
	var list []Exchange
	var open []string // ids of the calls of the last exchange
	answer := func() {
		if len(open) == 0 {
			return
		}
		x := Exchange{Role: RoleUser}
		for _, id := range open {
			if r := results[id]; r != nil {
				x.Results = append(x.Results, *r)
			} else {
				x.Results = append(x.Results,
					Item{Result: &Result{CallID: id, Text: "The call was not carried out.", Failed: true}})
			}
		}
		list, open = append(list, x), nil
	}
	for _, item := range items {
		role := item.Role
		switch {
		case item.Result != nil:
			answer()
			continue
		case item.Call != nil:
			role = RoleAssistant
		}
		if role == RoleUser {
			answer()
		}
		if len(list) == 0 || list[len(list)-1].Role != role {
			list = append(list, Exchange{Role: role})
		}
		last := &list[len(list)-1]
		last.Items = append(last.Items, item)
		if item.Call != nil {
			open = append(open, item.Call.ID)
		}
	}
	answer()
	return list
}
