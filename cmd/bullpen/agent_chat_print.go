package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/client"
)

// style is how text looks on a terminal: the parameters of the escape sequence that begins it.
type style string

const (
	styleNone   style = ""
	styleBold   style = "1"
	styleDim    style = "2"
	styleRed    style = "31"
	styleGreen  style = "32"
	styleCyan   style = "36"
	stylePrompt style = "1;33"
)

// How many lines of the agent's output are shown, unless the user asks for the details.
const (
	maxThinkingLines = 4
	maxResultLines   = 6
	maxDiffLines     = 40
	maxPlanLines     = 200
	maxCutBytes      = 1 << 20 // of text that /details shows
)

// chatPrinter prints a chat: the agent's text to standard output, and everything else to standard error.
//
// The agent is hostile. What it prints has no control characters, and on a terminal no line of it begins in
// the first column, not even a wrapped one. So it cannot look like a prompt.
type chatPrinter struct {
	streams
	hasColour bool
	details   bool
	own       string // message of the user that starts the turn, which is on the screen already

	item      string // id of the item whose text was printed last
	column    int    // after that text
	open      bool   // whether the last line has no end
	prompting bool   // whether the last line is a prompt, or what the user has typed

	kinds map[string]sessions.ItemKind // of the items in progress
	calls map[string]bool              // ids of the items in progress whose tool calls are printed
	texts map[string]bool              // ids of the items in progress whose text is printed
	cut   []string                     // texts that were shortened since the last message
}

func newChatPrinter(s streams, details bool) *chatPrinter {
	p := &chatPrinter{streams: s, details: details}
	p.hasColour = s.terminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	p.forgetItems()
	return p
}

func (p *chatPrinter) forgetItems() {
	p.kinds, p.calls, p.texts = map[string]sessions.ItemKind{}, map[string]bool{}, map[string]bool{}
}

// minWidth is the width of a terminal whose width is unknown or very small.
const minWidth = 40

