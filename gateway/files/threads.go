package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Threads reads the threads of organisations. The Holder of a thread is empty if the holding
// execution has ended.
type Threads interface {
	// Get returns a thread, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
	// List returns up to limit threads with ids above after, ordered by id: the users' threads, or
	// those of an owner, whose names are their ids.
	List(ctx context.Context, org string, owner proto.ThreadOwner, after string, limit int) ([]proto.ThreadSummary, error)
}

// Versions reads, forks and removes the stored versions of threads.
type Versions interface {
	// Archive writes a directory of a version as a tar, the home for the empty path; version 0 is the
	// newest with the staged files. Before it writes, it returns [proto.ErrNotFound] if there is no
	// such thread or version, and a [*proto.NoFileError] if that has no such directory.
	Archive(ctx context.Context, org, thread string, version int64, path string, w io.Writer) error
	// Unpack unpacks a tar below a directory in a new version, and returns its number. It creates the
	// thread and the directory if they do not exist. It returns a [*proto.FieldError] for a bad tar, a
	// [*proto.PathError] or a [*proto.SpaceError] if the files exceed tar.Most, and a
	// [*proto.BusyError] if an execution holds the thread at the end.
	Unpack(ctx context.Context, org, thread, path string, tar *proto.TarUpload) (version int64, err error)
	// Fork creates a thread from a version of another; version 0 is the newest with the staged
	// files. It returns [proto.ErrNotFound] if there is no such thread or version, and
	// [proto.ErrExists] if the new id is taken.
	Fork(ctx context.Context, org, from string, version int64, to string) (*proto.Thread, error)
	// Remove removes a thread with its versions and staged files. It returns [proto.ErrNotFound] if
	// there is none, and a [*proto.BusyError] while an execution holds it.
	Remove(ctx context.Context, org, thread string) error
}

// ThreadAdmin maintains the store of threads of all organisations.
type ThreadAdmin interface {
	// Collect removes unreferenced blobs older than safeAge, which is at least [proto.MinSafeAge].
	Collect(ctx context.Context, safeAge time.Duration) (proto.Collected, error)
	// Rebuild rebuilds the heads of threads from the store.
	Rebuild(ctx context.Context) (proto.Rebuilt, error)
}

// ThreadRoutes are the routes of threads.
type ThreadRoutes struct {
	*filestore.Opener
	Threads  Threads
	Versions Versions
	Admin    ThreadAdmin
	Quotas   Quotas
}

// Handlers returns the handlers of the routes.
func (s *ThreadRoutes) Handlers() []web.Handler {
	return []web.Handler{
		{ID: "listThreads", Handle: s.list},
		{ID: "getThread", Handle: s.get},
		{ID: "deleteThread", Handle: s.remove},
		{ID: "forkThread", Handle: s.fork},
		{ID: "archiveThread", Handle: s.archive},
		{ID: "unpackThread", Handle: web.CloseOnError(s.unpack)},
		{ID: "collectThreads", Handle: s.collect},
		{ID: "rebuildThreads", Handle: s.rebuild},
	}
}

func (s *ThreadRoutes) list(w http.ResponseWriter, r *web.Request) error {
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

func (s *ThreadRoutes) get(w http.ResponseWriter, r *web.Request) error {
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

func (s *ThreadRoutes) remove(w http.ResponseWriter, r *web.Request) error {
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

func (s *ThreadRoutes) fork(w http.ResponseWriter, r *web.Request) error {
	id, err := threadID(r)
	if err != nil {
		return err
	}
	fork, err := web.DecodeBody[api.ForkRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), web.VersionsTimeout)
	defer cancel()
	if err := s.Quotas.CheckQuota(ctx, r.Key.Org, proto.QuotaStored); err != nil {
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

func (s *ThreadRoutes) archive(w http.ResponseWriter, r *web.Request) error {
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

// unpack unpacks a tar into a thread while it arrives.
func (s *ThreadRoutes) unpack(w http.ResponseWriter, r *web.Request) error {
	id := chi.URLParam(r.Request, "id")
	if err := proto.CheckThreadID("id", id); err != nil {
		return err // unlike with other operations, the thread need not exist
	}
	key := r.Key
	dir, err := proto.CleanFilePath(s.Home, r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	if err := s.Quotas.CheckQuota(r.Context(), key.Org, proto.QuotaStored); err != nil {
		return err
	}
	most, err := s.HomeLimit(r.Context(), &key)
	if err != nil {
		return err
	}
	// Unpack checks this again, but the client should know before it sends everything.
	head, err := s.Threads.Get(r.Context(), key.Org, id)
	switch {
	case err == nil && head.Holder != "":
		return &proto.BusyError{Thread: id, Holder: head.Holder}
	case err != nil && !errors.Is(err, proto.ErrNotFound):
		return fmt.Errorf("look up thread %s: %w", id, err)
	}
	done, err := s.BeginUpload(r.Context(), key.Org, most.Bytes)
	if err != nil {
		return err
	}
	defer done()
	long := r.LongBody(r.Body, 0)
	defer long.ClearDeadline()
	turn := s.TurnBody(r.Context(), key.Org)
	defer turn.End()
	body, end, err := web.Decompressed(w, r, turn.Encoded(long))
	if err != nil {
		return err
	}
	defer end()
	version, err := s.Versions.Unpack(r.Context(), key.Org, id, dir, s.Tar(r.Info, turn.Plain(body), most))
	if err != nil {
		return fmt.Errorf("unpack a tar into thread %s: %w", id, err)
	}
	return web.WriteValue(w, http.StatusOK, api.ChangedFile{Path: dir, Version: version})
}

func (s *ThreadRoutes) collect(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeOptionalBody[api.CollectRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	removed, err := s.Admin.Collect(r.Context(), time.Duration(req.SafeAge))
	if err != nil {
		return fmt.Errorf("collect blobs of threads: %w", err)
	}
	web.AuditAfter(r, "", "", removed)
	return web.WriteValue(w, http.StatusOK, removed)
}

func (s *ThreadRoutes) rebuild(w http.ResponseWriter, r *web.Request) error {
	rebuilt, err := s.Admin.Rebuild(r.Context())
	if err != nil {
		return fmt.Errorf("rebuild threads: %w", err)
	}
	web.AuditAfter(r, "", "", rebuilt)
	return web.WriteValue(w, http.StatusOK, rebuilt)
}
