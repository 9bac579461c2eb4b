package gateway

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"iter"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bullpen-run/bullpen/gateway/executions"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// stub replaces the other packages in memory. A submitted job stays queued until a test starts and
// ends it.
type stub struct {
	noSecretsKey bool

	mu        sync.Mutex
	runs      map[proto.TraceID]*run
	submitted chan proto.TraceID
	onSubmit  func(*proto.Job)       // called after a job was accepted
	refuse    func(*proto.Job) error // if it returns an error, the job is not accepted
	missing   func(*proto.Meta) *proto.Missing
	stats     func(context.Context) (proto.QueueStats, error)
	bindings  map[string]proto.Binding
	revision  uint64
	keys      []proto.Key
	secrets   map[string]string // secret -> key id
	registry  *registry
	orgs      orgStore
	plans     planStore
	watches   atomic.Int64 // number of open watches
}

type run struct {
	job     *proto.Job
	record  proto.Record
	events  [][]byte
	changed chan struct{}
	broken  error // of look-ups
}

// Missing implements [gateway.Capabilities].
func (q *stub) Missing(m *proto.Meta) *proto.Missing {
	if q.missing == nil {
		return nil
	}
	return q.missing(m)
}

func newStub() *stub {
	return &stub{
		runs: map[proto.TraceID]*run{}, submitted: make(chan proto.TraceID, 100),
		bindings: map[string]proto.Binding{}, secrets: map[string]string{}, orgs: orgStore{}, plans: planStore{},
		stats: func(context.Context) (proto.QueueStats, error) { return proto.QueueStats{Workers: 1}, nil },
	}
}

// The scopes of the keys of most tests.
var (
	asUser  = proto.Key{Scopes: proto.UserScopes()}
	asAdmin = proto.Key{Scopes: proto.Scopes(), Global: true}
)

// addKey stores a key with the scopes of another and returns its secret. A new organisation gets the
// plan; otherwise the plan narrows the key.
func (q *stub) addKey(org, plan string, like proto.Key) string {
	secret := proto.NewKeySecret("local")
	q.mu.Lock()
	defer q.mu.Unlock()
	id := fmt.Sprintf("key_%d", len(q.keys)+1)
	if _, ok := q.orgs[org]; !ok {
		q.orgs[org] = proto.Org{Name: org, Plan: cmp.Or(plan, proto.UnlimitedPlan)}
	}
	if plan == q.orgs[org].Plan {
		plan = ""
	}
	q.keys = append(q.keys, proto.Key{
		ID: id, Name: "test", Org: org, Plan: plan, Scopes: like.Scopes, Global: like.Global, Hint: proto.KeyHint(secret),
		CreatedAt: time.Now(),
	})
	q.secrets[secret] = id
	return secret
}

// finishAtOnce makes every job start, print and end as soon as it is submitted.
func (q *stub) finishAtOnce(r proto.Result, stdout ...string) {
	q.onSubmit = func(job *proto.Job) {
		q.start(job.TraceID)
		for _, text := range stdout {
			q.output(job.TraceID, proto.Stdout, text)
			r.Stdout += text
		}
		q.finish(job.TraceID, r)
	}
}

func (q *stub) update(id proto.TraceID, f func(*run)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	x := q.runs[id]
	f(x)
	close(x.changed)
	x.changed = make(chan struct{})
}

func (q *stub) start(id proto.TraceID) {
	q.update(id, func(x *run) {
		now := time.Now()
		x.record.Status, x.record.StartedAt, x.record.Attempt = proto.StatusRunning, &now, 1
		x.events = append(x.events, proto.AppendStatusEvent(nil, id))
	})
}

func (q *stub) output(id proto.TraceID, stream proto.Stream, text string) {
	q.update(id, func(x *run) {
		x.events = append(x.events, proto.AppendOutputEvent(nil, stream, []byte(text), int64(len(x.events)+1)))
	})
}

func (q *stub) finish(id proto.TraceID, r proto.Result) {
	q.update(id, func(x *run) { x.end(r) })
}

