// Package agenttest has what tests of the surfaces of agents need: a host with threads in memory, and
// a store of runs in memory.
package agenttest

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Host implements [agent.RequestHost] and [agent.BackgroundHost] for an organisation named acme. Programs end
// as Result says.
type Host struct {
	agent.BatchStore // nil for none

	R       *http.Request // the present one
	Threads map[string]*proto.Thread
	Homes   map[string][]byte // files by thread and path
	Puts    []string          // paths of files that were stored
	Leaves  map[string]string // files that programs leave in the home
	Result  proto.Result
	Err     error // of executions
	// Cell, if not nil, returns the results of cells. Otherwise there is no interpreter.
	Cell    func(code string) (*api.CellResult, error)
	Meta    []proto.AgentFile
	ErrSave error // of SaveFile
	// Modified is when all files were changed; zero for the time of the list.
	Modified time.Time

	mu       sync.Mutex
	requests []*api.ExecuteRequest
	records  map[proto.TraceID]*proto.Record
	reserved int64
	memory   int64 // bytes that can be reserved; 0 for no limit
}

// NewHost returns a host without threads.
func NewHost() *Host {
	return &Host{
		Threads: map[string]*proto.Thread{}, Homes: map[string][]byte{},
		records: map[proto.TraceID]*proto.Record{},
	}
}

// Requests returns the requests of executions.
func (h *Host) Requests() []*api.ExecuteRequest {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.requests)
}

