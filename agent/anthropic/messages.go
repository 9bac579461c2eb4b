package anthropic

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// maxSteps is the number of turns in an answer. A client continues a paused one.
	maxSteps = 10
	// maxWall is the time for an answer.
	maxWall = 10 * time.Minute
	// firstLife is how long a container of the first revision lives after its creation, laterLife
	// how long one of later revisions lives after its last use.
	firstLife       = time.Hour
	laterLife       = 30 * 24 * time.Hour
	containerPrefix = "container_"
)

// run is an answer in the making.
type run struct {
	agent.Run
	container *container
	message   message // without its content
	created   time.Time
	thinks    bool // the client sees what the model thinks
}

func (s *Server) createMessage(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	var req *request
	err := host.ReadBody(w, func(body []byte) (err error) {
		req, err = decodeRequest(body)
		return err
	})
	if err != nil {
		return err
	}
	req.betas = betasOf(r.Header)
	run, err := newRun(r.Context(), host, req, "msg_"+rand.Text(), nil)
	if err != nil {
		return agent.ClientError(err)
	}
	if run.Parts = req.Stream; req.Stream {
		return s.stream(w, r, run)
	}
	c := &collector{run: run}
	if err := agent.Continue(r.Context(), s.Upstream, &run.Run, c); err != nil {
		return agent.ClientError(err)
	}
	writeJSON(w, http.StatusOK, &run.message)
	return nil
}

// newRun returns the run of an id that a request asks for. The files that it puts into the container
// are there then. started is how the run started before, nil for a new one.
func newRun(ctx context.Context, host agent.Host, req *request, id string, started *agent.Start) (*run, error) {
	set, err := req.toolSet()
	if err != nil {
		return nil, err
	}
	talk, err := req.conversation()
	if err != nil {
		return nil, err
	}
	var c *container
	var created time.Time
	if started != nil {
		c, created = newContainer(host, started.Container, set.revision), started.Created
	} else if c, created, err = openContainer(ctx, host, string(req.Container), set.revision); err != nil {
		return nil, err
	}
	c.Run = id
	c.Expires = func(used time.Time) time.Time { return expiryOf(c.revision, created, used) }
	if req.Container != "" && started == nil {
		if err := host.KeepFiles(ctx, c.ID, c.Expires(time.Now())); err != nil {
			return nil, err
		}
	}
	if len(talk.uploads) > 0 && set.revision == "" {
		return nil, proto.FieldErrorf("tools", "must have the code execution tool for a container_upload")
	}
	if err := c.upload(ctx, talk, req.Container != "", started != nil); err != nil {
		return nil, err
	}
	var system []agent.Instruction
	for i := range req.System {
		system = append(system, agent.Instruction{Text: req.System[i].Text, Cache: ifSet(req.System[i].Cache)})
	}
	r := &run{
		Run: agent.Run{
			Turn: agent.Turn{
				Model: req.Model, System: system, Items: talk.items, MaxTokens: req.MaxTokens,
				Format:      req.format(),
				Temperature: req.Temperature, TopP: req.TopP, Stop: req.Stop, Thinking: ifSet(req.Thinking),
				Anthropic: agent.AnthropicSettings{
					Betas: req.betas, Context: ifSet(req.Context), Effort: req.OutputConfig.Effort,
				},
			},
			Tools: set.all(c), NewCallID: newCallID, Reserve: host.Reserve, Steps: maxSteps, Wall: maxWall,
			Defer: set.revision != pythonTool, // clients of the first revision expect each result in the message of its call
		},
		container: c, created: created, thinks: req.thinks(),
		message: message{ID: id, Type: "message", Role: "assistant", Model: req.Model, Content: []any{}},
	}
	if choice := req.ToolChoice; choice != nil {
		r.Turn.Choice, r.Turn.Serial = agent.Choice{Mode: choice.Type, Name: choice.Name}, choice.Serial
		switch choice.Type {
		case "auto", "any", "none", "tool":
		default:
			return nil, proto.FieldErrorf("tool_choice.type", "must be auto, any, none or tool")
		}
		if choice.Name == toolName && set.revision == bashTool {
			r.Turn.Choice.Name = bashName // the model has two tools in its place
		}
	}
	if req.Container != "" {
		r.message.Container = r.containerBody(time.Now())
	}
	return r, nil
}

var errNoContainer = api.Errorf(api.CodeNotFound,
	"container: there is none of this id, or it has expired; send the request without it to get a new one")

// openContainer returns the container with an id, or a new one if id is empty, with its creation
// time.
func openContainer(ctx context.Context, host agent.Host, id, revision string) (*container, time.Time, error) {
	now := time.Now()
	c := newContainer(host, id, revision)
	if id == "" {
		c.ID = agent.NewContainerID(containerPrefix)
		return c, now, nil
	}
	if !strings.HasPrefix(id, containerPrefix) {
		return nil, now, errNoContainer
	}
	thread, err := host.Thread(ctx, id)
	if known, ok := errors.AsType[*api.Error](err); ok && known.Code == api.CodeNotFound {
		return nil, now, errNoContainer
	}
	if err != nil {
		return nil, now, err
	}
	switch {
	case revision == pythonTool: // its calls fail one by one
		c.expired = now.Sub(thread.CreatedAt) > firstLife
	case now.Sub(thread.UsedAt) > laterLife:
		return nil, now, errNoContainer
	}
	return c, thread.CreatedAt, nil
}

func newContainer(host agent.Host, id, revision string) *container {
	return &container{Container: agent.Container{Host: host, ID: id}, revision: revision}
}

