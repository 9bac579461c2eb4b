package gateway

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// threads keeps threads and their files in memory. A thread is free once its holder has ended,
// which it learns from the stub of the jobs.
type threads struct {
	stub   *stub
	mu     sync.Mutex
	heads  map[string]*proto.Thread
	files  map[string][]byte // by organisation, thread and path
	fail   error             // returned by all calls from now on
	broken bool              // contents differ from what was stored
	age    time.Duration     // age of the last collection
	most   proto.Space       // size limit that calls must pass; any if zero
	refuse error             // returned for files
}

func newThreads(q *stub) *threads {
	return &threads{stub: q, heads: map[string]*proto.Thread{}, files: map[string][]byte{}}
}

func key(org, id string) string { return org + "/" + id }

// take returns a thread with its present holder. It creates a missing thread if create is true.
func (s *threads) take(org, id string, create bool) (*proto.Thread, error) {
	if s.fail != nil {
		return nil, s.fail
	}
	t := s.heads[key(org, id)]
	if t == nil && !create {
		return nil, fmt.Errorf("thread: %w", proto.ErrNotFound)
	}
	if t == nil {
		t = &proto.Thread{Org: org, ID: id, CreatedAt: time.Now(), UsedAt: time.Now()}
		s.heads[key(org, id)] = t
	}
	if record, _, err := s.stub.look(org, t.Holder); t.Holder != "" &&
		(err == nil && record.Status.Terminal() || err != nil && time.Since(t.HeldAt) > 30*time.Second) {
		t.Holder = ""
	}
	return t, nil
}

func (s *threads) Lock(_ context.Context, org, thread string, id proto.TraceID) (*proto.Thread, string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, err := s.take(org, thread, true)
	if err != nil {
		return nil, "", err
	}
	if t.Holder != "" && t.Holder != id {
		return nil, "", &proto.BusyError{Thread: thread, Holder: t.Holder}
	}
	t.Holder, t.HeldAt, t.UsedAt = id, time.Now(), time.Now()
	return new(*t), "worker-7", nil
}

func (s *threads) Unlock(_ context.Context, org, thread string, id proto.TraceID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.heads[key(org, thread)]; t != nil && t.Holder == id {
		t.Holder = ""
	}
	return s.fail
}

// holder returns the stored holder of a thread of acme, even if that execution has ended.
func (s *threads) holder(id string) proto.TraceID {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heads[key("acme", id)].Holder
}

func (s *threads) Get(_ context.Context, org, id string) (*proto.Thread, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, err := s.take(org, id, false)
	if err != nil {
		return nil, err
	}
	return new(*t), nil
}

func (s *threads) List(
	_ context.Context, org string, owner proto.ThreadOwner, after string, limit int,
) (list []proto.ThreadSummary, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.heads {
		name, ok := owner.NameOf(t.ID)
		if owner == "" {
			name, ok = t.ID, !proto.ThreadOwned(t.ID)
		}
		if ok && t.Org == org && name > after {
			summary := t.Summary()
			summary.ID = name
			list = append(list, summary)
		}
	}
	slices.SortFunc(list, func(a, b proto.ThreadSummary) int { return strings.Compare(a.ID, b.ID) })
	return list[:min(limit, len(list))], s.fail
}

func (s *threads) ListUsed(
	_ context.Context, org, prefix string, since time.Time, limit int,
) (list []proto.ThreadSummary, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.heads {
		if t.Org == org && strings.HasPrefix(t.ID, prefix) && !t.UsedAt.Before(since) {
			list = append(list, t.Summary())
		}
	}
	slices.SortFunc(list, func(a, b proto.ThreadSummary) int { return strings.Compare(a.ID, b.ID) })
	return list[:min(limit, len(list))], s.fail
}

func (s *threads) ArchiveSelected(ctx context.Context, org, id string, paths []string, w io.Writer) error {
	return s.Archive(ctx, org, id, 0, strings.Join(paths, " "), w)
}

