package executions

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// History finds executions.
type History interface {
	// List returns the executions that match a filter, the newest first. It returns a
	// [*proto.HistoryError] if the index of executions cannot be used.
	List(ctx context.Context, f *proto.HistoryFilter) (proto.HistoryPage, error)
}

// deliveryReads is the number of a page's deliveries read concurrently.
const deliveryReads = 8

// listExecutions lists the executions of the key's organisation, the newest first.
func (s *Routes) listExecutions(w http.ResponseWriter, r *web.Request) error {
	query := r.URL.Query()
	f, err := historyFilter(query)
	if err != nil {
		return err
	}
	if f.Limit, err = web.PageSize(r); err != nil {
		return err
	}
	f.Org = r.Key.Org
	scope := *f
	scope.Limit = 0
	if cursor := query.Get("cursor"); cursor != "" {
		if f.Before, err = s.OpenCursor("executions", &scope, cursor); err != nil {
			return err
		}
	}
	page, err := s.History.List(r.Context(), f)
	if err != nil {
		return fmt.Errorf("list executions: %w", err)
	}
	answer, err := s.executionPage(r.Context(), &page)
	if err != nil {
		return err
	}
	if page.Next != 0 {
		next, err := s.SealCursor("executions", &scope, page.Next)
		if err != nil {
			return err
		}
		answer.NextCursor = &next
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

// executionPage returns the form of a page for clients.
func (s *Routes) executionPage(ctx context.Context, page *proto.HistoryPage) (*api.Executions, error) {
	now, answer := time.Now(),
		&api.Executions{Executions: make([]api.ListedExecution, len(page.Records)), Complete: page.Complete}
	if page.Behind > 0 {
		answer.Behind = new(int64(page.Behind))
	}
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(deliveryReads)
	for i, record := range page.Records {
		reads.Go(func() error {
			delivery, err := s.DeliveryStatus(ctx, record)
			if err == nil {
				answer.Executions[i] = api.NewListedExecution(record, delivery, s.waitingFor(record), now)
			}
			return err
		})
	}
	return answer, reads.Wait()
}

// historyFilter parses the filters in a query.
func historyFilter(query url.Values) (*proto.HistoryFilter, error) {
	f := &proto.HistoryFilter{Metadata: map[string]string{}}
	for name := range query {
		value := query.Get(name)
		if key, ok := strings.CutPrefix(name, api.MetadataParam); ok {
			if !api.ValidMetadata(key, value) {
				return nil, proto.FieldErrorf(
					proto.Shorten(name), "is no metadata that an execution can have; write metadata.<key>=<value>")
			}
			f.Metadata[key] = value
			continue
		}
		if name == "limit" || name == "cursor" {
			continue
		}
		parse := historyParams[name]
		if parse == nil {
			return nil, proto.FieldErrorf(proto.Shorten(name), "is no parameter of this list; see /docs")
		}
		if err := parse(f, name, value); err != nil {
			return nil, err
		}
	}
	if len(f.Metadata) > api.MaxMetadata {
		return nil, proto.FieldErrorf("metadata", "must be asked for by at most %d keys", api.MaxMetadata)
	}
	return f, nil
}

// historyParams parse the parameters of the list of executions.
var historyParams = map[string]func(f *proto.HistoryFilter, name, value string) error{ // read only
	"status": func(f *proto.HistoryFilter, name, value string) error {
		return web.ParseOneOf(&f.Status, name, value, api.Statuses())
	},
	"language": func(f *proto.HistoryFilter, name, value string) error {
		return web.ParseOneOf(&f.Language, name, value, proto.Languages())
	},
	"delivery_mode": func(f *proto.HistoryFilter, name, value string) error {
		return web.ParseOneOf(&f.Mode, name, value, api.Modes())
	},
	"thread_id": func(f *proto.HistoryFilter, name, value string) error {
		f.ThreadID = value
		return proto.CheckThreadID(name, value)
	},
	"request_id": func(f *proto.HistoryFilter, name, value string) error {
		return web.ParseText(&f.RequestID, name, value)
	},
	"key": func(f *proto.HistoryFilter, name, value string) error {
		return web.ParseText(&f.Key, name, value)
	},
	"schedule": func(f *proto.HistoryFilter, name, value string) error {
		return web.ParseText(&f.Schedule, name, value)
	},
	"batch": func(f *proto.HistoryFilter, name, value string) error {
		return web.ParseText(&f.Batch, name, value)
	},
	"pipeline": func(f *proto.HistoryFilter, name, value string) error {
		return web.ParseText(&f.Pipeline, name, value)
	},
	"created_after": func(f *proto.HistoryFilter, name, value string) error {
		return web.ParseTime(&f.From, name, value)
	},
	"created_before": func(f *proto.HistoryFilter, name, value string) error {
		return web.ParseTime(&f.Until, name, value)
	},
}
