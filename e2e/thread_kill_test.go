package e2e

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

var (
	threadKills = repeatsFlag("thread-kills", 3, 6,
		"how often a worker is killed while it loads and saves homes of threads, in each deployment")
	threadSeed = flag.Uint64("thread-seed", 0, "what the moments of these kills are drawn with; 0 draws it")
)

// threadJournal is a thread in whose home each execution writes its number in several ways. The
// home can therefore be recognised as one complete version.
type threadJournal struct {
	id string

	mu      sync.Mutex
	entries []int // executions whose entries are in the home, in order
	next    int
}

const (
	bigSize = 5_000_000 // larger than what is packed into a layer
	bigs    = 8         // number of different large files, which bounds disk use
)

// code returns the program of execution n. It prints what it found and changes all of it.
func (d *threadJournal) code(n int) string {
	return fmt.Sprintf(`{ cat log; sha256sum <big; ls -d dir-*; cat dir-*/log; } 2>/dev/null | sha256sum | cut -c 1-64
echo $(cat log 2>/dev/null)
echo %[1]d >>log
yes '%[2]s %[3]d' | head -c %[4]d >big
mv dir-* dir-%[1]d 2>/dev/null || mkdir dir-%[1]d
echo %[1]d >>dir-%[1]d/log
`, n, d.id, n%bigs, bigSize)
}

// largeContent returns the digest of the large file that execution n leaves.
func (d *threadJournal) largeContent(n int) string {
	line := fmt.Sprintf("%s %d\n", d.id, n%bigs)
	sum := sha256.Sum256(bytes.Repeat([]byte(line), bigSize/len(line)+1)[:bigSize])
	return hex.EncodeToString(sum[:])
}

// expected returns what the execution after these entries prints.
func (d *threadJournal) expected(entries []int) string {
	var text, list strings.Builder
	for _, n := range entries {
		fmt.Fprintln(&text, n)
		fmt.Fprintf(&list, " %d", n)
	}
	if len(entries) > 0 {
		last, log := entries[len(entries)-1], text.String()
		fmt.Fprintf(&text, "%s  -\ndir-%d\n%s", d.largeContent(last), last, log)
	}
	return fmt.Sprintf("%x\n%s\n", sha256.Sum256([]byte(text.String())), strings.TrimPrefix(list.String(), " "))
}

func (d *threadJournal) entriesNow() []int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.entries)
}

// outcomes counts how executions ended.
type outcomes struct {
	mu sync.Mutex
	n  map[string]int
}

func (o *outcomes) add(what string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.n == nil {
		o.n = map[string]int{}
	}
	o.n[what]++
}

func (o *outcomes) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(o.n)) {
		parts = append(parts, fmt.Sprintf("%s %d", what, o.n[what]))
	}
	return strings.Join(parts, ", ")
}

// write runs the next execution of a journal and checks what it found against the earlier ones. A
// client without a response retries. An error is a broken guarantee.
func (d *threadJournal) write(ctx context.Context, at func() *api) (proto.Result, error) {
	d.mu.Lock()
	d.next++
	n := d.next
	d.mu.Unlock()
	var res proto.Result
	r, err := retryUntilDone(ctx, func() (*reply, error) {
		body := bash(d.code(n)).and("thread_id", d.id, "timeout", 60)
		return at().try(ctx, http.MethodPost, executePath, body, "Idempotency-Key", fmt.Sprintf("%s.%d", d.id, n))
	})
	if err == nil && r.status != http.StatusOK {
		err = errors.New("refused")
	}
	if err == nil {
		err = json.Unmarshal(r.body, &res)
	}
	if err == nil {
		err = d.checkResult(n, &res)
	}
	if err != nil {
		return res, fmt.Errorf("execution %d of %s after %v: %w: %s", n, d.id, d.entriesNow(), err, r)
	}
	return res, nil
}

