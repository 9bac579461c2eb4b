package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/client"
)

// decodeData decodes the data of an event.
func decodeData[T any](e *client.AgentEvent) (data T, err error) {
	if err = json.Unmarshal(e.Data, &data); err != nil {
		err = fmt.Errorf("decode the data of event %d: %w", e.Sequence, err)
	}
	return data, err
}

// turnPrinter prints a turn of an agent: text to standard output, everything else to standard error.
type turnPrinter struct {
	streams
	session string
	json    bool   // print the events as the server sends them instead
	open    bool   // whether the last printed text does not end a line
	failure string // of the agent; empty for none
}

func (p *turnPrinter) event(e *client.AgentEvent) error {
	kind := sessions.EventType(e.Type)
	if p.json {
		_, err := p.out.Write(e.Line)
		if err != nil || kind != sessions.ErrorEvent && kind != sessions.SessionEnded {
			return err
		}
	}
	switch kind {
	case sessions.ItemDelta:
		data, err := decodeData[sessions.Delta](e)
		if err != nil || data.Delta == "" {
			return err
		}
		p.open = !strings.HasSuffix(data.Delta, "\n")
		_, err = io.WriteString(p.out, strings.Map(printableLine, data.Delta))
		return err
	case sessions.ItemCompleted:
		data, err := decodeData[sessions.ItemData](e)
		if err != nil {
			return err
		}
		return p.item(&data.Item)
	case sessions.ErrorEvent:
		data, err := decodeData[sessions.Failure](e)
		p.failure = data.Message
		return err
	case sessions.SessionEnded:
		data, err := decodeData[sessions.Ended](e)
		if !p.json {
			p.note("the session ended: %s", strings.TrimSuffix(string(data.Reason)+", "+data.Message, ", "))
		}
		if data.Reason == sessions.EndError {
			p.failure = data.Message
		}
		return err
	case sessions.PermissionRequested:
		data, err := decodeData[client.AgentPermission](e)
		return p.pending(e, permissionText(p.session, &data), err)
	case sessions.QuestionRequested:
		data, err := decodeData[client.AgentQuestion](e)
		return p.pending(e, questionText(p.session, &data), err)
	default:
		return nil
	}
}

// item prints the parts of a complete item, except for text, which its deltas have printed.
func (p *turnPrinter) item(item *sessions.Item) error {
	if item.Role != nil && *item.Role == sessions.RoleUser {
		return nil
	}
	err := p.endLine()
	for i := range item.Content {
		if part := &item.Content[i]; part.Type != sessions.PartText {
			p.note("%s", partText(part))
		}
	}
	return err
}

