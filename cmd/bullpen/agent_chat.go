package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/client"
)

type agentChatCommand struct {
	remote        `embed:""`
	agentSettings `embed:""`
	Agent         string   `arg:"" help:"The agent, such as mock or claude."`
	Message       []string `arg:"" optional:"" help:"The first message. - reads it from standard input."`
	Session       string   `placeholder:"ID" help:"Continue this session instead of creating one."`
	Details       bool     `help:"Shorten nothing, and show thinking that is marked as private."`
}

func (*agentChatCommand) Help() string {
	return `Creates a session and sends it what you type, a line at a time. The agent's text goes to standard output as it
arrives. Thinking, tool calls, results and diffs go to standard error. When the agent asks for a permission or has a
question, you answer in place. What the agent prints is indented: only bullpen writes in the first column.

  """         begins and ends a message of several lines
  Ctrl-C      interrupts the agent; a second one leaves
  Ctrl-D      leaves
  /details    prints what was shortened since your last message
  /help       prints this list
  /exit       leaves

Other messages that begin with a slash go to the agent. Leaving does not end the session: --session continues it, also
after a crash. It first shows the last turn and asks what is still without an answer. --model then applies to the new
messages, and the other settings of a session cannot be given.

Without a terminal, the whole of standard input is one message, unless MESSAGE is given, and the command returns when
the agent has answered it. Nobody can be asked then: permissions and questions are rejected. To allow what the agent
needs, create the session with --permission-mode acceptEdits or bypass.

--json prints the events, one JSON object per line. It asks nothing either.

Exit codes: 0 you left or the turn ended, 1 failure of the command or the agent, the end of the session, or a rejection
because nobody could be asked, 2 wrong usage, 130 interrupted.

Examples:

  bullpen agent chat claude
  bullpen agent chat claude --permission-mode acceptEdits 'Fix the failing test.'
  bullpen agent chat claude --session ses_01
  bullpen agent chat codex --permission-mode bypass <task.md`
}

func (c *agentChatCommand) Run(ctx context.Context, s streams) error {
	given := c.agentSettings
	given.Model, given.Variant = "", ""
	if c.Session != "" && given != (agentSettings{}) {
		return usagef("--session continues a session as it is: of its settings, only --model and --variant can be given")
	}
	in, isFile := s.in.(*os.File)
	interactive := isFile && isTerminal(in) && s.terminal && !c.JSON
	if len(c.Message) == 0 && !interactive {
		c.Message = []string{"-"}
	}
	message, err := agentMessage(s, c.Message)
	if err != nil {
		return err
	}
	if strings.TrimSpace(message) == "" && !interactive {
		return usagef("there is no message: give one, or write it to standard input")
	}
	x := &chat{
		agentChatCommand: c, out: newChatPrinter(s, c.Details), results: make(chan func() error),
		events: make(chan chatEvent), notes: make(chan string, 1), answered: map[string]bool{},
	}
	cfg, err := c.config(s)
	if err != nil {
		return err
	}
	cfg.OnRetry = retryProgress(streams{err: noteWriter(x.notes), terminal: s.terminal})
	if x.cl, err = client.New(cfg); err != nil {
		return err
	}
	if interactive {
		x.in = openTerminalInput(in)
	}
	if err := x.open(ctx); err != nil {
		return err
	}
	if message = strings.TrimSpace(message); message != "" {
		if interactive {
			x.out.prompt(messagePrompt + strings.Map(printableLine, message))
			x.out.endLine()
		}
		x.first = message
	}
	return x.run(ctx)
}

// chat is a conversation in a terminal, or of one message without one.
type chat struct {
	*agentChatCommand
	cl  *client.Client
	out *chatPrinter
	in  *terminalInput // nil if there is nobody to ask

	first   string // message to send at once; empty for none
	events  chan chatEvent
	results chan func() error // of requests
	notes   chan string       // about the connection
	calls   int               // requests without a result
	after   int64             // sequence number of the last event

	// sent are the messages whose turns have not started.
	sent    []string
	running bool // whether a turn is in progress
	// interrupt is set if the turn must be interrupted as soon as it starts.
	interrupt bool
	// again is set after Ctrl-C, until the agent or the user does something else.
	again bool

	asks     []*ask          // permissions and questions without an answer
	next     ask             // stands for the next message, which the user is asked for
	answered map[string]bool // ids of the ones that this chat has answered
	shown    *ask            // what the user is being asked; nil for nothing
	shownAt  time.Time
	reading  bool // whether a line is being read
	due      <-chan time.Time
	lines    []string // of a message of several lines, which is being written; nil for none

	ended       sessions.EndReason // of the session; empty if it goes on
	failure     string             // of the agent in the last turn; empty for none
	rejected    int                // permissions and questions that nobody could answer
	interrupted bool               // whether the user has interrupted the last turn
}

