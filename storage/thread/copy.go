package thread

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
)

// source is a home that parts are copied from.
type source struct {
	head *proto.Thread
	tree *tree // the current home
}

// Copy copies parts of homes to the home of a thread, as one new version. A file or link replaces
// whatever is at its path. An existing directory keeps its metadata and its other entries. A part
// whose thread does not exist is empty. The error wraps [proto.ErrExists] if the thread must be new
// and exists. It is a [*proto.CopyError] or [*proto.SpaceError] if a limit is exceeded, a
// [*proto.PathError] if directories would be nested too deeply, and a [*proto.BusyError] if an
// execution holds the thread.
func (v *Versions) Copy(ctx context.Context, org, thread string, c *proto.TreeCopy) error {
	for range maxEditAttempts {
		err := v.copy(ctx, org, thread, c)
		if errors.Is(err, proto.ErrConflict) || errors.Is(err, errSourceChanged) {
			continue
		}
		if err != nil {
			return fmt.Errorf("copy files to thread %s: %w", thread, err)
		}
		return nil
	}
	return fmt.Errorf("copy files to thread %s: %w: threads changed during each of %d attempts: try again", thread,
		proto.ErrConflict, maxEditAttempts)
}

func (v *Versions) copy(ctx context.Context, org, thread string, c *proto.TreeCopy) error {
	head, err := v.Heads.Get(ctx, org, thread)
	switch {
	case errors.Is(err, proto.ErrNotFound):
		head = &proto.Thread{Org: org, ID: thread}
	case err != nil:
		return err
	case c.New:
		return proto.ErrExists
	}
	parts := make([]*picked, len(c.Parts))
	total := proto.Space{}
	for i := range c.Parts {
		if parts[i], err = v.pick(ctx, org, &c.Parts[i]); err != nil {
			return err
		}
		if total = total.Add(parts[i].root.usage().Space); total.Over(c.Most) {
			return &proto.CopyError{Size: total, Most: c.Most}
		}
	}
	_, err = v.editHead(ctx, head, c.Home, func(e *edit) error {
		for i, p := range parts {
			if err := e.add(ctx, v, c.Parts[i].Dir, p); err != nil {
				return err
			}
		}
		return nil
	})
	return err
}

// picked is a selected part of a home.
type picked struct {
	source
	root *node
}

// pick selects a part of a home. The directories above what is selected are in it.
func (v *Versions) pick(ctx context.Context, org string, part *proto.TreePart) (*picked, error) {
	head, err := v.Heads.Get(ctx, org, part.Thread)
	if errors.Is(err, proto.ErrNotFound) {
		head, err = &proto.Thread{Org: org, ID: part.Thread}, nil
	}
	var t *tree
	if err == nil {
		t, err = v.currentTree(ctx, head)
	}
	if err != nil {
		return nil, fmt.Errorf("read thread %s: %w", part.Thread, err)
	}
	root, err := t.root.pick(ctx, proto.NewPathMatcher(part.Paths))
	if root == nil {
		root = newDir(time.Time{})
	}
	return &picked{source{head, t}, root}, err
}

// pick returns a copy of a directory with a matcher's selection, or nil if that is empty. The copy
// shares all files and all wholly selected directories.
func (n *node) pick(ctx context.Context, m proto.PathMatcher) (*node, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if m.Empty() {
		return nil, nil
	}
	var part *node
	for name, child := range n.children {
		below, selected := m.Enter(name)
		if !selected {
			if child.kind != layer.Dir {
				continue
			}
			var err error
			if child, err = child.pick(ctx, below); child == nil || err != nil {
				if err != nil {
					return nil, err
				}
				continue
			}
		}
		if part == nil {
			dir := *n
			dir.children = nil
			part = &dir
		}
		part.setChild(name, child)
	}
	return part, nil
}

