package tools

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/bullpen-run/bullpen/gateway/executions"
	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/interpreters"
	"github.com/bullpen-run/bullpen/gateway/mcp"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// callForm is the version of the signed name of a call, see [Routes.callTrace].
const callForm = "bullpen-mcp-1"

// Files opens files and signs the URLs of files.
type Files interface {
	// OpenPath returns the files that a request addresses, and name cleaned by clean. The files
	// must be closed.
	OpenPath(r *web.Request, req *api.FileRequest, name string, clean func(root, name string) (string, error)) (
		*filestore.Store, string, error)
	// SignUpload returns a URL to upload a file to.
	SignUpload(r *web.Request, req *api.FileUploadRequest) (*api.SignedURL, error)
	// SignDownload returns a URL to download a file from.
	SignDownload(r *web.Request, req *api.FileDownloadRequest) (*api.SignedURL, error)
}

// Routes is the route of the Model Context Protocol.
type Routes struct {
	*executions.Runner
	Files   Files
	Version string // of the program
	// URLSecret signs the names of calls. All gateways have the same random secret.
	URLSecret    *[32]byte
	Interpreters *interpreters.Service

	protocol *mcp.Handler
	running  running
}

// Handlers returns the handlers of the routes.
func (s *Routes) Handlers() []web.Handler {
	s.protocol = mcp.NewHandler(s.Version, s)
	return []web.Handler{{ID: "mcp", Handle: s.serve}}
}

// serve answers requests of the Model Context Protocol.
func (s *Routes) serve(w http.ResponseWriter, r *web.Request) error {
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
	if err := s.ReserveMessage(r.Info, body); err != nil {
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
	return s.protocol.Serve(w, r.Request, body, decoded)
}

// callTrace returns the trace id of a call's execution. It is derived from the secret alone, so
// that every gateway can cancel the execution.
func (s *Routes) callTrace(call *mcp.Call) proto.TraceID {
	if call.Name == "" {
		return proto.NewTraceID()
	}
	text := strings.Join([]string{callForm, web.RequestOf(call.HTTP).Key.ID, call.Name}, "\n")
	return proto.DerivedTraceID(string(web.Signature(*s.URLSecret, text)))
}

// Execute implements [mcp.Sandbox]. The execution is inline, or streaming if the client wants
// progress and the plan allows it.
func (s *Routes) Execute(
	_ context.Context, call *mcp.Call, req *api.ExecuteRequest,
) (result *api.ToolResult, err error) {
	if s.IsDraining() {
		return nil, web.ErrDraining // here, because the route also serves tools that start nothing
	}
	r := web.RequestOf(call.HTTP)
	i, id := r.Info, s.callTrace(call)
	ctx, span := s.StartRequest(r, id, "tools/call "+api.ToolExecute)
	defer func() { web.EndRequest(ctx, i, span, http.StatusOK, err) }() // errors of tools are answers
	mode := proto.ModeInline
	if call.Progress != nil && i.Plan.Streaming {
		mode = proto.ModeStreaming
	}
	if call.Name != "" {
		if err := s.checkUnused(ctx, i.Key.Org, id); err != nil {
			return nil, err
		}
	}
	job, err := s.Job(ctx, req, web.CallerOf(r), mode, id, 0)
	if err != nil {
		return nil, err
	}
	run, err := s.Start(ctx, i, &proto.Submission{Job: job}, 0)
	s.Shrink(i, web.RequestCost) // the program is stored
	if err != nil {
		return nil, err
	}
	defer run.Close()
	var record *proto.Record
	if mode == proto.ModeInline {
		record, err = run.Wait(ctx)
	} else {
		record, err = run.WaitWithProgress(ctx, call.Progress)
	}
	if err != nil {
		if call.Connected && errors.Is(err, context.Canceled) {
			err = errors.Join(err, s.Runner.Cancel(ctx, i.Key.Org, run.ID))
		}
		return nil, err
	}
	if err := s.ReserveOutput(i, run.ID, record.Result); err != nil {
		return nil, err
	}
	return api.NewToolResult(run.ID, record.Result), nil
}

// checkUnused refuses a call with the name of an earlier one.
func (s *Routes) checkUnused(ctx context.Context, org string, id proto.TraceID) error {
	_, err := s.Jobs.Summary(ctx, org, id)
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

// Authorize implements [mcp.Sandbox].
func (s *Routes) Authorize(call *mcp.Call, tool *api.Tool) error {
	if key := &web.RequestOf(call.HTTP).Key; !key.Has(tool.Scope) {
		return api.MissingScope(tool.Scope)
	}
	return nil
}

// Cancel implements [mcp.Sandbox].
func (s *Routes) Cancel(ctx context.Context, call *mcp.Call) error {
	s.running.cancel(s.callTrace(call))
	return s.Runner.Cancel(ctx, web.RequestOf(call.HTTP).Key.Org, s.callTrace(call))
}

// ListFiles implements [mcp.Sandbox].
func (s *Routes) ListFiles(_ context.Context, call *mcp.Call, req *api.FileListRequest) (*api.ToolFiles, error) {
	files := &api.ToolFiles{Files: []api.File{}}
	from, dir, err := s.Files.OpenPath(web.RequestOf(call.HTTP), &req.FileRequest, req.Path, proto.CleanFilePath)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	if err := from.At(req.Version); err != nil {
		return nil, err
	}
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
func (s *Routes) UploadURL(_ context.Context, call *mcp.Call, req *api.FileUploadRequest) (*api.SignedURL, error) {
	return s.Files.SignUpload(web.RequestOf(call.HTTP), req)
}

// DownloadURL implements [mcp.Sandbox].
func (s *Routes) DownloadURL(
	_ context.Context, call *mcp.Call, req *api.FileDownloadRequest,
) (*api.SignedURL, error) {
	return s.Files.SignDownload(web.RequestOf(call.HTTP), req)
}

// PublicError implements [mcp.Sandbox].
func (s *Routes) PublicError(call *mcp.Call, err error) *api.Error {
	i := web.RequestOf(call.HTTP).Info
	i.Err, i.Reported = err, true
	return api.NewError(err)
}