// chatEvent is an event of the session, or the error that ended their stream.
type chatEvent struct {
	*client.AgentEvent
	err error
}

// noteWriter passes on text. It drops text if the last one was not received yet.
type noteWriter chan<- string

// Write implements [io.Writer].
func (w noteWriter) Write(text []byte) (int, error) {
	select {
	case w <- string(text):
	default:
	}
	return len(text), nil
}

const (
	messagePrompt = "> "
	linePrompt    = ". " // within a message of several lines
	// settleTime is how long something must be due before the user is asked for it. Permissions that an
	// earlier answer covers are resolved before that.
	settleTime = 50 * time.Millisecond
	// leaveTimeout bounds the wait for requests in progress when the user leaves.
	leaveTimeout = 10 * time.Second
)

// errLeave is returned when the user leaves.
var errLeave = errors.New("the user leaves")

// open creates the session, or reads the existing one.
func (c *chat) open(ctx context.Context) error {
	if c.Session != "" {
		return c.resume(ctx)
	}
	r, err := c.request(c.Agent)
	if err != nil {
		return err
	}
	created, err := c.cl.CreateAgentSession(ctx, "", r)
	if err != nil {
		return uncertain(err, "see bullpen agent session list")
	}
	c.Session = created.ID
	c.hello("")
	return nil
}

// hello tells the user where they are.
func (c *chat) hello(what string) {
	if c.in != nil {
		c.out.notice("%s, session %s%s. Ctrl-C interrupts the agent, Ctrl-D leaves, /help helps.",
			cell(c.Agent), cell(c.Session), what)
	}
}

// recentEvents is the number of events that are read when a session continues. They are to contain the
// beginning of the last turn.
const recentEvents = 1000

// resume reads the existing session. It shows the last turn.
func (c *chat) resume(ctx context.Context) error {
	x, err := c.cl.AgentSession(ctx, c.Session)
	if err != nil {
		return err
	}
	if x.Agent != c.Agent {
		return usagef("session %s is one of %s, not of %s", cell(c.Session), cell(x.Agent), cell(c.Agent))
	}
	for i := range x.Permissions {
		c.asks = append(c.asks, &ask{permission: &x.Permissions[i]})
	}
	for i := range x.Questions {
		c.asks = append(c.asks, &ask{question: &x.Questions[i]})
	}
	// There are as many sequence numbers as events, or more.
	offset := max(0, x.Events-recentEvents)
	c.after, c.running = offset, offset > 0
	events, err := client.Collect(c.cl.AgentSessionEvents(ctx, c.Session, offset))
	if err != nil {
		return err
	}
	last := 0 // the event at which the last turn starts
	for i, e := range events {
		if sessions.EventType(e.Type) == sessions.TurnStarted {
			last = i
		}
	}
	c.hello(", continued")
	for i, e := range events {
		if err := c.track(e); err != nil {
			return err
		}
		if i >= last && c.in != nil {
			if err := c.out.event(e); err != nil {
				return err
			}
		}
	}
	c.out.endLine()
	if c.ended == sessions.EndTerminated || c.ended == sessions.EndError {
		return c.endError()
	}
	c.failure = ""
	return nil
}

// run chats until the user leaves, or without a terminal until the turn has ended.
func (c *chat) run(ctx context.Context) error {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // an interrupt is for the agent
	defer cancel()
	go c.follow(ctx, c.after)
	if c.first != "" {
		c.send(ctx, c.first)
	}
	if c.in == nil {
		c.rejectAll(ctx)
	}
	err := c.loop(ctx, signals)
	if errors.Is(err, errLeave) {
		err = c.finishCalls(signals)
	}
	c.out.endLine()
	if c.ended == "" || c.ended == sessions.EndCompleted {
		c.out.notice("To continue: bullpen agent chat %s --session %s", shellWord(c.Agent), shellWord(c.Session))
	}
	return err
}