// checkResult records the result of execution n.
func (d *threadJournal) checkResult(n int, res *proto.Result) error {
	found := d.expected(d.entriesNow())
	ran := res.Success
	switch code := proto.ErrorCode(deref(res.ErrorCode)); code {
	case "":
	case proto.CodeThreadSave:
		ran = res.ProgramExitCode != nil && *res.ProgramExitCode == 0
	case proto.CodeThreadMount:
		found = ""
		ran = res.ProgramExitCode == nil
	case proto.CodeWorkerLost:
		return nil // its output is unknown
	default:
		return errors.New("it was to end otherwise")
	}
	if !ran || res.Stdout != found {
		return fmt.Errorf("it was to print %q", found)
	}
	if res.Success {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.entries = append(d.entries, n)
	}
	return nil
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// retryUntilDone retries until the response does not come from a server that is stopped, stopping
// or starting, or ctx is done.
func retryUntilDone(ctx context.Context, ask func() (*reply, error)) (*reply, error) {
	look := time.NewTicker(50 * time.Millisecond)
	defer look.Stop()
	for {
		r, err := ask()
		if err == nil && r.status < http.StatusInternalServerError {
			return r, nil
		}
		if err == nil {
			err = errors.New(r.String())
		}
		select {
		case <-ctx.Done():
			return r, err
		case <-look.C:
		}
	}
}

// checkFiles checks that the visible thread is one complete version and has everything confirmed
// before.
func (d *threadJournal) checkFiles(ctx context.Context, at func() *api) error {
	before := d.entriesNow()
	ask := func(method, path string, body any) (*reply, error) {
		return retryUntilDone(ctx, func() (*reply, error) { return at().try(ctx, method, path, body) })
	}
	r, err := ask(http.MethodGet, "/v1/threads/"+d.id, nil)
	if err != nil || r.status == http.StatusNotFound && len(before) == 0 {
		return err
	}
	var head struct{ Version, Bytes int64 }
	if r.status != http.StatusOK || json.Unmarshal(r.body, &head) != nil || head.Version < int64(len(before)) {
		return fmt.Errorf("thread %s with %v: %s", d.id, before, r)
	}
	if r, err = ask(http.MethodPost, "/v1/files/list", request{"source": "thread", "id": d.id}); err != nil {
		return err
	}
	if err := d.checkListing(r, len(before)); err != nil {
		return err
	}
	if head.Version == 0 {
		return nil
	}
	if r, err = ask(http.MethodGet, fmt.Sprintf("/v1/threads/%s/archive?version=%d", d.id, head.Version),
		nil); err != nil {
		return err
	}
	return d.checkArchive(r, before, int(head.Version))
}

// checkListing checks the listing of a home with at least that many entries.
func (d *threadJournal) checkListing(r *reply, least int) error {
	var list struct {
		Files []struct {
			Name string
			Size int64
		}
	}
	if r.status != http.StatusOK || json.Unmarshal(r.body, &list) != nil {
		return fmt.Errorf("files of %s: %s", d.id, r)
	}
	size, last := map[string]int64{}, 0
	for _, f := range list.Files {
		name, number, is := strings.Cut(f.Name, "-")
		if is {
			var err error
			if last, err = strconv.Atoi(number); err != nil {
				return fmt.Errorf("files of %s: %s", d.id, r)
			}
		}
		size[name] = f.Size
	}
	if len(list.Files) == 0 && least == 0 {
		return nil
	}
	_, dir := size["dir"]
	if !dir || len(list.Files) != 3 || size["big"] != bigSize || size["log"] < int64(2*least) || last < least {
		return fmt.Errorf("files of %s with %d entries at least: %s", d.id, least, r)
	}
	return nil
}

// checkArchive checks an archive of a version of the home that starts with the entries in before.
func (d *threadJournal) checkArchive(r *reply, before []int, version int) error {
	files := map[string][]byte{}
	for in := tar.NewReader(bytes.NewReader(r.body)); r.status == http.StatusOK; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			files[strings.Trim(h.Name, "./")], err = io.ReadAll(in)
		}
		if err != nil {
			return fmt.Errorf("archive of %s: %w", d.id, err)
		}
	}
	var entries []int
	for line := range strings.Lines(string(files["log"])) {
		n, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			return fmt.Errorf("archive of %s: %w", d.id, err)
		}
		entries = append(entries, n)
	}
	if len(entries) != version || !slices.Equal(entries[:len(before)], before) {
		return fmt.Errorf("version %d of %s has the entries %v, and should begin with %v: HTTP %d", version, d.id, entries,
			before, r.status)
	}
	last := entries[version-1]
	dir := "dir-" + strconv.Itoa(last)
	_, there := files[dir]
	if big := sha256.Sum256(files["big"]); hex.EncodeToString(big[:]) != d.largeContent(last) || !there ||
		!bytes.Equal(files["log"], files[dir+"/log"]) {
		return fmt.Errorf("version %d of %s is not one version: %v with a large file %x", version, d.id,
			slices.Sorted(maps.Keys(files)), big)
	}
	return nil
}