// add adds a picked part to the home that is edited, below a directory.
func (e *edit) add(ctx context.Context, v *Versions, dir string, p *picked) error {
	if len(p.root.children) == 0 {
		return nil
	}
	depth := 1
	if dir != "" {
		depth += 1 + strings.Count(dir, "/")
	}
	if err := p.root.checkHeight(depth); err != nil {
		return &proto.PathError{Path: dir, Message: "would have directories that are nested too deeply; keep fewer levels"}
	}
	to := e.root
	if dir != "" {
		to, _ = e.makeParent(dir+"/.", e.now)
	}
	c := &copier{ctx: ctx, versions: v, edit: e, packs: len(e.packs), done: make(map[*node]*node)}
	e.packs = slices.Concat(e.packs, p.tree.packs)
	e.sources = append(e.sources, p.source)
	return c.merge(to, p.root)
}

// copier copies nodes of a source into a home that is edited.
type copier struct {
	ctx      context.Context // of the copy
	versions *Versions
	edit     *edit
	packs    int             // index of the source's first pack among the home's
	done     map[*node]*node // files with several names
}

// merge copies what is in a directory to a directory of the home.
func (c *copier) merge(to, from *node) error {
	if c.ctx.Err() != nil {
		return context.Cause(c.ctx)
	}
	for _, name := range slices.Sorted(maps.Keys(from.children)) {
		child := from.children[name]
		if child.kind != layer.Dir {
			file, err := c.file(child)
			if err != nil {
				return fmt.Errorf("%.300q: %w", name, err)
			}
			to.setChild(name, file)
			continue
		}
		old := to.children[name]
		dir := c.edit.makeDir(to, name, c.edit.now)
		if old == nil || old.kind != layer.Dir {
			dir.mode, dir.sec, dir.nsec, dir.xattrs = child.mode, child.sec, child.nsec, child.xattrs
		}
		if err := c.merge(dir, child); err != nil {
			return err
		}
	}
	return nil
}

// file returns the copy of a file or symlink.
func (c *copier) file(n *node) (*node, error) {
	if done := c.done[n]; done != nil {
		return done, nil
	}
	file := *n
	switch {
	case file.content.staged != nil:
		object, err := c.versions.putLarge(c.ctx, c.edit.org, file.content.staged)
		if err != nil {
			return nil, err
		}
		file.content.object = object
		if object != nil {
			file.content.staged = nil
		}
	case file.content.object == nil:
		file.content.pack += c.packs
	}
	if n.linked {
		c.done[n] = &file
	}
	return &file, nil
}

// checkSources returns errSourceChanged unless the homes that parts were copied from still have their
// content. It must be called when the manifest of the copy is stored: from then on, that protects the
// content from Collect.
func (v *Versions) checkSources(ctx context.Context, sources []source) error {
	for _, s := range sources {
		after, err := v.Heads.Get(ctx, s.head.Org, s.head.ID)
		switch {
		case errors.Is(err, proto.ErrNotFound):
			return errSourceChanged
		case err != nil:
			return err
		case s.head.Version != nil && !refersToLayers(after, s.head.Version, true):
			return errSourceChanged
		}
	}
	return nil
}

// ArchiveSelected writes the patterns' selection of a thread's current home as a tar, as Archive
// does, with the directories above it. If the thread does not exist, the error wraps
// [proto.ErrNotFound].
func (v *Versions) ArchiveSelected(ctx context.Context, org, thread string, paths []string, w io.Writer) error {
	t, err := v.numberedTree(ctx, org, thread, 0)
	if err != nil {
		return fmt.Errorf("archive thread %s: %w", thread, err)
	}
	part := *t
	if part.root, err = t.root.pick(ctx, proto.NewPathMatcher(paths)); err != nil {
		return fmt.Errorf("archive thread %s: %w", thread, err)
	}
	if part.root == nil {
		part.root = newDir(t.root.modified())
	}
	return v.archive(ctx, &part, thread, w)
}