// follow passes on the events of the session after a sequence number.
func (c *chat) follow(ctx context.Context, after int64) {
	pass := func(e chatEvent) bool {
		select {
		case c.events <- e:
			return e.err == nil
		case <-ctx.Done():
			return false
		}
	}
	for ctx.Err() == nil { // a message continues a session whose agent has ended
		for e, err := range c.cl.FollowAgentSession(ctx, c.Session, after) {
			if !pass(chatEvent{e, err}) {
				return
			}
			after = e.Sequence
		}
	}
}

// loop handles what happens. It returns errLeave when the user leaves.
func (c *chat) loop(ctx context.Context, signals <-chan os.Signal) error {
	for {
		if c.in == nil && c.isDone() {
			return c.outcome()
		}
		c.schedulePrompt()
		var lines <-chan inputLine
		if c.in != nil {
			lines = c.in.lines
		}
		var err error
		select {
		case e := <-c.events:
			if err = e.err; err == nil {
				err = c.handle(ctx, e.AgentEvent)
			}
		case result := <-c.results:
			c.calls--
			err = result()
		case note := <-c.notes:
			c.out.lines(styleDim, 0, note)
		case line := <-lines:
			err = c.line(ctx, &line)
		case <-c.due:
			c.due = nil
			c.show()
		case s := <-signals:
			err = c.signalled(ctx, s)
		}
		if err != nil {
			return err
		}
	}
}

// isDone reports whether all messages are answered.
func (c *chat) isDone() bool { return len(c.sent) == 0 && !c.running && c.calls == 0 }

// finishCalls waits for the results of requests in progress, so that what the user has answered arrives.
func (c *chat) finishCalls(signals <-chan os.Signal) error {
	limit := time.After(leaveTimeout)
	for c.calls > 0 {
		select {
		case result := <-c.results:
			c.calls--
			if err := result(); err != nil {
				return err
			}
		case <-limit:
			return errors.New("the server does not answer")
		case <-signals:
			return exitError{code: exitInterrupted}
		}
	}
	return nil
}

// call sends a request without blocking. handle is called with its error in the loop.
func (c *chat) call(ctx context.Context, request func() error, handle func(error) error) {
	c.calls++
	go func() {
		err := request()
		select {
		case c.results <- func() error { return handle(err) }:
		case <-ctx.Done():
		}
	}()
}

// send sends a message.
func (c *chat) send(ctx context.Context, text string) {
	c.sent = append(c.sent, text)
	c.out.cut = nil
	c.again, c.interrupted = false, false
	m := &client.AgentMessage{Text: text, Model: c.Model, Variant: c.Variant}
	c.call(ctx, func() error { return c.cl.SendAgentMessage(ctx, c.Session, m) }, func(err error) error {
		if err == nil {
			return nil
		}
		if i := slices.Index(c.sent, text); i >= 0 {
			c.sent = slices.Delete(c.sent, i, i+1)
		}
		return c.failed(uncertain(err, "see bullpen agent session events"))
	})
}

// failed shows the error of a request. Without a terminal it returns the error.
func (c *chat) failed(err error) error {
	if c.in == nil {
		return err
	}
	c.out.failure("%v", explain(err))
	return nil
}

// track applies an event to the state of the chat.
func (c *chat) track(e *client.AgentEvent) error {
	c.after = e.Sequence
	switch sessions.EventType(e.Type) {
	case sessions.TurnStarted:
		c.running, c.ended, c.failure, c.out.own = true, "", "", ""
		if len(c.sent) > 0 {
			c.out.own, c.sent = c.sent[0], c.sent[1:]
		}
	case sessions.TurnEnded:
		c.running, c.again, c.interrupt = false, false, false
	case sessions.SessionEnded:
		data, err := decodeData[sessions.Ended](e)
		if err != nil {
			return err
		}
		c.running, c.interrupt, c.ended, c.asks = false, false, data.Reason, nil
		if data.Reason == sessions.EndError {
			c.failure = data.Message
		}
	case sessions.ErrorEvent:
		data, err := decodeData[sessions.Failure](e)
		if err != nil {
			return err
		}
		if c.failure = data.Message; !c.running { // the messages have expired
			c.sent = nil
		}
	case sessions.PermissionRequested, sessions.QuestionRequested:
		asked, err := decodeAsk(e)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(c.asks, asked.same) {
			c.asks = append(c.asks, asked)
		}
	case sessions.PermissionResolved, sessions.QuestionResolved:
		resolved, err := decodeAsk(e)
		if err != nil {
			return err
		}
		c.asks = slices.DeleteFunc(c.asks, resolved.same)
	}
	return nil
}