// victim is a process that runs programs and will be killed.
type victim struct {
	*process
	data  string
	start func() *process
	store *storagetest.Proxy // used by this process only; nil for a directory
}

// A step is a point at which a process is killed. arm arranges for hit to be called as soon as the
// step is reached, and the kill happens before hit returns. victim is nil if the process is
// unknown.
type step struct {
	name string
	cold bool // no home is cached
	arm  func(hit func(*victim)) (disarm func())
}

// testThreadsKilled kills workers at each step of fetching and saving homes, and at random times.
func testThreadsKilled(t *testing.T, p *programs, in topology) {
	b := p.newBucket(t)
	const slots = 3
	sys := newSystem(t, p, in, noSlots, append(b.flags(), "--slots", strconv.Itoa(slots))...)
	if !in.separate {
		one := &victim{process: sys.front, data: sys.data, store: b.Proxy}
		killThreads(t, sys, []*victim{one}, storeSteps([]*victim{one}))
		return
	}
	var victims []*victim
	for range 2 {
		v := &victim{data: filepath.Join(t.TempDir(), "worker"), store: b.server.Proxy(&storagetest.Injector{})}
		t.Cleanup(v.store.Close)
		v.start = func() *process {
			proc, _ := sys.startWorkerIn(t, v.data, "--store", v.store.StoreURL(b.prefix))
			return proc
		}
		v.process = v.start()
		victims = append(victims, v)
	}
	killThreads(t, sys, victims, slices.Concat(storeSteps(victims), schedulerSteps(t, connect(t, p, sys.broker))))
}

// testThreadsKilledDirectory kills a server that stores everything in its own directory, at random
// times.
func testThreadsKilledDirectory(t *testing.T, p *programs) {
	sys := newSystem(t, p, topology{}, 3)
	killThreads(t, sys, []*victim{{process: sys.front, data: sys.data}}, nil)
}

// storeSteps returns the steps that are visible as requests to the store.
func storeSteps(victims []*victim) []step {
	var steps []step
	for _, at := range []struct {
		name, op, path string
		answered       bool
	}{
		{"a layer is put", "put", "/layers/", false},
		{"a layer is there", "put", "/layers/", true},
		{"an object is put", "put", "/objects/", false},
		{"an object is there", "put", "/objects/", true},
		{"a manifest is put", "put", "/threads/", false},
		{"a manifest is there", "put", "/threads/", true},
		{"a layer is got", "get", "/layers/", false},
		{"an object is got", "get", "/objects/", true},
	} {
		steps = append(steps, step{name: at.name, cold: at.op == "get", arm: func(hit func(*victim)) func() {
			for _, v := range victims {
				v.store.Watch(func(r *http.Request, answered bool) {
					if answered == at.answered && storagetest.Operation(r) == at.op && strings.Contains(r.URL.Path, at.path) {
						hit(v)
					}
				})
			}
			return func() {
				for _, v := range victims {
					v.store.Watch(nil)
				}
			}
		}})
	}
	return steps
}

// schedulerSteps returns the steps that are visible in the streams.
func schedulerSteps(t *testing.T, nc *nats.Conn) []step {
	var steps []step
	for _, at := range []struct {
		name, subject string
		is            func(m *nats.Msg) bool
	}{
		{"a program is claimed", "bullpen.exec.>", func(m *nats.Msg) bool {
			return m.Header.Get("Bullpen-Status") == "running"
		}},
		{"a program prints", "bullpen.out.>", func(*nats.Msg) bool { return true }},
		{"a result is pending", "bullpen.exec.>", func(m *nats.Msg) bool {
			return bytes.Contains(m.Data, []byte(`"pending":`))
		}},
		{"a head is changed", "bullpen.thread.>", func(m *nats.Msg) bool {
			var head proto.Thread
			return json.Unmarshal(m.Data, &head) == nil && head.Version != nil && head.Version.Trace == head.Holder
		}},
		{"a result stands", "bullpen.exec.>", func(m *nats.Msg) bool { return m.Header.Get("Bullpen-Status") == "success" }},
	} {
		steps = append(steps, step{name: at.name, arm: func(hit func(*victim)) func() {
			sub, err := nc.Subscribe(at.subject, func(m *nats.Msg) {
				if at.is(m) {
					hit(nil)
				}
			})
			if err != nil {
				t.Error(err)
				return func() {}
			}
			return func() { _ = sub.Unsubscribe() }
		}})
	}
	return steps
}

