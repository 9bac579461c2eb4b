package thread

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// MinSafeAge is the minimal safe age. An object that a commit finds in the store may be an hour
	// old already.
	MinSafeAge = 2 * time.Hour
	// manifestBatch is how many manifests are listed before they are read.
	manifestBatch = 256
	// maxProblems limits how many unreadable blobs an error lists.
	maxProblems = 10
)

// threadKey identifies a thread.
type threadKey struct{ org, id string }

// collection is one run of Collect.
type collection struct {
	*Versions
	cutoff  time.Time
	heads   map[threadKey]*proto.Thread
	removed []*proto.Thread // tombstones
	garbage []proto.Blob    // manifests
	unused  []unusedBlob

	mu           sync.Mutex
	bases        map[string]bool // keys of needed manifests that are bases of others
	layers       map[string]bool // keys of needed layers
	unread       []orgLayer      // needed layers whose objects are not known yet
	objects      map[string]bool
	uploads      map[string]bool
	incomplete   map[string]bool // organisations with unreadable blobs
	problems     []error
	moreProblems int

	result proto.Collected
}

// unusedBlob is an old blob that was unreferenced when it was listed.
type unusedBlob struct {
	key    string
	size   int64
	needed map[string]bool // by key, of the blobs of its kind
	sweep  func(ctx context.Context, key string, cutoff time.Time) (bool, error)
	result *proto.Swept
}

type orgLayer struct {
	org string
	proto.Layer
}

// Collect removes blobs that no head or manifest needs and that are older than safeAge by the
// store's clock. safeAge must be at least [MinSafeAge] and exceed the time from a commit's first
// blob to its head. Manifests of threads without a head are retained for Rebuild. If a needed blob
// cannot be read, Collect retains all layers and objects of the organisation, and the error
// describes it. Collect also completes interrupted removals of threads. Collections may run
// concurrently.
func (v *Versions) Collect(ctx context.Context, safeAge time.Duration) (proto.Collected, error) {
	if safeAge < MinSafeAge {
		return proto.Collected{},
			fmt.Errorf("collect blobs: a safe age of %v could remove blobs of running commits: use at least %v",
				safeAge, MinSafeAge)
	}
	c := &collection{
		Versions: v, heads: make(map[threadKey]*proto.Thread), bases: make(map[string]bool), layers: make(map[string]bool),
		objects: make(map[string]bool), uploads: make(map[string]bool), incomplete: make(map[string]bool),
	}
	err := c.run(ctx, safeAge)
	if err == nil && c.moreProblems > 0 {
		c.problems = append(c.problems, fmt.Errorf("and %d more", c.moreProblems))
	}
	if err = errors.Join(append(c.problems, err)...); err != nil {
		return c.result, fmt.Errorf("collect blobs: %w", err)
	}
	return c.result, nil
}

