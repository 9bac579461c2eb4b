package sessions

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// normaliser turns an agent's reports into the events of a turn.
type normaliser struct {
	info *Info
	mode string            // permission mode of the session
	wide bool              // see Runner.WideAlways
	ids  map[string]string // of items of the turn, by the agent's own ids
	// deltas and completed contain the agent's own ids of the items that have deltas or are
	// complete.
	deltas, completed map[string]bool
	placeholder       string // native id of the assistant's empty item; empty if there is none
}

// begin resets the normaliser for a turn. open contains the items in progress, if the turn is
// resumed.
func (n *normaliser) begin(open map[string]string) {
	n.ids, n.deltas, n.completed, n.placeholder = map[string]string{}, map[string]bool{}, map[string]bool{}, ""
	maps.Copy(n.ids, open)
}

// replay applies an event of the turn in progress that is already in the log.
func (n *normaliser) replay(e *Event) error {
	switch e.Type {
	case ItemStarted, ItemCompleted:
		d, err := DataOf[ItemData](e)
		if err != nil || d.Item.NativeID == nil {
			return err
		}
		n.ids[*d.Item.NativeID] = d.Item.ID
		n.completed[*d.Item.NativeID] = e.Type == ItemCompleted
	case ItemDelta:
		d, err := DataOf[Delta](e)
		if err != nil || d.NativeItemID == nil {
			return err
		}
		n.ids[*d.NativeItemID], n.deltas[*d.NativeItemID] = d.ItemID, true
	}
	return nil
}

// clone returns a copy that can be modified independently.
func (n *normaliser) clone() normaliser {
	c := *n
	c.ids, c.deltas, c.completed = maps.Clone(n.ids), maps.Clone(n.deltas), maps.Clone(n.completed)
	return c
}

// batch collects the events of one entry.
type batch struct {
	*normaliser
	state   *State
	events  []Event
	answers []*Answer // to permissions that are granted without asking the user
}

// userItem adds the user's message as an item, unless the agent reports it itself.
func (b *batch) userItem(m *Message) error {
	if b.info.OwnUserItems {
		return nil
	}
	user := Item{
		NativeID: new(fmt.Sprintf("user_%d", m.Number)), Kind: KindMessage, Role: new(RoleUser),
		Content: []Part{Text(m.Text)}, Status: InProgress,
	}
	started := Native{Type: ItemStarted, Data: ItemData{user}, Synthetic: true}
	user.Status = Completed
	return b.add(&started, &Native{Type: ItemCompleted, Data: ItemData{user}, Synthetic: true})
}

// startPlaceholder adds an empty item of the assistant, if the agent's turns begin with one.
func (b *batch) startPlaceholder(session string, m *Message) error {
	if !b.info.PendingAssistant {
		return nil
	}
	b.placeholder = placeholderID(session, m.Number)
	return b.add(&Native{Type: ItemStarted, Synthetic: true, Data: ItemData{Item{
		NativeID: new(b.placeholder), Kind: KindMessage, Role: new(RoleAssistant), Content: []Part{}, Status: InProgress,
	}}})
}

// placeholderID returns the native id of the assistant's empty item.
func placeholderID(session string, message int64) string {
	return fmt.Sprintf("%s_pending_assistant_%d", session, message)
}

// add adds the events of reports.
func (b *batch) add(reports ...*Native) error {
	for _, n := range reports {
		if n.Cursor != "" {
			b.state.Cursor = n.Cursor
		}
		if n.NativeSession != "" {
			b.state.Native = n.NativeSession
		}
		if err := b.addOne(n); err != nil {
			return err
		}
	}
	return nil
}

