package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	defaultPage = 20
	mostPage    = 100
	// versionsTimeout bounds forking and removing a thread, which ask the store for many things.
	versionsTimeout = time.Minute
)

// threadView is the JSON form of a thread.
type threadView struct {
	ID        string  `json:"id"`
	Version   int64   `json:"version"` // 0 while the home is empty
	Bytes     int64   `json:"bytes"`
	Files     int64   `json:"files"`
	CreatedAt string  `json:"created_at"`
	UsedAt    string  `json:"used_at"`
	Holder    *string `json:"holder"`
}

// wholeThreadView is the JSON form of a thread with its versions.
type wholeThreadView struct {
	threadView
	Versions []versionView `json:"versions"`
	Staged   []stagedView  `json:"staged"`
}

type versionView struct {
	Number    int64   `json:"number"`
	CreatedAt string  `json:"created_at"`
	TraceID   *string `json:"trace_id"`
	Bytes     int64   `json:"bytes"`
	Files     int64   `json:"files"`
}

type stagedView struct {
	Path string `json:"path"`
	Size int64  `json:"size"`
	At   string `json:"at"`
}

func viewThread(t *proto.ThreadSummary) threadView {
	return threadView{
		ID: t.ID, Version: t.Version, Bytes: t.Bytes, Files: t.Files, CreatedAt: t.CreatedAt.UTC().Format(timeLayout),
		UsedAt: t.UsedAt.UTC().Format(timeLayout), Holder: optional(string(t.Holder)),
	}
}

func viewWholeThread(t *proto.Thread) wholeThreadView {
	v := wholeThreadView{threadView: viewThread(new(t.Summary())), Versions: []versionView{}, Staged: make([]stagedView, len(t.Staged))}
	add := func(n *proto.Version) {
		v.Versions = append(v.Versions, versionView{
			n.Number, n.CreatedAt.UTC().Format(timeLayout), optional(string(n.Trace)), n.Bytes, n.Files,
		})
	}
	if t.Version != nil {
		add(t.Version)
	}
	for i := range t.History {
		add(&t.History[i])
	}
	for i, f := range t.Staged {
		v.Staged[i] = stagedView{f.Path, f.Size, f.At.UTC().Format(timeLayout)}
	}
	return v
}

func (s *Server) listThreads(w http.ResponseWriter, r *http.Request) error {
	limit, err := pageSize(r)
	if err != nil {
		return err
	}
	cursor := r.URL.Query().Get("cursor")
	if cursor != "" && proto.CheckThreadID("cursor", cursor) != nil {
		return &proto.FieldError{Field: "cursor", Message: "cursor must be what next_cursor had in the answer before"}
	}
	list, err := s.Threads.List(r.Context(), infoOf(r.Context()).key.Org, cursor, limit+1)
	if err != nil {
		return fmt.Errorf("list threads: %w", err)
	}
	more := len(list) > limit
	list = list[:min(len(list), limit)]
	answer := struct {
		Threads    []threadView `json:"threads"`
		NextCursor *string      `json:"next_cursor"`
	}{Threads: make([]threadView, len(list))}
	for i := range list {
		answer.Threads[i] = viewThread(&list[i])
	}
	if more {
		answer.NextCursor = &list[len(list)-1].ID
	}
	return writeValue(w, http.StatusOK, answer)
}

// threadID gives the thread that the path names. What cannot be one does not exist.
func threadID(r *http.Request) (string, error) {
	id := chi.URLParam(r, "id")
	if proto.CheckThreadID("id", id) != nil {
		return "", errNoThread
	}
	return id, nil
}

// threadError words what went wrong with a thread.
func threadError(doing, id string, err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return errNoThread
	}
	return fmt.Errorf("%s thread %s: %w", doing, id, err)
}

func (s *Server) getThread(w http.ResponseWriter, r *http.Request) error {
	id, err := threadID(r)
	if err != nil {
		return err
	}
	t, err := s.Threads.Get(r.Context(), infoOf(r.Context()).key.Org, id)
	if err != nil {
		return threadError("look up", id, err)
	}
	return writeValue(w, http.StatusOK, viewWholeThread(t))
}

func (s *Server) deleteThread(w http.ResponseWriter, r *http.Request) error {
	id, err := threadID(r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), versionsTimeout)
	defer cancel()
	if err := s.Versions.Remove(ctx, infoOf(ctx).key.Org, id); err != nil {
		return threadError("remove", id, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) forkThread(w http.ResponseWriter, r *http.Request) error {
	id, err := threadID(r)
	if err != nil {
		return err
	}
	body, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	fork, err := proto.DecodeFork(body)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), versionsTimeout)
	defer cancel()
	t, err := s.Versions.Fork(ctx, infoOf(ctx).key.Org, id, fork.Version, fork.ID)
	switch {
	case errors.Is(err, proto.ErrExists):
		return errThreadExists
	case errors.Is(err, proto.ErrNotFound) && fork.Version > 0:
		return errNoVersion
	case err != nil:
		return threadError("fork", id, err)
	}
	w.Header().Set("Location", "/v1/threads/"+t.ID)
	return writeValue(w, http.StatusCreated, viewWholeThread(t))
}

func (s *Server) archiveThread(w http.ResponseWriter, r *http.Request) error {
	id, err := threadID(r)
	if err != nil {
		return err
	}
	version, err := queryInt(r, "version", 1, maxWhole, 0)
	if err != nil {
		return err
	}
	org := infoOf(r.Context()).key.Org
	done, err := s.transfers.begin(r.Context(), org)
	if err != nil {
		return err
	}
	defer done()
	out := &late{w: w, begin: func(h http.Header) {
		h.Set("Content-Type", "application/x-tar")
		h.Set("Content-Disposition", attachment(id+".tar"))
		h.Set("Content-Security-Policy", contentPolicy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cache-Control", "private, no-store")
	}}
	err = s.Versions.Archive(r.Context(), org, id, version, out)
	if errors.Is(err, proto.ErrNotFound) && version > 0 {
		return errNoVersion
	}
	if err != nil {
		return threadError("archive", id, err)
	}
	return nil
}

func (s *Server) collectThreads(w http.ResponseWriter, r *http.Request) error {
	body, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	if len(bytes.TrimSpace(body)) == 0 {
		body = []byte("{}") // nothing of it is needed
	}
	safeAge, err := proto.DecodeCollect(body)
	if err != nil {
		return err
	}
	done, err := s.ThreadAdmin.Collect(r.Context(), safeAge)
	if err != nil {
		return fmt.Errorf("collect blobs of threads: %w", err)
	}
	return writeValue(w, http.StatusOK, done)
}

func (s *Server) rebuildThreads(w http.ResponseWriter, r *http.Request) error {
	done, err := s.ThreadAdmin.Rebuild(r.Context())
	if err != nil {
		return fmt.Errorf("rebuild threads: %w", err)
	}
	return writeValue(w, http.StatusOK, done)
}
