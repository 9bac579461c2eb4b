package gateway

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	historyRetry = 5 // seconds after which a list that failed may succeed
	// deliveryReads is the number of deliveries of a page that are read at the same time.
	deliveryReads = 8
	// cursorSum is the number of bytes of a cursor that bind it to its list.
	cursorSum = 8
)

// listExecutions lists the executions of the key's organisation, the newest first.
func (s *Server) listExecutions(w http.ResponseWriter, r *http.Request) error {
	query := r.URL.Query()
	f, err := historyFilter(query)
	if err != nil {
		return err
	}
	if f.Limit, err = pageSize(r); err != nil {
		return err
	}
	f.Org = infoOf(r.Context()).key.Org
	if cursor := query.Get("cursor"); cursor != "" {
		if f.Before, err = decodeCursor(cursor, f); err != nil {
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
		answer.NextCursor = new(encodeCursor(page.Next, f))
	}
	return writeValue(w, http.StatusOK, answer)
}

// executionPage returns the form of a page for clients.
func (s *Server) executionPage(ctx context.Context, page *proto.HistoryPage) (*api.Executions, error) {
	now, answer := time.Now(), &api.Executions{Executions: make([]api.ListedExecution, len(page.Records)), Complete: page.Complete}
	if page.Behind > 0 {
		answer.Behind = new(int64(page.Behind))
	}
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(deliveryReads)
	for i, record := range page.Records {
		reads.Go(func() error {
			delivery, err := s.deliveryStatus(ctx, record)
			if err == nil {
				answer.Executions[i] = api.NewListedExecution(record, delivery, now)
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
				return nil, proto.FieldErrorf(proto.Shorten(name), "is no metadata that an execution can have; write metadata.<key>=<value>")
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
		return oneOf(&f.Status, name, value, api.Statuses())
	},
	"language": func(f *proto.HistoryFilter, name, value string) error {
		return oneOf(&f.Language, name, value, proto.Languages())
	},
	"delivery_mode": func(f *proto.HistoryFilter, name, value string) error {
		return oneOf(&f.Mode, name, value, api.Modes())
	},
	"thread_id": func(f *proto.HistoryFilter, name, value string) error {
		f.ThreadID = value
		return proto.CheckThreadID(name, value)
	},
	"request_id":     func(f *proto.HistoryFilter, name, value string) error { return some(&f.RequestID, name, value) },
	"key":            func(f *proto.HistoryFilter, name, value string) error { return some(&f.Key, name, value) },
	"schedule":       func(f *proto.HistoryFilter, name, value string) error { return some(&f.Schedule, name, value) },
	"batch":          func(f *proto.HistoryFilter, name, value string) error { return some(&f.Batch, name, value) },
	"pipeline":       func(f *proto.HistoryFilter, name, value string) error { return some(&f.Pipeline, name, value) },
	"created_after":  func(f *proto.HistoryFilter, name, value string) error { return instant(&f.From, name, value) },
	"created_before": func(f *proto.HistoryFilter, name, value string) error { return instant(&f.Until, name, value) },
}

func oneOf[T ~string](to *T, name, value string, list []T) error {
	*to = T(value)
	if !slices.Contains(list, *to) {
		return proto.FieldErrorf(name, "must be one of %v", list)
	}
	return nil
}

// maxFilter is the number of bytes of a value that a filter may ask for.
const maxFilter = 1024

func some(to *string, name, value string) error {
	*to = value
	if value == "" || len(value) > maxFilter || !utf8.ValidString(value) {
		return proto.FieldErrorf(name, "must be 1 to %d bytes of UTF-8", maxFilter)
	}
	return nil
}

func instant(to *time.Time, name, value string) (err error) {
	if *to, err = time.Parse(time.RFC3339Nano, value); err != nil || to.IsZero() {
		return proto.FieldErrorf(name, "must be a time as in RFC 3339, such as 2026-11-23T20:00:00Z")
	}
	return nil
}

// encodeCursor returns the cursor of the page that goes on before a place in the list that the
// filter selects.
func encodeCursor(place int64, f *proto.HistoryFilter) string {
	return base64.RawURLEncoding.EncodeToString(append(binary.BigEndian.AppendUint64(nil, uint64(place)), filterSum(f)...))
}

// decodeCursor returns the place in a cursor. A cursor of another list or organisation is an error.
func decodeCursor(cursor string, f *proto.HistoryFilter) (int64, error) {
	raw, err := base64.RawURLEncoding.DecodeString(cursor)
	if err != nil || len(raw) != 8+cursorSum || string(raw[8:]) != string(filterSum(f)) {
		return 0, proto.FieldErrorf("cursor", "must be the next_cursor of an answer to the same request")
	}
	return int64(binary.BigEndian.Uint64(raw)), nil
}

// filterSum returns a checksum of what a filter selects, whatever the page.
func filterSum(f *proto.HistoryFilter) []byte {
	all := *f
	all.Limit, all.Before = 0, 0
	text, err := json.Marshal(all)
	if err != nil {
		text = nil // it has only text and times
	}
	sum := sha256.Sum256(text)
	return sum[:cursorSum]
}
