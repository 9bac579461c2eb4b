package thread

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
)

const (
	// maxChanges and maxChangeBytes limit the changes that a comparison returns, and their paths.
	maxChanges     = 1000
	maxChangeBytes = 1 << 20
	// maxCompared limits the content in bytes that a comparison reads of each version.
	maxCompared = 64 << 20
)

// errCompared ends a comparison that has reached a limit.
var errCompared = errors.New("the comparison has reached a limit")

// Compare returns what differs at a path and below it between two versions of a home, in ascending
// order: kinds, modes, contents and the targets of symlinks. from 0 is an empty home, to 0 the
// current home including staged files. The path is relative to the home and clean; the empty path
// is the home. truncated reports that there may be more changes. If a version does not exist, the
// error is a [*proto.NoVersionError], and if neither has the path, a [*proto.NoFileError].
func (v *Versions) Compare(
	ctx context.Context, org, thread string, from, to int64, path string,
) (changes []proto.FileChange, truncated bool, err error) {
	after, err := v.numberedTree(ctx, org, thread, to)
	if err != nil {
		return nil, false, fmt.Errorf("compare versions of thread %s: %w", thread, err)
	}
	before := &tree{org: org, root: &node{kind: layer.Dir}}
	if from > 0 {
		if before, err = v.numberedTree(ctx, org, thread, from); err != nil {
			return nil, false, fmt.Errorf("compare versions of thread %s: %w", thread, err)
		}
	}
	c := &comparison{
		ctx: ctx, before: before, after: after, framesBefore: v.newFrameReader(), framesAfter: v.newFrameReader(),
	}
	a, b := before.root.find(path), after.root.find(path)
	switch {
	case a == nil && b == nil:
		err = &proto.NoFileError{Path: path}
	case path == "":
		err = c.below(nil, a, b)
	default:
		var at *layer.Path
		err = c.compare(at.Child(path), a, b)
	}
	if errors.Is(err, errCompared) {
		return c.changes, true, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("compare versions of thread %s: %w", thread, err)
	}
	return c.changes, false, nil
}

// comparison collects the differences of two trees.
type comparison struct {
	ctx                       context.Context // of the request
	before, after             *tree
	framesBefore, framesAfter *frameReader
	changes                   []proto.FileChange
	paths                     int   // bytes of the paths of changes
	read                      int64 // bytes of content read of each version
}

// compare compares what is at a path and below it. A node is nil if its version has nothing there.
func (c *comparison) compare(at *layer.Path, a, b *node) error {
	if c.ctx.Err() != nil {
		return context.Cause(c.ctx)
	}
	if a == b {
		return nil
	}
	same, err := c.same(a, b)
	if err != nil {
		return err
	}
	if !same {
		path := at.String()
		if c.paths += len(path); len(c.changes) == maxChanges || c.paths > maxChangeBytes {
			return errCompared
		}
		c.changes = append(c.changes, proto.FileChange{Path: path, Before: a.state(), After: b.state()})
	}
	return c.below(at, a, b)
}

// below compares the entries of directories. Other nodes have none.
func (c *comparison) below(at *layer.Path, a, b *node) error {
	before, after := a.entries(), b.entries()
	names := slices.AppendSeq(slices.Collect(maps.Keys(before)), maps.Keys(after))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if err := c.compare(at.Child(name), before[name], after[name]); err != nil {
			return err
		}
	}
	return nil
}

// entries returns the entries of a directory.
func (n *node) entries() map[string]*node {
	if n == nil {
		return nil
	}
	return n.children
}

// state returns the form of a node in a change: nil for no node.
func (n *node) state() *proto.FileState {
	if n == nil {
		return nil
	}
	f := n.file("")
	return &proto.FileState{Type: f.Type(), Size: f.Size, Mode: n.mode, Modified: f.Modified}
}

// same reports whether two nodes are equal, apart from times, attributes and entries.
func (c *comparison) same(a, b *node) (bool, error) {
	switch {
	case a == nil || b == nil || a.kind != b.kind || a.mode != b.mode || a.target != b.target:
		return false, nil
	case a.kind != layer.File:
		return true, nil
	case a.size != b.size || !slices.Equal(a.extents, b.extents):
		return false, nil
	}
	digest, other := a.content.digest(), b.content.digest()
	switch {
	case len(a.extents) == 0 || c.before.tag(a) == c.after.tag(b):
		return true, nil
	case digest != "" && other != "":
		return digest == other, nil
	default:
		return c.sameContent(a, b)
	}
}

// digest returns the digest of content that is a blob of its own, otherwise "".
func (c *content) digest() string {
	switch {
	case c.staged != nil:
		return c.staged.Digest
	case c.object != nil:
		return DigestName(*c.object)
	default:
		return ""
	}
}

// sameContent compares the content of two files with the same holes by reading it. At least one is
// in a pack, and so are at most [layer.MaxInline] bytes.
func (c *comparison) sameContent(a, b *node) (bool, error) {
	if c.read += a.dense(a.size); c.read > maxCompared {
		return false, errCompared
	}
	before, err := c.before.open(c.ctx, a, 0, a.size, c.framesBefore)
	if err != nil {
		return false, err
	}
	defer func() { _ = before.Close() }() // it was only read
	after, err := c.after.open(c.ctx, b, 0, b.size, c.framesAfter)
	if err != nil {
		return false, err
	}
	defer func() { _ = after.Close() }()
	// Only the data between holes is read.
	return equalContent(before.data, after.data)
}

// equalContent reports whether two readers have the same content.
func equalContent(a, b io.Reader) (bool, error) {
	const step = 32 << 10
	before, after := make([]byte, step), make([]byte, step)
	for {
		n, err := io.ReadFull(a, before)
		m, errAfter := io.ReadFull(b, after)
		if failure := cmp.Or(ignoreEnd(err), ignoreEnd(errAfter)); failure != nil {
			return false, hideNotFound(failure)
		}
		if !bytes.Equal(before[:n], after[:m]) {
			return false, nil
		}
		if n < step { // both have ended
			return true, nil
		}
	}
}

// ignoreEnd returns nil for the end of a reader.
func ignoreEnd(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}