func (b *batch) addOne(n *Native) error {
	switch data := n.Data.(type) {
	case ItemData:
		return b.item(n, data.Item)
	case Delta:
		return b.delta(n, data)
	case Permission:
		if n.Type == PermissionResolved {
			return b.withdraw(data.ID, false)
		}
		return b.permission(n, data)
	case Question:
		if n.Type == QuestionResolved {
			return b.withdraw(data.ID, true)
		}
		b.state.Pending = append(b.state.Pending, Pending{Question: &data})
	case Ended:
		if err := b.dropPending(); err != nil {
			return err
		}
		b.state.Running, b.state.Ended, b.state.ExitCode = false, data.Reason, data.ExitCode
		if data.Stderr != nil {
			b.state.Stderr = data.Stderr.Head + data.Stderr.Tail
		}
	}
	switch n.Type {
	case SessionStarted: // the service has appended it
		return nil
	case TurnStarted: // the runner appends it
		return nil
	case TurnEnded:
		return b.endTurn(n.Data)
	default:
		return b.event(n, n.Data)
	}
}

// event adds an event with the given data.
func (b *batch) event(n *Native, data any) error {
	e, err := event(n.Type, data)
	e.Synthetic, e.Raw = n.Synthetic, n.Raw
	b.events = append(b.events, e)
	return err
}

// endTurn ends the turn, if one is in progress.
func (b *batch) endTurn(data any) error {
	if !b.state.Running {
		return nil
	}
	if err := b.dropPending(); err != nil {
		return err
	}
	b.state.Running, b.state.Open = false, nil
	turn, _ := data.(Turn)
	turn.Phase, turn.ID = "ended", turnID(b.state.Turns)
	return b.event(&Native{Type: TurnEnded, Synthetic: true}, turn)
}

func turnID(number int64) string { return fmt.Sprintf("turn_%d", number) }

// dropPending rejects all questions and permissions without an answer.
func (b *batch) dropPending() error {
	for i := range b.state.Pending {
		if err := b.reject(&b.state.Pending[i]); err != nil {
			return err
		}
	}
	b.state.Pending = nil
	return nil
}

// withdraw rejects a question or permission, if it has no answer yet.
func (b *batch) withdraw(id string, question bool) error {
	p := b.state.removePending(id, question)
	if p == nil {
		return nil
	}
	return b.reject(p)
}

// reject adds the event of the rejection of a question or permission.
func (b *batch) reject(p *Pending) error {
	if p.Permission != nil {
		resolved := *p.Permission
		resolved.Status = PermissionRejected
		return b.event(&Native{Type: PermissionResolved, Synthetic: true}, resolved)
	}
	resolved := *p.Question
	resolved.Status = QuestionRejected
	return b.event(&Native{Type: QuestionResolved, Synthetic: true}, resolved)
}

// fail adds an error event and ends the turn.
func (b *batch) fail(code, message string) error {
	n := &Native{Type: ErrorEvent, Synthetic: true, Data: Failure{Message: message, Code: &code}}
	return b.add(n, &Native{Type: TurnEnded})
}

// item adds the events that a report about an item leads to.
func (b *batch) item(n *Native, x Item) error {
	native := ""
	if x.NativeID != nil {
		native = *x.NativeID
	}
	isAnswer := x.Kind == KindMessage && x.Role != nil && *x.Role == RoleAssistant
	if isAnswer && native != b.placeholder {
		b.replacePlaceholder(native)
	}
	if b.completed[native] && native != "" {
		return nil
	}
	started := native != "" && b.state.Open[native] != ""
	if n.Type == ItemStarted && started {
		return nil
	}
	if x.ID = b.id(native); x.ParentID != nil {
		x.ParentID = orNil(b.ids[*x.ParentID])
	}
	if n.Type == ItemStarted {
		b.open(native, x.ID)
		return b.event(n, ItemData{x})
	}
	if !started {
		beginning := x
		beginning.Status = InProgress
		b.open(native, x.ID)
		if err := b.event(&Native{Type: ItemStarted, Synthetic: true}, ItemData{beginning}); err != nil {
			return err
		}
	}
	if text := TextOf(x.Content); isAnswer && text != "" && !b.deltas[native] {
		err := b.event(&Native{Type: ItemDelta, Synthetic: true}, Delta{x.ID, x.NativeID, text})
		if err != nil {
			return err
		}
	}
	delete(b.state.Open, native)
	b.completed[native] = true
	return b.event(n, ItemData{x})
}