func (s *threads) Remove(_ context.Context, org, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, err := s.take(org, id, false)
	if err != nil {
		return err
	}
	if t.Holder != "" {
		return fmt.Errorf("remove: %w", &proto.BusyError{Thread: id, Holder: t.Holder})
	}
	delete(s.heads, key(org, id))
	return nil
}

func (s *threads) Fork(_ context.Context, org, id string, version int64, to string) (*proto.Thread, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, err := s.take(org, id, false)
	if err != nil {
		return nil, err
	}
	if s.heads[key(org, to)] != nil {
		return nil, proto.ErrExists
	}
	made := &proto.Thread{Org: org, ID: to, CreatedAt: time.Now(), UsedAt: time.Now()}
	for _, v := range append([]proto.Version{*t.Version}, t.History...) {
		if v.Number == cmp.Or(version, t.Number()) {
			v.Number, v.Trace = 1, ""
			made.Version = &v
		}
	}
	if made.Version == nil {
		return nil, proto.ErrNotFound
	}
	s.heads[key(org, to)] = made
	return new(*made), nil
}

func (s *threads) Archive(_ context.Context, org, id string, version int64, dir string, w io.Writer) error {
	s.mu.Lock()
	t, err := s.take(org, id, false)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if version > t.Number() {
		return proto.ErrNotFound
	}
	if dir == "nothing" {
		return fmt.Errorf("archive: %w", &proto.NoFileError{Path: dir, Directory: true})
	}
	out := tar.NewWriter(w)
	body := fmt.Sprintf("version %d%s", cmp.Or(version, t.Number()), dir)
	err = out.WriteHeader(&tar.Header{Name: "a", Size: int64(len(body)), Mode: 0o644})
	if err == nil {
		_, err = io.WriteString(out, body)
	}
	if s.broken {
		err = errors.New("the store is gone")
	}
	if err != nil {
		return err
	}
	return out.Close()
}

// Unpack stores the whole tar as one file.
func (s *threads) Unpack(_ context.Context, org, id, dir string, u *proto.TarUpload) (int64, error) {
	content, err := io.ReadAll(u.Body)
	if err == nil {
		err = u.Proceed(int64(len(content)))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		err = s.refuse
	}
	if err != nil {
		return 0, fmt.Errorf("unpack: %w", err)
	}
	if s.most != (proto.Space{}) && s.most != u.Most || u.Home != "/home/baponi" {
		return 0, fmt.Errorf("space %+v, home %s", u.Most, u.Home)
	}
	s.files[key(key(org, id), dir)] = content
	return 5, nil
}

func (s *threads) Collect(_ context.Context, safeAge time.Duration) (proto.Collected, error) {
	s.age = safeAge
	return proto.Collected{Layers: proto.Swept{Blobs: 2, Bytes: 300}, Uploads: proto.Swept{Blobs: 1, Bytes: 9}}, s.fail
}

func (s *threads) Rebuild(context.Context) (proto.Rebuilt, error) {
	return proto.Rebuilt{Made: 3, Kept: 2, Lost: 1}, s.fail
}

// threadFiles implements Files with threads. It has its own List.
type threadFiles struct{ *threads }

func (s threadFiles) List(
	_ context.Context, org, thread string, version int64, dir string, recursive bool, each func(proto.File) error,
) error {
	thread, err := s.at(org, thread, version)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	names := s.names(org, thread)
	if body, ok := s.files[key(key(org, thread), dir)]; len(names) > 0 && dir != "" && (!ok || body != nil) {
		return fmt.Errorf("list: %w", proto.ErrNotFound)
	}
	for _, name := range names {
		below := dir == "" || strings.HasPrefix(name, dir+"/")
		if level := path.Dir("/"+name) == "/"+dir; !below || !level && !recursive {
			continue
		}
		body := s.files[key(key(org, thread), name)]
		if err := each(proto.File{
			Path: name, Size: int64(len(body)), Modified: time.Unix(1, 0),
			IsDirectory: body == nil,
		}); err != nil {
			return err
		}
	}
	return s.fail
}

