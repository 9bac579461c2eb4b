package agents

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"

	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// Home gives a request access to the files of a thread. All errors are [*api.Error]. Paths are
// cleaned and relative to the home. Links are not followed.
type Home struct {
	a      *Agent
	thread string
}

// Home returns the files of a thread of the request's organisation. The thread need not exist.
func (a *Agent) Home(thread string) *Home { return &Home{a, thread} }

// HomePath returns the path of homes in sandboxes.
func (a *Agent) HomePath() string { return a.m.Opener.Home }

// CheckCaller returns an error if the request's API key has become invalid since the request began.
func (a *Agent) CheckCaller() error { return a.public(a.m.CheckCaller(a.r)) }

// UntilDrain returns a context that is cancelled when the server begins to shut down.
func (a *Agent) UntilDrain(ctx context.Context) (context.Context, context.CancelFunc) {
	return a.m.UntilDrain(ctx)
}

// ReleaseMemory releases the memory reserved for the body and for reads from the store.
func (a *Agent) ReleaseMemory() {
	a.m.ReleaseReads(a.i)
	a.m.Shrink(a.i, web.RequestCost)
}

// LimitReads returns ctx with limits of its own for reads of the store, for what is not released with the
// request. release releases the memory of what was read.
func (a *Agent) LimitReads(ctx context.Context) (limited context.Context, release func()) {
	return a.m.LimitReads(ctx, &web.Info{RequestID: a.i.RequestID, Key: a.i.Key})
}

// open calls use with the files.
func (h *Home) open(ctx context.Context, use func(*filestore.Store) error) error {
	key := h.a.i.Key
	files, err := h.a.m.Opener.Open(ctx, &key, proto.SourceThread, h.thread)
	if err != nil {
		return h.a.public(err)
	}
	defer files.Close()
	return h.a.public(use(files))
}

// change calls change within a transfer. A change completes even if the client disconnects.
func (h *Home) change(ctx context.Context, change func(context.Context, *filestore.Store) error) error {
	return h.open(ctx, func(files *filestore.Store) error {
		end, err := files.Begin(ctx)
		if err != nil {
			return err
		}
		defer end()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), web.VersionsTimeout)
		defer cancel()
		return change(ctx, files)
	})
}

// List calls each for the entries of a directory. Its error has the code [api.CodeNotFound] if
// there is no such directory. In a thread that does not exist, every directory exists and is empty.
func (h *Home) List(ctx context.Context, dir string, each func(proto.File) error) error {
	var eachErr error
	err := h.a.m.Homes.List(ctx, h.a.org(), h.thread, 0, dir, false, func(f proto.File) error {
		eachErr = each(f)
		return eachErr
	})
	if eachErr != nil {
		return eachErr
	}
	return h.a.public(err)
}

// Open opens a file. Each reader of its content counts as a transfer until it is closed.
func (h *Home) Open(ctx context.Context, name string) (content *proto.FileContent, err error) {
	err = h.open(ctx, func(files *filestore.Store) error {
		if content, err = files.Open(ctx, name); err != nil {
			return err
		}
		read := content.Read
		content.Read = func(ctx context.Context, offset, length int64) (io.ReadCloser, error) {
			end, err := files.Begin(ctx)
			if err != nil {
				return nil, h.a.public(err)
			}
			body, err := read(ctx, offset, length)
			if err != nil {
				end()
				return nil, err
			}
			return &transferBody{body, sync.OnceFunc(end)}, nil
		}
		return nil
	})
	return content, err
}

// PutBody stores the body of the request as a file, and returns its size.
func (h *Home) PutBody(w http.ResponseWriter, name string) (size int64, err error) {
	size, err = h.putBody(w, name)
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
	}
	return size, h.a.public(err)
}

func (h *Home) putBody(w http.ResponseWriter, name string) (size int64, err error) {
	a, r := h.a, h.a.r
	if err := web.RequireIdentity(w, r); err != nil {
		return 0, err
	}
	ctx := r.Context()
	if err := a.m.Keys.CheckQuota(ctx, a.org(), proto.QuotaStored); err != nil {
		return 0, err
	}
	limit, err := a.m.Opener.HomeLimit(ctx, &a.i.Key)
	if err != nil {
		return 0, err
	}
	if size = r.ContentLength; size > limit.Bytes {
		return 0, web.BodyTooLarge(limit.Bytes)
	}
	return size, h.open(ctx, func(files *filestore.Store) error {
		done, err := files.BeginUpload(ctx, max(size, web.SmallOutput))
		if err != nil {
			return err
		}
		defer done()
		long := r.LongBody(r.Body, limit.Bytes)
		defer long.ClearDeadline()
		var body io.Reader = long
		if size < 0 {
			spool, err := a.m.Spool()
			if err != nil {
				return fmt.Errorf("spool an upload: %w", err)
			}
			defer func() { _ = spool.Close() }() // Close removes the file
			if size, err = io.Copy(spool, io.LimitReader(long, limit.Bytes+1)); err != nil {
				return formError(err)
			}
			if size > limit.Bytes {
				return web.BodyTooLarge(limit.Bytes)
			}
			if _, err := spool.Seek(0, io.SeekStart); err != nil {
				return fmt.Errorf("spool an upload: %w", err)
			}
			body = spool
		}
		return files.Put(ctx, name, size, body)
	})
}