func (x *run) end(r proto.Result) {
	now := time.Now()
	x.record.Status, x.record.Result, x.record.CompletedAt = r.Status(), &r, &now
	x.record.ResultSeq = int64(len(x.events) + 1)
}

func (q *stub) record(id proto.TraceID) proto.Record {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.runs[id].record
}

func (q *stub) Submit(_ context.Context, job *proto.Job) error {
	if q.refuse != nil {
		if err := q.refuse(job); err != nil {
			return err
		}
	}
	q.mu.Lock()
	q.runs[job.TraceID] = &run{
		job: job, record: proto.Record{Meta: job.Meta, Status: proto.StatusQueued}, changed: make(chan struct{}),
	}
	q.mu.Unlock()
	q.submitted <- job.TraceID
	if q.onSubmit != nil {
		q.onSubmit(job)
	}
	return nil
}

func (q *stub) look(org string, id proto.TraceID) (*proto.Record, <-chan struct{}, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	x, ok := q.runs[id]
	if !ok || x.record.Org != org {
		return nil, nil, proto.ErrNotFound
	}
	record := x.record
	return &record, x.changed, x.broken
}

// Lookup reserves the memory of the outputs, as the store does.
func (q *stub) Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	end, err := proto.BeginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	record, _, err := q.look(org, id)
	if err == nil && record.Result != nil {
		err = proto.ReserveRead(ctx, len(record.Result.Stdout)+len(record.Result.Stderr))
	}
	return record, err
}

func (q *stub) Summary(_ context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	record, _, err := q.look(org, id)
	if err == nil && record.Result != nil {
		result := *record.Result
		result.Stdout, result.Stderr = "", ""
		record.Result = &result
	}
	return record, err
}

