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
	// MinSafeAge is the least safe age. An object that a commit finds in the store may be an hour old, and then the commit goes on.
	MinSafeAge = 2 * time.Hour
	// batch is how many manifests are listed before they are read.
	batch = 256
	// maxTold is how many of the things that could not be read an error tells of.
	maxTold = 10
)

// threadKey names a thread.
type threadKey struct{ org, id string }

// collection is one run of Collect. What it knows grows until the sweep begins.
type collection struct {
	*Versions
	cutoff  time.Time
	heads   map[threadKey]*proto.Thread
	garbage []proto.Blob // manifests

	mu       sync.Mutex
	bases    map[string]bool // keys of manifests that others go on from
	layers   map[string]bool // keys of those that are needed
	unread   []layerOf       // of these, whose objects are not known yet
	objects  map[string]bool
	uploads  map[string]bool
	unsure   map[string]bool // organisations of which something could not be read, so that it is not known what they need
	problems []error
	untold   int

	done proto.Collected
}

type layerOf struct {
	org string
	proto.Layer
}

// Collect removes the blobs that no head and no manifest needs and that are older than safeAge by the clock of the store, which must be at
// least [MinSafeAge], and more than the longest time from the first blob of a commit to its head. Manifests of threads without a head stay,
// since a rebuild needs them. Where something that is needed cannot be read, so that it is not known what it needs in turn, the
// organisation's layers and objects all stay, and the error says what it is. Several collections may run at the same time.
func (v *Versions) Collect(ctx context.Context, safeAge time.Duration) (proto.Collected, error) {
	if safeAge < MinSafeAge {
		return proto.Collected{}, fmt.Errorf("collect blobs: a safe age of %v could remove what is being committed: give at least %v", safeAge, MinSafeAge)
	}
	c := &collection{
		Versions: v, heads: make(map[threadKey]*proto.Thread),
		bases: make(map[string]bool), layers: make(map[string]bool), objects: make(map[string]bool), uploads: make(map[string]bool), unsure: make(map[string]bool),
	}
	err := c.run(ctx, safeAge)
	if err == nil && c.untold > 0 {
		c.problems = append(c.problems, fmt.Errorf("and %d more", c.untold))
	}
	if err = errors.Join(append(c.problems, err)...); err != nil {
		return c.done, fmt.Errorf("collect blobs: %w", err)
	}
	return c.done, nil
}

