package storagetest

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
	"github.com/bullpen-run/bullpen/storage/blob"
)

// Memory is a [blob.Backend] in memory. The zero value is an empty backend.
type Memory struct {
	mu      sync.Mutex
	objects map[string]object
}

type object struct {
	content  []byte
	modified time.Time
}

// Put implements [blob.Backend].
func (m *Memory) Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error {
	buffer := bytes.NewBuffer(make([]byte, 0, size+bytes.MinRead)) // ReadFrom need not grow it
	if _, err := buffer.ReadFrom(content); err != nil {
		return err
	}
	b := buffer.Bytes()
	if int64(len(b)) != size {
		return fmt.Errorf("put blob %q: the content has %d bytes, want %d", key, len(b), size)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, exists := m.objects[key]; exists && !replace {
		return &blob.Error{Op: "put", Key: key, Kind: proto.ErrExists}
	}
	if m.objects == nil {
		m.objects = map[string]object{}
	}
	m.objects[key] = object{content: b, modified: time.Now()}
	return nil
}

// Get implements [blob.Backend].
func (m *Memory) Get(_ context.Context, key string, span blob.Span) (io.ReadCloser, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o, exists := m.objects[key]
	if !exists {
		return nil, &blob.Error{Op: "get", Key: key, Kind: proto.ErrNotFound}
	}
	if int64(len(o.content)) != span.Size {
		return nil, &blob.Error{
			Op: "get", Key: key, Kind: proto.ErrCorrupt,
			Err: fmt.Errorf("it has %d bytes, want %d", len(o.content), span.Size),
		}
	}
	return io.NopCloser(bytes.NewReader(o.content[span.Offset : span.Offset+span.Length])), nil
}

// Stat implements [blob.Backend].
func (m *Memory) Stat(_ context.Context, key string) (blob.Entry, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o, exists := m.objects[key]
	if !exists {
		return blob.Entry{}, &blob.Error{Op: "stat", Key: key, Kind: proto.ErrNotFound}
	}
	return blob.Entry{Key: key, Size: int64(len(o.content)), Modified: o.modified}, nil
}

// Delete implements [blob.Backend].
func (m *Memory) Delete(_ context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.objects, key)
	return nil
}

// List implements [blob.Backend].
func (m *Memory) List(_ context.Context, prefix, after string) iter.Seq2[blob.Entry, error] {
	return func(yield func(blob.Entry, error) bool) {
		m.mu.Lock()
		objects := maps.Clone(m.objects)
		m.mu.Unlock()
		for _, key := range slices.Sorted(maps.Keys(objects)) {
			if !strings.HasPrefix(key, prefix) || key <= after {
				continue
			}
			o := objects[key]
			if !yield(blob.Entry{Key: key, Size: int64(len(o.content)), Modified: o.modified}, nil) {
				return
			}
		}
	}
}