// at returns the thread whose files are those of a version of another: its id and @VERSION.
func (s threadFiles) at(org, thread string, version int64) (string, error) {
	if version == 0 {
		return thread, nil
	}
	old := fmt.Sprintf("%s@%d", thread, version)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.names(org, old)) == 0 {
		return "", fmt.Errorf("find: %w", &proto.NoVersionError{Number: version})
	}
	return old, nil
}

// names returns the paths of a thread in order.
func (s threadFiles) names(org, thread string) (names []string) {
	for k := range s.files {
		if name, ok := strings.CutPrefix(k, key(org, thread)+"/"); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func (s threadFiles) Open(
	_ context.Context, org, thread string, version int64, name string,
) (*proto.FileContent, error) {
	thread, err := s.at(org, thread, version)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	body, ok := s.files[key(key(org, thread), name)]
	if !ok || body == nil || s.fail != nil {
		return nil, cmp.Or(s.fail, proto.ErrNotFound)
	}
	return &proto.FileContent{
		File: proto.File{Path: name, Size: int64(len(body)), Modified: time.Unix(1, 0)},
		Tag:  fmt.Sprintf("%d-%.1s", len(body), body),
		Read: func(_ context.Context, offset, length int64) (io.ReadCloser, error) {
			in := io.Reader(bytes.NewReader(body[offset : offset+length]))
			if s.broken {
				in = io.MultiReader(in, brokenReader{}) // the error appears after all content
			}
			return io.NopCloser(in), nil
		},
	}, nil
}

// Compare compares files by their content.
func (s threadFiles) Compare(
	_ context.Context, org, thread string, from, to int64, at string,
) (changes []proto.FileChange, truncated bool, err error) {
	sides := [2]map[string]*proto.FileState{{}, {}}
	contents := [2]map[string][]byte{{}, {}}
	for i, version := range []int64{from, to} {
		if i == 0 && from == 0 {
			continue
		}
		side, err := s.at(org, thread, version)
		if err != nil {
			return nil, false, err
		}
		names := s.names(org, side)
		if len(names) == 0 {
			return nil, false, fmt.Errorf("compare: %w", proto.ErrNotFound)
		}
		for _, name := range names {
			body := s.files[key(key(org, side), name)]
			contents[i][name] = body
			sides[i][name] = &proto.FileState{
				Type: proto.FileRegular, Size: int64(len(body)), Mode: 0o644, Modified: time.Unix(1, 0),
			}
		}
	}
	both := slices.AppendSeq(slices.Collect(maps.Keys(sides[0])), maps.Keys(sides[1]))
	slices.Sort(both)
	for _, name := range slices.Compact(both) {
		if below := at == "" || name == at || strings.HasPrefix(name, at+"/"); !below ||
			sides[0][name] != nil && sides[1][name] != nil && bytes.Equal(contents[0][name], contents[1][name]) {
			continue
		}
		changes = append(changes, proto.FileChange{Path: name, Before: sides[0][name], After: sides[1][name]})
	}
	return changes, s.broken, s.fail
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errors.New("the digest is another") }

func (s threadFiles) CheckSpace(_ context.Context, _, thread, name string, _ int64, most proto.Space) error {
	if s.most != (proto.Space{}) && s.most != most {
		return fmt.Errorf("space for %s in %s: %+v", name, thread, most)
	}
	if s.refuse != nil {
		return fmt.Errorf("space for %s: %w", name, s.refuse)
	}
	return nil
}

func (s threadFiles) Delete(_ context.Context, org, thread, name string, recursive bool) (int64, error) {
	return s.change(org, thread, name, func(all map[string][]byte, at string) error {
		for k := range all {
			if strings.HasPrefix(k, at+"/") && !recursive {
				return &proto.PathError{Path: name, Message: "is not empty"}
			}
		}
		maps.DeleteFunc(all, func(k string, _ []byte) bool { return k == at || strings.HasPrefix(k, at+"/") })
		return nil
	})
}

func (s threadFiles) Rename(_ context.Context, org, thread, from, to string, most proto.Space) (int64, error) {
	return s.change(org, thread, from, func(all map[string][]byte, at string) error {
		if s.most != most {
			return fmt.Errorf("renamed with the limit %+v", most)
		}
		all[key(key(org, thread), to)] = all[at]
		delete(all, at)
		return s.refuse
	})
}

// change makes a new version with a change of what is at a path.
func (s threadFiles) change(
	org, thread, name string, change func(all map[string][]byte, at string) error,
) (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, err := s.take(org, thread, false)
	if err != nil {
		return 0, fmt.Errorf("change: %w", err)
	}
	if t.Holder != "" {
		return 0, fmt.Errorf("change: %w", &proto.BusyError{Thread: thread, Holder: t.Holder})
	}
	at := key(key(org, thread), name)
	if _, ok := s.files[at]; !ok {
		return 0, fmt.Errorf("change: %w", &proto.NoFileError{Path: name})
	}
	return t.Number() + 1, change(s.files, at)
}

func (s threadFiles) Stage(
	ctx context.Context, org, thread, name string, size int64, most proto.Space, body io.Reader,
) error {
	if err := s.CheckSpace(ctx, org, thread, name, size, most); err != nil {
		return err
	}
	content, err := io.ReadAll(body)
	if err == nil && int64(len(content)) != size {
		err = fmt.Errorf("%d bytes of %d", len(content), size)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t, takeErr := s.take(org, thread, true)
	if err == nil && takeErr == nil && len(t.Staged) == proto.MaxStaged {
		err = &proto.StagedError{Thread: thread, Files: proto.MaxStaged}
	}
	if err := cmp.Or(err, takeErr); err != nil {
		return fmt.Errorf("stage: %w", err)
	}
	t.Staged = append(t.Staged, proto.StagedFile{Path: name, At: time.Now(), Blob: proto.Blob{Size: size}})
	s.files[key(key(org, thread), name)] = content
	return nil
}

func (s threadFiles) StageIfUnchanged(
	ctx context.Context, org, thread, name, tag string, size int64, most proto.Space, body io.Reader,
) error {
	current := ""
	if content, err := s.Open(ctx, org, thread, 0, name); err == nil {
		current = content.Tag
	}
	if current != tag {
		return fmt.Errorf("stage: %w", &proto.FileChangedError{})
	}
	return s.Stage(ctx, org, thread, name, size, most, body)
}

func (s threadFiles) Put(
	ctx context.Context, org, thread, name string, size int64, most proto.Space, body io.Reader,
) error {
	s.mu.Lock()
	if t, err := s.take(org, thread, true); err == nil && t.Holder != "" {
		s.mu.Unlock()
		return fmt.Errorf("put: %w", &proto.BusyError{Thread: thread, Holder: t.Holder})
	}
	s.mu.Unlock()
	return s.Stage(ctx, org, thread, name, size, most, body)
}

const inThread = `{"code":"1","thread_id":"t"}`

var allModes = map[string][]string{
	"inline": {"Accept", web.TypeJSON}, "streaming": {"Accept", web.TypeNDJSON},
	"async": {"Prefer", "respond-async"},
}

// One execution holds a thread from its acceptance to its end. The next execution can have it at
// once.
func TestThreadIsLockedByOneExecution(t *testing.T) {
	for name, headers := range allModes {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			id := h.execute(inThread, "Prefer", "respond-async").want(202, "").trace()
			for range 2 { // queued, then running
				a := h.execute(inThread, headers...).want(409, "conflict", "thread t is in use by execution "+string(id)+"; wait")
				if a.header.Get("Retry-After") != "" || a.header.Get("X-Trace-Id") != "" {
					t.Errorf("headers %v", a.header)
				}
				h.stub.start(id)
			}
			h.stub.finish(id, proto.Exited(0))
			h.stub.finishAtOnce(proto.Exited(0))
			next := h.execute(inThread, headers...)
			if next.status/100 != 2 {
				t.Fatalf("%d %s", next.status, next.body)
			}
			job := h.stub.runs[next.trace()].job
			if job.ThreadID != "t" || job.Prefer != "worker-7" || h.threads.holder("t") != job.TraceID {
				t.Errorf("job %+v, holder %s", job.Meta, h.threads.holder("t"))
			}
			if got := h.do("GET", "/v1/executions/"+string(job.TraceID), "").want(200, "").json()["thread_id"]; got != "t" {
				t.Errorf("thread_id %v", got)
			}
			other := newHarness(t)
			other.stub.finishAtOnce(proto.Exited(0))
			job = other.stub.runs[other.execute(hello, headers...).trace()].job
			if job.ThreadID != "" || job.Prefer != "" || len(other.threads.heads) != 0 {
				t.Errorf("without a thread: %+v, %d threads", job.Meta, len(other.threads.heads))
			}
		})
	}
}

func TestThreadsBelongToTheOrganisation(t *testing.T) {
	h := newHarness(t)
	h.execute(inThread, "Prefer", "respond-async").want(202, "")
	ours := h.stub.addKey("acme", "pro", asUser)
	h.execute(inThread, "Prefer", "respond-async", "Authorization", "Bearer "+ours).want(409, "conflict")
	theirs := h.stub.addKey("other", "pro", asUser)
	h.execute(inThread, "Prefer", "respond-async", "Authorization", "Bearer "+theirs).want(202, "")
}

func TestCancelledInTheQueueFreesTheThread(t *testing.T) {
	h := newHarness(t)
	id := h.execute(inThread, "Prefer", "respond-async").want(202, "").trace()
	h.do("POST", "/v1/executions/"+string(id)+"/cancel", "").want(202, "")
	h.execute(inThread, "Prefer", "respond-async").want(202, "")
}

// A job that was not submitted holds no thread.
func TestRefusedExecutionUnlocks(t *testing.T) {
	for name, test := range map[string]struct {
		refuse error
		status int
	}{
		"refused":     {&proto.Rejection{Reason: proto.RejectedConcurrency, Used: 5, Limit: 5}, 429},
		"unconfirmed": {errors.New("no answer"), 503},
	} {
		for _, headers := range [][]string{nil, {"Idempotency-Key", "k"}} {
			t.Run(fmt.Sprint(name, headers), func(t *testing.T) {
				h := newHarness(t)
				h.stub.refuse = func(*proto.Job) error { return test.refuse }
				if a := h.execute(inThread, headers...); a.status != test.status || h.threads.holder("t") != "" ||
					h.stub.bound() != 0 {
					t.Errorf("%d %s, holder %q, %d bindings", a.status, a.body, h.threads.holder("t"), h.stub.bound())
				}
				h.stub.refuse = nil
				h.stub.finishAtOnce(proto.Exited(0))
				h.execute(inThread, headers...).want(200, "")
			})
		}
	}
}

func TestUnansweredLock(t *testing.T) {
	h := newHarness(t)
	h.threads.fail = context.DeadlineExceeded
	h.execute(inThread, "Idempotency-Key", "k").want(503, "service_unavailable")
	if len(h.stub.runs) != 0 || h.stub.bound() != 0 || !strings.Contains(h.log.String(), "unlock thread failed") {
		t.Errorf("%d executions, %d bindings, log\n%s", len(h.stub.runs), h.stub.bound(), h.log)
	}
	h.threads.fail = nil
	h.stub.finishAtOnce(proto.Exited(0))
	h.execute(inThread, "Idempotency-Key", "k").want(200, "")
}

// A repeated request must not conflict with its own hold on the thread.
func TestRetryAndItsOwnThread(t *testing.T) {
	for name, headers := range allModes {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *harness) {
				headers := append(headers, "Idempotency-Key", "k")
				first := h.begin(h.executeRequest(inThread, headers...))
				id := <-h.stub.submitted
				second := h.begin(h.executeRequest(inThread, headers...))
				synctest.Wait()
				h.execute(inThread, "Idempotency-Key", "another").want(409, "conflict")
				h.execute(inThread, "Idempotency-Key", "another").want(409, "conflict") // the key was not consumed
				h.stub.start(id)
				h.stub.finish(id, proto.Exited(0))
				if one, two := <-first, <-second; one.status/100 != 2 || one.status != two.status || one.trace() != two.trace() {
					t.Errorf("%d %s and %d %s", one.status, one.body, two.status, two.body)
				}
			})
		})
	}
	t.Run("server died before it submitted", func(t *testing.T) {
		bubble(t, func(t *testing.T, h *harness) {
			h.stub.finishAtOnce(proto.Exited(0))
			r, err := api.Decode[api.ExecuteRequest]([]byte(inThread))
			if err != nil {
				t.Fatal(err)
			}
			dead := proto.Binding{Trace: proto.NewTraceID(), BoundAt: time.Now()}
			dead.BodyHash, _ = r.Hash()
			if _, _, err := h.stub.Bind(t.Context(), "acme", "key_1", "k", dead); err != nil {
				t.Fatal(err)
			}
			if _, _, err := h.threads.Lock(t.Context(), "acme", "t", dead.Trace); err != nil {
				t.Fatal(err)
			}
			h.execute(inThread).want(409, "conflict")
			h.execute(inThread, "Idempotency-Key", "k").want(200, "")
		})
	})
	t.Run("withdrawn", func(t *testing.T) {
		bubble(t, func(t *testing.T, h *harness) {
			h.execute(inThread, "Idempotency-Key", "k").want(503, "service_unavailable")
			h.stub.finishAtOnce(proto.Exited(0))
			h.execute(inThread, "Idempotency-Key", "k").want(200, "")
		})
	})
}

