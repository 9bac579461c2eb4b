package tools

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/gateway/interpreters"
	"github.com/bullpen-run/bullpen/gateway/mcp"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// running are the cells that calls of this process wait for, by the names of the calls.
type running struct{ cells sync.Map }

// begin returns a context for a cell that ends when the call is cancelled. end must be called.
func (r *running) begin(ctx context.Context, id proto.TraceID) (_ context.Context, end func()) {
	ctx, cancel := context.WithCancel(ctx)
	r.cells.Store(id, cancel)
	return ctx, func() {
		r.cells.Delete(id)
		cancel()
	}
}

// cancel cancels a call.
func (r *running) cancel(id proto.TraceID) {
	if cancel, ok := r.cells.Load(id); ok {
		cancel.(context.CancelFunc)() //nolint:forcetypeassert // nothing else is stored
	}
}

// RunCell implements [mcp.Sandbox]. The cell is interrupted when the client leaves or cancels the call.
func (s *Routes) RunCell(
	_ context.Context, call *mcp.Call, req *api.ContextExecuteRequest,
) (*api.ToolCell, []api.Picture, error) {
	if s.IsDraining() {
		return nil, nil, web.ErrDraining
	}
	r := web.RequestOf(call.HTTP)
	id := s.callTrace(call)
	r, release := r.WhileConnected()
	defer release()
	ctx, stop := s.UntilLeave(r.Context())
	defer stop()
	ctx, end := s.running.begin(ctx, id)
	defer end()
	r.Calls.Store(true)
	s.Shrink(r.Info, web.RequestCost+int64(len(req.Code)))
	type outcome struct {
		cell     *api.ToolCell
		pictures []api.Picture
		err      error
	}
	ended := make(chan outcome, 1)
	go func() {
		cell, pictures, err := s.runCell(ctx, r, req)
		ended <- outcome{cell, pictures, err}
	}()
	tick := time.NewTicker(web.Keepalive)
	defer tick.Stop()
	began := time.Now()
	for {
		select {
		case o := <-ended:
			return o.cell, o.pictures, o.err
		case <-tick.C:
			if call.Progress == nil {
				continue
			}
			if err := call.Progress(fmt.Sprintf("running for %s", time.Since(began).Round(time.Second))); err != nil {
				end()
				o := <-ended
				return nil, nil, errors.Join(err, o.err)
			}
		}
	}
}

func (s *Routes) runCell(
	ctx context.Context, r *web.Request, req *api.ContextExecuteRequest,
) (*api.ToolCell, []api.Picture, error) {
	caller := interpreters.Caller{Info: r.Info, Caller: web.CallerOf(r)}
	place, err := s.Interpreters.Open(ctx, caller, &interpreters.Request{
		Thread: req.ThreadID, Language: req.Language, Timeout: time.Duration(req.Timeout) * time.Second,
		Restart: req.Restart,
	})
	var result *interpreters.Result
	if err == nil {
		result, err = s.Interpreters.Run(ctx, r.Key.Org, req.ThreadID, &place.Place, &api.CellRequest{
			Code: req.Code, Timeout: req.Timeout, InterruptOnClose: true,
		})
	}
	if lost, ok := errors.AsType[*interpreters.LostError](err); ok {
		return nil, nil, api.Errorf(api.CodeContextLost, "%s. Call again with restart to go on without the variables", lost)
	}
	if err != nil {
		return nil, nil, err
	}
	cell := &api.ToolCell{
		ThreadID: req.ThreadID, New: place.New && result.Count <= 1, NotSaved: result.NotSaved,
		CellResult: *result.CellResult,
	}
	pictures := cell.CutForModel()
	size := len(cell.Stdout) + len(cell.Stderr) + api.MaxToolOutput
	for _, p := range pictures {
		size += len(p.Base64)
	}
	if !s.ReserveText(r.Info, int64(size)) {
		return nil, nil, api.Unavailable(1, "the code has run, but too many requests are open here for its output")
	}
	return cell, pictures, nil
}
