package agents

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Threads reads the threads of organisations.
type Threads interface {
	// Get returns a thread, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
	// ListUsed returns up to limit threads with an id prefix that were used since a time, ordered
	// by id.
	ListUsed(ctx context.Context, org, prefix string, since time.Time, limit int) ([]proto.ThreadSummary, error)
}

// Versions changes and removes the stored versions of threads.
type Versions interface {
	// Unpack unpacks a tar below a directory in a new version, and returns its number. It creates the
	// thread and the directory if they do not exist.
	Unpack(ctx context.Context, org, thread, path string, tar *proto.TarUpload) (version int64, err error)
	// Remove removes a thread with its versions and staged files. It returns [proto.ErrNotFound] if
	// there is none, and a [*proto.BusyError] while an execution holds it.
	Remove(ctx context.Context, org, thread string) error
}

// Homes reads and stages files in the homes of threads.
type Homes interface {
	// List calls each for the entries of a directory of a version, or for everything below it if
	// recursive is true; version 0 is the newest with the staged files. It stops if each returns an
	// error. An unknown thread has no entries. List returns [proto.ErrNotFound] if the path does not
	// name a directory.
	List(
		ctx context.Context, org, thread string, version int64, path string, recursive bool, each func(proto.File) error,
	) error
	// StageIfUnchanged stores size bytes of body as a file if the file still has a tag, or does not
	// exist for an empty tag. Otherwise it returns a [*proto.FileChangedError].
	StageIfUnchanged(ctx context.Context, org, thread, path, tag string, size int64, most proto.Space,
		body io.Reader) error
}

// ownThread returns the id of the thread behind an agent's name: a container's, or a file's. No
// name leads to a user's thread.
func ownThread(name string) string {
	if proto.ThreadOwned(name) {
		return name
	}
	return proto.OwnerContainer.Thread(name)
}

// Thread returns the thread of a container. Its ID is that of the container.
func (a *Agent) Thread(ctx context.Context, id string) (*proto.Thread, error) {
	if proto.CheckThreadID("id", id) != nil {
		return nil, a.public(web.ThreadError("look up", id, proto.ErrNotFound))
	}
	t, err := a.m.Threads.Get(ctx, a.org(), ownThread(id))
	if err != nil {
		return nil, a.public(web.ThreadError("look up", id, err))
	}
	named := *t
	named.ID = id
	used, err := a.m.Interpreters.LastUse(ctx, a.org(), ownThread(id))
	if err != nil {
		return nil, a.public(err)
	}
	if used.After(named.UsedAt) {
		named.UsedAt = used
	}
	return &named, nil
}

// maxUsedThreads is the number of threads that an agent can list.
const maxUsedThreads = 2000

// UsedThreads returns the containers' threads with an id prefix that were used since a time,
// ordered by id. It returns an error if there are too many.
func (a *Agent) UsedThreads(ctx context.Context, prefix string, since time.Time) ([]proto.ThreadSummary, error) {
	list, err := a.m.Threads.ListUsed(ctx, a.org(), ownThread(prefix), since, maxUsedThreads+1)
	for i := range list {
		list[i].ID, _ = proto.OwnerContainer.NameOf(list[i].ID)
	}
	switch {
	case err != nil:
		err = fmt.Errorf("list threads: %w", err)
	case len(list) > maxUsedThreads:
		err = api.Errorf(api.CodeValidation, "more than %d are in use, which is more than this server lists", maxUsedThreads)
	}
	return list, a.public(err)
}

// emptyTar is a tar without entries.
var emptyTar [1024]byte

// CreateThread creates the thread of a container. A thread exists only once its home has had
// content, so the home gets a hidden, empty directory.
func (a *Agent) CreateThread(ctx context.Context, id string) error {
	return a.public(a.createThread(ctx, id))
}

func (a *Agent) createThread(ctx context.Context, id string) error {
	m, i := a.m, a.i
	if err := m.Keys.CheckQuota(ctx, i.Key.Org, proto.QuotaStored); err != nil {
		return err
	}
	most, err := m.Opener.HomeLimit(ctx, &i.Key)
	if err != nil {
		return err
	}
	_, err = m.Versions.Unpack(ctx, i.Key.Org, ownThread(id), ".outputs",
		m.Opener.Tar(i, bytes.NewReader(emptyTar[:]), most))
	if err != nil {
		return fmt.Errorf("create thread %s: %w", id, err)
	}
	return nil
}