// addThread stores a free thread with three versions.
func (h *harness) addThread(org, id string) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	version := func(n int64) proto.Version {
		return proto.Version{
			Number: n, CreatedAt: at.Add(time.Duration(n) * time.Second), Trace: "trc_AbCdEfGhIjKlMnOpQrSt",
			Bytes: n * 100, Files: n,
			Manifest: proto.Blob{Key: "secret/key"}, Layers: []proto.Layer{{Blob: proto.Blob{Key: "secret/layer"}}},
		}
	}
	h.threads.mu.Lock()
	defer h.threads.mu.Unlock()
	h.threads.heads[key(org, id)] = &proto.Thread{
		Org: org, ID: id, CreatedAt: at, UsedAt: at.Add(time.Minute), Fence: 7, Version: new(version(3)),
		History: []proto.Version{version(2), version(1)},
		Staged:  []proto.StagedFile{{Path: "a/b", At: at, Blob: proto.Blob{Key: "secret/upload", Size: 9}}},
	}
}

func TestThreads(t *testing.T) {
	h := newHarness(t)
	if a := h.do("GET", "/v1/threads", "").want(200, ""); strings.TrimSpace(
		string(a.body)) != `{"threads":[],"next_cursor":null}` {
		t.Errorf("none: %s", a.body)
	}
	h.addThread("acme", "t")
	h.addThread("other", "theirs")
	const short = `"id":"t","version":3,"bytes":300,"files":3,"created_at":"2026-01-02T03:04:05.678Z",` +
		`"used_at":"2026-01-02T03:05:05.678Z","holder":null`
	if a := h.do("GET", "/v1/threads", "").want(200, ""); strings.TrimSpace(string(a.body)) != `{"threads":[{`+short+
		`}],"next_cursor":null}` {
		t.Errorf("list: %s", a.body)
	}
	const long = short + `,"versions":[{"number":3,"created_at":"2026-01-02T03:04:08.678Z",` +
		`"trace_id":"trc_AbCdEfGhIjKlMnOpQrSt","bytes":300,"files":3},` +
		`{"number":2,"created_at":"2026-01-02T03:04:07.678Z","trace_id":"trc_AbCdEfGhIjKlMnOpQrSt","bytes":200,"files":2},` +
		`{"number":1,"created_at":"2026-01-02T03:04:06.678Z","trace_id":"trc_AbCdEfGhIjKlMnOpQrSt","bytes":100,"files":1}],` +
		`"staged":[{"path":"a/b","size":9,"at":"2026-01-02T03:04:05.678Z"}]`
	if a := h.do("GET", "/v1/threads/t", "").want(200, ""); strings.TrimSpace(string(a.body)) != `{`+long+`}` {
		t.Errorf("thread: %s", a.body)
	}
	id := h.execute(inThread, "Prefer", "respond-async").want(202, "").trace()
	if got := h.do("GET", "/v1/threads/t", "").want(200, "").json()["holder"]; got != string(id) {
		t.Errorf("holder %v", got)
	}
	h.do("DELETE", "/v1/threads/t", "").want(409, "conflict", string(id))

	fork := h.do("POST", "/v1/threads/t/fork", `{"id":"f"}`).want(201, "")
	if f := fork.json(); fork.header.Get("Location") != "/v1/threads/f" || f["id"] != "f" || f["version"] != 1.0 ||
		f["bytes"] != 300.0 ||
		f["versions"].([]any)[0].(map[string]any)["trace_id"] != nil {
		t.Errorf("fork %s", fork.body)
	}
	if f := h.do("POST", "/v1/threads/t/fork", `{"id":"g","version":2}`).want(201, "").json(); f["bytes"] != 200.0 {
		t.Errorf("fork of a version: %v", f)
	}
	h.do("POST", "/v1/threads/t/fork", `{"id":"f"}`).want(409, "conflict", "there is a thread of that id")
	h.do("POST", "/v1/threads/t/fork", `{"id":"new","version":4}`).want(404, "not_found", "version")
	h.do("POST", "/v1/threads/t/fork", `{"id":"a/b"}`).want(400, "validation_error", "id must be")
	h.do("POST", "/v1/threads/t/fork", ``).want(400, "validation_error", "body")

	h.stub.finish(id, proto.Exited(0))
	if a := h.do("DELETE", "/v1/threads/t", "").want(204, ""); len(a.body) != 0 {
		t.Errorf("deleted: %s", a.body)
	}
	empty := h.execute(`{"code":"1","thread_id":"e"}`, "Prefer", "respond-async").want(202, "").trace()
	h.stub.finish(empty, proto.Exited(0))
	if e := h.do("GET", "/v1/threads/e", "").want(200, "").json(); e["version"] != 0.0 || len(e["versions"].([]any)) != 0 {
		t.Errorf("empty thread %v", e)
	}
	for id, message := range map[string]string{
		"t": "no thread", "theirs": "no thread", "never": "no thread", "-": "no thread",
		strings.Repeat("a", 129): "no thread",
		"a%2fb":                  "nothing of that id", "..%2f": "nothing of that id",
	} {
		h.do("GET", "/v1/threads/"+id, "").want(404, "not_found", message)
		h.do("DELETE", "/v1/threads/"+id, "").want(404, "not_found", message)
		h.do("POST", "/v1/threads/"+id+"/fork", `{"id":"n"}`).want(404, "not_found", message)
		h.do("GET", "/v1/threads/"+id+"/archive", "").want(404, "not_found", message)
	}
	for _, path := range []string{"/v1/threads", "/v1/threads/t", "/v1/threads/t/archive"} {
		h.do("GET", path, "", "Authorization", "").want(401, "unauthorized")
	}
}

