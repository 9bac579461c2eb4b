package thread_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/threads"
)

func (w *world) stageIf(id, path, tag, content string) error {
	return w.versions.StageIfUnchanged(w.ctx, org, id, path, tag, int64(len(content)), unlimitedHome,
		strings.NewReader(content))
}

// tag returns the tag of a file, empty if there is none.
func (w *world) tag(tb fatal, id, path string) string {
	tb.Helper()
	f, err := w.versions.Open(w.ctx, org, id, 0, path)
	if errors.Is(err, proto.ErrNotFound) {
		return ""
	}
	check(tb, err)
	return f.Tag
}

// contentIfAny returns the content of a file, or "no file".
func (w *world) contentIfAny(tb fatal, id, path string) string {
	tb.Helper()
	if w.tag(tb, id, path) == "" {
		return "no file"
	}
	return w.content(tb, id, path)
}

func isFileChanged(err error) bool {
	_, changed := errors.AsType[*proto.FileChangedError](err)
	return changed
}

func TestStageIfUnchanged(t *testing.T) {
	t.Parallel()
	const id, path = "t", "d/f"
	prepared := func(w *world, t *testing.T) {
		w.run(t, id, func(root string) {
			check(t, os.Mkdir(root+"/d", 0o755), os.WriteFile(root+"/d/f", []byte("old"), 0o644),
				os.WriteFile(root+"/other", nil, 0o644))
		})
	}
	for name, c := range map[string]struct {
		before, meanwhile func(w *world, t *testing.T) // nil for nothing
		changed           bool
	}{
		"new thread":   {},
		"new file":     {before: func(w *world, t *testing.T) { w.write(t, id, "x", "x") }},
		"of a version": {before: prepared},
		"staged":       {before: func(w *world, t *testing.T) { w.stage(t, id, path, "old") }},
		"staged over a version": {before: func(w *world, t *testing.T) {
			prepared(w, t)
			w.stage(t, id, path, "staged")
		}},
		"other files change": {before: prepared, meanwhile: func(w *world, t *testing.T) {
			w.stage(t, id, "other", "new")
			w.stage(t, id, "d/g", "new")
			w.run(t, id, func(root string) { check(t, os.WriteFile(root+"/d/h", []byte("new"), 0o644)) })
		}},
		"an execution begins": {before: prepared, meanwhile: func(w *world, t *testing.T) {
			_, _, err := w.heads.Lock(w.ctx, org, id, proto.NewTraceID())
			check(t, err)
		}},
		"appears":        {meanwhile: func(w *world, t *testing.T) { w.stage(t, id, path, "theirs") }, changed: true},
		"appears, empty": {meanwhile: func(w *world, t *testing.T) { w.stage(t, id, path, "") }, changed: true},
		"appears in a version": {
			before: func(w *world, t *testing.T) { w.write(t, id, "x", "x") }, meanwhile: prepared,
			changed: true,
		},
		"staged meanwhile": {
			before: prepared, meanwhile: func(w *world, t *testing.T) { w.stage(t, id, path, "theirs") },
			changed: true,
		},
		"staged twice": {
			before:    func(w *world, t *testing.T) { w.stage(t, id, path, "old") },
			meanwhile: func(w *world, t *testing.T) { w.stage(t, id, path, "new") }, changed: true,
		},
		"an execution changes it": {before: prepared, meanwhile: func(w *world, t *testing.T) {
			w.run(t, id, func(root string) { check(t, os.WriteFile(root+"/d/f", []byte("new"), 0o644)) })
		}, changed: true},
		"deleted": {
			before: prepared, meanwhile: func(w *world, t *testing.T) { check(t, w.remove(org, id, path)) },
			changed: true,
		},
		"renamed": {before: prepared, meanwhile: func(w *world, t *testing.T) {
			check(t, w.rename(id, "d", "e", unlimitedHome))
		}, changed: true},
		"thread is removed": {before: prepared, meanwhile: func(w *world, t *testing.T) {
			check(t, w.versions.Remove(w.ctx, org, id))
		}, changed: true},
		// These are no files at the path, and are replaced as by Stage.
		"a directory appears":  {meanwhile: func(w *world, t *testing.T) { w.stage(t, id, path+"/x", "x") }},
		"a file above appears": {meanwhile: func(w *world, t *testing.T) { w.stage(t, id, "d", "x") }},
		"a link appears": {meanwhile: func(w *world, t *testing.T) {
			w.run(t, id, func(root string) { check(t, os.Mkdir(root+"/d", 0o755), os.Symlink("x", root+"/d/f")) })
		}},
		// The bytes are the same, and the tag is not.
		"staged, then in a version": {
			before:    func(w *world, t *testing.T) { w.stage(t, id, path, "old") },
			meanwhile: func(w *world, t *testing.T) { w.run(t, id, func(string) {}) }, changed: true,
		},
		"compacted": {before: func(w *world, t *testing.T) {
			prepared(w, t)
			w.write(t, id, "later", "x")
		}, meanwhile: func(w *world, t *testing.T) { w.compact(t, id) }, changed: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			if c.before != nil {
				c.before(w, t)
			}
			tag := w.tag(t, id, path)
			if err := w.stageIf(id, path, tag+"x", "mine"); !isFileChanged(err) {
				t.Errorf("with another tag: %v", err)
			}
			if tag != "" {
				if err := w.stageIf(id, path, "", "mine"); !isFileChanged(err) {
					t.Errorf("as a new file: %v", err)
				}
			}
			want, uploads := "mine", 0
			w.backend.watch(nil, once("put", "uploads/", func() { // the content is stored, and not yet in the head
				w.backend.watch(nil, nil)
				if c.meanwhile != nil {
					c.meanwhile(w, t)
				}
				if uploads = len(w.backend.keys("uploads/")); c.changed {
					want = w.contentIfAny(t, id, path)
				}
			}))
			err := w.stageIf(id, path, tag, "mine")
			if c.changed != isFileChanged(err) || !c.changed && err != nil {
				t.Fatalf("%v", err)
			}
			if got := w.contentIfAny(t, id, path); got != want {
				t.Errorf("%q, want %q", got, want)
			}
			if left := len(w.backend.keys("uploads/")); c.changed && left != uploads-1 {
				t.Errorf("%d uploads are stored, and %d with the rejected one", left, uploads)
			}
			check(t, w.stageIf(id, path, w.tag(t, id, path), "again"))
			if got := w.content(t, id, path); got != "again" {
				t.Errorf("with the new tag: %q", got)
			}
		})
	}
}

