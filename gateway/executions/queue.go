package executions

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Queue shows the queue.
type Queue interface {
	// View returns the queue of an API key.
	View(ctx context.Context, req *proto.QueueRequest) (proto.QueueView, error)
}

func (s *Routes) getQueue(w http.ResponseWriter, r *web.Request) error {
	i := r.Info
	req := proto.QueueRequest{Org: i.Key.Org, Key: i.Key.ID}
	for text := range strings.SplitSeq(r.URL.Query().Get("trace_id"), ",") {
		if text == "" {
			continue
		}
		id, err := proto.ParseTraceID(text)
		if err != nil {
			return proto.FieldErrorf("trace_id", "%q is not an execution's id", text)
		}
		if req.Traces = append(req.Traces, id); len(req.Traces) > proto.MaxQueuePlaces {
			return proto.FieldErrorf("trace_id", "must be at most %d ids", proto.MaxQueuePlaces)
		}
	}
	view, err := s.Queue.View(r.Context(), &req)
	if err != nil {
		return fmt.Errorf("show the queue: %w", err)
	}
	return web.WriteValue(w, http.StatusOK, api.NewQueue(&view, i.Plan.KeyConcurrent, &i.Plan.Plan))
}
