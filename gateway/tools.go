package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/gateway/mcp"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// callForm is the version of the signed name of a call, see [callTrace].
	callForm = "bullpen-mcp-1"
	// messageCost is the number of copies of a message of the Model Context Protocol beyond those of
	// other bodies, and toolOutputCost the number of copies of the output in a result, escaped.
	messageCost, toolOutputCost = 4, 8
	// valueCost is the memory of a value in such a message, or in a request to an agent, in bytes.
	valueCost = 1 << 10
	// maxProgress is the size of the text of one progress notification in bytes. The end of longer
	// text is sent.
	maxProgress = 4 << 10
)

// serveMCP answers requests of the Model Context Protocol.
func (s *Server) serveMCP(w http.ResponseWriter, r *web.Request) error {
	if err := s.CheckOrigin(r); err != nil {
		return err
	}
	if err := mcp.Check(r.Request); err != nil {
		return err
	}
	body, err := s.ReadBody(w, r)
	if err != nil {
		return err
	}
	if err := s.reserveMessage(r.Info, body); err != nil {
		return err
	}
	if mcp.Connected(r.Request) {
		var release func()
		r, release = r.WhileConnected()
		defer release()
	}
	decoded, err := s.BeginTurn(r, body)
	if err != nil {
		return err
	}
	defer decoded()
	return s.tools.Serve(w, r.Request, body, decoded)
}

// reserveMessage reserves the memory for the message of a model's client while it is decoded and
// carried out.
func (s *Server) reserveMessage(i *web.Info, message []byte) error {
	values, err := api.CountValues(message)
	if err != nil {
		return err
	}
	if !s.Reserve(i, int64(len(message))*messageCost+int64(values)*valueCost) {
		return web.ErrOverloaded
	}
	return nil
}

// toolCalls carries out the tools of the Model Context Protocol, with the functions that the routes
// of the same purpose use.
type toolCalls struct{ *Server }

// callTrace returns the trace id of the execution of a call. It can be computed from the secret
// alone, so that every gateway can cancel the execution.
func (t toolCalls) callTrace(call *mcp.Call) proto.TraceID {
	if call.Name == "" {
		return proto.NewTraceID()
	}
	text := strings.Join([]string{callForm, web.RequestOf(call.HTTP).Key.ID, call.Name}, "\n")
	return proto.DerivedTraceID(string(web.Signature(*t.URLSecret, text)))
}

// Execute implements [mcp.Sandbox]. The execution is inline, or streaming if the client wants
// progress and the plan includes that.
func (t toolCalls) Execute(
	_ context.Context, call *mcp.Call, req *api.ExecuteRequest,
) (result *api.ToolResult, err error) {
	if t.IsDraining() {
		return nil, web.ErrDraining // here, because the route also serves tools that start nothing
	}
	r := web.RequestOf(call.HTTP)
	i, id := r.Info, t.callTrace(call)
	ctx, span := t.StartRequest(r, id, "tools/call "+api.ToolExecute)
	defer func() { web.EndRequest(ctx, i, span, http.StatusOK, err) }() // errors of tools are answers
	mode := proto.ModeInline
	if call.Progress != nil && i.Plan.Streaming {
		mode = proto.ModeStreaming
	}
	if call.Name != "" {
		if err := t.checkUnused(ctx, i.Key.Org, id); err != nil {
			return nil, err
		}
	}
	job, err := t.Admission.Job(ctx, req, web.CallerOf(r), mode, id, t.queueWait(0, req.Timeout))
	if err != nil {
		return nil, err
	}
	var watch Watch
	if mode == proto.ModeInline {
		if watch, err = t.Jobs.Watch(i.Key.Org, id); err != nil {
			return nil, err
		}
		defer watch.Close()
	}
	x, err := t.submit(ctx, i, &proto.Submission{Job: job}, 0)
	t.Shrink(i, web.RequestCost) // the program is stored
	if err != nil {
		return nil, err
	}
	x.watch = watch
	i.Trace = x.id
	var record *proto.Record
	if mode == proto.ModeInline {
		record, err = t.await(ctx, x)
		if err == nil && record.ExpiredInQueue() {
			return nil, t.expiredInQueue(ctx, x)
		}
	} else {
		record, err = t.awaitWithProgress(ctx, x, call.Progress)
	}
	if err != nil {
		if call.Connected && errors.Is(err, context.Canceled) {
			err = errors.Join(err, t.cancelCall(ctx, i.Key.Org, x.id))
		}
		return nil, waitError(x.id, err)
	}
	if !t.Reserve(i, int64(min(len(record.Result.Stdout), api.MaxToolOutput)+
		min(len(record.Result.Stderr), api.MaxToolOutput))*toolOutputCost) {
		return nil, api.Unavailable(1, "the execution has ended, but too many requests are open here for its output: "+
			web.StatusHint(x.id))
	}
	return api.NewToolResult(x.id, record.Result), nil
}