// handle handles an event.
func (c *chat) handle(ctx context.Context, e *client.AgentEvent) error {
	if err := c.track(e); err != nil {
		return err
	}
	if c.JSON {
		if _, err := c.out.out.Write(e.Line); err != nil {
			return err
		}
	} else if err := c.showEvent(e); err != nil {
		return err
	}
	switch {
	case sessions.EventType(e.Type) == sessions.TurnStarted && c.interrupt:
		c.interruptTurn(ctx)
	case c.ended == sessions.EndTerminated || c.ended == sessions.EndError:
		return c.endError()
	case c.in == nil:
		c.rejectAll(ctx)
	}
	return nil
}

// showEvent prints an event. It does not repeat the answers of the user, and leaves a failure to the end of
// the command if there is no terminal.
func (c *chat) showEvent(e *client.AgentEvent) error {
	switch sessions.EventType(e.Type) {
	case sessions.PermissionResolved, sessions.QuestionResolved:
		resolved, err := decodeAsk(e)
		if err != nil || c.answered[resolved.id()] {
			return err
		}
	case sessions.ErrorEvent:
		if c.in == nil {
			return nil
		}
	}
	return c.out.event(e)
}

// rejectAll rejects what the agent asks, because there is nobody to ask.
func (c *chat) rejectAll(ctx context.Context) {
	for _, a := range slices.Clone(c.asks) {
		c.answer(ctx, a, &reply{})
	}
}

// answer sends the answer to a permission or question.
func (c *chat) answer(ctx context.Context, a *ask, r *reply) {
	c.answered[a.id()] = true
	c.asks = slices.DeleteFunc(c.asks, a.same)
	c.call(ctx, func() error { return a.send(ctx, c.cl, c.Session, r) }, func(err error) error {
		refused, ok := errors.AsType[*client.Error](err)
		switch {
		case err == nil && c.in == nil:
			c.rejected++
			c.out.notice("rejected, because there is no terminal to ask on: %s", a)
			return nil
		case err == nil:
			return nil
		case ok && strings.Contains(refused.Message, "unknown "+a.kind()+" id"):
			if c.in != nil {
				c.out.notice("It was answered elsewhere, or withdrawn.")
			}
			return nil
		}
		if c.running { // the agent still waits
			c.asks = append([]*ask{a}, c.asks...)
		}
		return c.failed(err)
	})
}

// outcome returns the error of the turn, without a terminal.
func (c *chat) outcome() error {
	switch {
	case c.interrupted:
		return exitError{code: exitInterrupted}
	case c.failure != "":
		return fmt.Errorf("the agent failed: %s", oneLine(c.failure))
	case c.rejected > 0:
		return fmt.Errorf("%d requests of the agent were rejected, because there is no terminal to ask on: "+
			"create the session with --permission-mode", c.rejected)
	default:
		return nil
	}
}

// endError returns the error for a session that has ended.
func (c *chat) endError() error {
	if c.failure != "" {
		return fmt.Errorf("session %s has ended: %s", cell(c.Session), oneLine(c.failure))
	}
	return fmt.Errorf("session %s has ended", cell(c.Session))
}

// signalled handles a signal.
func (c *chat) signalled(ctx context.Context, s os.Signal) error {
	busy := c.running || len(c.sent) > 0
	c.out.prompting = c.in != nil // the terminal shows ^C
	switch {
	case s != os.Interrupt || c.again:
		return exitError{code: exitInterrupted}
	case busy:
		c.out.notice("Interrupting the agent. Ctrl-C again leaves.")
		c.interrupted = true
		if c.running {
			c.interruptTurn(ctx)
		} else {
			c.interrupt = true
		}
	default:
		c.out.notice("Ctrl-C again leaves, and so does Ctrl-D.")
	}
	c.again, c.lines, c.shown = true, nil, nil // the terminal has discarded the line
	return nil
}

