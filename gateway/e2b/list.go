package e2b

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

const (
	maxPage      = 100
	headerNext   = "X-Next-Token"
	headerActive = "X-Total-Running"
	listCursor   = "e2b sandboxes"
)

// filter selects sandboxes.
type filter struct {
	states       []state
	metadata     map[string]string
	startedAfter time.Time
	template     string
}

// matches reports whether a sandbox is selected, without regard to its state.
func (f *filter) matches(x *proto.LiveSandbox) bool {
	if f.template != "" && f.template != templateOf(x) || x.StartedAt.Before(f.startedAfter) {
		return false
	}
	for key, value := range f.metadata {
		if found, ok := x.Metadata[key]; !ok || found != value {
			return false
		}
	}
	return true
}

// parseFilter parses the filter in the query of a request.
func parseFilter(query url.Values) (f filter, err error) {
	f.template = query.Get("template")
	for name := range strings.SplitSeq(strings.Join(query["state"], ","), ",") {
		switch s := state(name); s {
		case running, paused:
			f.states = append(f.states, s)
		case "":
		default:
			return f, proto.FieldErrorf("state", "must be running, paused, or both")
		}
	}
	if text := query.Get("startedAfter"); text != "" {
		if f.startedAfter, err = time.Parse(time.RFC3339Nano, text); err != nil {
			return f, proto.FieldErrorf("startedAfter", "must be a time such as 2026-01-02T15:04:05Z")
		}
	}
	f.metadata, err = parseMetadata(query.Get("metadata"))
	return f, err
}

// parseMetadata parses a filter of metadata: pairs like those of a query, encoded once more in each part
// and once more as a whole.
func parseMetadata(text string) (map[string]string, error) {
	malformed := proto.FieldErrorf("metadata", "must be encoded like a query")
	whole, err := url.QueryUnescape(text)
	if err != nil {
		return nil, malformed
	}
	metadata := map[string]string{}
	for pair := range strings.SplitSeq(whole, "&") {
		if pair == "" {
			continue
		}
		key, value, _ := strings.Cut(pair, "=")
		if key, err = url.QueryUnescape(key); err != nil {
			return nil, malformed
		}
		if value, err = url.QueryUnescape(value); err != nil {
			return nil, malformed
		}
		metadata[key] = value
	}
	return metadata, nil
}

// selected returns the living sandboxes of the caller's organisation that a filter selects, and how many of
// them run.
func (s *Server) selected(r *web.Request, f *filter) (list []proto.LiveSandbox, active int) {
	found, _ := s.Store.Page(r.Key.Org, "", -1, func(x *proto.LiveSandbox) bool {
		now, alive := stateOf(x)
		if !alive || !f.matches(x) {
			return false
		}
		if now == running {
			active++
		}
		return len(f.states) == 0 || slices.Contains(f.states, now)
	})
	return found, active
}

func (s *Server) list(w http.ResponseWriter, r *web.Request) error {
	query := r.URL.Query()
	f, err := parseFilter(query)
	if err != nil {
		return err
	}
	limit := maxPage
	if text := query.Get("limit"); text != "" {
		if limit, err = strconv.Atoi(text); err != nil || limit < 1 || limit > maxPage {
			return proto.FieldErrorf("limit", "must be from 1 to %d", maxPage)
		}
	}
	order := cmp.Or(query.Get("order"), "desc")
	if order != "asc" && order != "desc" {
		return proto.FieldErrorf("order", "must be asc or desc")
	}
	found, active := s.selected(r, &f)
	slices.SortFunc(found, func(a, b proto.LiveSandbox) int {
		if order == "desc" {
			a, b = b, a
		}
		return strings.Compare(place(&a), place(&b))
	})
	scope := []string{r.Key.Org, order}
	if token := query.Get("nextToken"); token != "" {
		after, err := s.Core.OpenPlace(listCursor, scope, token)
		if err != nil {
			return proto.FieldErrorf("nextToken", "must be the X-Next-Token of an answer in the same order")
		}
		found = slices.DeleteFunc(found, func(x proto.LiveSandbox) bool {
			if order == "desc" {
				return place(&x) >= after
			}
			return place(&x) <= after
		})
	}
	if len(found) > limit {
		found = found[:limit]
		next, err := s.Core.SealPlace(listCursor, scope, place(&found[limit-1]))
		if err != nil {
			return err
		}
		w.Header().Set(headerNext, next)
	}
	w.Header().Set(headerActive, strconv.Itoa(active))
	return web.WriteValue(w, http.StatusOK, s.forms(r, found))
}

// place is the place of a sandbox in a list that is sorted by the start.
func place(x *proto.LiveSandbox) string { return fmt.Sprintf("%020d %s", x.StartedAt.UnixNano(), x.ID) }

// listV1 answers with the running sandboxes.
func (s *Server) listV1(w http.ResponseWriter, r *web.Request) error {
	f, err := parseFilter(r.URL.Query())
	if err != nil {
		return err
	}
	f.states = []state{running}
	found, _ := s.selected(r, &f)
	return web.WriteValue(w, http.StatusOK, s.forms(r, found))
}

func (s *Server) forms(r *web.Request, found []proto.LiveSandbox) []listed {
	forms, profiles := make([]listed, len(found)), s.profiles(r)
	for i := range found {
		forms[i] = newListed(&found[i], profiles.of(found[i].Profile))
	}
	return forms
}

// profileCache remembers the profiles of a key during a request.
type profileCache struct {
	ctx   context.Context //nolint:containedctx // of the request
	from  Profiles
	key   *proto.Key
	found map[string]*proto.Profile
}

func (s *Server) profiles(r *web.Request) *profileCache {
	return &profileCache{r.Context(), s.Profiles, &r.Key, map[string]*proto.Profile{}}
}

// of returns a profile. It is the default one if the key may no longer use that one.
func (c *profileCache) of(name string) *proto.Profile {
	if p := c.found[name]; p != nil {
		return p
	}
	p, err := c.from.ProfileFor(c.ctx, c.key, name)
	if err != nil {
		p = proto.DefaultProfile()
	}
	c.found[name] = &p
	return &p
}

// unixParam parses a parameter in seconds since 1970, 0 if it is absent.
func unixParam(r *web.Request, name string) (int64, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, proto.FieldErrorf(name, "must be seconds since 1970")
	}
	return n, nil
}