// checkUnused refuses a call with the name of an earlier one.
func (t toolCalls) checkUnused(ctx context.Context, org string, id proto.TraceID) error {
	_, err := t.Jobs.Summary(ctx, org, id)
	switch {
	case errors.Is(err, proto.ErrNotFound):
		return nil
	case err != nil:
		return fmt.Errorf("look up %s: %w", id, err)
	default:
		return api.Errorf(api.CodeConflict,
			"another request of this session had the same id; its execution is at /v1/executions/%s", id)
	}
}

// awaitWithProgress is [Server.await] for an execution that is streamed.
func (t toolCalls) awaitWithProgress(
	ctx context.Context, x *admitted, progress func(string) error,
) (*proto.Record, error) {
	limited, cancel := context.WithDeadline(ctx, x.deadline)
	defer cancel()
	tail, err := t.Events.Follow(limited, x.request.Key.Org, x.id, 0)
	switch {
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		return nil, web.ErrDeadline
	case err != nil:
		return nil, errors.Join(fmt.Errorf("follow %s: %w", x.id, err), t.clientGone(ctx, x))
	}
	defer tail.Close()
	batch, err := t.awaitStart(ctx, x, tail)
	start := time.Now()
	for err == nil {
		if batch.Result != nil {
			return batch.Result, nil
		}
		if text := outputText(batch.Lines); text != "" {
			if err := progress(text); err != nil {
				return nil, err
			}
		}
		batch, err = t.nextUntil(ctx, tail, time.Now().Add(web.Keepalive))
		if errors.Is(err, web.ErrDeadline) && !t.HasLeft() {
			batch, err = proto.Events{}, progress(fmt.Sprintf("running for %s", time.Since(start).Round(time.Second)))
		}
	}
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("events of %s have no result", x.id)
	}
	return nil, err
}

// outputText returns the output in the lines of events, or its end if it is long.
func outputText(lines []byte) string {
	var text []byte
	for line := range bytes.Lines(lines) {
		var event struct{ Type, Data string }
		if json.Unmarshal(line, &event) == nil && event.Type == "output" {
			text = append(text, event.Data...)
		}
	}
	return strings.ToValidUTF8(string(text[max(0, len(text)-maxProgress):]), "")
}

// Authorize implements [mcp.Sandbox].
func (t toolCalls) Authorize(call *mcp.Call, tool *api.Tool) error {
	if key := &web.RequestOf(call.HTTP).Key; !key.Has(tool.Scope) {
		return api.MissingScope(tool.Scope)
	}
	return nil
}

// Cancel implements [mcp.Sandbox].
func (t toolCalls) Cancel(ctx context.Context, call *mcp.Call) error {
	return t.cancelCall(ctx, web.RequestOf(call.HTTP).Key.Org, t.callTrace(call))
}

// cancelCall ends an execution, if there is one that has not ended.
func (t toolCalls) cancelCall(ctx context.Context, org string, id proto.TraceID) error {
	ctx, done := web.Detached(ctx)
	defer done()
	record, err := t.Jobs.Summary(ctx, org, id)
	if err == nil && !record.Status.Terminal() {
		_, err = t.Jobs.Cancel(ctx, org, id)
	}
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("cancel %s: %w", id, err)
	}
	return nil
}

// ListFiles implements [mcp.Sandbox].
func (t toolCalls) ListFiles(_ context.Context, call *mcp.Call, req *api.FileListRequest) (*api.ToolFiles, error) {
	files := &api.ToolFiles{Files: []api.File{}}
	from, dir, err := t.opener.OpenPath(web.RequestOf(call.HTTP), &req.FileRequest, req.Path, proto.CleanFilePath)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	err = from.List(call.HTTP.Context(), dir, req.Recursive, func(f proto.File) error {
		if len(files.Files) == api.MaxToolFiles {
			files.Truncated = true
			return errEnough
		}
		files.Files = append(files.Files, api.NewFile(&f))
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	return files, nil
}

// errEnough ends the reading of a list.
var errEnough = errors.New("the list is long enough")

// UploadURL implements [mcp.Sandbox].
func (t toolCalls) UploadURL(_ context.Context, call *mcp.Call, req *api.FileUploadRequest) (*api.SignedURL, error) {
	return t.files.SignUpload(web.RequestOf(call.HTTP), req)
}

// DownloadURL implements [mcp.Sandbox].
func (t toolCalls) DownloadURL(
	_ context.Context, call *mcp.Call, req *api.FileDownloadRequest,
) (*api.SignedURL, error) {
	return t.files.SignDownload(web.RequestOf(call.HTTP), req)
}

// PublicError implements [mcp.Sandbox].
func (t toolCalls) PublicError(call *mcp.Call, err error) *api.Error {
	i := web.RequestOf(call.HTTP).Info
	i.Err, i.Reported = err, true
	return api.NewError(err)
}