// interruptTurn interrupts the turn in progress.
func (c *chat) interruptTurn(ctx context.Context) {
	c.call(ctx, func() error { return c.cl.InterruptAgentSession(ctx, c.Session) }, c.orFailed)
}

// orFailed is failed for an error that may be nil.
func (c *chat) orFailed(err error) error {
	if err == nil {
		return nil
	}
	return c.failed(err)
}

// wanted returns what the user must be asked for; nil for nothing.
func (c *chat) wanted() *ask {
	switch {
	case c.in == nil:
		return nil
	case len(c.asks) > 0:
		return c.asks[0]
	case c.running || len(c.sent) > 0:
		return nil
	default:
		return &c.next
	}
}

// schedulePrompt makes show be called if the user must be asked for something.
func (c *chat) schedulePrompt() {
	wanted := c.wanted()
	if c.shown != nil && (c.shown != wanted || !c.out.prompting) { // something else was printed
		c.shown.isShown, c.shown = false, nil
		c.out.endLine()
	}
	if wanted != nil && c.shown == nil && c.due == nil {
		c.due = time.After(settleTime)
	}
}

// show asks the user for what is wanted.
func (c *chat) show() {
	wanted := c.wanted()
	if wanted == nil || c.shown != nil {
		return
	}
	switch {
	case wanted != &c.next:
		c.in.discard() // what was typed earlier is no answer
		wanted.show(c.out)
	case c.lines != nil:
		c.out.prompt(linePrompt)
	default:
		c.out.prompt(messagePrompt)
	}
	c.shown, c.shownAt = wanted, time.Now()
	if !c.reading {
		c.reading = true
		c.in.read()
	}
}

// line handles a line of the user.
func (c *chat) line(ctx context.Context, l *inputLine) error {
	asked, early := c.shown, l.at.Before(c.shownAt)
	c.shown, c.reading, c.out.prompting, c.again = nil, false, false, false
	switch {
	case errors.Is(l.err, io.EOF):
		c.out.prompting = true // Ctrl-D does not end the line
		return errLeave
	case l.err != nil:
		return fmt.Errorf("read from the terminal: %w", l.err)
	case asked != nil && asked != &c.next && !early:
		if r := asked.parse(l.text); r != nil {
			c.answer(ctx, asked, r)
		}
		return nil
	case len(c.asks) > 0: // typed before the user has seen what is asked
		return nil
	}
	return c.messageLine(ctx, l)
}

const multiLine = `"""`

// messageLine handles a line of a message.
func (c *chat) messageLine(ctx context.Context, l *inputLine) error {
	text := strings.TrimRight(l.text, " \t")
	rest, begins := strings.CutPrefix(text, multiLine)
	switch {
	case c.lines != nil:
	case begins:
		c.lines, text = []string{}, rest
	case l.more:
		c.out.notice("Several lines arrived at once. They are one message: end it with a line %s", multiLine)
		c.lines = []string{}
	default:
		return c.message(ctx, strings.TrimSpace(text))
	}
	text, ends := strings.CutSuffix(text, multiLine)
	if text != "" || len(c.lines) > 0 {
		c.lines = append(c.lines, text)
	}
	if !ends {
		return nil
	}
	message := strings.TrimSpace(strings.Join(c.lines, "\n"))
	c.lines = nil
	if message != "" {
		c.send(ctx, message)
	}
	return nil
}

// message handles a message of one line, or a command.
func (c *chat) message(ctx context.Context, text string) error {
	switch text {
	case "":
	case "/exit":
		return errLeave
	case "/details":
		c.out.showCut()
	case "/help":
		_, list, _ := strings.Cut(c.Help(), "\n\n")
		list, _, _ = strings.Cut(list, "\n\n")
		_, _ = fmt.Fprintln(c.out.err, list)
	default:
		c.send(ctx, text)
	}
	return nil
}