// run has an order that the package's comment explains.
func (c *collection) run(ctx context.Context, safeAge time.Duration) error {
	now, err := c.clock(ctx)
	if err != nil {
		return fmt.Errorf("ask the store for the time: %w", err)
	}
	c.cutoff = now.Add(-safeAge)
	for _, step := range []func(context.Context) error{
		c.readHeads, c.readManifests, c.sweepManifests, c.readObjects, c.sweepBlobs,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// clock gives the time of the store.
func (c *collection) clock(ctx context.Context) (time.Time, error) {
	b := emptyBlob(clockPrefix + random())
	if err := c.Blobs.Put(ctx, b, bytes.NewReader(nil)); err != nil {
		return time.Time{}, err
	}
	e, err := c.Blobs.Stat(ctx, b.Key)
	return e.Modified, errors.Join(err, c.Blobs.Delete(ctx, b.Key))
}

// doubt notes that something of an organisation could not be read. Its error is that of ctx.
func (c *collection) doubt(ctx context.Context, org string, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unsure[org] = true
	if len(c.problems) == maxTold {
		c.untold++
	} else {
		c.problems = append(c.problems, fmt.Errorf("no layers and objects of %s are removed: %w", org, err))
	}
	return nil
}

// need notes what a version needs.
func (c *collection) need(org string, version *proto.Version) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range version.Layers {
		if !c.layers[l.Key] && l.Objects > 0 {
			c.unread = append(c.unread, layerOf{org, l})
		}
		c.layers[l.Key] = true
	}
}

func (c *collection) readHeads(ctx context.Context) error {
	for head, err := range c.Heads.All(ctx) {
		if err != nil {
			return err
		}
		if head.Version != nil {
			c.need(head.Org, head.Version)
		}
		for _, f := range head.Staged {
			c.uploads[f.Key] = true
		}
		// Only what the manifests are judged by is kept.
		slim := &proto.Thread{Version: &proto.Version{Number: head.Number()}, History: head.History}
		if head.Version != nil {
			slim.Version.Manifest = head.Version.Manifest
		}
		c.heads[threadKey{head.Org, head.ID}] = slim
	}
	return nil
}

// readManifests notes what all manifests need that are to stay.
func (c *collection) readManifests(ctx context.Context) error {
	var found []proto.Blob
	read := func() error {
		err := each(ctx, found, c.readManifest)
		found = found[:0]
		return err
	}
	for e, err := range c.Blobs.List(ctx, threadsPrefix) {
		if err != nil {
			return err
		}
		b, key, ok := manifestBlob(e)
		if !ok {
			continue // none of ours
		}
		if e.Modified.Before(c.cutoff) && !stays(c.heads[threadKey{key.org, key.thread}], b.Key, key.number) {
			c.garbage = append(c.garbage, b)
			continue
		}
		if found = append(found, b); len(found) == batch {
			if err := read(); err != nil {
				return err
			}
		}
	}
	return read()
}

// stays reports whether a manifest is needed, whatever its age: head is that of its thread, nil where there is none.
func stays(head *proto.Thread, manifest string, number int64) bool {
	// One with a higher number may be of a commit that is known and will be completed.
	return head == nil || refers(head, manifest) || number > head.Number()
}

func (c *collection) readManifest(ctx context.Context, b proto.Blob) error {
	m, err := c.ReadManifest(ctx, b)
	switch {
	case errors.Is(err, proto.ErrNotFound):
		return nil // removed since it was listed
	case err != nil:
		key, _ := parseManifestKey(b.Key)
		return c.doubt(ctx, key.org, err)
	}
	c.need(m.Org, &m.Version)
	return c.needBase(ctx, m.Version.Base)
}

// needBase notes that a manifest is needed, and those that it goes on from.
func (c *collection) needBase(ctx context.Context, base *proto.Base) error {
	for base != nil {
		c.mu.Lock()
		known := c.bases[base.Manifest.Key]
		c.bases[base.Manifest.Key] = true
		c.mu.Unlock()
		if known {
			return nil
		}
		m, err := c.ReadManifest(ctx, base.Manifest)
		if err != nil { // it was read a moment ago
			key, _ := parseManifestKey(base.Manifest.Key)
			return c.doubt(ctx, key.org, err)
		}
		base = m.Version.Base
	}
	return nil
}

// sweepManifests removes those that no head has named, if that is still so, and notes what the others need.
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
		case stays(head, b.Key, key.number):
			err = c.readManifest(ctx, b)
		case c.bases[b.Key] || c.unsure[key.org]:
		default:
			var removed bool
			if removed, err = c.sweep(ctx, b.Key, c.cutoff); err == nil && !removed {
				err = c.readManifest(ctx, b)
			}
			count(&c.done.Manifests, removed, b.Size)
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

// readObjects notes which objects the layers need.
func (c *collection) readObjects(ctx context.Context) error {
	return each(ctx, c.unread, func(ctx context.Context, l layerOf) error {
		var keys []string
		err := c.Versions.objects(ctx, l.org, &l.Layer, func(b proto.Blob) error {
			keys = append(keys, b.Key)
			return nil
		})
		if err != nil {
			return c.doubt(ctx, l.org, err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, key := range keys {
			c.objects[key] = true
		}
		return nil
	})
}

func (c *collection) sweepBlobs(ctx context.Context) error {
	plain := func(ctx context.Context, key string) (bool, error) { return c.sweep(ctx, key, c.cutoff) }
	marked := func(ctx context.Context, key string) (bool, error) { return c.sweepObject(ctx, key, c.cutoff) }
	for _, kind := range []struct {
		prefix string
		needed map[string]bool
		sure   bool // even where something could not be read
		sweep  func(context.Context, string) (bool, error)
		done   *proto.Swept
	}{
		{uploadsPrefix, c.uploads, true, plain, &c.done.Uploads},
		{layersPrefix, c.layers, false, plain, &c.done.Layers},
		{objectsPrefix, c.objects, false, marked, &c.done.Objects},
		{sweepPrefix, nil, true, plain, new(proto.Swept)}, // of collections that died
		{clockPrefix, nil, true, plain, new(proto.Swept)},
	} {
		for e, err := range c.Blobs.List(ctx, kind.prefix) {
			if err != nil {
				return err
			}
			org := orgOf(e.Key, kind.prefix)
			ours := org != "" || kind.prefix == clockPrefix && !strings.Contains(e.Key[len(clockPrefix):], "/")
			if !ours || kind.needed[e.Key] || !kind.sure && c.unsure[org] || !e.Modified.Before(c.cutoff) {
				continue
			}
			removed, err := kind.sweep(ctx, e.Key)
			if err != nil {
				return err
			}
			count(kind.done, removed, e.Size)
		}
	}
	return nil
}