func (q *stub) Submitted(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	record, err := q.Lookup(ctx, org, id)
	if err != nil {
		return nil, err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if job := q.runs[id].job; job != nil {
		record.Request = job.Request()
	}
	return record, nil
}

func (q *stub) Wait(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	for {
		record, changed, err := q.look(org, id)
		if err != nil || record.Status.Terminal() {
			return record, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (q *stub) Watch(org string, id proto.TraceID) (executions.Watch, error) {
	return q.watch(q.Wait, org, id), nil
}

// watch returns a Watch that waits with wait. It is counted until it is closed.
func (q *stub) watch(wait waiter, org string, id proto.TraceID) executions.Watch {
	q.watches.Add(1)
	return &watch{q, wait, org, id}
}

type waiter = func(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)

type watch struct {
	queue *stub
	wait  waiter
	org   string
	id    proto.TraceID
}

func (w *watch) Wait(ctx context.Context) (*proto.Record, error) { return w.wait(ctx, w.org, w.id) }

func (w *watch) Close() { w.queue.watches.Add(-1) }

func (q *stub) Abandon(_ context.Context, m *proto.Meta, reason string) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.runs[m.TraceID] != nil {
		return proto.ErrConflict
	}
	x := &run{record: proto.Record{Meta: *m}, changed: make(chan struct{})}
	x.end(proto.Failure(proto.CodeExpiredInQueue, reason))
	q.runs[m.TraceID] = x
	return nil
}

func (q *stub) Withdraw(
	ctx context.Context, org string, id proto.TraceID, r proto.Result,
) (*proto.Record, error) {
	if _, _, err := q.look(org, id); err != nil {
		return nil, err
	}
	q.update(id, func(x *run) {
		if x.record.Status == proto.StatusQueued {
			x.end(r)
		}
	})
	return q.Lookup(ctx, org, id)
}

func (q *stub) Cancel(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	q.update(id, func(x *run) {
		switch x.record.Status {
		case proto.StatusQueued:
			x.end(proto.Cancelled())
		case proto.StatusRunning:
			x.record.Cancelling = true
		}
	})
	return q.Lookup(ctx, org, id)
}

func (q *stub) Stats(ctx context.Context) (proto.QueueStats, error) { return q.stats(ctx) }

type stubTail struct {
	stub  *stub
	id    proto.TraceID
	after int64
	ended bool
}

func (q *stub) Follow(_ context.Context, _ string, id proto.TraceID, after int64) (web.Tail, error) {
	return &stubTail{stub: q, id: id, after: after}, nil
}

func (q *stub) Last(_ context.Context, _ string, id proto.TraceID, _ int) (int64, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return int64(len(q.runs[id].events)), nil
}

func (t *stubTail) Close() {}

func (t *stubTail) Next(ctx context.Context) (proto.Events, error) {
	for !t.ended {
		batch, changed := t.ready()
		if batch.First > 0 {
			return batch, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return proto.Events{}, ctx.Err()
		}
	}
	return proto.Events{}, io.EOF
}

func (t *stubTail) ready() (b proto.Events, changed <-chan struct{}) {
	t.stub.mu.Lock()
	defer t.stub.mu.Unlock()
	x := t.stub.runs[t.id]
	for i, line := range x.events {
		if seq := int64(i + 1); seq > t.after {
			if b.First == 0 {
				b.First = seq
			}
			b.Last = seq
			b.Lines = append(b.Lines, line...)
		}
	}
	t.after = max(t.after, b.Last)
	if x.record.Result != nil {
		if b.Last = x.record.ResultSeq; b.First == 0 {
			b.First = b.Last
		}
		t.ended = true
		rec := x.record
		b.Result = &rec
	}
	return b, x.changed
}

func (q *stub) Authenticate(secret string) (*proto.Key, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, k := range q.keys {
		if k.ID == q.secrets[secret] && k.RevokedAt == nil {
			return &k, true
		}
	}
	return nil, false
}

func (q *stub) Key(id string) (*proto.Key, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, k := range q.keys {
		if k.ID == id {
			return &k, true
		}
	}
	return nil, false
}

func (q *stub) Hash(secret string) string { return "hash of " + secret }

func (q *stub) WithHash(hash string) (*proto.Key, bool) {
	return q.Authenticate(strings.TrimPrefix(hash, "hash of "))
}

// forget makes a key one whose secret nobody has.
func (q *stub) forget(id string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	maps.DeleteFunc(q.secrets, func(_, of string) bool { return of == id })
}

// Rotate names a key, or none.
func (q *stub) Rotate(context.Context) (string, error) {
	if q.noSecretsKey {
		return "", fmt.Errorf("rotate: %w", proto.ErrNoSecretsKey)
	}
	return "age1new", nil
}

func (q *stub) Create(_ context.Context, k proto.Key) (proto.Key, string, error) {
	for _, name := range k.AllowedProfiles() {
		if !proto.BuiltInProfile(name) && !q.registry.has(name) {
			return proto.Key{}, "", fmt.Errorf("bind: %w", proto.ErrNotFound)
		}
	}
	secret := q.addKey(k.Org, k.Plan, k)
	q.mu.Lock()
	defer q.mu.Unlock()
	made := &q.keys[len(q.keys)-1]
	made.Name, made.Profile, made.Env, made.Secrets, made.Mounts, made.ExpiresAt = k.Name, k.Profile, k.Env, k.Secrets,
		k.Mounts, k.ExpiresAt
	made.Concurrent, made.MaxTimeout, made.RequestRate, made.AllowedNetworks = k.Concurrent, k.MaxTimeout, k.RequestRate,
		k.AllowedNetworks
	made.Profiles = k.Profiles
	return *made, secret, nil
}

func (q *stub) List(org string) []proto.Key {
	list, _ := q.Page(org, "", -1, nil)
	return list
}

func (q *stub) Page(org, after string, limit int, keep func(*proto.Key) bool) ([]proto.Key, string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	place := func(k *proto.Key) string { return k.CreatedAt.UTC().Format(time.RFC3339Nano) + k.ID }
	return pageOf(slices.Values(q.keys), func(k *proto.Key) string { return k.Org }, place, org, after, limit, keep)
}

// pageOf returns a page of the values of an organisation, or of all, ordered by their places.
func pageOf[T any](
	all iter.Seq[T], orgOf, place func(*T) string, org, after string, limit int, keep func(*T) bool,
) ([]T, string) {
	var list []T
	for v := range all {
		if org == "" || orgOf(&v) == org {
			list = append(list, v)
		}
	}
	slices.SortFunc(list, func(a, b T) int { return strings.Compare(place(&a), place(&b)) })
	return web.Listed[T]{Values: list, Place: place}.Page("", after, limit, keep)
}

func (q *stub) Get(_ context.Context, id string) (proto.Key, error) {
	if k, ok := q.Key(id); ok {
		return *k, nil
	}
	return proto.Key{}, proto.ErrNotFound
}

func (q *stub) Change(_ context.Context, id string, change func(*proto.Key) error) (proto.Key, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.keys {
		if q.keys[i].ID == id {
			changed := q.keys[i]
			if err := change(&changed); err != nil {
				return proto.Key{}, err
			}
			q.keys[i] = changed
			return changed, nil
		}
	}
	return proto.Key{}, proto.ErrNotFound
}

func (q *stub) Revoke(ctx context.Context, id string) (proto.Key, error) {
	return q.Change(ctx, id, func(k *proto.Key) error {
		k.RevokedAt = new(time.Now())
		return nil
	})
}

// rotatingKeys is the stub for keys, which another method named Rotate is in the way of.
type rotatingKeys struct{ *stub }

func (q rotatingKeys) Rotate(ctx context.Context, id string, until time.Time) (proto.Key, string, error) {
	secret := proto.NewKeySecret("local")
	key, err := q.Change(ctx, id, func(k *proto.Key) error {
		q.secrets[secret] = id
		k.OverlapUntil, k.Hint = &until, proto.KeyHint(secret)
		return nil
	})
	return key, secret, err
}

// keyUses replaces the registry of the last uses of keys.
type keyUses struct{ last sync.Map }

func (u *keyUses) Used(_, key string, at time.Time) { u.last.Store(key, at) }

func (u *keyUses) LastUsed(_, key string) (time.Time, bool) {
	at, ok := u.last.Load(key)
	if !ok {
		return time.Time{}, false
	}
	return at.(time.Time), true
}

// stores guards the registries that streams read while requests change them.
var stores sync.Mutex

// lookUp returns a value of a registry.
func lookUp[T any](l map[string]T, key string) (T, error) {
	stores.Lock()
	defer stores.Unlock()
	v, ok := l[key]
	if !ok {
		return v, proto.ErrNotFound
	}
	return v, nil
}

// put stores a value in a registry.
func put[T any](l map[string]T, key string, v T) {
	stores.Lock()
	defer stores.Unlock()
	l[key] = v
}

// drop removes a value from a registry.
func drop[T any](l map[string]T, key string) {
	stores.Lock()
	defer stores.Unlock()
	delete(l, key)
}

// orgStore replaces the registry of organisations.
type orgStore map[string]proto.Org

func (l orgStore) Org(_ context.Context, name string) (proto.Org, error) {
	return lookUp(l, name)
}

func (l orgStore) Page(org, after string, limit int, keep func(*proto.Org) bool) ([]proto.Org, string) {
	name := func(o *proto.Org) string { return o.Name }
	return pageOf(maps.Values(l), name, name, org, after, limit, keep)
}

func (l orgStore) Create(_ context.Context, o proto.Org) error {
	if _, err := lookUp(l, o.Name); err == nil {
		return proto.ErrExists
	}
	put(l, o.Name, o)
	return nil
}

func (l orgStore) Change(ctx context.Context, name string, change func(*proto.Org) error) (proto.Org, error) {
	o, err := l.Org(ctx, name)
	if err == nil {
		err = change(&o)
	}
	if err == nil {
		put(l, name, o)
	}
	return o, err
}

// orgData shows that the organisation itself is all that is stored.
type orgData struct{ orgStore }

func (d orgData) List(_ context.Context, name string) (*proto.OrgData, error) {
	data := &proto.OrgData{Org: name, Kinds: []proto.StoredData{{Kind: "organisation"}}}
	if _, ok := d.orgStore[name]; ok {
		data.Kinds[0].Count = 1
	}
	return data, nil
}

// memberStore replaces the registry of members.
type memberStore map[string]proto.Member

func (l memberStore) Member(id string) (proto.Member, bool) {
	m, ok := l[id]
	return m, ok
}

func (l memberStore) Get(_ context.Context, id string) (proto.Member, error) {
	m, ok := l[id]
	if !ok {
		return m, proto.ErrNotFound
	}
	return m, nil
}

func (l memberStore) List(org string) []proto.Member {
	list, _ := l.Page(org, "", -1, nil)
	return list
}

func (l memberStore) Page(org, after string, limit int, keep func(*proto.Member) bool) ([]proto.Member, string) {
	return pageOf(maps.Values(l), func(m *proto.Member) string { return m.Org }, func(m *proto.Member) string {
		return m.ID
	}, org, after, limit, keep)
}

func (l memberStore) Create(_ context.Context, m proto.Member) (proto.Member, error) {
	m.ID, m.CreatedAt = fmt.Sprintf("%s%d", proto.MemberPrefix, len(l)+1), time.Now()
	for _, other := range l {
		if other.Org == m.Org && other.Name() == m.Name() {
			return m, proto.ErrExists
		}
	}
	l[m.ID] = m
	return m, nil
}

func (l memberStore) Change(ctx context.Context, id string, change func(*proto.Member) error) (proto.Member, error) {
	m, err := l.Get(ctx, id)
	if err == nil {
		err = change(&m)
	}
	if err == nil {
		l[id] = m
	}
	return m, err
}

func (l memberStore) Remove(ctx context.Context, id string, check func(proto.Member) error) (proto.Member, error) {
	m, err := l.Get(ctx, id)
	if err == nil {
		err = check(m)
	}
	if err == nil {
		delete(l, id)
	}
	return m, err
}

// sessionStore replaces the registry of sessions.
type sessionStore map[string]proto.Session

func (l sessionStore) Session(_ context.Context, token string) (proto.Session, error) {
	return lookUp(l, proto.SessionID(token))
}

func (l sessionStore) Page(org, after string, limit int, keep func(*proto.Session) bool) ([]proto.Session, string) {
	return pageOf(maps.Values(l), func(s *proto.Session) string { return s.Org }, func(s *proto.Session) string {
		return s.ID
	}, org, after, limit, keep)
}

func (l sessionStore) Create(_ context.Context, s proto.Session) (proto.Session, string, error) {
	token := proto.NewSessionToken(&[32]byte{1})
	s.ID, s.CreatedAt, s.UsedAt = proto.SessionID(token), time.Now(), time.Now()
	put(l, s.ID, s)
	return s, token, nil
}

func (l sessionStore) Use(_ context.Context, id string) error {
	s, err := lookUp(l, id)
	s.UsedAt = time.Now()
	put(l, id, s)
	return err
}

func (l sessionStore) End(_ context.Context, id string) error {
	_, err := lookUp(l, id)
	drop(l, id)
	return err
}

// planStore replaces the registry of plans.
type planStore map[string]proto.Plan

func (l planStore) Plan(_ context.Context, name string) (proto.Plan, error) {
	if p, ok := l[name]; ok {
		return p, nil
	}
	if p, ok := proto.PresetPlan(name); ok {
		return p, nil
	}
	return proto.Plan{}, proto.ErrNotFound
}

func (l planStore) List() []proto.Plan {
	return append(proto.PresetPlans(),
		slices.SortedFunc(maps.Values(l), func(a, b proto.Plan) int { return strings.Compare(a.Name, b.Name) })...)
}

func (l planStore) Create(ctx context.Context, p proto.Plan) error {
	if _, err := l.Plan(ctx, p.Name); err == nil {
		return proto.ErrExists
	}
	l[p.Name] = p
	return nil
}

func (l planStore) Replace(ctx context.Context, p proto.Plan, check func(proto.Plan) error) error {
	old, err := l.Plan(ctx, p.Name)
	if err == nil {
		err = check(old)
	}
	if err == nil {
		l[p.Name] = p
	}
	return err
}

func (l planStore) Remove(_ context.Context, name string, check func(proto.Plan) error) (proto.Plan, error) {
	p, ok := l[name]
	if !ok {
		return p, proto.ErrNotFound
	}
	err := check(p)
	if err == nil {
		delete(l, name)
	}
	return p, err
}

func (q *stub) Bind(_ context.Context, _, scope, key string, b proto.Binding) (proto.Binding, bool, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if holds, ok := q.bindings[scope+"/"+key]; ok {
		return holds, false, nil
	}
	return q.store(scope, key, b), true, nil
}

func (q *stub) store(scope, key string, b proto.Binding) proto.Binding {
	q.revision++
	b.Revision = q.revision
	q.bindings[scope+"/"+key] = b
	return b
}

func (q *stub) Bound(_ context.Context, _, scope, key string) (proto.Binding, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	b, ok := q.bindings[scope+"/"+key]
	if !ok {
		return proto.Binding{}, proto.ErrNotFound
	}
	return b, nil
}

func (q *stub) Replace(_ context.Context, _, scope, key string, old, b proto.Binding) (proto.Binding, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.bindings[scope+"/"+key].Revision != old.Revision {
		return proto.Binding{}, proto.ErrConflict
	}
	return q.store(scope, key, b), nil
}

func (q *stub) Release(_ context.Context, _, scope, key string, b proto.Binding) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.bindings[scope+"/"+key].Revision == b.Revision {
		delete(q.bindings, scope+"/"+key)
	}
	return nil
}

func (q *stub) bound() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.bindings)
}

