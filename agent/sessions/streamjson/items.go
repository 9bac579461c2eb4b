package streamjson

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

// block is a part of a message, or of a tool's result.
type block struct {
	Type     string          `json:"type"`
	Text     string          `json:"text"`
	Thinking string          `json:"thinking"`
	ID       string          `json:"id"`
	Name     string          `json:"name"`
	Input    json.RawMessage `json:"input"`
	ToolUse  string          `json:"tool_use_id"`
	Content  json.RawMessage `json:"content"`
	IsError  bool            `json:"is_error"`
}

// messageLine is a line of the type assistant or user.
type messageLine struct {
	Parent  *string `json:"parent_tool_use_id"` // nil unless a subagent wrote the line
	Message struct {
		ID      string          `json:"id"` // Amp has none
		Content json.RawMessage `json:"content"`
	} `json:"message"`
	// Error is set if Claude Code itself wrote the text, because the model failed.
	Error  string          `json:"error"`
	Result json.RawMessage `json:"tool_use_result"` // data of the tool whose result the message contains
}

// Delta reports the next piece of a text, of a line of the type stream_event.
func (r *Reader) Delta(l *Line) error {
	var line struct {
		Parent *string `json:"parent_tool_use_id"`
		Event  struct {
			Type    string `json:"type"`
			Message struct {
				ID string `json:"id"`
			} `json:"message"`
			Delta struct {
				Type string `json:"type"`
				Text string `json:"text"`
			} `json:"delta"`
		} `json:"event"`
	}
	if err := l.Decode(&line); err != nil {
		return r.Unparsed(err.Error())
	}
	switch e := &line.Event; {
	case line.Parent != nil:
	case e.Type == "message_start":
		r.begin(e.Message.ID)
	case e.Type == "content_block_delta" && e.Delta.Type == "text_delta":
		return r.Emit(sessions.ItemDelta, sessions.Delta{NativeItemID: new(r.textID()), Delta: e.Delta.Text})
	}
	return nil
}

// begin makes a message of the assistant the one in progress.
func (r *Reader) begin(message string) { r.message, r.text, r.last = message, "", "" }

// textID returns the native id of the text in progress.
func (r *Reader) textID() string {
	if r.text == "" {
		r.text = r.blockID()
	}
	return r.text
}

// blockID returns a new native id for a part of the message in progress.
func (r *Reader) blockID() string {
	r.blocks++
	if r.message == "" {
		return fmt.Sprintf("message_%d", r.blocks)
	}
	return fmt.Sprintf("%s_%d", r.message, r.blocks)
}

// Items reports each part of a line of the type assistant or user as an item.
func (r *Reader) Items(l *Line) error {
	var line messageLine
	if err := l.Decode(&line); err != nil {
		return r.Unparsed(err.Error())
	}
	if line.Error != "" { // the result contains it
		return nil
	}
	var list []block
	_ = json.Unmarshal(line.Message.Content, &list) // otherwise it is a user's text, which is an item already
	assistant := l.Type == "assistant"
	if assistant && line.Parent == nil && line.Message.ID != r.message {
		r.begin(line.Message.ID)
	}
	for i := range list {
		var item *sessions.Item
		switch b := &list[i]; {
		case assistant && b.Type == "tool_use":
			item = r.call(&line, b)
		case !assistant && b.Type == "tool_result":
			if item = result(b); len(list) == 1 {
				item.Content = append(item.Content, fileRef(line.Result)...)
			}
		case assistant && line.Parent == nil:
			item = r.answer(b)
		}
		if item == nil {
			continue
		}
		if err := r.Emit(sessions.ItemCompleted, sessions.ItemData{Item: *item}); err != nil {
			return err
		}
	}
	return nil
}

// answer returns the item of a text or a thought; nil for another block.
func (r *Reader) answer(b *block) *sessions.Item {
	item := &sessions.Item{Role: new(sessions.RoleAssistant), Status: sessions.Completed}
	switch b.Type {
	case "text":
		item.Kind, item.NativeID, item.Content = sessions.KindMessage, new(r.textID()), []sessions.Part{sessions.Text(b.Text)}
		r.last, r.text = r.text, ""
	case "thinking":
		item.Kind, item.NativeID = sessions.KindStatus, new(r.blockID())
		item.Content = []sessions.Part{{Type: sessions.PartReasoning, Text: b.Thinking, Visibility: "public"}}
	default:
		return nil
	}
	return item
}

// call returns the item of a call of a tool.
func (r *Reader) call(line *messageLine, b *block) *sessions.Item {
	item := &sessions.Item{
		NativeID: new(b.ID), ParentID: line.Parent, Kind: sessions.KindToolCall, Role: new(sessions.RoleAssistant),
		Content: []sessions.Part{{
			Type: sessions.PartToolCall, Name: b.Name, Arguments: string(b.Input), CallID: b.ID,
		}},
		Status: sessions.Completed,
	}
	if item.ParentID == nil && r.last != "" {
		item.ParentID = new(r.last)
	}
	return item
}

// result returns the item of a tool's result.
func result(b *block) *sessions.Item {
	item := &sessions.Item{
		NativeID: new(b.ToolUse + "_result"), ParentID: new(b.ToolUse), Kind: sessions.KindToolResult,
		Role:    new(sessions.RoleTool),
		Content: []sessions.Part{{Type: sessions.PartToolResult, CallID: b.ToolUse, Output: textOf(b.Content)}},
		Status:  sessions.Completed,
	}
	if b.IsError {
		item.Status = sessions.Failed
	}
	return item
}

// textOf returns the text of a tool's result: a string or a list of blocks.
func textOf(content json.RawMessage) string {
	var text string
	if json.Unmarshal(content, &text) == nil {
		return text
	}
	var list []block
	if json.Unmarshal(content, &list) != nil {
		return string(content)
	}
	var texts []string
	for _, b := range list {
		if b.Type == "text" {
			texts = append(texts, b.Text)
		}
	}
	return strings.Join(texts, "\n")
}

// fileRef returns the file that a tool has changed, from the data of Claude Code's Write and Edit.
func fileRef(data json.RawMessage) []sessions.Part {
	var change struct {
		Type  string `json:"type"` // create for a new file
		Path  string `json:"filePath"`
		Patch []struct {
			OldStart int      `json:"oldStart"`
			OldLines int      `json:"oldLines"`
			NewStart int      `json:"newStart"`
			NewLines int      `json:"newLines"`
			Lines    []string `json:"lines"`
		} `json:"structuredPatch"`
	}
	if json.Unmarshal(data, &change) != nil || change.Path == "" {
		return nil
	}
	part := sessions.Part{Type: sessions.PartFileRef, Path: change.Path, Action: "write"}
	if len(change.Patch) > 0 {
		var diff strings.Builder
		for _, h := range change.Patch {
			fmt.Fprintf(&diff, "@@ -%d,%d +%d,%d @@\n", h.OldStart, h.OldLines, h.NewStart, h.NewLines)
			diff.WriteString(strings.Join(h.Lines, "\n") + "\n")
		}
		part.Action, part.Diff = "patch", new(diff.String())
	} else if change.Type != "create" {
		return nil
	}
	return []sessions.Part{part}
}