// Execute implements [agent.Host].
func (h *Host) Execute(_ context.Context, id proto.TraceID, req *api.ExecuteRequest) (*proto.Record, error) {
	if h.Err != nil {
		return nil, h.Err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if record := h.records[id]; record != nil {
		return record, nil
	}
	h.use(req.ThreadID)
	h.requests = append(h.requests, req)
	for name, text := range h.Leaves {
		h.Homes[req.ThreadID+"/"+name] = []byte(text)
	}
	now := time.Now()
	h.records[id] = &proto.Record{Status: h.Result.Status(), StartedAt: &now, Result: &h.Result}
	return h.records[id], nil
}

// Place implements [agent.Host].
func (h *Host) Place(_ context.Context, thread string, cells bool) (*proto.Place, error) {
	if h.Cell == nil || !cells {
		return nil, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.use(thread)
	return &proto.Place{Start: "trc_start", Context: "python-1-a"}, nil
}

// ExecuteAt implements [agent.Host].
func (h *Host) ExecuteAt(
	ctx context.Context, _ *proto.Place, id proto.TraceID, req *api.ExecuteRequest,
) (*proto.Record, error) {
	return h.Execute(ctx, id, req)
}

// RunCell implements [agent.Host].
func (h *Host) RunCell(
	_ context.Context, _ string, _ *proto.Place, _ proto.TraceID, code string,
) (*api.CellResult, error) {
	return h.Cell(code)
}

func (h *Host) use(thread string) {
	if h.Threads[thread] == nil {
		h.Threads[thread] = &proto.Thread{ID: thread, CreatedAt: time.Now()}
	}
	h.Threads[thread].UsedAt = time.Now()
}

// Reserve implements [agent.Host].
func (h *Host) Reserve(n int64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.reserved += n; h.memory > 0 && h.reserved > h.memory {
		return api.Unavailable(1, "full")
	}
	return nil
}

// Begin implements [agent.BackgroundHost].
func (h *Host) Begin(ctx context.Context, _ *proto.AgentRun, _ bool) (context.Context, error) {
	return ctx, nil
}

// Release implements [agent.BackgroundHost]. What was reserved stays.
func (h *Host) Release() {}

// Thread implements [agent.Host].
func (h *Host) Thread(_ context.Context, id string) (*proto.Thread, error) {
	if t := h.Threads[id]; t != nil {
		return t, nil
	}
	return nil, api.Errorf(api.CodeNotFound, "no thread")
}

// ListFiles implements [agent.Host].
func (h *Host) ListFiles(_ context.Context, thread, dir string, each func(proto.File) error) error {
	for key, text := range h.Homes {
		name, ok := strings.CutPrefix(key, strings.TrimSuffix(thread+"/"+dir, "/")+"/")
		if ok && !strings.Contains(name, "/") {
			if err := each(proto.File{
				Path: strings.TrimPrefix(dir+"/"+name, "/"), Size: int64(len(text)),
				Modified: cmp.Or(h.Modified, time.Now()),
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// OpenFile implements [agent.Host].
func (h *Host) OpenFile(_ context.Context, thread, path string) (*proto.FileContent, error) {
	text, ok := h.Homes[thread+"/"+path]
	if !ok {
		return nil, api.Errorf(api.CodeNotFound, "no file")
	}
	return &proto.FileContent{
		File: proto.File{Path: path, Size: int64(len(text))}, Tag: tagOf(text),
		Read: func(_ context.Context, offset, length int64) (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(text[offset : offset+length])), nil
		},
	}, nil
}

// PutFile implements [agent.Host].
func (h *Host) PutFile(_ context.Context, thread, path string, _ int64, body io.Reader) error {
	text, err := io.ReadAll(body)
	h.use(thread)
	h.Homes[thread+"/"+path] = text
	h.Puts = append(h.Puts, path)
	return err
}

// ReplaceFile implements [agent.Host].
func (h *Host) ReplaceFile(ctx context.Context, thread, path, tag string, size int64, body io.Reader) error {
	current := ""
	if text, ok := h.Homes[thread+"/"+path]; ok {
		current = tagOf(text)
	}
	if current != tag {
		return &proto.FileChangedError{}
	}
	return h.PutFile(ctx, thread, path, size, body)
}

func tagOf(text []byte) string { return fmt.Sprintf("%x", sha256.Sum256(text)) }

// CleanPath implements [agent.Host].
func (h *Host) CleanPath(path string) (string, error) { return proto.CleanFilePath("/home", path) }

// SaveFile implements [agent.Host].
func (h *Host) SaveFile(ctx context.Context, f *proto.AgentFile, body io.Reader) error {
	if h.ErrSave != nil {
		return h.ErrSave
	}
	h.Meta = append(slices.DeleteFunc(h.Meta, func(old proto.AgentFile) bool { return old.ID == f.ID }), *f)
	return h.PutFile(ctx, f.Thread(), proto.AgentFileContent, f.Bytes, body)
}

// KeepFiles implements [agent.Host].
func (h *Host) KeepFiles(_ context.Context, container string, until time.Time) error {
	for i := range h.Meta {
		if f := &h.Meta[i]; f.Container == container {
			f.ExpiresAt = &until
		}
	}
	return nil
}

// File implements [agent.Host].
func (h *Host) File(_ context.Context, id string) (*proto.AgentFile, error) {
	for i := range h.Meta {
		if h.Meta[i].ID == id {
			return &h.Meta[i], nil
		}
	}
	return nil, api.Errorf(api.CodeNotFound, "no file")
}

// ReadBody calls decode with the body of the request.
func (h *Host) ReadBody(_ http.ResponseWriter, decode func(body []byte) error) error {
	body, err := io.ReadAll(h.R.Body)
	if err != nil {
		return err
	}
	if _, err := api.CountValues(body); err != nil {
		return err
	}
	return decode(body)
}

// ReadUpload returns the file of the form in the request's body, or the form without a file if it
// has the field instead.
func (h *Host) ReadUpload(_ http.ResponseWriter, instead string) (*proto.AgentUpload, error) {
	up := &proto.AgentUpload{ReadCloser: http.NoBody, Fields: map[string]string{}}
	if file, header, err := h.R.FormFile("file"); err == nil {
		up.ReadCloser, up.Name, up.Size = file, header.Filename, header.Size
	} else if h.R.FormValue(instead) == "" {
		return nil, proto.FieldErrorf("file", "is missing")
	}
	for name, values := range h.R.MultipartForm.Value {
		up.Fields[name] = values[0]
	}
	return up, nil
}

// Caller returns the organisation and the id of the API key of the request.
func (h *Host) Caller() (org, key string) { return "acme", "k" }

// AllowStored allows all runs.
func (h *Host) AllowStored(context.Context, bool) error { return nil }

// CreateThread creates a thread.
func (h *Host) CreateThread(_ context.Context, id string) error { h.use(id); return nil }

// RemoveThread removes a thread.
func (h *Host) RemoveThread(_ context.Context, id string) error { delete(h.Threads, id); return nil }

// UsedThreads returns the threads with an id prefix that were used since a time.
func (h *Host) UsedThreads(_ context.Context, prefix string, since time.Time) (list []proto.ThreadSummary, err error) {
	for id, t := range h.Threads {
		if strings.HasPrefix(id, prefix) && !t.UsedAt.Before(since) {
			list = append(list, t.Summary())
		}
	}
	return list, nil
}

// Profile returns a profile with 4 GiB of memory.
func (h *Host) Profile(context.Context) (proto.Profile, error) {
	return proto.Profile{Memory: 4 * proto.GiB}, nil
}

// DeleteFile deletes a file in a thread's home.
func (h *Host) DeleteFile(_ context.Context, thread, path string) error {
	delete(h.Homes, thread+"/"+path)
	return nil
}

// RemoveFile removes a file.
func (h *Host) RemoveFile(_ context.Context, id string) error {
	before := len(h.Meta)
	if h.Meta = slices.DeleteFunc(h.Meta, func(f proto.AgentFile) bool { return f.ID == id }); len(h.Meta) == before {
		return api.Errorf(api.CodeNotFound, "no file")
	}
	return nil
}

// Files returns all files of the organisation.
func (h *Host) Files() []proto.AgentFile { return slices.Clone(h.Meta) }

// Reserved returns the number of bytes that were reserved.
func (h *Host) Reserved() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.reserved
}

// SetMemory limits the bytes that can be reserved; 0 is no limit.
func (h *Host) SetMemory(n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.memory = n
}