// pending prints the permission or question that the agent waits for.
func (p *turnPrinter) pending(e *client.AgentEvent, text string, err error) error {
	if err != nil {
		return err
	}
	if err := p.endLine(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(p.err, "%sThen follow the turn: bullpen agent session events --follow --after %d %s\n",
		text, e.Sequence, shellWord(p.session))
	return err
}

// note prints a line on standard error.
func (p *turnPrinter) note(format string, args ...any) {
	_, _ = fmt.Fprintf(p.err, "--- %s\n", oneLine(fmt.Sprintf(format, args...)))
}

func (p *turnPrinter) endLine() (err error) {
	if p.open {
		_, err = io.WriteString(p.out, "\n")
	}
	p.open = false
	return err
}

// end returns the failure of the agent. It is called after the last event.
func (p *turnPrinter) end() error {
	err := p.endLine()
	if p.failure != "" {
		return errors.Join(err, fmt.Errorf("the agent failed: %s", oneLine(p.failure)))
	}
	return err
}

// agentEventPrinter prints a line for each event.
type agentEventPrinter struct {
	streams
	json bool // print the events as the server sends them instead
}

func (p *agentEventPrinter) event(e *client.AgentEvent) error {
	if p.json {
		_, err := p.out.Write(e.Line)
		return err
	}
	text, err := eventText(e)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(p.out, "%4d  %s  %-20s  %s\n", e.Sequence, e.Time.Local().Format("15:04:05"), cell(e.Type), text)
	return err
}

// eventText returns the content of an event as one line.
func eventText(e *client.AgentEvent) (string, error) {
	switch sessions.EventType(e.Type) {
	case sessions.ItemStarted, sessions.ItemCompleted:
		data, err := decodeData[sessions.ItemData](e)
		return itemText(&data.Item), err
	case sessions.ItemDelta:
		data, err := decodeData[sessions.Delta](e)
		return oneLine(data.ItemID + " " + data.Delta), err
	case sessions.ErrorEvent:
		data, err := decodeData[sessions.Failure](e)
		return oneLine(data.Message), err
	case sessions.SessionEnded:
		data, err := decodeData[sessions.Ended](e)
		return oneLine(strings.TrimSuffix(string(data.Reason)+", "+data.Message, ", ")), err
	case sessions.PermissionRequested, sessions.PermissionResolved:
		data, err := decodeData[client.AgentPermission](e)
		return oneLine(data.ID + " " + data.Status + ": " + data.Action + " " + string(data.Metadata)), err
	case sessions.QuestionRequested, sessions.QuestionResolved:
		data, err := decodeData[client.AgentQuestion](e)
		text := data.ID + " " + data.Status + ": " + data.Prompt
		if data.Response != nil {
			text += " " + *data.Response
		}
		return oneLine(text), err
	case sessions.Unparsed:
		data, err := decodeData[sessions.UnparsedOutput](e)
		return oneLine(data.Error), err
	default:
		return "", nil
	}
}

// itemText returns the content of an item as one line.
func itemText(item *sessions.Item) string {
	words := []string{item.ID, string(item.Kind)}
	if item.Role != nil {
		words = append(words, string(*item.Role))
	}
	if item.Status == sessions.Failed {
		words = append(words, string(item.Status))
	}
	for i := range item.Content {
		words = append(words, partText(&item.Content[i]))
	}
	return oneLine(strings.Join(words, " "))
}

// partText returns the content of a part of an item.
func partText(part *sessions.Part) string {
	switch part.Type {
	case sessions.PartText:
		return part.Text
	case sessions.PartReasoning:
		return "reasoning: " + part.Text
	case sessions.PartJSON:
		return string(part.JSON)
	case sessions.PartToolCall:
		return "calls " + part.Name + " " + part.Arguments
	case sessions.PartToolResult:
		return "result: " + part.Output
	case sessions.PartFileRef:
		return part.Action + " " + part.Path
	case sessions.PartImage:
		return "image " + part.Path
	case sessions.PartStatus:
		if part.Detail != nil {
			return part.Label + ": " + *part.Detail
		}
		return part.Label
	default:
		return string(part.Type)
	}
}

// maxLine is the maximum length of a printed event, in characters.
const maxLine = 200

// oneLine returns a text as one line that is safe to print on a terminal.
func oneLine(text string) string {
	runes := []rune(strings.Join(strings.Fields(text), " "))
	if len(runes) > maxLine {
		runes = append(runes[:maxLine-1], '…')
	}
	return strings.Map(printable, string(runes))
}

// permissionText returns a pending permission with the commands that answer it.
func permissionText(session string, permission *client.AgentPermission) string {
	text := "The agent asks for a permission: " + oneLine(permission.Action+" "+string(permission.Metadata)) + "\n"
	command := "  bullpen agent session approve " + shellWord(session) + " " + shellWord(permission.ID)
	return text + command + "\n" + command + " --always\n" + command + " --reject\n"
}

// questionText returns a pending question with the commands that answer it.
func questionText(session string, question *client.AgentQuestion) string {
	command := "  bullpen agent session answer " + shellWord(session) + " " + shellWord(question.ID)
	lines := []string{"The agent asks: " + oneLine(question.Prompt)}
	for _, option := range question.Options {
		lines = append(lines, command+" "+shellWord(option))
	}
	if len(question.Options) == 0 {
		lines = append(lines, command+" ANSWER")
	}
	return strings.Join(append(lines, command+" --reject"), "\n") + "\n"
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_./:@%+,=-]*$`)

// shellWord returns a text quoted as one word for a shell.
func shellWord(text string) string {
	if plainWord.MatchString(text) {
		return text
	}
	return "'" + strings.ReplaceAll(strings.Map(printable, text), "'", `'\''`) + "'"
}