// killThreads kills processes while programs run in threads, alternating between steps and random
// times.
func killThreads(t *testing.T, sys *system, victims []*victim, steps []step) {
	seed := *threadSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	random.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
	steps = append(steps, step{name: "any moment", arm: func(hit func(*victim)) func() {
		// The random time is the point of the test.
		timer := time.AfterFunc(time.Duration(random.IntN(1500))*time.Millisecond, func() { hit(nil) })
		return func() { timer.Stop() }
	}})
	var front struct {
		sync.Mutex
		base string
	}
	front.base = sys.base
	key, client := sys.key, sys.http
	at := func() *api {
		front.Lock()
		defer front.Unlock()
		return &api{t: t, base: front.base, key: key, http: client}
	}
	sys.ready(t)

	const diaries = 16
	ended := make(chan struct{}, 1) // receives when an execution has ended
	over, finish := context.WithCancel(t.Context())
	ctx, stop := context.WithCancel(t.Context())
	began := make(chan *threadJournal)
	var ends outcomes
	var clients, readers sync.WaitGroup
	defer readers.Wait()
	defer clients.Wait()
	defer stop()
	defer finish()
	var all []*threadJournal
	for i := range diaries {
		d := &threadJournal{id: fmt.Sprintf("diary-%d", i)}
		all = append(all, d)
		clients.Go(func() {
			for {
				select {
				case <-over.Done():
					return
				case began <- d:
				default:
				}
				res, err := d.write(ctx, at)
				if err != nil {
					t.Error(err)
					return
				}
				ends.add(cmp.Or(deref(res.ErrorCode), "success"))
				select {
				case ended <- struct{}{}:
				default:
				}
			}
		})
	}
	reads := 0
	readers.Go(func() {
		for {
			select {
			case <-over.Done():
				return
			case d := <-began:
				if err := d.checkFiles(ctx, at); err != nil {
					t.Error(err)
				}
				reads++
			}
		}
	})
	killed := map[string]int{}
	for i := range threadKills.n() {
		s := steps[i%len(steps)]
		if s.cold {
			s.name += " (cold)"
		}
		if t.Failed() || !killAt(t, s, victims, ended) {
			break
		}
		killed[s.name]++
		cold := i+1 < threadKills.n() && steps[(i+1)%len(steps)].cold
		for _, v := range victims {
			if !v.ended() {
				continue
			}
			if cold {
				if err := os.RemoveAll(filepath.Join(v.data, "homes")); err != nil {
					t.Error(err)
				}
			}
			if v.start != nil {
				v.process = v.start()
				continue
			}
			sys.startFront(t)
			v.process = sys.front
			front.Lock()
			front.base = sys.base
			front.Unlock()
			sys.ready(t)
		}
	}
	finish()
	patient := time.AfterFunc(patience, stop)
	defer patient.Stop()
	clients.Wait()
	readers.Wait()
	entries := 0
	for _, d := range all { // what the last executions left
		patient.Reset(patience)
		if res, err := d.write(ctx, at); err != nil || !res.Success {
			t.Errorf("%+v, %v", res, err)
		}
		if err := d.checkFiles(ctx, at); err != nil {
			t.Error(err)
		}
		entries += len(d.entriesNow())
	}
	t.Logf("killed %v; executions ended: %s; %d entries; read %d times meanwhile", killed, &ends, entries, reads)
}

// killAt waits for an execution to end and then kills the victim that reaches the step. If the
// process is unknown, it kills all victims.
func killAt(t *testing.T, s step, victims []*victim, ended <-chan struct{}) bool {
	for range cap(ended) + 1 { // the first may be from before
		select {
		case <-ended:
		case <-time.After(patience):
			t.Errorf("no execution ends before the kill when %s", s.name)
			return false
		}
	}
	hit := make(chan *victim)
	var once sync.Once
	done := make(chan struct{})
	disarm := s.arm(func(v *victim) {
		once.Do(func() {
			select {
			case hit <- v:
				<-done
			case <-done:
			}
		})
	})
	defer disarm()
	defer close(done)
	select {
	case v := <-hit:
		if v != nil {
			v.kill()
			return true
		}
		for _, v := range victims {
			v.signal(os.Kill)
		}
		for _, v := range victims {
			<-v.exited
		}
		return true
	case <-time.After(patience):
		t.Errorf("it never came that %s", s.name)
		return false
	}
}
