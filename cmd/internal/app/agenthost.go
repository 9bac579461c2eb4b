package app

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/gateway"
	"github.com/bullpen-run/bullpen/gateway/agents"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// modelHost returns the host of a request of a model API.
func modelHost(server *gateway.Server, r *http.Request) agent.RequestHost {
	host := server.Agents().ForRequest(r)
	if web.RequestOf(r).ModelsOnly {
		return sandboxHost{agent: host}
	}
	return host
}

// sandboxHost is the host of a request from a sandbox. Programs there can ask the model. They have no access to
// what the organisation has stored, and run nothing outside of their sandbox.
type sandboxHost struct{ agent *agents.Agent }

var errModelsOnly = api.Errorf(api.CodeForbidden,
	"programs in this sandbox can only ask the model: they cannot use containers, files, batches or stored responses "+
		"of this server")

// Requests for the model need only these.

func (h sandboxHost) ReadBody(w http.ResponseWriter, decode func(body []byte) error) error {
	return h.agent.ReadBody(w, decode)
}

func (h sandboxHost) Reserve(n int64) error { return h.agent.Reserve(n) }

func (h sandboxHost) CleanPath(path string) (string, error) { return h.agent.CleanPath(path) }

func (h sandboxHost) Profile(ctx context.Context) (proto.Profile, error) { return h.agent.Profile(ctx) }

// Caller returns an organisation that does not exist, in which nothing is stored.
func (sandboxHost) Caller() (org, key string) { return "", "" }

func (sandboxHost) Execute(context.Context, proto.TraceID, *api.ExecuteRequest) (*proto.Record, error) {
	return nil, errModelsOnly
}

func (sandboxHost) Place(context.Context, string, bool) (*proto.Place, error) {
	return nil, errModelsOnly
}

func (sandboxHost) ExecuteAt(
	context.Context, *proto.Place, proto.TraceID, *api.ExecuteRequest,
) (*proto.Record, error) {
	return nil, errModelsOnly
}

func (sandboxHost) RunCell(
	context.Context, string, *proto.Place, proto.TraceID, string,
) (*api.CellResult, error) {
	return nil, errModelsOnly
}

func (sandboxHost) Thread(context.Context, string) (*proto.Thread, error) { return nil, errModelsOnly }

func (sandboxHost) ListFiles(context.Context, string, string, func(proto.File) error) error {
	return errModelsOnly
}

func (sandboxHost) OpenFile(context.Context, string, string) (*proto.FileContent, error) {
	return nil, errModelsOnly
}

func (sandboxHost) PutFile(context.Context, string, string, int64, io.Reader) error {
	return errModelsOnly
}

func (sandboxHost) ReplaceFile(context.Context, string, string, string, int64, io.Reader) error {
	return errModelsOnly
}

func (sandboxHost) KeepFiles(context.Context, string, time.Time) error { return errModelsOnly }

func (sandboxHost) SaveFile(context.Context, *proto.AgentFile, io.Reader) error { return errModelsOnly }

func (sandboxHost) File(context.Context, string) (*proto.AgentFile, error) { return nil, errModelsOnly }

func (sandboxHost) ReadUpload(http.ResponseWriter, string) (*proto.AgentUpload, error) {
	return nil, errModelsOnly
}

func (sandboxHost) CreateThread(context.Context, string) error { return errModelsOnly }
func (sandboxHost) RemoveThread(context.Context, string) error { return errModelsOnly }
func (sandboxHost) AllowStored(context.Context, bool) error    { return errModelsOnly }

func (sandboxHost) UsedThreads(context.Context, string, time.Time) ([]proto.ThreadSummary, error) {
	return nil, errModelsOnly
}

func (sandboxHost) DeleteFile(context.Context, string, string) error { return errModelsOnly }
func (sandboxHost) Files() []proto.AgentFile                         { return nil }
func (sandboxHost) RemoveFile(context.Context, string) error         { return errModelsOnly }
func (sandboxHost) BaseURL() (string, error)                         { return "", errModelsOnly }

func (sandboxHost) CreateBatch(http.ResponseWriter, string, string, time.Duration, func([]byte) error) (
	*proto.BatchAndState, error,
) {
	return nil, errModelsOnly
}

func (sandboxHost) Batches() []proto.BatchAndState { return nil }

func (sandboxHost) Batch(context.Context, string) (*proto.BatchAndState, error) {
	return nil, errModelsOnly
}

func (sandboxHost) CancelBatch(context.Context, string) (*proto.BatchAndState, error) {
	return nil, errModelsOnly
}

func (sandboxHost) RemoveBatch(context.Context, string) error { return errModelsOnly }

func (sandboxHost) BatchItems(
	context.Context, *proto.Batch, func([]byte, proto.ItemStatus, string) error,
) error {
	return errModelsOnly
}