// What an execution writes is not in the home until it has ended, and a file that is staged meanwhile
// replaces it.
func TestStageIfUnchangedDuringExecution(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "f", "old")
	w.run(t, "t", func(root string) {
		check(t, os.WriteFile(root+"/f", []byte("theirs"), 0o644), w.stageIf("t", "f", w.tag(t, "t", "f"), "mine"))
	})
	if got := w.content(t, "t", "f"); got != "mine" {
		t.Errorf("%q", got)
	}
}

// Of several writers that have opened the same file one replaces it, and none overwrites another.
func TestStageIfUnchangedRaces(t *testing.T) {
	t.Parallel()
	const writers, lines = 4, 5
	w := newWorld(t)
	var work sync.WaitGroup
	for writer := range writers {
		work.Go(func() {
			for line := 0; line < lines; {
				text := ""
				f, err := w.versions.Open(w.ctx, org, "t", 0, "f")
				tag := ""
				if err == nil {
					tag = f.Tag
					var old []byte
					old, err = part(w.ctx, f, 0, f.Size)
					text = string(old)
				}
				if err == nil || errors.Is(err, proto.ErrNotFound) {
					err = w.stageIf("t", "f", tag, text+fmt.Sprintf("%d %d\n", writer, line))
				}
				switch {
				case err == nil:
					line++
				case !isFileChanged(err):
					t.Error(err)
					return
				}
			}
		})
	}
	work.Wait()
	seen := map[string]bool{}
	for line := range strings.Lines(w.content(t, "t", "f")) {
		if seen[line] {
			t.Errorf("twice: %s", line)
		}
		seen[line] = true
	}
	if len(seen) != writers*lines {
		t.Errorf("%d lines of %d", len(seen), writers*lines)
	}
}

// lostAnswers loses the answer of each write of a staged file, which is then tried again.
type lostAnswers struct {
	*threads.Threads
	meanwhile func()
}

func (h *lostAnswers) Stage(
	ctx context.Context, org, id string, f proto.StagedFile, accept func([]proto.StagedFile, *proto.Thread) error,
) error {
	if err := h.Threads.Stage(ctx, org, id, f, accept); err != nil {
		return err
	}
	h.meanwhile()
	return h.Threads.Stage(ctx, org, id, f, accept)
}

// A write whose answer is lost is not taken for somebody else's, and its content is not removed.
func TestStageIfUnchangedLosesAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	heads := &lostAnswers{w.heads, func() {}}
	w.versions.Heads = heads
	check(t, w.stageIf("t", "f", "", "one"))
	tag := w.tag(t, "t", "f")
	check(t, w.stageIf("t", "f", tag, "two"))
	if got := w.content(t, "t", "f"); got != "two" {
		t.Errorf("%q", got)
	}
	heads.meanwhile = func() {
		must[*proto.Thread](t)(w.versions.Fork(w.ctx, org, "t", 0, "fork"))
		w.versions.Heads = w.heads
		w.stage(t, "t", "f", "theirs")
	}
	if err := w.stageIf("t", "f", w.tag(t, "t", "f"), "three"); !isFileChanged(err) {
		t.Error(err)
	}
	if got, fork := w.content(t, "t", "f"), w.content(t, "fork", "f"); got != "theirs" || fork != "three" {
		t.Errorf("%q, and in the fork %q", got, fork)
	}
}
