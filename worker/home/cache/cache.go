// Package cache gives the executions of a worker the homes of their threads. It keeps the newest version of each thread that was lately used
// here as a directory, so that a home is ready without being fetched, and stores what an execution changed as the next version.
//
// A version's directory is the lower one of a home's overlay. Nobody changes it while there is a home on it. When its successor is the thread's
// newest version, the directory is made into that one, in the time that the change takes; it has no name of its own meanwhile, so that
// what a killed process leaves is never taken for a version.
package cache

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/thread"
	"github.com/bullpen-run/bullpen/worker/home"
)

// Heads are the heads of threads.
type Heads interface {
	// Get gives a head as it is now. Its error is [proto.ErrNotFound] where there is none.
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
	// Compact puts one layer in the place of the first ones of the newest version, which make the same home. Its error is
	// [proto.ErrConflict] where these are not its first layers.
	Compact(ctx context.Context, org, id string, old []proto.Layer, full proto.Layer) error
}

// The names in a keeper's directory. Each version has one of its own, see [nameOf]; what is being made or removed lies beside them.
const (
	workPrefix = "work-"
	emptyName  = "empty"
	bootName   = "boot"
	// bootID names this run of the kernel.
	bootID = "/proc/sys/kernel/random/boot_id"
	// blockSize is what a file takes on a disk at least, or about that, in bytes.
	blockSize = 4096
	dirMode   = 0o700
)

// Config is what a keeper needs to know.
type Config struct {
	// Dir is where homes are kept, which is made if need be, for one process at a time. Its file system must support file handles and id-mapped
	// mounts.
	Dir string
	// Most is how many bytes of disk homes may take that nobody uses.
	Most int64
	// Versions are what homes are made of and stored as.
	Versions *thread.Versions
	Heads    Heads
	Owners   *home.Owners
	Log      *slog.Logger
}

// Cache keeps homes. It is safe for concurrent use.
type Cache struct {
	cfg  Config
	work sync.WaitGroup // in the background

	mu     sync.Mutex
	closed bool
	places map[string]*place // by the thread's name
}

// place is where a thread's home is kept. users counts those who have it or wait for it.
type place struct {
	thread string
	turn   chan struct{} // holds one while somebody reads or changes what follows
	at     version
	homes  int // that are on it

	users    int // this and the rest under the keeper's lock
	used     time.Time
	cost     int64
	gone     bool // another one has taken its place
	compacts context.CancelFunc
}

// version is a version that is there as a directory; number 0 is none.
type version struct {
	number int64
	digest string // of its manifest
	cost   int64  // bytes of disk
}

// threadName gives the name of a thread in a keeper's directory.
func threadName(org, id string) string {
	sum := sha256.Sum256([]byte(org + "/" + id))
	return hex.EncodeToString(sum[:16])
}

// nameOf gives the name of a version's directory.
func nameOf(thread string, v version) string {
	return fmt.Sprintf("%s.%d.%s.%d", thread, v.number, strings.TrimPrefix(v.digest, "sha256:"), v.cost)
}

func parseName(name string) (thread string, v version, ok bool) {
	parts := strings.Split(name, ".")
	if len(parts) != 4 || len(parts[0]) != 32 || len(parts[2]) != 64 {
		return "", v, false
	}
	number, err := strconv.ParseInt(parts[1], 10, 64)
	bytes, err2 := strconv.ParseInt(parts[3], 10, 64)
	v = version{number: number, digest: "sha256:" + parts[2], cost: bytes}
	return parts[0], v, err == nil && err2 == nil && number > 0 && nameOf(parts[0], v) == name
}

func of(v *proto.Version) version {
	if v == nil {
		return version{}
	}
	return version{number: v.Number, digest: v.Manifest.Digest, cost: v.Bytes + v.Files*blockSize}
}

// Open opens a keeper.
func Open(cfg Config) (*Cache, error) {
	k := &Cache{cfg: cfg, places: map[string]*place{}}
	err := os.MkdirAll(cfg.Dir, dirMode)
	if err == nil {
		err = k.sweep()
	}
	if err != nil {
		return nil, fmt.Errorf("open the homes of threads: %w", err)
	}
	k.evict() // the bound may be another than it was
	return k, nil
}

// Close ends what goes on in the background, and waits for that. Homes that were given out must have been closed. What is kept stays for the
// next one.
func (k *Cache) Close() error {
	k.mu.Lock()
	k.closed = true
	for _, p := range k.places {
		p.compacts()
	}
	k.mu.Unlock()
	k.work.Wait()
	return nil
}

