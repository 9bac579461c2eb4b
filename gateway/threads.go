package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func (s *Server) listThreads(w http.ResponseWriter, r *web.Request) error {
	limit, err := web.PageSize(r)
	if err != nil {
		return err
	}
	cursor := r.URL.Query().Get("cursor")
	if cursor != "" && proto.CheckThreadID("cursor", cursor) != nil {
		return web.BadCursor()
	}
	list, err := s.Threads.List(r.Context(), r.Key.Org, "", cursor, limit+1)
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
	return web.WriteValue(w, http.StatusOK, answer)
}

// threadID returns the id in the path. An id of the wrong form does not exist.
func threadID(r *web.Request) (string, error) {
	id := chi.URLParam(r.Request, "id")
	if proto.CheckThreadID("id", id) != nil {
		return "", web.ThreadError("look up", id, proto.ErrNotFound)
	}
	return id, nil
}

// versionError is web.ThreadError for an operation on a version, 0 for the newest.
func versionError(operation, id string, version int64, err error) error {
	if errors.Is(err, proto.ErrNotFound) && version > 0 {
		return api.Errorf(api.CodeNotFound, "there is no such thread, or it does not have that version; see /v1/threads/{id}")
	}
	return web.ThreadError(operation, id, err)
}

func (s *Server) getThread(w http.ResponseWriter, r *web.Request) error {
	id, err := threadID(r)
	if err != nil {
		return err
	}
	t, err := s.Threads.Get(r.Context(), r.Key.Org, id)
	if err != nil {
		return web.ThreadError("look up", id, err)
	}
	return web.WriteValue(w, http.StatusOK, api.NewWholeThread(t))
}

func (s *Server) deleteThread(w http.ResponseWriter, r *web.Request) error {
	id, err := threadID(r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), web.VersionsTimeout)
	defer cancel()
	if err := s.Versions.Remove(ctx, r.Key.Org, id); err != nil {
		return web.ThreadError("remove", id, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) forkThread(w http.ResponseWriter, r *web.Request) error {
	id, err := threadID(r)
	if err != nil {
		return err
	}
	fork, err := web.DecodeBody[api.ForkRequest](&s.Core, w, r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), web.VersionsTimeout)
	defer cancel()
	if err := s.Admission.CheckQuota(ctx, r.Key.Org, proto.QuotaStored); err != nil {
		return err
	}
	t, err := s.Versions.Fork(ctx, r.Key.Org, id, fork.Version, fork.ID)
	if errors.Is(err, proto.ErrExists) {
		return api.Errorf(api.CodeConflict, "there is a thread of that id already; choose another, or remove that one first")
	}
	if err != nil {
		return versionError("fork", id, fork.Version, err)
	}
	w.Header().Set("Location", "/v1/threads/"+t.ID)
	return web.WriteValue(w, http.StatusCreated, api.NewWholeThread(t))
}

func (s *Server) archiveThread(w http.ResponseWriter, r *web.Request) error {
	id, err := threadID(r)
	if err != nil {
		return err
	}
	version, err := web.QueryInt(r, "version", 1, api.MaxWhole, 0)
	if err != nil {
		return err
	}
	dir, err := proto.CleanFilePath(s.Home, r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	org := r.Key.Org
	done, err := s.Transfers.Begin(r.Context(), org)
	if err != nil {
		return err
	}
	defer done()
	if err := s.Versions.Archive(r.Context(), org, id, version, dir, web.TarAnswer(w, r, id)); err != nil {
		if missing, ok := errors.AsType[*proto.NoFileError](err); ok {
			return api.Errorf(api.CodeNotFound, "%s", missing)
		}
		return versionError("archive", id, version, err)
	}
	return nil
}

// unpackThread unpacks a tar into a thread while it arrives.
func (s *Server) unpackThread(w http.ResponseWriter, r *web.Request) error {
	version, dir, err := s.unpack(w, r)
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
		return err
	}
	return web.WriteValue(w, http.StatusOK, api.ChangedFile{Path: dir, Version: version})
}

func (s *Server) unpack(w http.ResponseWriter, r *web.Request) (version int64, dir string, err error) {
	id := chi.URLParam(r.Request, "id")
	if err := proto.CheckThreadID("id", id); err != nil {
		return 0, "", err // unlike with other operations, the thread need not exist
	}
	key := r.Key
	if dir, err = proto.CleanFilePath(s.Home, r.URL.Query().Get("path")); err != nil {
		return 0, "", err
	}
	if err := s.Admission.CheckQuota(r.Context(), key.Org, proto.QuotaStored); err != nil {
		return 0, "", err
	}
	most, err := s.opener.HomeLimit(r.Context(), &key)
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
	done, err := s.opener.BeginUpload(r.Context(), key.Org, most.Bytes)
	if err != nil {
		return 0, "", err
	}
	defer done()
	long := r.LongBody(r.Body, 0)
	defer long.ClearDeadline()
	turn := s.TurnBody(r.Context(), key.Org)
	defer turn.End()
	body, end, err := web.Decompressed(w, r, turn.Encoded(long))
	if err != nil {
		return 0, "", err
	}
	defer end()
	version, err = s.Versions.Unpack(r.Context(), key.Org, id, dir, s.opener.Tar(r.Info, turn.Plain(body), most))
	if err != nil {
		return 0, "", fmt.Errorf("unpack a tar into thread %s: %w", id, err)
	}
	return version, dir, nil
}

func (s *Server) collectThreads(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeOptionalBody[api.CollectRequest](&s.Core, w, r)
	if err != nil {
		return err
	}
	removed, err := s.ThreadAdmin.Collect(r.Context(), time.Duration(req.SafeAge))
	if err != nil {
		return fmt.Errorf("collect blobs of threads: %w", err)
	}
	web.AuditAfter(r, "", "", removed)
	return web.WriteValue(w, http.StatusOK, removed)
}

func (s *Server) rebuildThreads(w http.ResponseWriter, r *web.Request) error {
	rebuilt, err := s.ThreadAdmin.Rebuild(r.Context())
	if err != nil {
		return fmt.Errorf("rebuild threads: %w", err)
	}
	web.AuditAfter(r, "", "", rebuilt)
	return web.WriteValue(w, http.StatusOK, rebuilt)
}
