package agent

import (
	"context"
	"encoding/json"
	"strings"
)

// passedCalls passes a turn's calls of the client's tools on as they arrive, one after another: the
// parts of a call wait until those before it are complete.
type passedCalls struct {
	loop  *loop
	text  *textItem
	calls []*passedCall // as the model's server counts
	front int           // the first one that is not complete
	later []string      // texts that came within a call
}

type passedCall struct {
	call      *Call // nil before the client has seen a part
	name      string
	arguments strings.Builder
	sent      int  // bytes of arguments that were passed on
	ended     bool // the model's server said so
	checked   int  // bytes of arguments that were no complete JSON
}

// add handles a part of a call.
func (p *passedCalls) add(ctx context.Context, part *CallPart) error {
	if part.Call >= MaxCalls {
		return nil
	}
	for len(p.calls) <= part.Call {
		p.calls = append(p.calls, &passedCall{})
	}
	c := p.calls[part.Call]
	if c.name == "" {
		c.name = part.Name
	}
	if err := p.loop.run.Reserve(int64(len(part.Arguments))); err != nil {
		return err
	}
	c.arguments.WriteString(part.Arguments)
	c.ended = c.ended || part.End
	for p.front < len(p.calls) {
		c := p.calls[p.front]
		if err := p.send(ctx, c); err != nil {
			return err
		}
		if !c.ended && (p.front == len(p.calls)-1 || !c.whole()) {
			return nil
		}
		if err := p.end(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// open reports whether the client has a part of a call that is not complete.
func (p *passedCalls) open() bool { return p.front < len(p.calls) && p.calls[p.front].call != nil }

// whole reports whether the arguments are complete. Servers that do not say so begin the next call then.
func (c *passedCall) whole() bool {
	if c.arguments.Len() == c.checked {
		return false
	}
	c.checked = c.arguments.Len()
	return json.Valid([]byte(c.arguments.String()))
}

// send passes on what there is of a call. A tool that does not exist is not the client's matter.
func (p *passedCalls) send(ctx context.Context, c *passedCall) error {
	l := p.loop
	t := l.tool(c.name)
	if t == nil {
		return nil
	}
	part := c.arguments.String()[c.sent:]
	if c.call != nil && part == "" {
		return nil
	}
	if c.call == nil {
		if err := p.text.end(ctx); err != nil {
			return err
		}
		c.call = &Call{ID: l.run.NewCallID(t), Name: c.name}
		l.passed++
	}
	c.sent += len(part)
	return l.log.Append(ctx, Event{
		Kind: EventCallPart, Item: l.item, Call: &Call{ID: c.call.ID, Name: c.name, Arguments: noArguments}, Text: part,
	})
}

var noArguments = json.RawMessage("{}")

// end ends the item of the front call, and begins with what came meanwhile.
func (p *passedCalls) end(ctx context.Context, c *passedCall) error {
	p.front++
	if c.call == nil {
		return nil
	}
	c.call.Arguments = json.RawMessage(c.arguments.String())
	if len(c.call.Arguments) == 0 { // of a tool without parameters
		c.call.Arguments = noArguments
	}
	if !isObject(c.call.Arguments) {
		c.call.Arguments, c.call.Malformed = noArguments, true
	}
	if _, err := p.loop.appendItem(ctx, Event{Kind: EventCall, Call: c.call}); err != nil {
		return err
	}
	p.loop.turn.Items = append(p.loop.turn.Items, Item{Call: c.call})
	later := p.later
	p.later = nil
	for _, text := range later {
		if err := p.text.add(ctx, text); err != nil {
			return err
		}
	}
	return nil
}

// finish passes on the calls of a complete reply that were not, as far as they are complete.
func (p *passedCalls) finish(ctx context.Context, reply *Reply) error {
	if reply.Finish != FinishDone { // the open call was cut off
		return nil
	}
	for p.front < len(p.calls) {
		c := p.calls[p.front]
		if err := p.send(ctx, c); err != nil {
			return err
		}
		if err := p.end(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// thinkingPart passes a part of the model's thinking on.
func (l *loop) thinkingPart(ctx context.Context, text *textItem, part string) error {
	if part == "" {
		return nil
	}
	if err := text.end(ctx); err != nil {
		return err
	}
	return l.log.Append(ctx, Event{Kind: EventThinking, Item: l.item, Text: part})
}