// replacePlaceholder makes the assistant's empty item, if there is one, the item with a native id.
func (b *batch) replacePlaceholder(native string) {
	if b.placeholder == "" {
		return
	}
	b.ids[native] = b.ids[b.placeholder]
	if id, ok := b.state.Open[b.placeholder]; ok {
		delete(b.state.Open, b.placeholder)
		b.open(native, id)
	}
	b.deltas[native] = b.deltas[b.placeholder]
	b.placeholder = ""
}

// open marks an item as in progress.
func (b *batch) open(native, id string) {
	if native == "" {
		return
	}
	if b.state.Open == nil {
		b.state.Open = map[string]string{}
	}
	b.state.Open[native] = id
}

// id returns the id of the item with a native id. It assigns a new id if the item is new or has no
// native id.
func (b *batch) id(native string) string {
	if id := b.ids[native]; id != "" && native != "" {
		return id
	}
	b.state.Items++
	id := fmt.Sprintf("itm_%d", b.state.Items)
	if native != "" {
		b.ids[native] = id
	}
	return id
}

// delta adds a piece of an item's text.
func (b *batch) delta(n *Native, d Delta) error {
	native := ""
	if d.NativeItemID != nil {
		native = *d.NativeItemID
	}
	if native != b.placeholder && b.ids[native] == "" {
		b.replacePlaceholder(native)
	}
	if b.state.Open[native] == "" {
		started := Item{
			NativeID: d.NativeItemID, Kind: KindMessage, Role: new(RoleAssistant), Content: []Part{}, Status: InProgress,
		}
		if err := b.item(&Native{Type: ItemStarted, Synthetic: true}, started); err != nil {
			return err
		}
	}
	d.ItemID, b.deltas[native] = b.id(native), true
	return b.event(n, d)
}

// permission adds a request for a permission. It grants the permission itself if the session's mode
// or an earlier answer allows it.
func (b *batch) permission(n *Native, p Permission) error {
	p.Status = PermissionPending
	if b.mode == PermissionBypass && b.info.Sandboxed || b.mode == PermissionAcceptEdits && p.isFileChange() {
		// Clients do not see it.
		b.state.Sequence++
		p.Status = PermissionAccepted
		b.answers = append(b.answers, &Answer{Permission: &p})
		return nil
	}
	if err := b.event(n, p); err != nil {
		return err
	}
	if !b.state.allows(&p, b.wide) {
		b.state.Pending = append(b.state.Pending, Pending{Permission: &p})
		return nil
	}
	p.Status = PermissionAlways
	b.answers = append(b.answers, &Answer{Permission: &p})
	return b.event(&Native{Type: PermissionResolved, Synthetic: true}, p)
}

// permissionFields are the metadata that identify what a permission is for. Each agent has its own.
type permissionFields struct {
	Permission string `json:"permission"`
	Kind       string `json:"codexRequestKind"`
	Tool       string `json:"toolName"`
	ToolName   string `json:"tool_name"`
	Command    any    `json:"command"`
	Patterns   any    `json:"patterns"` // what OpenCode's permissions cover
	Input      struct {
		Command any    `json:"command"`
		URL     string `json:"url"`
	} `json:"input"`
}

func (p *Permission) fields() (f permissionFields) {
	_ = json.Unmarshal(p.Metadata, &f) // agents may give these fields other types
	return f
}

func (p *Permission) isFileChange() bool {
	kinds := []string{"filechange", "file_change", "edit", "write", "multiedit", "notebookedit"}
	f := p.fields()
	return slices.ContainsFunc([]string{p.Action, f.Kind, f.Permission, f.Tool, f.ToolName}, func(name string) bool {
		return slices.Contains(kinds, strings.ToLower(name))
	})
}
