package agents

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/gateway/executions"
	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Files stores the files of organisations' agents, without their content.
type Files interface {
	// Put stores a file, new or in place of the one of its id. It returns a [*proto.QuotaError] if the
	// organisation has too many.
	Put(ctx context.Context, f proto.AgentFile) error
	// Get returns a file, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (proto.AgentFile, error)
	// List returns the files of an organisation, the newest first.
	List(org string) []proto.AgentFile
	// Remove removes a file, or returns [proto.ErrNotFound].
	Remove(ctx context.Context, org, id string) error
}

// Keys knows what API keys may do.
type Keys interface {
	// ValidKey returns the API key under which work goes on without a request, and what it may do.
	ValidKey(ctx context.Context, id string) (*proto.Key, proto.Entitlement, error)
	// CheckMode rejects a mode that the plan does not include.
	CheckMode(ctx context.Context, e *proto.Entitlement, mode proto.Mode) error
	// CheckQuota rejects what would use more if the organisation has reached a hard limit of its month:
	// of the quotas named, or of all if none are.
	CheckQuota(ctx context.Context, org string, quotas ...proto.QuotaName) error
	// ProfileOf returns the sandbox profile that a key is bound to.
	ProfileOf(ctx context.Context, key *proto.Key) (proto.Profile, error)
}

// Threads reads the threads of organisations.
type Threads interface {
	// Get returns a thread, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
	// ListUsed returns up to limit threads whose ids have a prefix and that were used since a time, in
	// the order of their ids.
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
	// List calls each for the entries of a directory, or for everything below it if recursive is
	// true. It stops at an error of each. An unknown thread has no entries. List returns
	// [proto.ErrNotFound] if the path does not name a directory.
	List(ctx context.Context, org, thread, path string, recursive bool, each func(proto.File) error) error
	// StageIfUnchanged stores size bytes of body as a file, on the condition that the file has a tag, or
	// with an empty tag that there is no file. Otherwise it returns a [*proto.FileChangedError].
	StageIfUnchanged(ctx context.Context, org, thread, path, tag string, size int64, most proto.Space,
		body io.Reader) error
}

// Maker makes the agents of requests and of runs in the background.
type Maker struct {
	*executions.Runner
	Opener   *filestore.Opener
	Keys     Keys
	Threads  Threads
	Versions Versions
	Homes    Homes
	Files    Files
	Batches  Batches // of requests to agents
	Uploads  Uploads
	// Spool returns an empty file, which is removed when it is closed.
	Spool func() (*os.File, error)
}

// Agent carries out what an agent needs for one request of a surface, or for a run in the background,
// with the rights and limits of an API key. All errors are [*api.Error]; those of this server are
// logged with the request.
type Agent struct {
	m *Maker
	i *web.Info
	r *web.Request // nil in the background
	// resumed is set in the background if an execution may have been submitted by another process.
	resumed bool
	// end ends a run in the background, with an error for its client.
	end      context.CancelCauseFunc
	watching sync.WaitGroup // of the key of a run in the background
}

// ForRequest returns the agent of a request of a [web.Surface].
func (m *Maker) ForRequest(r *http.Request) *Agent {
	request := web.RequestOf(r)
	return &Agent{m: m, i: request.Info, r: request}
}

// checkKeyEvery is how often the API key of a run in the background is looked up.
const checkKeyEvery = time.Second

// InBackground returns the agent of a run in the background. Until Begin it can only reserve memory.
// Release must be called at the end.
func (m *Maker) InBackground(org, id string) *Agent {
	return &Agent{m: m, i: &web.Info{RequestID: id, Key: proto.Key{Org: org}}, end: func(error) {}}
}

// Begin returns the context for the use of the agent of a run in the background. It is done, with the error
// for the client as its cause, when the API key may not run programs any more. resumed is set if the run
// has begun before.
func (a *Agent) Begin(ctx context.Context, run *proto.AgentRun, resumed bool) (context.Context, error) {
	key, plan, err := a.m.Keys.ValidKey(ctx, run.Key)
	if err != nil {
		return nil, a.public(err)
	}
	a.i.Key, a.i.Plan, a.resumed = *key, plan, resumed
	ctx, a.end = context.WithCancelCause(ctx)
	a.watching.Go(func() {
		tick := time.NewTicker(checkKeyEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				_, _, _ = a.validKey(ctx)
			}
		}
	})
	return ctx, nil
}

// Release ends the use of the agent of a run in the background, and releases its memory.
func (a *Agent) Release() {
	a.end(nil)
	a.watching.Wait()
	a.m.Shrink(a.i, 0)
}

