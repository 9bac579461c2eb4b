package responses

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto/api"
)

const referenceType = "item_reference"

// responseOf returns the id of the response that an item is from: the middle of the item's id.
func responseOf(item string) string {
	_, rest, _ := strings.Cut(item, "_")
	id, _, _ := strings.Cut(rest, "_")
	return responsePrefix + id
}

// resolveReferences replaces references in a request's input by the items of stored responses. It
// returns the resulting body, which no longer needs these responses.
func (s *Server) resolveReferences(
	ctx context.Context, host agent.RequestHost, v vendor, req *request, body []byte,
) ([]byte, error) {
	items, found := req.inputItems(), false
	known := map[string]map[string]json.RawMessage{} // items of responses
	for i, raw := range items {
		var ref struct{ Type, ID string }
		if json.Unmarshal(raw, &ref) != nil || ref.Type != referenceType {
			continue
		}
		found = true
		id := responseOf(ref.ID)
		if known[id] == nil {
			var err error
			if known[id], err = s.storedItems(ctx, host, v, id); err != nil {
				return nil, err
			}
		}
		if items[i] = known[id][ref.ID]; items[i] == nil {
			return nil, api.Errorf(api.CodeNotFound,
				"Item with id '%s' not found: the response that has it was not stored, was deleted, or is past its retention; "+
					"send the item itself", ref.ID)
		}
	}
	if !found {
		return body, nil
	}
	return replaceInput(host, req, body, "input", items)
}

// storedItems returns the input and output items of a stored response by id. There are none for an
// unknown response.
func (s *Server) storedItems(
	ctx context.Context, host agent.RequestHost, v vendor, id string,
) (map[string]json.RawMessage, error) {
	all := map[string]json.RawMessage{}
	run, err := s.open(ctx, host, v, id)
	if err != nil && agent.Public(err).Code == api.CodeNotFound {
		return all, nil
	}
	if err != nil {
		return nil, err
	}
	run.out.outputs, run.out.encrypted, run.out.forModel = true, true, true
	if err := run.read(ctx); err != nil {
		return nil, err
	}
	for _, item := range run.inputItems() {
		all[item.id] = item.raw
	}
	for _, item := range run.out.response.Output {
		raw := value(item)
		var head struct{ ID string }
		_ = json.Unmarshal(raw, &head) // the encoder has made it
		all[head.ID] = raw
	}
	return all, nil
}

// inputItem is an item of the input of a stored response.
type inputItem struct {
	id  string
	raw json.RawMessage
}

// inputItems returns the items of the input, each with an id. A text is a message, and texts in
// messages are parts, as OpenAI stores them.
func (r *stored) inputItems() (list []inputItem) {
	for i, raw := range r.request.inputItems() {
		var members map[string]json.RawMessage
		if json.Unmarshal(raw, &members) != nil || members == nil {
			continue // no request with it was accepted
		}
		id := fmt.Sprintf("msg_%s_in%d", strings.TrimPrefix(r.record.ID, responsePrefix), i)
		if given := members["id"]; isSet(given) && json.Unmarshal(given, &id) == nil && id != "" {
			list = append(list, inputItem{id, raw})
			continue
		}
		members["id"] = value(id)
		if !isSet(members["type"]) {
			members["type"] = value("message")
		}
		var text string
		if content := members["content"]; isSet(content) && json.Unmarshal(content, &text) == nil {
			kind := "input_text"
			if string(members["role"]) == `"assistant"` {
				kind = "output_text"
			}
			members["content"] = value([]any{map[string]any{"type": kind, "text": text}})
		}
		if members["role"] != nil && members["status"] == nil {
			members["status"] = value(statusCompleted)
		}
		list = append(list, inputItem{id, value(members)})
	}
	return list
}

// listInputItems answers with the input of a stored response.
func (s *Server) listInputItems(v vendor, w http.ResponseWriter, r *http.Request) error {
	run, err := s.open(r.Context(), s.Host(r), v, chi.URLParam(r, "id"))
	if err != nil {
		return err
	}
	items := run.inputItems()
	places := map[string]int{}
	for i := range items {
		places[items[i].id] = i
	}
	l, err := newPage(items, r.URL.Query(), defaultPage, maxPage,
		func(i *inputItem) listed { return listed{id: i.id, place: places[i.id]} },
		func(i *inputItem) json.RawMessage { return i.raw })
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, l)
	return nil
}
