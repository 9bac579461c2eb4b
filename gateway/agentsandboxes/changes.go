package agentsandboxes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"unicode/utf8"

	"github.com/aymanbagabas/go-udiff"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// maxChanges limits the files of a save whose changes are returned.
	maxChanges = 200
	// maxCompared is the size of the largest file whose content is compared, and maxDiffs of all diffs of a save, in
	// bytes.
	maxCompared = 256 << 10
	maxDiffs    = 512 << 10
)

// Threads reads threads.
type Threads interface {
	// Get returns a thread, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
}

// Versions reads the versions of threads.
type Versions interface {
	// Compare returns what differs between two versions at a path and below it. truncated reports that there may be
	// more.
	Compare(ctx context.Context, org, thread string, from, to int64, path string) (
		changes []proto.FileChange, truncated bool, err error)
	// Open opens a regular file of a version.
	Open(ctx context.Context, org, thread string, version int64, path string) (*proto.FileContent, error)
}

// Change is what has happened to a file.
type Change struct {
	Path   string // absolute
	Action string // write for a new file, and patch for one that was changed or removed
	// Diff is the unified diff; empty if the content is no text, is too large, or did not change.
	Diff string
}

// readVersion remembers the version of the files with which the sandbox has started.
func (b *Sandbox) readVersion(ctx context.Context) error {
	head, err := b.sandboxes.Threads.Get(ctx, b.live.Org, b.live.ThreadID)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	if err == nil {
		b.version = head.Number()
	}
	return err
}

// Save stores the files, and returns what has changed since the last save. Files below the directory hidden of the
// home are not mentioned. more reports that the list is not complete.
func (b *Sandbox) Save(ctx context.Context, hidden string) (changes []Change, more bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	version, err := b.sandboxes.Live.Save(ctx, b.live.Org, b.live.ID)
	if err != nil {
		return nil, false, fmt.Errorf("save the files of session %s: %w", b.session.ID, err)
	}
	from := b.version
	if version == from {
		return nil, false, nil
	}
	b.version = version
	list, more, err := b.sandboxes.Versions.Compare(ctx, b.live.Org, b.live.ThreadID, from, version, "")
	if err != nil {
		return nil, false, fmt.Errorf("compare the files of session %s: %w", b.session.ID, err)
	}
	left := maxDiffs
	for i := range list {
		f := &list[i]
		if f.Path == hidden || strings.HasPrefix(f.Path, hidden+"/") || !isFile(f.Before) && !isFile(f.After) {
			continue
		}
		if len(changes) == maxChanges {
			return changes, true, nil
		}
		c := Change{Path: path.Join(proto.SandboxHome, f.Path), Action: "patch"}
		if f.Before == nil {
			c.Action = "write"
		}
		diff, same, err := b.diff(ctx, f, from, version)
		if err != nil {
			return nil, false, err
		}
		if same {
			continue
		}
		if left -= len(diff); left >= 0 {
			c.Diff = diff
		}
		changes = append(changes, c)
	}
	return changes, more, nil
}

// diff returns the unified diff of a file; empty if the content is no text or too large. same reports that the
// content did not change.
func (b *Sandbox) diff(ctx context.Context, f *proto.FileChange, from, to int64) (diff string, same bool, err error) {
	before, okBefore, err := b.text(ctx, f.Before, from, f.Path)
	if err != nil {
		return "", false, err
	}
	after, okAfter, err := b.text(ctx, f.After, to, f.Path)
	if err != nil || !okBefore || !okAfter {
		return "", false, err
	}
	oldName, newName := "a/"+f.Path, "b/"+f.Path
	if f.Before == nil {
		oldName = "/dev/null"
	}
	if f.After == nil {
		newName = "/dev/null"
	}
	return udiff.Unified(oldName, newName, before, after), f.Before != nil && f.After != nil && before == after, nil
}

func isFile(s *proto.FileState) bool { return s != nil && s.Type == proto.FileRegular }

// text returns the content of a file in a version; none if there is no file. ok is false if it is no text or too
// large.
func (b *Sandbox) text(ctx context.Context, state *proto.FileState, version int64, name string) (
	text string, ok bool, err error,
) {
	if state == nil {
		return "", true, nil
	}
	if !isFile(state) || state.Size > maxCompared {
		return "", false, nil
	}
	file, err := b.sandboxes.Versions.Open(ctx, b.live.Org, b.live.ThreadID, version, name)
	if err != nil {
		return "", false, err
	}
	body, err := file.Read(ctx, 0, state.Size)
	if err != nil {
		return "", false, err
	}
	content, err := io.ReadAll(body)
	if err = errors.Join(err, body.Close()); err != nil {
		return "", false, err
	}
	return string(content), utf8.Valid(content) && !strings.ContainsRune(string(content), 0), nil
}