// validKey returns the API key of a run in the background as it is now. It ends the run if that may not
// run programs any more.
func (a *Agent) validKey(ctx context.Context) (*proto.Key, proto.Entitlement, error) {
	key, plan, err := a.m.Keys.ValidKey(ctx, a.i.Key.ID)
	if proto.Final(err) {
		a.end(api.NewError(err))
	}
	return key, plan, err
}

// over reports whether the run of a context has ended, and not only its process.
func over(ctx context.Context) bool {
	_, ended := errors.AsType[*api.Error](context.Cause(ctx))
	return ended || errors.Is(context.Cause(ctx), proto.ErrRunCancelled)
}

func (a *Agent) org() string { return a.i.Key.Org }

// Caller returns the organisation and the id of the API key.
func (a *Agent) Caller() (org, key string) { return a.i.Key.Org, a.i.Key.ID }

// public returns the error for the client, and keeps err for the log.
func (a *Agent) public(err error) error {
	if err == nil {
		return nil
	}
	a.i.Err, a.i.Reported = err, true
	known := api.NewError(err)
	if _, busy := errors.AsType[*proto.BusyError](err); busy { // in the words of those who know containers alone
		known = api.Errorf(api.CodeConflict,
			"the container is in use by another request; try again when that has ended, or use another container")
	}
	if a.r == nil && known.Code == api.CodeInternal && !errors.Is(err, context.Canceled) {
		a.m.Log.Warn("agent call failed", "run", a.i.RequestID, "org", a.org(), "error", err)
	}
	return known
}

// AllowStored refuses a run that is to be stored if there is no room for it, and one that is to go on in
// the background if the plan has no asynchronous executions.
func (a *Agent) AllowStored(ctx context.Context, background bool) error {
	if err := a.m.CheckDisk(); err != nil {
		return err
	}
	if background {
		if err := a.m.Keys.CheckMode(ctx, &a.i.Plan, proto.ModeAsync); err != nil {
			return a.public(err)
		}
	}
	return a.public(a.m.Keys.CheckQuota(ctx, a.org(), proto.QuotaStored))
}

// RequestID returns the id of the request.
func (a *Agent) RequestID() string { return a.i.RequestID }

// ReadBody reads the body of the request and calls decode with it. Large bodies of one organisation
// are decoded one after another.
func (a *Agent) ReadBody(w http.ResponseWriter, decode func(body []byte) error) error {
	var malformed error
	err := a.m.WithBody(w, a.r, func(body []byte) error {
		if err := a.m.ReserveMessage(a.i, body); err != nil {
			return err
		}
		malformed = decode(body)
		return nil
	})
	if err != nil {
		return a.public(err)
	}
	return malformed
}

// Reserve reserves the memory for n bytes of text that the request keeps until its end.
func (a *Agent) Reserve(n int64) error {
	if !a.m.ReserveText(a.i, n) {
		return a.public(web.ErrOverloaded)
	}
	return nil
}

// ownThread returns the id of the thread that an agent calls by a name: that of a container, or the id
// of a file's thread. No name leads to a thread of a user.
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
	return &named, nil
}

// maxUsedThreads is the number of threads that an agent can list.
const maxUsedThreads = 2000

// UsedThreads returns the threads of containers whose ids have a prefix and that were used since a
// time, in the order of these ids. It returns an error if they are too many.
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

// Profile returns the sandbox profile of the API key.
func (a *Agent) Profile(ctx context.Context) (proto.Profile, error) {
	profile, err := a.m.Keys.ProfileOf(ctx, &a.i.Key)
	return profile, a.public(err)
}

// emptyTar is a tar without entries.
var emptyTar [1024]byte

// CreateThread creates the thread of a container. A thread whose home has never had anything does not exist, so the
// home has a hidden, empty directory.
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

// RemoveThread removes the thread of a container with its files. The code of its error is [api.CodeNotFound] if there
// is none, and [api.CodeConflict] while an execution uses it.
func (a *Agent) RemoveThread(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), web.VersionsTimeout)
	defer cancel()
	if err := a.m.Versions.Remove(ctx, a.org(), ownThread(id)); err != nil {
		return a.public(web.ThreadError("remove", id, err))
	}
	return nil
}

// ListFiles calls each for the entries of a directory of a thread's home, of which there are none if
// it does not exist.
func (a *Agent) ListFiles(ctx context.Context, thread, dir string, each func(proto.File) error) error {
	var ours error
	err := a.m.Homes.List(ctx, a.org(), ownThread(thread), dir, false, func(f proto.File) error {
		ours = each(f)
		return ours
	})
	if ours != nil {
		return ours
	}
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		return a.public(fmt.Errorf("list files of thread %s: %w", thread, err))
	}
	return nil
}

