package agent

import (
	"context"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Route is a route of a vendor's API.
type Route struct {
	api.Route
	Handle func(w http.ResponseWriter, r *http.Request) error
}

// RequestHost is the [Host] of a request of a vendor's client, and carries out what the request needs besides.
type RequestHost interface {
	Host
	BatchStore
	// ReadBody reads the body of the request and calls decode with it. It returns the error of decode.
	ReadBody(w http.ResponseWriter, decode func(body []byte) error) error
	// ReadUpload reads the form that is the body of the request, with its file. A form with the field
	// instead, unless that is empty, may have no file. The result must be closed.
	ReadUpload(w http.ResponseWriter, instead string) (*proto.AgentUpload, error)
	// CreateThread creates a thread without files.
	CreateThread(ctx context.Context, id string) error
	// RemoveThread removes a thread with its files. The code of its error is [api.CodeConflict] while
	// an execution uses it.
	RemoveThread(ctx context.Context, id string) error
	// AllowStored refuses a run that is to be stored, or to go on in the background, if the server or
	// the API key has no room for it.
	AllowStored(ctx context.Context, background bool) error
	// UsedThreads returns the threads whose ids have a prefix and that were used since a time, in the
	// order of their ids. It returns an error if they are too many.
	UsedThreads(ctx context.Context, prefix string, since time.Time) ([]proto.ThreadSummary, error)
	// Profile returns the sandbox profile of the API key.
	Profile(ctx context.Context) (proto.Profile, error)
	// DeleteFile deletes a file in a thread's home. The code of its error is [api.CodeNotFound] if
	// there is none.
	DeleteFile(ctx context.Context, thread, path string) error
	// Files returns the files of the organisation that have not expired, the newest first.
	Files() []proto.AgentFile
	// RemoveFile removes a file of the organisation. The code of its error is [api.CodeNotFound] if
	// there is none.
	RemoveFile(ctx context.Context, id string) error
}

// BatchStore stores batches of requests for messages.
type BatchStore interface {
	// BaseURL returns the address of this server for its clients, without a slash at its end.
	BaseURL() (string, error)
	// CreateBatch stores a batch of requests to an API: those in a member of the body's object. The
	// batch expires after life. check is called with each request.
	CreateBatch(w http.ResponseWriter, api, member string, life time.Duration, check func(item []byte) error) (
		*proto.BatchAndState, error)
	// Batches returns the batches, the newest first.
	Batches() []proto.BatchAndState
	// Batch returns a batch. The code of its error is [api.CodeNotFound] if there is none.
	Batch(ctx context.Context, id string) (*proto.BatchAndState, error)
	// CancelBatch cancels a batch unless it has ended, and returns it.
	CancelBatch(ctx context.Context, id string) (*proto.BatchAndState, error)
	// RemoveBatch removes a batch. The code of its error is [api.CodeConflict] if it has not ended.
	RemoveBatch(ctx context.Context, id string) error
	// BatchItems calls each with the items of a batch in order: what was uploaded, the status, and the
	// id of the run.
	BatchItems(ctx context.Context, b *proto.Batch,
		each func(item []byte, status proto.ItemStatus, run string) error) error
}
