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

// RequestHost is the [Host] of a vendor client's request, with the request's other needs.
type RequestHost interface {
	Host
	BatchStore
	// ReadBody reads the body of the request and calls decode with it. It returns the error of decode.
	ReadBody(w http.ResponseWriter, decode func(body []byte) error) error
	// ReadUpload reads the form in the request's body, with its file. If the form has a field named
	// instead, which may be empty for none, the file is optional. The result must be closed.
	ReadUpload(w http.ResponseWriter, instead string) (*proto.AgentUpload, error)
	// CreateThread creates a thread without files.
	CreateThread(ctx context.Context, id string) error
	// RemoveThread removes a thread with its files. The code of its error is [api.CodeConflict] while
	// an execution uses it.
	RemoveThread(ctx context.Context, id string) error
	// AllowStored refuses a stored or background run if the server or the API key has no room for
	// it.
	AllowStored(ctx context.Context, background bool) error
	// UsedThreads returns the threads with an id prefix that were used since a time, ordered by id.
	// It returns an error if there are too many.
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
	// BaseURL returns this server's address for clients, without a trailing slash.
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
	// BatchItems calls each with the items of a batch in order: the uploaded item, the status, and
	// the run's id.
	BatchItems(ctx context.Context, b *proto.Batch,
		each func(item []byte, status proto.ItemStatus, run string) error) error
}
