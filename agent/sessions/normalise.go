package sessions

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// normaliser turns what an agent reports into events of a turn.
type normaliser struct {
	info *Info
	mode string            // permission mode of the session
	ids  map[string]string // of items of the turn, by the agent's own ids
	// deltas and completed have the agent's own ids of items that have deltas, and that are complete.
	deltas, completed map[string]bool
	assistant         string // the agent's own id of the empty item of the assistant; empty for none
}

// begin prepares for a turn that is new, or in progress with these items.
func (n *normaliser) begin(open map[string]string) {
	n.ids, n.deltas, n.completed, n.assistant = map[string]string{}, map[string]bool{}, map[string]bool{}, ""
	maps.Copy(n.ids, open)
}

// replay notes an event of the turn in progress that is in the log.
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

// clone returns a copy that shares nothing that is modified.
func (n *normaliser) clone() normaliser {
	c := *n
	c.ids, c.deltas, c.completed = maps.Clone(n.ids), maps.Clone(n.deltas), maps.Clone(n.completed)
	return c
}

// batch has the events of an entry while they are made.
type batch struct {
	*normaliser
	state   *State
	events  []Event
	answers []*Answer // of permissions that need no user
}

// userItem adds the message of the user as an item, unless the agent reports it.
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

// emptyItem adds the empty item of the assistant, if the agent's turns begin with one.
func (b *batch) emptyItem(session string, m *Message) error {
	if !b.info.PendingAssistant {
		return nil
	}
	b.assistant = pendingAssistant(session, m.Number)
	return b.add(&Native{Type: ItemStarted, Synthetic: true, Data: ItemData{Item{
		NativeID: new(b.assistant), Kind: KindMessage, Role: new(RoleAssistant), Content: []Part{}, Status: InProgress,
	}}})
}

// pendingAssistant is the native id of the empty item of the assistant.
func pendingAssistant(session string, message int64) string {
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
		return b.permission(n, data)
	case Question:
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
	case SessionStarted: // the session's own is its first event
		return nil
	case TurnStarted:
		return nil // the runner makes it
	case TurnEnded:
		return b.endTurn(n.Data)
	default:
		return b.event(n, n.Data)
	}
}

// event adds an event with data.
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

// dropPending resolves what no longer waits for an answer.
func (b *batch) dropPending() error {
	for _, p := range b.state.Pending {
		n := &Native{Type: PermissionResolved, Synthetic: true}
		var data any
		if p.Permission != nil {
			resolved := *p.Permission
			resolved.Status = PermissionRejected
			data = resolved
		} else {
			n.Type = QuestionResolved
			resolved := *p.Question
			resolved.Status = QuestionRejected
			data = resolved
		}
		if err := b.event(n, data); err != nil {
			return err
		}
	}
	b.state.Pending = nil
	return nil
}

// fail adds an error, and ends the turn.
func (b *batch) fail(code, message string) error {
	n := &Native{Type: ErrorEvent, Synthetic: true, Data: Failure{Message: message, Code: &code}}
	return b.add(n, &Native{Type: TurnEnded})
}

// item adds an event of an item.
func (b *batch) item(n *Native, x Item) error {
	native := ""
	if x.NativeID != nil {
		native = *x.NativeID
	}
	isAnswer := x.Kind == KindMessage && x.Role != nil && *x.Role == RoleAssistant
	if isAnswer && b.assistant != "" && native != b.assistant { // the empty item is this one
		b.ids[native] = b.ids[b.assistant]
		b.rename(b.assistant, native)
		b.assistant = ""
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

// rename makes an item known under another id of the agent's.
func (b *batch) rename(from, to string) {
	if id, ok := b.state.Open[from]; ok {
		delete(b.state.Open, from)
		b.open(to, id)
	}
	b.deltas[to] = b.deltas[from]
}

// open notes that an item is in progress.
func (b *batch) open(native, id string) {
	if native == "" {
		return
	}
	if b.state.Open == nil {
		b.state.Open = map[string]string{}
	}
	b.state.Open[native] = id
}

// id returns the id of an item.
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
	if b.assistant != "" && native != b.assistant && b.ids[native] == "" {
		b.ids[native] = b.ids[b.assistant]
		b.rename(b.assistant, native)
		b.assistant = ""
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

// permission adds a request for a permission. It answers it itself if the user's mode or an earlier
// answer allows it.
func (b *batch) permission(n *Native, p Permission) error {
	p.Status = PermissionPending
	if b.mode == PermissionAcceptEdits && p.isFileChange() { // it is not shown
		b.state.Sequence++
		p.Status = PermissionAccepted
		b.answers = append(b.answers, &Answer{Permission: &p})
		return nil
	}
	if err := b.event(n, p); err != nil {
		return err
	}
	if !b.state.allows(&p) {
		b.state.Pending = append(b.state.Pending, Pending{Permission: &p})
		return nil
	}
	p.Status = PermissionAlways
	b.answers = append(b.answers, &Answer{Permission: &p})
	return b.event(&Native{Type: PermissionResolved, Synthetic: true}, p)
}

// permissionFields are what permissions are recognised by.
type permissionFields struct {
	Permission string `json:"permission"`
	Kind       string `json:"codexRequestKind"`
	Tool       string `json:"toolName"`
	ToolName   string `json:"tool_name"`
	Command    any    `json:"command"`
	Input      struct {
		Command any `json:"command"`
	} `json:"input"`
}

func (p *Permission) fields() (f permissionFields) {
	_ = json.Unmarshal(p.Metadata, &f) // other fields than these are an agent's own
	return f
}

func (p *Permission) isFileChange() bool {
	kinds := []string{"filechange", "file_change", "edit", "write", "multiedit", "notebookedit"}
	f := p.fields()
	return slices.ContainsFunc([]string{p.Action, f.Kind, f.Permission, f.Tool, f.ToolName}, func(word string) bool {
		return slices.Contains(kinds, strings.ToLower(word))
	})
}

// scopes returns what an answer for the session is about: the kind of the permission, with the command if it is
// for one. Otherwise one answer would allow all commands.
func (p *Permission) scopes() (list []string) {
	f := p.fields()
	command := f.Command
	if command == nil {
		command = f.Input.Command
	}
	suffix := ""
	if command != nil {
		suffix = " " + fmt.Sprint(command)
	}
	for _, word := range []string{p.Action, f.Permission, f.Kind, f.Tool, f.ToolName} {
		if word != "" {
			list = append(list, strings.ToLower(word)+suffix)
		}
	}
	return list
}

// allow notes that a permission is granted for the session.
func (s *State) allow(p *Permission) {
	for _, scope := range p.scopes() {
		if !slices.Contains(s.Always, scope) && len(scope) <= maxScope && len(s.Always) < maxScopes {
			s.Always = append(s.Always, scope)
		}
	}
}

// Limits of what is noted of permissions for the session. The user is asked again for others.
const (
	maxScope  = 1024
	maxScopes = 100
)

// allows reports whether a permission was granted for the session.
func (s *State) allows(p *Permission) bool {
	return slices.ContainsFunc(p.scopes(), func(scope string) bool { return slices.Contains(s.Always, scope) })
}