// run executes the steps in the order that the package comment justifies.
func (c *collection) run(ctx context.Context, safeAge time.Duration) error {
	now, err := c.storeTime(ctx)
	if err != nil {
		return fmt.Errorf("determine the time of the store: %w", err)
	}
	c.cutoff = now.Add(-safeAge)
	for _, step := range []func(context.Context) error{
		c.readHeads, c.completeRemovals, c.readManifests, c.sweepManifests, c.readObjects, c.findGarbage, c.readNewHeads,
		c.sweepBlobs,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// storeTime returns the time of the store's clock.
func (c *collection) storeTime(ctx context.Context) (time.Time, error) {
	b := emptyBlob(clockPrefix + random())
	if err := c.Blobs.Put(ctx, b, bytes.NewReader(nil)); err != nil {
		return time.Time{}, err
	}
	e, err := c.Blobs.Stat(ctx, b.Key)
	return e.Modified, errors.Join(err, c.Blobs.Delete(ctx, b.Key))
}

// markIncomplete records that something of an organisation could not be read. It only fails if ctx
// is done.
func (c *collection) markIncomplete(ctx context.Context, org string, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.incomplete[org] = true
	if len(c.problems) == maxProblems {
		c.moreProblems++
	} else {
		c.problems = append(c.problems, fmt.Errorf("all layers and objects of %s are retained: %w", org, err))
	}
	return nil
}

// markLayers marks the layers of a version as needed.
func (c *collection) markLayers(org string, version *proto.Version) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range version.Layers {
		if !c.layers[l.Key] && l.Objects > 0 {
			c.unread = append(c.unread, orgLayer{org, l})
		}
		c.layers[l.Key] = true
	}
}

func (c *collection) readHeads(ctx context.Context) error {
	for head, err := range c.Heads.All(ctx) {
		if err != nil {
			return err
		}
		if head.Removal != "" {
			c.removed = append(c.removed, head)
			delete(c.heads, threadKey{head.Org, head.ID})
			continue
		}
		if head.Version != nil {
			c.markLayers(head.Org, head.Version)
		}
		for _, f := range head.Staged {
			c.uploads[f.Key] = true
		}
		// Only what isNeeded reads is held in memory.
		slim := &proto.Thread{Version: &proto.Version{Number: head.Number()}, History: head.History}
		if head.Version != nil {
			slim.Version.Manifest = head.Version.Manifest
		}
		c.heads[threadKey{head.Org, head.ID}] = slim
	}
	return nil
}

// completeRemovals completes interrupted removals of threads.
func (c *collection) completeRemovals(ctx context.Context) error {
	for _, t := range c.removed {
		if err := c.completeRemoval(ctx, t.Org, t.ID, t.Removal); err != nil {
			return fmt.Errorf("complete the removal of thread %s of %s: %w", t.ID, t.Org, err)
		}
	}
	return nil
}

// readManifests marks everything referenced by needed manifests, and collects the others as
// garbage.
func (c *collection) readManifests(ctx context.Context) error {
	var found []proto.Blob
	read := func() error {
		err := forEach(ctx, found, c.readManifest)
		found = found[:0]
		return err
	}
	for e, err := range c.Blobs.List(ctx, threadsPrefix) {
		if err != nil {
			return err
		}
		b, key, ok := manifestBlob(e)
		if !ok {
			continue // foreign
		}
		if e.Modified.Before(c.cutoff) && !isNeeded(c.heads[threadKey{key.org, key.thread}], b.Key, key.number) {
			c.garbage = append(c.garbage, b)
			continue
		}
		if found = append(found, b); len(found) == manifestBatch {
			if err := read(); err != nil {
				return err
			}
		}
	}
	return read()
}

// isNeeded reports whether a manifest is needed whatever its age. head is the head of its thread,
// or nil.
func isNeeded(head *proto.Thread, manifest string, number int64) bool {
	// A higher number may belong to a commit in progress.
	return head == nil || refersTo(head, manifest) || number > head.Number()
}

func (c *collection) readManifest(ctx context.Context, b proto.Blob) error {
	m, err := c.ReadManifest(ctx, b)
	switch {
	case errors.Is(err, proto.ErrNotFound):
		return nil // removed after it was listed
	case err != nil:
		key, _ := parseManifestKey(b.Key)
		return c.markIncomplete(ctx, key.org, err)
	}
	c.markLayers(m.Org, &m.Version)
	return c.markBases(ctx, m.Version.Base)
}

// markBases marks the base of a manifest, its base and so on as needed.
func (c *collection) markBases(ctx context.Context, base *proto.Base) error {
	for base != nil {
		c.mu.Lock()
		known := c.bases[base.Manifest.Key]
		c.bases[base.Manifest.Key] = true
		c.mu.Unlock()
		if known {
			return nil
		}
		m, err := c.ReadManifest(ctx, base.Manifest)
		if err != nil {
			key, _ := parseManifestKey(base.Manifest.Key)
			return c.markIncomplete(ctx, key.org, err)
		}
		base = m.Version.Base
	}
	return nil
}

// sweepManifests removes garbage manifests that are still unneeded, and marks everything that the
// others refer to.
func (c *collection) sweepManifests(ctx context.Context) error {
	for _, b := range c.garbage {
		key, _ := parseManifestKey(b.Key)
		head, err := c.Heads.Get(ctx, key.org, key.thread)
		if errors.Is(err, proto.ErrNotFound) {
			head, err = nil, nil
		}
		switch {
		case err != nil:
			return err
		case isNeeded(head, b.Key, key.number):
			err = c.readManifest(ctx, b)
		case c.bases[b.Key] || c.incomplete[key.org]:
		default:
			var removed bool
			if removed, err = c.sweep(ctx, b.Key, c.cutoff); err == nil && !removed {
				err = c.readManifest(ctx, b)
			}
			count(&c.result.Manifests, removed, b.Size)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func count(s *proto.Swept, removed bool, size int64) {
	if removed {
		s.Blobs++
		s.Bytes += size
	}
}

// readObjects marks the objects that needed layers refer to.
func (c *collection) readObjects(ctx context.Context) error {
	unread := c.unread
	c.unread = nil
	return forEach(ctx, unread, func(ctx context.Context, l orgLayer) error {
		var keys []string
		err := c.Versions.objects(ctx, l.org, &l.Layer, func(b proto.Blob) error {
			keys = append(keys, b.Key)
			return nil
		})
		if err != nil {
			return c.markIncomplete(ctx, l.org, err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, key := range keys {
			c.objects[key] = true
		}
		return nil
	})
}

// findGarbage lists the blobs that are old and not needed.
func (c *collection) findGarbage(ctx context.Context) error {
	for _, group := range []struct {
		prefix string
		needed map[string]bool
		sweep  func(ctx context.Context, key string, cutoff time.Time) (bool, error)
		result *proto.Swept
	}{
		{uploadsPrefix, c.uploads, c.sweep, &c.result.Uploads},
		{layersPrefix, c.layers, c.sweep, &c.result.Layers},
		{objectsPrefix, c.objects, c.sweepObject, &c.result.Objects},
		{sweepPrefix, nil, c.sweep, new(proto.Swept)}, // of collections that were interrupted
		{clockPrefix, nil, c.sweep, new(proto.Swept)},
	} {
		for e, err := range c.Blobs.List(ctx, group.prefix) {
			if err != nil {
				return err
			}
			own := orgOf(e.Key, group.prefix) != "" || group.prefix == clockPrefix &&
				!strings.Contains(e.Key[len(clockPrefix):], "/")
			if own && !group.needed[e.Key] && e.Modified.Before(c.cutoff) {
				c.unused = append(c.unused, unusedBlob{e.Key, e.Size, group.needed, group.sweep, group.result})
			}
		}
	}
	return nil
}

// readNewHeads marks the references of heads that changed since readHeads. A store may date a
// multipart object from its first request, so that an object listed as old may have been completed
// and referenced in the meantime.
func (c *collection) readNewHeads(ctx context.Context) error {
	if len(c.unused) == 0 {
		return nil
	}
	if err := c.readHeads(ctx); err != nil {
		return err
	}
	return c.readObjects(ctx)
}

func (c *collection) sweepBlobs(ctx context.Context) error {
	for _, b := range c.unused {
		shared := strings.HasPrefix(b.key, layersPrefix) || strings.HasPrefix(b.key, objectsPrefix)
		if b.needed[b.key] || shared && c.incomplete[strings.Split(b.key, "/")[1]] {
			continue
		}
		removed, err := b.sweep(ctx, b.key, c.cutoff)
		if err != nil {
			return err
		}
		count(b.result, removed, b.size)
	}
	return nil
}
