package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// versionsTimeout bounds forking and removing a thread, which take many requests to the store.
const versionsTimeout = time.Minute

func (s *Server) listThreads(w http.ResponseWriter, r *http.Request) error {
	limit, err := pageSize(r)
	if err != nil {
		return err
	}
	cursor := r.URL.Query().Get("cursor")
	if cursor != "" && proto.CheckThreadID("cursor", cursor) != nil {
		return badCursor()
	}
	list, err := s.Threads.List(r.Context(), infoOf(r.Context()).key.Org, cursor, limit+1)
	if err != nil {
		return fmt.Errorf("list threads: %w", err)
	}
	answer := api.Threads{Threads: []api.Thread{}}
	for _, t := range list[:min(len(list), limit)] {
		answer.Threads = append(answer.Threads, api.NewThread(t))
	}
	if len(list) > limit {
		answer.NextCursor = &list[limit-1].ID
	}
	return writeValue(w, http.StatusOK, answer)
}

// threadID returns the id in the path. An id of the wrong form does not exist.
func threadID(r *http.Request) (string, error) {
	id := chi.URLParam(r, "id")
	if proto.CheckThreadID("id", id) != nil {
		return "", threadError("look up", id, proto.ErrNotFound)
	}
	return id, nil
}

// threadError wraps an error of an operation on a thread. ErrNotFound gets the message for a
// thread.
func threadError(operation, id string, err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "there is no thread of that id; see /v1/threads")
	}
	return fmt.Errorf("%s thread %s: %w", operation, id, err)
}

// versionError is threadError for an operation on a version, 0 for the newest.
func versionError(operation, id string, version int64, err error) error {
	if errors.Is(err, proto.ErrNotFound) && version > 0 {
		return api.Errorf(api.CodeNotFound, "there is no such thread, or it does not have that version; see /v1/threads/{id}")
	}
	return threadError(operation, id, err)
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
	return writeValue(w, http.StatusOK, api.NewWholeThread(t))
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
	fork, err := decodeBody[api.ForkRequest](s, w, r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), versionsTimeout)
	defer cancel()
	if err := s.checkQuota(ctx, infoOf(ctx).key.Org, proto.QuotaStored); err != nil {
		return err
	}
	t, err := s.Versions.Fork(ctx, infoOf(ctx).key.Org, id, fork.Version, fork.ID)
	if errors.Is(err, proto.ErrExists) {
		return api.Errorf(api.CodeConflict, "there is a thread of that id already; choose another, or remove that one first")
	}
	if err != nil {
		return versionError("fork", id, fork.Version, err)
	}
	w.Header().Set("Location", "/v1/threads/"+t.ID)
	return writeValue(w, http.StatusCreated, api.NewWholeThread(t))
}

func (s *Server) archiveThread(w http.ResponseWriter, r *http.Request) error {
	id, err := threadID(r)
	if err != nil {
		return err
	}
	version, err := queryInt(r, "version", 1, api.MaxWhole, 0)
	if err != nil {
		return err
	}
	dir, err := proto.CleanFilePath(s.Home, r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	org := infoOf(r.Context()).key.Org
	done, err := s.transfers.begin(r.Context(), org)
	if err != nil {
		return err
	}
	defer done()
	if err := s.Versions.Archive(r.Context(), org, id, version, dir, tarAnswer(w, r, id)); err != nil {
		if missing, ok := errors.AsType[*proto.NoFileError](err); ok {
			return api.Errorf(api.CodeNotFound, "%s", missing)
		}
		return versionError("archive", id, version, err)
	}
	return nil
}

// tarAnswer returns the writer of a tar that is the answer to a request. Until it is written to, the
// answer can be an error.
func tarAnswer(w http.ResponseWriter, r *http.Request, name string) *lazyWriter {
	return &lazyWriter{w: w, head: r.Method == http.MethodHead, begin: func(h http.Header) {
		h.Set("Content-Type", "application/x-tar")
		h.Set("Content-Disposition", attachment(name+".tar"))
		h.Set("Cache-Control", "private, no-store")
	}}
}

// unpackThread unpacks a tar into a thread while it arrives.
func (s *Server) unpackThread(w http.ResponseWriter, r *http.Request) error {
	version, dir, err := s.unpack(w, r)
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
		return err
	}
	return writeValue(w, http.StatusOK, api.ChangedFile{Path: dir, Version: version})
}

func (s *Server) unpack(w http.ResponseWriter, r *http.Request) (version int64, dir string, err error) {
	id := chi.URLParam(r, "id")
	if err := proto.CheckThreadID("id", id); err != nil {
		return 0, "", err // unlike with other operations, the thread need not exist
	}
	key := infoOf(r.Context()).key
	if dir, err = proto.CleanFilePath(s.Home, r.URL.Query().Get("path")); err != nil {
		return 0, "", err
	}
	if err := s.checkQuota(r.Context(), key.Org, proto.QuotaStored); err != nil {
		return 0, "", err
	}
	most, err := s.homeLimit(r.Context(), &key)
	if err != nil {
		return 0, "", err
	}
	// Unpack checks this again, but the client should know before it sends everything.
	head, err := s.Threads.Get(r.Context(), key.Org, id)
	switch {
	case err == nil && head.Holder != "":
		return 0, "", &proto.BusyError{Thread: id, Holder: head.Holder}
	case err != nil && !errors.Is(err, proto.ErrNotFound):
		return 0, "", fmt.Errorf("look up thread %s: %w", id, err)
	}
	done, err := s.beginUpload(r.Context(), &fileStore{org: key.Org}, most.Bytes)
	if err != nil {
		return 0, "", err
	}
	defer done()
	long := &longBody{from: r.Body, control: infoOf(r.Context()).rec.control}
	defer long.clearDeadline()
	body, end, err := decompressed(w, r, long)
	if err != nil {
		return 0, "", err
	}
	defer end()
	version, err = s.Versions.Unpack(r.Context(), key.Org, id, dir, &proto.TarUpload{
		Body: body, Home: s.Home, Most: most, Proceed: s.tarEntry(infoOf(r.Context())),
	})
	if err != nil {
		return 0, "", fmt.Errorf("unpack a tar into thread %s: %w", id, err)
	}
	return version, dir, nil
}

// tarEntry returns a function that reserves the memory of an entry of a tar until the request ends.
func (s *Server) tarEntry(i *info) func(memory int64) error {
	const step = 1 << 20
	var left int64
	return func(memory int64) error {
		if s.DiskFull != nil && s.DiskFull() != "" {
			return errDiskFull
		}
		for left < memory {
			if !s.reserve(i, step) {
				return errOverloaded
			}
			left += step
		}
		left -= memory
		return nil
	}
}

func (s *Server) collectThreads(w http.ResponseWriter, r *http.Request) error {
	req, err := decodeOptionalBody[api.CollectRequest](s, w, r)
	if err != nil {
		return err
	}
	removed, err := s.ThreadAdmin.Collect(r.Context(), time.Duration(req.SafeAge))
	if err != nil {
		return fmt.Errorf("collect blobs of threads: %w", err)
	}
	auditAfter(r, "", "", removed)
	return writeValue(w, http.StatusOK, removed)
}

func (s *Server) rebuildThreads(w http.ResponseWriter, r *http.Request) error {
	rebuilt, err := s.ThreadAdmin.Rebuild(r.Context())
	if err != nil {
		return fmt.Errorf("rebuild threads: %w", err)
	}
	auditAfter(r, "", "", rebuilt)
	return writeValue(w, http.StatusOK, rebuilt)
}