// MakeDirectory creates a directory and its parents, unless they exist.
func (h *Home) MakeDirectory(ctx context.Context, dir string) error {
	err := h.a.AllowStored(ctx, false)
	if err == nil {
		err = h.change(ctx, func(ctx context.Context, _ *filestore.Store) error {
			limit, err := h.a.m.Opener.HomeLimit(ctx, &h.a.i.Key)
			if err != nil {
				return err
			}
			_, err = h.a.m.Versions.Unpack(ctx, h.a.org(), h.thread, dir,
				h.a.m.Opener.Tar(h.a.i, bytes.NewReader(emptyTar[:]), limit))
			return err
		})
	}
	return h.a.public(err)
}

// HomeLimit returns the size of the largest home in bytes.
func (a *Agent) HomeLimit() (int64, error) {
	limit, err := a.m.Opener.HomeLimit(a.r.Context(), &a.i.Key)
	return limit.Bytes, a.public(err)
}

// OpenBody calls use with the body of the request, which is decompressed.
func (a *Agent) OpenBody(w http.ResponseWriter, use func(body io.Reader) error) error {
	long := a.r.LongBody(a.r.Body, 0)
	defer long.ClearDeadline()
	turn := a.m.TurnBody(a.r.Context(), a.org())
	defer turn.End()
	body, end, err := web.Decompressed(w, a.r, turn.Encoded(long))
	if err != nil {
		return a.public(err)
	}
	defer end()
	return use(turn.Plain(body))
}

// UnpackBody unpacks the body of the request, a tar, into a directory. It creates the directory if
// necessary. It calls each with the path of every entry as in the tar, relative to the directory.
func (h *Home) UnpackBody(w http.ResponseWriter, dir string, each func(path string)) error {
	err := h.unpackBody(w, dir, each)
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
	}
	return h.a.public(err)
}

func (h *Home) unpackBody(w http.ResponseWriter, dir string, each func(path string)) error {
	a, r := h.a, h.a.r
	if err := a.m.Keys.CheckQuota(r.Context(), a.org(), proto.QuotaStored); err != nil {
		return err
	}
	limit, err := a.m.Opener.HomeLimit(r.Context(), &a.i.Key)
	if err != nil {
		return err
	}
	done, err := a.m.Opener.BeginUpload(r.Context(), a.org(), limit.Bytes)
	if err != nil {
		return err
	}
	defer done()
	return a.OpenBody(w, func(body io.Reader) error {
		upload := a.m.Opener.Tar(a.i, body, limit)
		upload.Entry = each
		_, err := a.m.Versions.Unpack(r.Context(), a.org(), h.thread, dir, upload)
		return err
	})
}

// Delete deletes the file or directory at a path. A directory that is not empty needs recursive.
// Its error has the code [api.CodeNotFound] if there is nothing at the path.
func (h *Home) Delete(ctx context.Context, name string, recursive bool) error {
	return h.change(ctx, func(ctx context.Context, files *filestore.Store) error {
		_, err := files.Remove(ctx, name, recursive)
		return err
	})
}

// Move renames a file or directory. It creates the parents of the new path. Its error has the code
// [api.CodeNotFound] if there is nothing at the old path, and [api.CodeConflict] if the new path
// exists.
func (h *Home) Move(ctx context.Context, from, to string) error {
	return h.change(ctx, func(ctx context.Context, files *filestore.Store) error {
		_, err := files.Rename(ctx, from, to)
		return err
	})
}

// Remove removes the thread with its files, if it exists. Its error has the code [api.CodeConflict]
// while an execution uses the thread.
func (h *Home) Remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), web.VersionsTimeout)
	defer cancel()
	err := h.a.m.Versions.Remove(ctx, h.a.org(), h.thread)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return h.a.public(err)
}
