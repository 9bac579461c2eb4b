package executions

import (
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const executeRoute = "POST /v1/sandbox/execute"

func (s *Routes) execute(w http.ResponseWriter, r *web.Request) (err error) {
	id := proto.NewTraceID()
	ctx, span := s.StartRequest(r, id, executeRoute)
	defer func() { web.EndRequest(ctx, r.Info, span, r.Status(), err) }()

	wait, err := waitOf(r.Header)
	if err != nil {
		return err
	}
	req, err := web.DecodeBody[api.ExecuteRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	job, err := s.Job(r.Context(), req, web.CallerOf(r), modeOf(r.Header), id, wait)
	if err != nil {
		return err
	}
	hash, err := req.Hash()
	if err != nil {
		return err
	}
	idempotencyKey, err := web.IdempotencyKeyOf(r.Header)
	if err != nil {
		return err
	}
	run, err := s.Start(ctx, r.Info, &proto.Submission{Job: job, IdempotencyKey: idempotencyKey, BodyHash: hash}, wait)
	s.Shrink(r.Info, web.RequestCost) // the program is stored, and the wait for its end needs little
	if err != nil {
		return err
	}
	defer run.Close()
	w.Header().Set("X-Trace-Id", string(run.ID))
	if wait > 0 {
		w.Header().Set("Preference-Applied", fmt.Sprintf("%s=%d", web.PreferWait, wait/time.Second))
	}
	switch job.Mode {
	case proto.ModeAsync:
		w.Header().Set("Location", "/v1/executions/"+string(run.ID))
		w.Header().Set("Preference-Applied", web.PreferAsync)
		status := "running"
		if !job.RunAt.IsZero() {
			status = "queued"
		}
		return web.WriteValue(w, http.StatusAccepted, api.Accepted{TraceID: run.ID, Status: status})
	case proto.ModeStreaming:
		return run.stream(ctx, w, web.Preferred(r.Header, web.TypeNDJSON, web.TypeSSE) == web.TypeSSE)
	default:
		record, err := run.Wait(ctx)
		if err != nil {
			return err
		}
		result := record.Result
		return waitError(run.ID, web.WriteOutput(w, result.OutputBytes(), func(w io.Writer) error {
			return proto.WriteResult(w, result)
		}))
	}
}
