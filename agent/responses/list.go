package responses

import (
	"cmp"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// list is a list of OpenAI's, or a page of one.
type list[T any] struct {
	Object  string  `json:"object"`
	Data    []T     `json:"data"`
	FirstID *string `json:"first_id,omitempty"`
	LastID  *string `json:"last_id,omitempty"`
	HasMore bool    `json:"has_more"`
}

// listed is what orders a list.
type listed struct {
	id      string
	created time.Time
	place   int // among items of the same time
}

// newPage returns the items selected by a query's after, limit and order; the default order is
// newest first.
func newPage[T, B any](
	items []T, query url.Values, limit, maxLimit int, key func(*T) listed, body func(*T) B,
) (*list[B], error) {
	direction := -1
	switch order := query.Get("order"); order {
	case "", "desc":
	case "asc":
		direction = 1
	default:
		return nil, proto.FieldErrorf("order", "must be asc or desc")
	}
	if text := query.Get("limit"); text != "" {
		var err error
		if limit, err = strconv.Atoi(text); err != nil || limit < 1 || limit > maxLimit {
			return nil, proto.FieldErrorf("limit", "must be a whole number from 1 to %d", maxLimit)
		}
	}
	slices.SortFunc(items, func(a, b T) int {
		x, y := key(&a), key(&b)
		return direction * cmp.Or(x.created.Compare(y.created), cmp.Compare(x.place, y.place), cmp.Compare(x.id, y.id))
	})
	if after := query.Get("after"); after != "" {
		at := slices.IndexFunc(items, func(item T) bool { return key(&item).id == after })
		if at < 0 {
			return nil, api.Errorf(api.CodeNotFound, "there is nothing of the id after which the page begins")
		}
		items = items[at+1:]
	}
	l := &list[B]{Object: "list", Data: []B{}, HasMore: len(items) > limit}
	items = items[:min(len(items), limit)]
	for i := range items {
		l.Data = append(l.Data, body(&items[i]))
	}
	if n := len(items); n > 0 {
		l.FirstID, l.LastID = new(key(&items[0]).id), new(key(&items[n-1]).id)
	}
	return l, nil
}

const (
	defaultPage, maxPage = 20, 100
	maxUploads           = 10_000 // in a page: an organisation's maximum
)

func (s *Server) listContainers(w http.ResponseWriter, r *http.Request) error {
	threads, err := s.Host(r).UsedThreads(r.Context(), openAIContainer, time.Now().Add(-containerLife))
	if err != nil {
		return agent.ClientError(err)
	}
	query := r.URL.Query()
	if name := query.Get("name"); name != "" { // which is the id
		threads = slices.DeleteFunc(threads, func(t proto.ThreadSummary) bool { return t.ID != name })
	}
	l, err := newPage(threads, query, defaultPage, maxPage,
		func(t *proto.ThreadSummary) listed { return listed{id: t.ID, created: t.CreatedAt} },
		func(t *proto.ThreadSummary) *containerBody {
			return newContainerBody(t.ID, t.CreatedAt, t.UsedAt, t.ID)
		})
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, l)
	return nil
}

func (s *Server) listUploads(w http.ResponseWriter, r *http.Request) error {
	query := r.URL.Query()
	files := s.Host(r).Files()
	if purpose := query.Get("purpose"); purpose != "" && purpose != userData {
		files = nil
	}
	l, err := newPage(files, query, maxUploads, maxUploads, func(f *proto.AgentFile) listed {
		return listed{id: f.ID, created: f.CreatedAt}
	}, newFileBody)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, l)
	return nil
}