// upload puts the files of a conversation into the container, and their names into the texts for
// the model. Clients repeat the blocks of earlier messages, whose files an existing container
// already has. A resumed run has already uploaded everything.
func (c *container) upload(ctx context.Context, talk *conversation, reused, started bool) error {
	done, names := map[string]bool{}, agent.Names{}
	for _, u := range talk.uploads {
		if !u.current && reused || started {
			done[u.id] = true
		}
	}
	for _, u := range talk.uploads {
		f, err := c.Host.File(ctx, u.id)
		if err != nil && done[u.id] {
			continue // it was there once
		}
		if err != nil {
			return err
		}
		name := names.Of(f)
		talk.items[u.item].Text = fmt.Sprintf(
			"The file %q is in the home directory of the sandbox, which is its working directory.", name)
		if done[u.id] || c.expired {
			continue
		}
		if err := c.Upload(ctx, f, name); err != nil {
			return err
		}
		done[u.id] = true
	}
	return nil
}

// expiryOf returns when a container expires that was created and used at these times.
func expiryOf(revision string, created, used time.Time) time.Time {
	if revision == pythonTool {
		return created.Add(firstLife)
	}
	return used.Add(laterLife)
}

// containerBody returns the container for an answer.
func (r *run) containerBody(now time.Time) *containerBody {
	return &containerBody{ID: r.container.ID, ExpiresAt: expiryOf(r.container.revision, r.created, now).UTC().Format(
		time.RFC3339)}
}

var stopReasons = map[agent.Reason]string{
	agent.ReasonDone: "end_turn", agent.ReasonLength: "max_tokens", agent.ReasonStop: "stop_sequence",
	agent.ReasonCalls:  "tool_use",
	agent.ReasonPaused: "pause_turn", agent.ReasonRefused: "refusal",
}

// finish completes the message without its content, at a time.
func (r *run) finish(end *agent.End, now time.Time) {
	m := &r.message
	m.StopReason = new(stopReasons[end.Reason])
	if end.Stop != "" {
		m.StopSequence = &end.Stop
	}
	u := &end.Usage
	m.Usage = usageBody{
		InputTokens: max(0, u.Input-u.CacheRead-u.CacheWrite), OutputTokens: u.Output, CacheCreationTokens: u.CacheWrite,
		CacheReadTokens: u.CacheRead,
	}
	if end.Calls > 0 {
		m.Usage.ServerToolUse = &serverToolUse{CodeExecutionRequests: end.Calls}
	}
	if r.container.Used {
		m.Container = r.containerBody(now)
	}
}

// blockOf returns the block of an event that is a whole item.
func blockOf(e *agent.Event) any {
	switch e.Kind {
	case agent.EventTextEnd:
		return &textBlock{Type: "text", Text: e.Text}
	case agent.EventThought:
		if e.Thought.Redacted != "" {
			return &redactedBlock{"redacted_thinking", e.Thought.Redacted}
		}
		return &thinkingBlock{"thinking", e.Thought.Text, cmp.Or(e.Thought.Signature, unsigned)}
	case agent.EventCall:
		kind := "tool_use"
		if e.Server {
			kind = "server_tool_use"
		}
		return &useBlock{kind, e.Call.ID, e.Call.Name, e.Call.Arguments}
	case agent.EventResult:
		return &resultBlock{e.Call.Name + "_tool_result", e.Call.ID, e.Outcome.Value}
	default:
		return nil
	}
}

// collector makes the answer that is not streamed.
type collector struct {
	run *run
	at  time.Time // of the event; zero for now
}

// Append implements [agent.Log].
func (c *collector) Append(_ context.Context, e agent.Event) error {
	if b := blockOf(&e); b != nil && (e.Kind != agent.EventThought || c.run.thinks) {
		c.run.message.Content = append(c.run.message.Content, b)
	}
	if e.Kind == agent.EventEnd {
		c.run.finish(e.End, cmp.Or(c.at, time.Now()))
	}
	return nil
}

func (s *Server) countTokens(w http.ResponseWriter, r *http.Request) error {
	var req *request
	err := s.Host(r).ReadBody(w, func(body []byte) (err error) {
		req, err = decodeCount(body)
		return err
	})
	if err != nil {
		return err
	}
	talk, err := req.conversation()
	if err != nil {
		return err
	}
	n := 0
	for i := range talk.items {
		n += textBytes(&talk.items[i])
	}
	for i := range req.System {
		n += len(req.System[i].Text)
	}
	for _, t := range req.Tools {
		n += len(t)
	}
	writeJSON(w, http.StatusOK, map[string]int{"input_tokens": (n + bytesPerToken - 1) / bytesPerToken})
	return nil
}

const (
	bytesPerToken = 4 // of English text, roughly
	imageTokens   = 1600
	// documentBytes is how much of a document's Base64 is like a byte of text.
	documentBytes = 8
)

// textBytes returns the bytes of an item, or what is as much for a model.
func textBytes(item *agent.Item) int {
	switch {
	case item.Call != nil:
		return len(item.Call.Arguments)
	case item.Thinking != nil:
		return len(item.Thinking.Text)
	case item.Image != nil:
		return imageTokens * bytesPerToken
	case item.Document != nil:
		return len(item.Document.Base64) / documentBytes
	case item.Result != nil:
		n := len(item.Result.Text)
		for i := range item.Result.Items {
			n += textBytes(&item.Result.Items[i])
		}
		return n
	default:
		return len(item.Text)
	}
}