// OpenFile opens a file in a thread's home. A reader of its content is a transfer until it is closed.
func (a *Agent) OpenFile(ctx context.Context, thread, name string) (*proto.FileContent, error) {
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

// PutFile stores a file in a thread's home, and creates the thread if it does not exist. The content
// of a file that is open is copied in the transfer of its reader: copies would block each other if
// each waited for a second one.
func (a *Agent) PutFile(ctx context.Context, thread, name string, size int64, body io.Reader) error {
	_, held := body.(*transferBody)
	return a.public(a.upload(ctx, thread, size, held, func(files *filestore.Store) error {
		return files.Put(ctx, name, size, body)
	}))
}

// ReplaceFile is PutFile on the condition that the file has a tag, as OpenFile returns it, or with an
// empty tag that there is no file. Otherwise the error is a [*proto.FileChangedError].
func (a *Agent) ReplaceFile(ctx context.Context, thread, name, tag string, size int64, body io.Reader) error {
	a.i.Calls.Store(true)
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

// DeleteFile deletes a file in a thread's home. The code of its error is [api.CodeNotFound] if there
// is none.
func (a *Agent) DeleteFile(ctx context.Context, thread, name string) error {
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
func (a *Agent) CleanPath(name string) (string, error) {
	home, clean := a.m.Opener.Home, path.Clean(name)
	if path.IsAbs(name) && clean != home && !strings.HasPrefix(clean, home+"/") {
		return "", fmt.Errorf("only files in the home directory %s are kept; use a path in it", home)
	}
	return proto.CleanFilePath(home, name)
}

// SaveFile stores a file of the organisation, with its content.
func (a *Agent) SaveFile(ctx context.Context, f *proto.AgentFile, body io.Reader) error {
	f.Org = a.org()
	if err := a.removeExpired(ctx); err != nil {
		return a.public(err)
	}
	if err := a.PutFile(ctx, f.Thread(), proto.AgentFileContent, f.Bytes, body); err != nil {
		return err
	}
	err := a.m.Files.Put(ctx, *f)
	if quota, full := errors.AsType[*proto.QuotaError](err); full { // there was none of its id
		cleanup, cancel := web.Detached(ctx)
		defer cancel()
		err = errors.Join(quota, a.m.Versions.Remove(cleanup, f.Org, f.Thread()))
	}
	return a.public(err)
}

// KeepFiles makes the files of a container expire at a time, if they would much earlier.
func (a *Agent) KeepFiles(ctx context.Context, container string, until time.Time) error {
	const much = 24 * time.Hour
	for _, f := range a.m.Files.List(a.org()) {
		if f.Container != container || f.ExpiresAt == nil || until.Sub(*f.ExpiresAt) < much || f.Expired(time.Now()) {
			continue
		}
		f.ExpiresAt = &until
		if err := a.m.Files.Put(ctx, f); err != nil {
			return a.public(fmt.Errorf("keep file %s: %w", f.ID, err))
		}
	}
	return nil
}

// File returns a file of the organisation.
func (a *Agent) File(ctx context.Context, id string) (*proto.AgentFile, error) {
	f, err := a.file(ctx, id)
	return f, a.public(err)
}

func (a *Agent) file(ctx context.Context, id string) (*proto.AgentFile, error) {
	if !proto.ValidAgentFileID(id) {
		return nil, errNoFile
	}
	f, err := a.m.Files.Get(ctx, a.org(), id)
	if errors.Is(err, proto.ErrNotFound) || err == nil && f.Expired(time.Now()) {
		return nil, errNoFile
	}
	if err != nil {
		return nil, fmt.Errorf("look up file %s: %w", id, err)
	}
	return &f, nil
}

var errNoFile = api.Errorf(api.CodeNotFound, "there is no file of that id, or it has expired")

// Files returns the files of the organisation that have not expired, the newest first.
func (a *Agent) Files() []proto.AgentFile {
	var list []proto.AgentFile
	for _, f := range a.m.Files.List(a.org()) {
		if !f.Expired(time.Now()) {
			list = append(list, f)
		}
	}
	return list
}

// RemoveFile removes a file of the organisation.
func (a *Agent) RemoveFile(ctx context.Context, id string) error {
	f, err := a.file(ctx, id)
	if err == nil {
		err = a.removeFile(ctx, f)
	}
	return a.public(err)
}

// removeExpired removes a few expired files of the organisation. A call for each new file keeps
// their number from growing.
func (a *Agent) removeExpired(ctx context.Context) error {
	const most = 3
	removed := 0
	for _, f := range a.m.Files.List(a.org()) {
		if !f.Expired(time.Now()) {
			continue
		}
		if err := a.removeFile(ctx, &f); err != nil {
			return err
		}
		if removed++; removed == most {
			break
		}
	}
	return nil
}

// removeFile removes the content first: without it, the file can be removed again.
func (a *Agent) removeFile(ctx context.Context, f *proto.AgentFile) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), web.VersionsTimeout)
	defer cancel()
	if err := a.m.Versions.Remove(ctx, f.Org, f.Thread()); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("remove the content of file %s: %w", f.ID, err)
	}
	if err := a.m.Files.Remove(ctx, f.Org, f.ID); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("remove file %s: %w", f.ID, err)
	}
	return nil
}