// sweep removes what a process left that was killed, and, after a restart of the machine, everything: files are not synced to disk one by
// one, and a power failure may have emptied some.
func (k *Cache) sweep() error {
	boot, err := os.ReadFile(bootID)
	if err != nil {
		return err
	}
	last, err := os.ReadFile(k.path(bootName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	entries, err := os.ReadDir(k.cfg.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		thread, v, ok := parseName(e.Name())
		switch {
		case e.Name() == bootName:
		case ok && bytes.Equal(boot, last) && k.places[thread] == nil:
			p := newPlace(thread)
			p.at, p.cost, p.used = v, v.cost, time.Unix(0, 0)
			if info, err := e.Info(); err == nil {
				p.used = info.ModTime()
			}
			k.places[thread] = p
		default:
			if err := os.RemoveAll(k.path(e.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.WriteFile(k.path(bootName), boot, 0o600); err != nil { //nolint:gosec // the directory is ours
		return err
	}
	return os.Mkdir(k.path(emptyName), 0o755) //nolint:gosec // what a home without files looks like
}

func newPlace(thread string) *place {
	return &place{thread: thread, turn: make(chan struct{}, 1), compacts: func() {}}
}

func (k *Cache) path(name string) string { return filepath.Join(k.cfg.Dir, name) }

// take gives the place of a thread to one more user.
func (k *Cache) take(thread string) *place {
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.places[thread]
	if p == nil {
		p = newPlace(thread)
		k.places[thread] = p
	}
	p.users++
	return p
}

// leave takes a user away.
func (k *Cache) leave(p *place) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p.users--
	p.used = time.Now()
	if p.users > 0 {
		return
	}
	switch {
	case p.gone:
		k.discard(p)
	case p.at.number == 0:
		delete(k.places, p.thread)
	}
	k.evict()
}

// enter waits for a place's turn.
func (p *place) enter(ctx context.Context) error {
	select {
	case p.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p *place) exit() { <-p.turn }

// settled notes what a place has now. It is called with its turn.
func (k *Cache) settled(p *place, at version) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p.at, p.cost = at, at.cost
	k.evict()
}

// evict removes homes that nobody uses while there is too much. It is called with mu held.
func (k *Cache) evict() {
	total := int64(0)
	var idle []*place
	for _, p := range k.places {
		total += p.cost
		if p.users == 0 {
			idle = append(idle, p)
		}
	}
	if total <= k.cfg.Most {
		return
	}
	slices.SortFunc(idle, func(a, b *place) int { return a.used.Compare(b.used) })
	for _, p := range idle {
		if total <= k.cfg.Most {
			return
		}
		total -= p.cost
		delete(k.places, p.thread)
		k.discard(p)
	}
}

// discard removes a place's directory. Nobody uses it any more.
func (k *Cache) discard(p *place) {
	if p.at.number == 0 {
		return
	}
	away := k.path(workPrefix + rand.Text())
	if err := os.Rename(k.path(nameOf(p.thread, p.at)), away); err != nil {
		k.cfg.Log.Warn("an unused home could not be removed", "error", err)
		return
	}
	p.at = version{}
	k.work.Go(func() { k.removeAll(away) })
}

func (k *Cache) removeAll(dir string) {
	if err := os.RemoveAll(dir); err != nil {
		k.cfg.Log.Warn("what is left of a home could not be removed", "directory", dir, "error", err)
	}
}

// prepare makes a place have a version, and gives the place: another one where a home is on it that has an older version. It is called
// with the place's turn, which goes with it.
func (k *Cache) prepare(ctx context.Context, p *place, t *proto.Thread) (*place, error) {
	want := of(t.Version)
	if p.at.number == want.number && p.at.digest == want.digest {
		return p, nil
	}
	if p.homes > 0 {
		p = k.replace(p)
	}
	if want.number == 0 { // what is there is of a thread of that name that was removed
		k.mu.Lock()
		k.discard(p)
		k.mu.Unlock()
		k.settled(p, version{})
		return p, nil
	}
	began := time.Now()
	err := k.make(ctx, p, t)
	if err != nil {
		return p, err
	}
	k.cfg.Log.Debug("home made ready", "org", t.Org, "thread", t.ID, "version", want.number, "took", time.Since(began))
	return p, nil
}

// replace puts an empty place where one is that is still needed as it is, and gives the turn of the one back for that of the other.
func (k *Cache) replace(p *place) *place {
	k.mu.Lock()
	next := newPlace(p.thread)
	next.turn <- struct{}{}
	next.users, p.gone = 1, true
	k.places[p.thread] = next
	k.mu.Unlock()
	p.exit()
	k.leave(p)
	return next
}

// make makes the directory of a thread's newest version.
func (k *Cache) make(ctx context.Context, p *place, t *proto.Thread) error {
	err := k.makeOnce(ctx, p, t)
	if errors.Is(err, proto.ErrCorrupt) { // on its way perhaps; from the start, for some of it may have been applied
		k.cfg.Log.Warn("a home was fetched wrong, and is fetched again", "org", t.Org, "thread", t.ID, "error", err)
		err = k.makeOnce(ctx, p, t)
	}
	return err
}

// makeOnce makes it out of the directory that is there, if that is one of the versions before. After an error there is none.
func (k *Cache) makeOnce(ctx context.Context, p *place, t *proto.Thread) error {
	work := k.path(workPrefix + rand.Text())
	layers := t.Version.Layers
	known := slices.ContainsFunc(t.History, func(v proto.Version) bool { return v.Number == p.at.number && v.Manifest.Digest == p.at.digest })
	old := p.at
	switch {
	case known:
		if err := os.Rename(k.path(nameOf(p.thread, p.at)), work); err != nil {
			return err
		}
		p.at = version{}
		layers = slices.DeleteFunc(slices.Clone(layers), func(l proto.Layer) bool { return l.Version <= old.number })
	default:
		k.mu.Lock()
		k.discard(p)
		k.mu.Unlock()
		if err := os.Mkdir(work, dirMode); err != nil {
			return err
		}
	}
	err := k.apply(ctx, work, t.Org, layers)
	if err == nil {
		err = os.Rename(work, k.path(nameOf(p.thread, of(t.Version))))
	}
	if err != nil {
		k.work.Go(func() { k.removeAll(work) })
		k.settled(p, version{})
		return err
	}
	k.settled(p, of(t.Version))
	return nil
}