func TestThreadPages(t *testing.T) {
	h := newHarness(t)
	for i := range 25 {
		h.addThread("acme", fmt.Sprintf("t%02d", i))
	}
	var ids []string
	for cursor, pages := "", 0; ; pages++ {
		page := h.do("GET", "/v1/threads?limit=10&cursor="+cursor, "").want(200, "").json()
		for _, x := range page["threads"].([]any) {
			ids = append(ids, x.(map[string]any)["id"].(string))
		}
		if page["next_cursor"] == nil {
			if pages != 2 || len(ids) != 25 || !slices.IsSorted(ids) {
				t.Errorf("%d pages, %v", pages+1, ids)
			}
			break
		}
		cursor = page["next_cursor"].(string)
	}
	if page := h.do("GET", "/v1/threads", "").want(200, "").json(); len(page["threads"].([]any)) != 20 {
		t.Errorf("%d threads on a page", len(page["threads"].([]any)))
	}
	for _, query := range []string{"limit=101", "limit=0", "limit=-1", "limit=x", "cursor=%2F"} {
		h.do("GET", "/v1/threads?"+query, "").want(400, "validation_error", query[:strings.Index(query, "=")])
	}
}

func TestArchive(t *testing.T) {
	h := newHarness(t)
	h.addThread("acme", "t")
	for query, want := range map[string]string{"": "version 3", "?version=2": "version 2"} {
		a := h.do("GET", "/v1/threads/t/archive"+query, "").want(200, "")
		in := tar.NewReader(bytes.NewReader(a.body))
		if _, err := in.Next(); err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(in)
		if err != nil || string(body) != want || a.header.Get("Content-Type") != "application/x-tar" ||
			a.header.Get("Content-Disposition") != `attachment; filename=t.tar` ||
			a.header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%q, %v, headers %v", body, err, a.header)
		}
	}
	h.do("GET", "/v1/threads/t/archive?version=4", "").want(404, "not_found", "version")
	h.do("GET", "/v1/threads/t/archive?version=0", "").want(400, "validation_error", "version")
	h.do("GET", "/v1/threads/t/archive?version=x", "").want(400, "validation_error", "version")
	// Half an archive must not look like a complete one.
	h.threads.broken = true
	resp, err := h.client.Do(h.request("GET", "/v1/threads/t/archive", ""))
	if err == nil {
		_, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
	}
	if err == nil {
		t.Error("an archive that broke off came whole")
	}
}