// RemoveThread removes the thread of a container with its files. The code of its error is
// [api.CodeNotFound] if there is none, and [api.CodeConflict] while an execution uses it.
func (a *Agent) RemoveThread(ctx context.Context, id string) error {
	if err := a.m.Interpreters.Stop(ctx, a.org(), a.i.Key.ID, ownThread(id)); err != nil {
		return a.public(err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), web.VersionsTimeout)
	defer cancel()
	if err := a.m.Versions.Remove(ctx, a.org(), ownThread(id)); err != nil {
		return a.public(web.ThreadError("remove", id, err))
	}
	return nil
}

// live returns the files of a container while its sandbox runs; nil for those of the last version.
func (a *Agent) live(ctx context.Context, thread string) (*sandboxes.Home, error) {
	id := ownThread(thread)
	if _, ok := proto.OwnerContainer.NameOf(id); !ok {
		return nil, nil
	}
	return a.m.Interpreters.Home(ctx, a.org(), id)
}

// changeLive calls change with the files of a container while its sandbox runs, and saves them. done is false if it
// does not run.
func (a *Agent) changeLive(
	ctx context.Context, thread string, change func(*sandboxes.Home) error,
) (done bool, err error) {
	home, err := a.live(ctx, thread)
	if home == nil || err != nil {
		return err != nil, a.public(err)
	}
	if err := a.m.Keys.CheckQuota(ctx, a.org(), proto.QuotaStored); err != nil {
		return true, a.public(err)
	}
	if err := change(home); err != nil {
		return true, err
	}
	if why := a.m.Interpreters.Save(ctx, a.org(), ownThread(thread)); why != "" {
		return true, a.public(api.Errorf(api.CodeConflict, "%s", why))
	}
	return true, nil
}

// ListFiles calls each for the entries of a directory of a thread's home. An unknown thread has
// none.
func (a *Agent) ListFiles(ctx context.Context, thread, dir string, each func(proto.File) error) error {
	home, err := a.live(ctx, thread)
	if err != nil {
		return a.public(err)
	}
	var ours error
	every := func(f proto.File) error {
		ours = each(f)
		return ours
	}
	if home != nil {
		err = home.List(ctx, dir, every)
	} else {
		err = a.m.Homes.List(ctx, a.org(), ownThread(thread), 0, dir, false, every)
	}
	if ours != nil {
		return ours
	}
	known, isKnown := errors.AsType[*api.Error](err)
	if err != nil && !errors.Is(err, proto.ErrNotFound) && (!isKnown || known.Code != api.CodeNotFound) {
		return a.public(fmt.Errorf("list files of thread %s: %w", thread, err))
	}
	return nil
}

// OpenFile opens a file in a thread's home. A reader of its content is a transfer until it is closed.
func (a *Agent) OpenFile(ctx context.Context, thread, name string) (*proto.FileContent, error) {
	if home, err := a.live(ctx, thread); home != nil || err != nil {
		if err != nil {
			return nil, a.public(err)
		}
		content, err := home.Open(ctx, name)
		return content, a.public(err)
	}
	key := a.i.Key
	files, err := a.m.Opener.Open(ctx, &key, proto.SourceThread, ownThread(thread))
	if err != nil {
		return nil, a.public(err)
	}
	defer files.Close()
	content, err := files.Open(ctx, name)
	if err != nil {
		return nil, a.public(err)
	}
	read := content.Read
	content.Read = func(ctx context.Context, offset, length int64) (io.ReadCloser, error) {
		end, err := files.Begin(ctx)
		if err != nil {
			return nil, a.public(err)
		}
		body, err := read(ctx, offset, length)
		if err != nil {
			end()
			return nil, err
		}
		return &transferBody{body, sync.OnceFunc(end)}, nil
	}
	return content, nil
}

// transferBody is a reader that holds a transfer until it is closed.
type transferBody struct {
	io.ReadCloser
	end func()
}

// Close implements [io.Closer].
func (b *transferBody) Close() error {
	defer b.end()
	return b.ReadCloser.Close()
}