// registry holds sandbox profiles and images in memory.
type registry struct {
	stub     *stub
	mu       sync.Mutex
	profiles map[string]proto.Profile
	images   map[string]*proto.Image
	failures []preloadFailure
}

// preloadFailure is what a worker stored about a sandbox.
type preloadFailure struct {
	sandbox proto.Sandbox
	failure proto.PreloadFailure
}

func (r *registry) PreloadFailure(_ context.Context, s proto.Sandbox) (*proto.PreloadFailure, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.failures {
		if reflect.DeepEqual(f.sandbox, s) {
			return &f.failure, nil
		}
	}
	return nil, nil
}

func (r *registry) has(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.profiles[name]
	return ok
}

func (r *registry) Profile(_ context.Context, name string) (proto.Profile, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, ok := r.profiles[name]
	if !ok {
		return p, fmt.Errorf("profile %s: %w", name, proto.ErrNotFound)
	}
	return p, nil
}

func (r *registry) List(string) []proto.Profile {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.SortedFunc(maps.Values(r.profiles), func(x, y proto.Profile) int {
		return strings.Compare(x.Name, y.Name)
	})
}

func (r *registry) Create(_ context.Context, p proto.Profile) error {
	if r.has(p.Name) {
		return fmt.Errorf("profile %s: %w", p.Name, proto.ErrExists)
	}
	r.put(p)
	return nil
}