func TestThreadAdmin(t *testing.T) {
	h := newHarness(t)
	for body, age := range map[string]time.Duration{"": proto.DefaultSafeAge, `{"safe_age":10800}`: 3 * time.Hour} {
		a := h.do("POST", "/v1/admin/threads/gc", body).want(200, "")
		if strings.TrimSpace(string(a.body)) != `{"layers":{"blobs":2,"bytes":300},"objects":{"blobs":0,"bytes":0},`+
			`"manifests":{"blobs":0,"bytes":0},"uploads":{"blobs":1,"bytes":9}}` || h.threads.age != age {
			t.Errorf("%s with %s", a.body, h.threads.age)
		}
	}
	h.do("POST", "/v1/admin/threads/gc", `{"safe_age":3600}`).want(400, "validation_error", "safe_age")
	h.do("POST", "/v1/admin/threads/gc", `{"safe":1}`).want(400, "validation_error", "safe")
	if a := h.do("POST", "/v1/admin/threads/rebuild", "").want(200, ""); strings.TrimSpace(
		string(a.body)) != `{"made":3,"kept":2,"lost":1}` {
		t.Errorf("%s", a.body)
	}
	execute := h.stub.addKey("acme", "pro", asUser)
	for _, path := range []string{"/v1/admin/threads/gc", "/v1/admin/threads/rebuild"} {
		h.do("POST", path, "", "Authorization", "Bearer "+execute).want(403, "forbidden")
		h.threads.fail = errors.New("the store is gone")
		h.do("POST", path, "").want(500, "internal")
		h.threads.fail = nil
	}
}