// PutFile stores a file in a thread's home, and creates the thread if it does not exist. An open
// file is copied within its reader's transfer: copies that each waited for a second transfer would
// deadlock.
func (a *Agent) PutFile(ctx context.Context, thread, name string, size int64, body io.Reader) error {
	done, err := a.changeLive(ctx, thread, func(home *sandboxes.Home) error {
		return a.public(home.Put(ctx, name, size, body))
	})
	if done {
		return err
	}
	_, held := body.(*transferBody)
	return a.public(a.upload(ctx, thread, size, held, func(files *filestore.Store) error {
		return files.Put(ctx, name, size, body)
	}))
}

// ReplaceFile is PutFile if the file still has the tag returned by OpenFile, or does not exist for
// an empty tag. Otherwise the error is a [*proto.FileChangedError].
func (a *Agent) ReplaceFile(ctx context.Context, thread, name, tag string, size int64, body io.Reader) error {
	a.i.Calls.Store(true)
	if done, err := a.changeLive(ctx, thread, func(home *sandboxes.Home) error {
		return a.replaceLive(ctx, home, name, tag, size, body)
	}); done {
		return err
	}
	err := a.upload(ctx, thread, size, false, func(files *filestore.Store) error {
		most, err := a.m.Opener.HomeLimit(ctx, &a.i.Key)
		if err != nil {
			return err
		}
		return files.Wrap("replace a file of",
			a.m.Homes.StageIfUnchanged(ctx, files.Org, ownThread(thread), name, tag, size, most, body))
	})
	if changed, ok := errors.AsType[*proto.FileChangedError](err); ok {
		return changed
	}
	return a.public(err)
}

// replaceLive replaces a file of a running sandbox, as [Agent.ReplaceFile] does.
func (a *Agent) replaceLive(
	ctx context.Context, home *sandboxes.Home, name, tag string, size int64, body io.Reader,
) error {
	current := ""
	content, err := home.Open(ctx, name)
	known, isKnown := errors.AsType[*api.Error](err)
	switch {
	case err == nil:
		current = content.Tag
	case !isKnown || known.Code != api.CodeNotFound:
		return a.public(err)
	}
	if current != tag {
		return &proto.FileChangedError{}
	}
	return a.public(home.Put(ctx, name, size, body))
}

// upload calls put with the files of a thread during a transfer. With held, the caller has begun one.
func (a *Agent) upload(
	ctx context.Context, thread string, size int64, held bool, put func(*filestore.Store) error,
) error {
	key := a.i.Key
	if err := a.m.Keys.CheckQuota(ctx, key.Org, proto.QuotaStored); err != nil {
		return err
	}
	files, err := a.m.Opener.Open(ctx, &key, proto.SourceThread, ownThread(thread))
	if err != nil {
		return err
	}
	defer files.Close()
	files.Held = held
	done, err := files.BeginUpload(ctx, size)
	if err != nil {
		return err
	}
	defer done()
	return put(files)
}

// DeleteFile deletes a file in a thread's home. The code of its error is [api.CodeNotFound] if
// there is none.
func (a *Agent) DeleteFile(ctx context.Context, thread, name string) error {
	if done, err := a.changeLive(ctx, thread, func(home *sandboxes.Home) error {
		return a.public(home.Delete(ctx, name, false))
	}); done {
		return err
	}
	return a.public(a.deleteFile(ctx, thread, name))
}

func (a *Agent) deleteFile(ctx context.Context, thread, name string) error {
	key := a.i.Key
	files, err := a.m.Opener.Open(ctx, &key, proto.SourceThread, ownThread(thread))
	if err != nil {
		return err
	}
	defer files.Close()
	end, err := files.Begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), web.VersionsTimeout)
	defer cancel()
	_, err = files.Remove(ctx, name, false)
	return err
}

// CleanPath returns a path relative to the home. Unlike elsewhere, an absolute path outside of the
// home is an error: a program would not find the file there.
func (a *Agent) CleanPath(name string) (string, error) { return CleanPath(a.m.Opener.Home, name) }

// CleanPath is [Agent.CleanPath] for a home at another path.
func CleanPath(home, name string) (string, error) {
	clean := path.Clean(name)
	if path.IsAbs(name) && clean != home && !strings.HasPrefix(clean, home+"/") {
		return "", fmt.Errorf("only files in the home directory %s are kept; use a path in it", home)
	}
	return proto.CleanFilePath(home, name)
}
