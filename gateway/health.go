package gateway

import (
	"context"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto/api"
)

// readyTimeout bounds the check behind /readyz.
const readyTimeout = time.Second

func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	web.WriteJSON(w, http.StatusOK, []byte(`{"status":"ok"}`))
}

// readyz reports whether executions would be accepted and run, and otherwise what is missing.
func (s *Server) readyz(w http.ResponseWriter, r *http.Request) {
	var missing, message string
	ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
	defer cancel()
	stats, err := s.Jobs.Stats(ctx)
	switch {
	case s.IsDraining():
		missing, message = "server", "this server is shutting down"
	case err != nil:
		web.RequestOf(r).Err = err
		missing, message = "queue", "the queue does not answer"
	case !s.StoreReady():
		missing, message = "store", "the blob store has not answered yet; see the log"
	case s.DiskFull != nil && s.DiskFull() != "":
		missing, message = "disk", s.DiskFull()
	case s.Unfit != nil && s.Unfit() != "":
		missing, message = "worker", "the worker here accepts no jobs: "+s.Unfit()
	case stats.Workers == 0 && !s.FromZero:
		missing, message = "worker", "no worker is live"
	default:
		ready := api.Ready{Status: "ready", Workers: stats.Workers}
		for _, p := range s.Problems() {
			ready.Problems = append(ready.Problems, p.Need)
		}
		_ = web.WriteValue(w, http.StatusOK, ready) // cannot fail
		return
	}
	w.Header().Set("Retry-After", "1")
	_ = web.WriteValue(w, http.StatusServiceUnavailable,
		api.NotReady{Code: api.CodeServiceUnavailable, Message: message, Missing: missing})
}
