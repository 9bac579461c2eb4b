package blob

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Memory is a [Backend] in memory, for tests. The zero value is an empty backend.
type Memory struct {
	mu      sync.Mutex
	objects map[string]object
}

type object struct {
	content  []byte
	modified time.Time
}

// Put implements [Backend].
func (m *Memory) Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error {
	b, err := io.ReadAll(content)
	if err != nil {
		return err
	}
	if int64(len(b)) != size {
		return sizeError(key, int64(len(b)), size)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, there := m.objects[key]; there && !replace {
		return &Error{Op: "put", Key: key, Kind: proto.ErrExists}
	}
	if m.objects == nil {
		m.objects = map[string]object{}
	}
	m.objects[key] = object{content: b, modified: time.Now()}
	return nil
}

// Get implements [Backend].
func (m *Memory) Get(_ context.Context, key string, span Span) (io.ReadCloser, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o, there := m.objects[key]
	if !there {
		return nil, &Error{Op: "get", Key: key, Kind: proto.ErrNotFound}
	}
	if int64(len(o.content)) != span.Size {
		return nil, sizeCorrupt(key, int64(len(o.content)), span.Size)
	}
	return io.NopCloser(bytes.NewReader(o.content[span.Offset : span.Offset+span.Length])), nil
}

// Stat implements [Backend].
func (m *Memory) Stat(_ context.Context, key string) (Entry, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o, there := m.objects[key]
	if !there {
		return Entry{}, &Error{Op: "stat", Key: key, Kind: proto.ErrNotFound}
	}
	return Entry{Key: key, Size: int64(len(o.content)), Modified: o.modified}, nil
}

// Delete implements [Backend].
func (m *Memory) Delete(_ context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.objects, key)
	return nil
}

// List implements [Backend].
func (m *Memory) List(_ context.Context, prefix, after string) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		m.mu.Lock()
		objects := maps.Clone(m.objects)
		m.mu.Unlock()
		for _, key := range slices.Sorted(maps.Keys(objects)) {
			if !strings.HasPrefix(key, prefix) || key <= after {
				continue
			}
			o := objects[key]
			if !yield(Entry{Key: key, Size: int64(len(o.content)), Modified: o.modified}, nil) {
				return
			}
		}
	}
}

func sizeError(key string, got, want int64) error {
	return fmt.Errorf("put blob %q: the content has %d bytes, want %d", key, got, want)
}

func sizeCorrupt(key string, got, want int64) error {
	return &Error{Op: "get", Key: key, Kind: proto.ErrCorrupt, Err: fmt.Errorf("it has %d bytes, want %d", got, want)}
}