// widthOf returns the number of columns of a terminal, 0 if w is none.
func widthOf(w io.Writer) int {
	f, ok := w.(*os.File)
	if !ok || !isTerminal(f) {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 {
		return 2 * minWidth
	}
	return max(minWidth, int(size.Col))
}

// runeWidth returns the number of columns of a character.
func runeWidth(r rune) int { return ansi.StringWidth(string(r)) }

// tab replaces tabs, whose width depends on the column.
const tab = "    "

// textIndent is the indentation of the agent's text.
const textIndent = 2

// text prints the next piece of the agent's text.
func (p *chatPrinter) text(text string) error {
	if p.prompting {
		p.endLine()
	}
	text = strings.Map(printableLine, text)
	width := widthOf(p.out)
	if width == 0 {
		p.open = !strings.HasSuffix(text, "\n")
		_, err := io.WriteString(p.out, text)
		return err
	}
	var b strings.Builder
	for _, r := range strings.ReplaceAll(text, "\t", tab) {
		n := runeWidth(r)
		if r == '\n' || p.open && p.column+n > width {
			b.WriteByte('\n')
			p.open = false
		}
		if r == '\n' {
			continue
		}
		if !p.open {
			b.WriteString(strings.Repeat(" ", textIndent))
			p.open, p.column = true, textIndent
		}
		b.WriteRune(r)
		p.column += n
	}
	_, err := io.WriteString(p.out, b.String())
	return err
}

// endLine ends the line of the agent's text or of a prompt.
func (p *chatPrinter) endLine() {
	switch {
	case p.open:
		_, _ = io.WriteString(p.out, "\n") // the next write returns the error again
	case p.prompting:
		_, _ = io.WriteString(p.err, "\n")
	}
	p.open, p.prompting = false, false
}

// paint returns text in a style.
func (p *chatPrinter) paint(s style, text string) string {
	if !p.hasColour || s == styleNone || text == "" {
		return text
	}
	return "\x1b[" + string(s) + "m" + text + "\x1b[0m"
}

// lines prints text of the agent to standard error, indented.
func (p *chatPrinter) lines(s style, indent int, text string) {
	p.endLine()
	text = strings.ReplaceAll(strings.Map(printableLine, strings.TrimRight(text, "\n")), "\t", tab)
	width := widthOf(p.err)
	var b strings.Builder
	for line := range strings.SplitSeq(text, "\n") {
		for _, part := range wrap(line, width-indent) {
			b.WriteString(strings.Repeat(" ", indent) + p.paint(s, part) + "\n")
		}
	}
	_, _ = io.WriteString(p.err, b.String())
}

// wrap splits a line into parts of a width. It does not split if width is not positive.
func wrap(line string, width int) (parts []string) {
	start, column := 0, 0
	for i, r := range line {
		n := runeWidth(r)
		if width > 0 && column+n > width {
			parts = append(parts, line[start:i])
			start, column = i, 0
		}
		column += n
	}
	return append(parts, line[start:])
}

// prompt asks for a line.
func (p *chatPrinter) prompt(text string) {
	p.endLine()
	_, _ = io.WriteString(p.err, p.paint(stylePrompt, text))
	p.prompting = true
}

// heading prints the line above what the agent asks.
func (p *chatPrinter) heading(text string) {
	p.endLine()
	_, _ = fmt.Fprintln(p.err, p.paint(stylePrompt, text))
}

// notice prints a line that is bullpen's own. Its arguments must be printable.
func (p *chatPrinter) notice(format string, args ...any) {
	p.endLine()
	_, _ = fmt.Fprintln(p.err, p.paint(styleDim, fmt.Sprintf(format, args...)))
}

// failure prints an error.
func (p *chatPrinter) failure(format string, args ...any) {
	p.lines(styleRed, textIndent, fmt.Sprintf(format, args...))
}

// excerpt returns at most a number of lines of a text: the first and the last ones. It returns all if limit
// is 0.
func excerpt(text string, limit int) (short string, isCut bool) {
	const columns = 100 // of an average line
	text = strings.TrimRight(text, "\n")
	if limit == 0 {
		return text, false
	}
	lines := strings.Split(text, "\n")
	if n := len(lines) - limit; n > 1 {
		head := (2*limit + 2) / 3
		lines = slices.Concat(lines[:head], []string{fmt.Sprintf("… %d more lines …", n)}, lines[head+n:])
		text, isCut = strings.Join(lines, "\n"), true
	}
	runes := []rune(text)
	if n := len(runes) - limit*columns; n > 0 {
		head := limit * columns * 2 / 3
		text = fmt.Sprintf("%s\n… %d more characters …\n%s", string(runes[:head]), n, string(runes[head+n:]))
		isCut = true
	}
	return text, isCut
}

// excerpt is the function excerpt, for text that /details shows in full.
func (p *chatPrinter) excerpt(text string, limit int) string {
	if p.details {
		limit = 0
	}
	short, isCut := excerpt(text, limit)
	if !p.details {
		lines := strings.Split(short, "\n")
		for i, line := range lines {
			if runes := []rune(line); len(runes) > maxLine {
				lines[i], isCut = string(runes[:maxLine-1])+"…", true
			}
		}
		short = strings.Join(lines, "\n")
	}
	size := 0
	for _, t := range p.cut {
		size += len(t)
	}
	if isCut && size+len(text) <= maxCutBytes {
		p.cut = append(p.cut, text)
	}
	return short
}

// showCut prints what was shortened in full.
func (p *chatPrinter) showCut() {
	if len(p.cut) == 0 {
		p.notice("Nothing was shortened since your last message.")
	}
	for i, text := range p.cut {
		if i > 0 {
			p.lines(styleNone, 0, "")
		}
		p.lines(styleNone, 4, text)
	}
}

// diff prints a unified diff. It reports whether it has shown only a part.
func (p *chatPrinter) diff(text string, limit int) (isCut bool) {
	text, isCut = excerpt(text, limit)
	for line := range strings.SplitSeq(text, "\n") {
		s := styleNone
		switch {
		case strings.HasPrefix(line, "+"):
			s = styleGreen
		case strings.HasPrefix(line, "-"):
			s = styleRed
		case strings.HasPrefix(line, "@@"):
			s = styleCyan
		}
		p.lines(s, 4, line)
	}
	return isCut
}

// event prints an event.
func (p *chatPrinter) event(e *client.AgentEvent) error {
	switch kind := sessions.EventType(e.Type); kind {
	case sessions.ItemStarted, sessions.ItemCompleted:
		data, err := decodeData[sessions.ItemData](e)
		if err != nil {
			return err
		}
		return p.printItem(&data.Item, kind == sessions.ItemCompleted)
	case sessions.ItemDelta:
		data, err := decodeData[sessions.Delta](e)
		if err != nil || data.Delta == "" {
			return err
		}
		return p.delta(&data)
	case sessions.TurnEnded:
		p.endTurn(e)
	case sessions.ErrorEvent:
		data, err := decodeData[sessions.Failure](e)
		if err != nil {
			return err
		}
		p.failure("error: %s", data.Message)
	case sessions.Unparsed:
		data, err := decodeData[sessions.UnparsedOutput](e)
		if err != nil {
			return err
		}
		p.lines(styleDim, textIndent, oneLine("unknown output of the agent: "+data.Error))
	case sessions.SessionEnded:
		data, err := decodeData[sessions.Ended](e)
		if err != nil {
			return err
		}
		p.sessionEnded(&data)
	case sessions.PermissionResolved, sessions.QuestionResolved:
		resolved, err := decodeAsk(e)
		if err != nil {
			return err
		}
		p.lines(styleDim, textIndent, resolved.resolution())
	}
	return nil
}

// endTurn ends the output of a turn.
func (p *chatPrinter) endTurn(e *client.AgentEvent) {
	p.forgetItems()
	p.item = ""
	var turn struct {
		Metadata struct {
			Interrupted bool `json:"interrupted"`
		} `json:"metadata"`
	}
	if json.Unmarshal(e.Data, &turn) == nil && turn.Metadata.Interrupted { // agents choose the metadata
		p.lines(styleDim, textIndent, "interrupted")
	}
}

func (p *chatPrinter) sessionEnded(ended *sessions.Ended) {
	p.forgetItems()
	text := strings.TrimSuffix("the agent ended: "+string(ended.Reason)+", "+ended.Message, ", ")
	p.lines(styleDim, textIndent, oneLine(text))
	if ended.Stderr != nil {
		p.lines(styleDim, 4, p.excerpt(ended.Stderr.Head+ended.Stderr.Tail, maxResultLines))
	}
}

// delta prints the next piece of a message.
func (p *chatPrinter) delta(d *sessions.Delta) error {
	if kind := p.kinds[d.ItemID]; kind != "" && kind != sessions.KindMessage {
		return nil // the complete item has all of it
	}
	if p.item != d.ItemID {
		p.endLine()
	}
	p.item, p.texts[d.ItemID] = d.ItemID, true
	return p.text(d.Delta)
}

// printItem prints what is new of an item.
func (p *chatPrinter) printItem(item *sessions.Item, isComplete bool) error {
	if item.Role != nil && *item.Role == sessions.RoleUser {
		if isComplete {
			p.userMessage(sessions.TextOf(item.Content))
		}
		return nil
	}
	p.kinds[item.ID] = item.Kind
	if isComplete && item.Kind == sessions.KindSystem && slices.ContainsFunc(item.Content, isFileRef) {
		p.lines(styleDim, textIndent, "files changed in this turn:") // tool results may have shown parts of it
	}
	for i := range item.Content {
		part := &item.Content[i]
		if part.Type == sessions.PartToolCall && part.Name != "" && !p.calls[item.ID] {
			p.calls[item.ID] = true
			p.toolCall(part)
		}
		if !isComplete {
			continue
		}
		if part.Type == sessions.PartText && item.Kind == sessions.KindMessage {
			if !p.texts[item.ID] {
				p.item = item.ID
				if err := p.text(part.Text); err != nil {
					return err
				}
			}
			continue
		}
		p.itemPart(item, part)
	}
	if isComplete {
		p.endLine()
		delete(p.kinds, item.ID)
		delete(p.calls, item.ID)
		delete(p.texts, item.ID)
	}
	return nil
}

func isFileRef(part sessions.Part) bool { return part.Type == sessions.PartFileRef }

// userMessage prints a message of a user, unless it is on the screen already.
func (p *chatPrinter) userMessage(text string) {
	if text = strings.TrimSpace(text); text != "" && text != strings.TrimSpace(p.own) {
		p.lines(styleDim, textIndent, messagePrompt+p.excerpt(text, maxPlanLines))
	}
}

// itemPart prints a part of a complete item.
func (p *chatPrinter) itemPart(item *sessions.Item, part *sessions.Part) {
	failed := item.Status == sessions.Failed
	switch part.Type {
	case sessions.PartToolCall:
		if failed {
			p.lines(styleRed, 4, "failed")
		}
	case sessions.PartToolResult:
		if s := styleNone; failed {
			s = styleRed
			p.lines(s, 4, strings.TrimRight("failed: "+p.excerpt(part.Output, maxResultLines), " "))
		} else if strings.TrimSpace(part.Output) != "" {
			p.lines(s, 4, p.excerpt(part.Output, maxResultLines))
		}
	case sessions.PartReasoning:
		if part.Visibility != "private" || p.details {
			p.lines(styleDim, textIndent, "thinking: "+p.excerpt(part.Text, maxThinkingLines))
		}
	case sessions.PartFileRef:
		p.lines(styleBold, 4, oneLine(part.Action+" "+part.Path))
		if part.Diff != nil && *part.Diff != "" {
			p.diff(p.excerpt(*part.Diff, maxDiffLines), 0)
		}
	default:
		p.lines(styleDim, textIndent, p.excerpt(partText(part), maxResultLines))
	}
}

// planTool is the name of the tool whose argument is a plan for the user.
const planTool = "ExitPlanMode"

// toolCall prints a tool call in one line.
func (p *chatPrinter) toolCall(part *sessions.Part) {
	arguments := argumentsOf(part)
	var plan struct {
		Plan string `json:"plan"`
	}
	isPlan := part.Name == planTool && json.Unmarshal([]byte(part.Arguments), &plan) == nil && plan.Plan != ""
	switch {
	case isPlan:
		p.lines(styleBold, textIndent, "• "+oneLine(part.Name))
		p.lines(styleNone, 4, p.excerpt(plan.Plan, maxPlanLines))
	case p.details:
		p.lines(styleBold, textIndent, "• "+oneLine(part.Name))
		p.lines(styleNone, 4, arguments)
	default:
		line := []rune("• " + oneLine(part.Name) + "  " + strings.Join(strings.Fields(arguments), " "))
		if limit := max(2*minWidth, widthOf(p.err)) - textIndent; len(line) > limit {
			p.cut = append(p.cut, part.Name+"\n"+arguments)
			line = append(line[:limit-1], '…')
		}
		p.lines(styleBold, textIndent, string(line))
	}
}

// argumentsOf returns the arguments of a tool call, one a line: the important ones first.
func argumentsOf(part *sessions.Part) string {
	var fields map[string]json.RawMessage
	if json.Unmarshal([]byte(part.Arguments), &fields) != nil {
		return part.Arguments
	}
	var list []string
	for _, name := range sortedFields(fields) {
		text := string(fields[name])
		_ = json.Unmarshal(fields[name], &text) // stays JSON if it is no text
		if name != firstFields[0] {
			text = name + ": " + text
		}
		list = append(list, text)
	}
	return strings.Join(list, "\n")
}