func (r *registry) put(p proto.Profile) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.profiles[p.Name] = p
}

func (r *registry) Replace(ctx context.Context, p proto.Profile, check func(proto.Profile) error) error {
	old, err := r.Profile(ctx, p.Name)
	if err == nil {
		err = check(old)
	}
	if err == nil {
		r.put(p)
	}
	return err
}

func (r *registry) Remove(ctx context.Context, name string, check func(proto.Profile) error) (proto.Profile, error) {
	p, err := r.Profile(ctx, name)
	if err == nil {
		err = check(p)
	}
	if err != nil {
		return p, err
	}
	keys := r.stub.List("")
	bound := &proto.BoundError{Profile: name}
	for _, k := range keys {
		if slices.Contains(k.AllowedProfiles(), name) && k.RevokedAt == nil {
			bound.Keys = append(bound.Keys, k.ID)
		}
	}
	if len(bound.Keys) > 0 {
		return p, bound
	}
	r.lose(name)
	return p, nil
}

// lose removes a profile even if keys are bound to it.
func (r *registry) lose(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.profiles, name)
}

func (r *registry) Image(_ context.Context, name string) (*proto.Image, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	image, ok := r.images[name]
	if !ok {
		return nil, fmt.Errorf("image %s: %w", name, proto.ErrNotFound)
	}
	return image, nil
}

// change changes a stored key.
func (q *stub) change(id string, f func(*proto.Key)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.keys {
		if q.keys[i].ID == id {
			f(&q.keys[i])
		}
	}
}