const (
	maxUploadField  = 4 << 10 // bytes of a part of a form that is no file
	maxUploadFields = 16      // also of one name
)

// ReadUpload reads the form in the body of the request, with a file of at most the size of a home. If instead names a
// field and the form has it, the form needs no file, and the content is empty. The result must be closed.
func (a *Agent) ReadUpload(w http.ResponseWriter, instead string) (*proto.AgentUpload, error) {
	up, err := a.readUpload(w, instead)
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
	}
	return up, a.public(err)
}

func (a *Agent) readUpload(w http.ResponseWriter, instead string) (up *proto.AgentUpload, err error) {
	m, i := a.m, a.i
	if err := web.RequireIdentity(w, a.r); err != nil {
		return nil, err
	}
	if err := m.Keys.CheckQuota(a.r.Context(), i.Key.Org, proto.QuotaStored); err != nil {
		return nil, err
	}
	most, err := m.Opener.HomeLimit(a.r.Context(), &i.Key)
	if err != nil {
		return nil, err
	}
	done, err := m.Opener.BeginUpload(a.r.Context(), i.Key.Org, web.SmallOutput)
	if err != nil {
		return nil, err
	}
	defer done()
	body := a.r.LongBody(a.r.Body, most.Bytes)
	defer body.ClearDeadline()
	a.r.Body = io.NopCloser(body)
	parts, err := a.r.MultipartReader()
	if err != nil {
		return nil, proto.FieldErrorf("body", "must be a form, with Content-Type multipart/form-data and a part named file")
	}
	up = &proto.AgentUpload{Fields: map[string]string{}}
	defer func() {
		if err != nil && up.ReadCloser != nil {
			err = errors.Join(err, up.Close())
		}
	}()
	for fields := 0; ; {
		part, err := parts.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return up, formError(err)
		}
		if part.FormName() != "file" {
			value, err := io.ReadAll(io.LimitReader(part, maxUploadField+1))
			if err != nil {
				return up, formError(err)
			}
			if fields++; len(value) > maxUploadField || fields > maxUploadFields {
				return up, proto.FieldErrorf("body", "has parts that are too long, or too many")
			}
			up.Fields[part.FormName()] = string(value)
			continue
		}
		if up.ReadCloser != nil {
			return up, proto.FieldErrorf("file", "must be given only once")
		}
		spool, err := m.Spool()
		if err != nil {
			return up, fmt.Errorf("spool an upload: %w", err)
		}
		up.ReadCloser, up.Name, up.ContentType = spool, part.FileName(), part.Header.Get("Content-Type")
		if up.Size, err = io.Copy(spool, io.LimitReader(part, most.Bytes+1)); err != nil {
			return up, formError(err)
		}
		if up.Size > most.Bytes {
			return up, web.BodyTooLarge(most.Bytes)
		}
		if _, err := spool.Seek(0, io.SeekStart); err != nil {
			return up, fmt.Errorf("spool an upload: %w", err)
		}
	}
	if up.ReadCloser == nil && up.Fields[instead] != "" {
		up.ReadCloser = http.NoBody
	}
	if up.ReadCloser == nil {
		return up, proto.FieldErrorf("file", "is missing: send the file as a part of this name")
	}
	return up, nil
}

// formError returns the error for a form that was not read to its end.
func formError(err error) error {
	if _, ok := errors.AsType[*api.Error](err); ok {
		return err
	}
	if _, ok := errors.AsType[*os.PathError](err); ok {
		return fmt.Errorf("spool an upload: %w", err)
	}
	return proto.FieldErrorf("body", "is no valid form, or ended before it was complete")
}
