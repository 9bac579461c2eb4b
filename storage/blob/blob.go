// Package blob stores immutable objects by key. A [Store] checks digests and retries failed
// requests; a [Backend] holds the objects: in a directory or in a bucket (package s3), each
// optionally encrypted. The package does not know what objects contain or who refers to them.
//
// # Keys
//
// A key has up to 512 bytes in components of up to 128, separated by slashes. A component consists
// of A-Z a-z 0-9 . _ - and = and begins with a letter or digit. If a key exists, no other key may
// begin with it and a slash. A key always names the same content: callers put a digest or a
// unique id into it.
package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"regexp"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	maxKey       = 512
	maxComponent = 128
)

// componentPattern has no counted repetition, which would take 100 KB of memory.
var componentPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._=-]*$`)

func validComponent(s string) bool { return len(s) <= maxComponent && componentPattern.MatchString(s) }

// ValidKey reports whether s may be the key of an object.
func ValidKey(s string) bool {
	if len(s) > maxKey {
		return false
	}
	for component := range strings.SplitSeq(s, "/") {
		if !validComponent(component) {
			return false
		}
	}
	return true
}

// Entry describes an object without its content.
type Entry = proto.BlobEntry

// Span is a part of an object, in bytes.
type Span struct {
	Size           int64 // of the whole object
	Offset, Length int64 // Length is positive and Offset+Length at most Size, unless all three are 0
}

// Whole reports whether the span is the whole object.
func (s Span) Whole() bool { return s.Length == s.Size }

// Backend stores bytes by key. It is called with valid keys only and makes each request once;
// [Store] verifies content and retries. All methods are safe for concurrent use. Their errors are
// [*Error]; errors of content and ctx are returned unchanged or wrapped.
type Backend interface {
	// Put stores size bytes of content, which must then return [io.EOF]. The object becomes visible
	// when it is complete and durable; if content fails, there is none. If the key exists, the
	// object is replaced atomically if replace is true, otherwise Put returns [proto.ErrExists]. A
	// backend without conditional writes always replaces.
	Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error
	// Get opens a span. The stream may end early and its content may be wrong. If the object is
	// found to have another size, the error is [proto.ErrCorrupt].
	Get(ctx context.Context, key string, span Span) (io.ReadCloser, error)
	// Stat describes one object.
	Stat(ctx context.Context, key string) (Entry, error)
	// Delete removes an object. It is no error if there is none.
	Delete(ctx context.Context, key string) error
	// List yields the objects whose keys begin with prefix and are greater than after, in byte
	// order. It ends after an error.
	List(ctx context.Context, prefix, after string) iter.Seq2[Entry, error]
}

// ErrUnavailable means that the store did not carry out a request. The state of the object is
// unknown.
var ErrUnavailable = errors.New("the store is unavailable")

// Error describes a failed request and its remedy.
type Error struct {
	Op        string // put, get, stat, delete, list
	Key       string // for list, the prefix
	Kind      error  // proto.ErrNotFound, proto.ErrExists, proto.ErrCorrupt or ErrUnavailable
	Remedy    string // empty for the default of Kind
	Retryable bool   // repeating the same request immediately may succeed
	Err       error  // the cause; may be nil
}

func (e *Error) Error() string { return e.Problem() + ": " + e.Advice() }

// Problem returns the failed request and its cause.
func (e *Error) Problem() string {
	text := fmt.Sprintf("%s blob %q: %v", e.Op, e.Key, e.Kind)
	if e.Err != nil {
		text += fmt.Sprintf(": %v", e.Err)
	}
	return text
}

// Advice returns the remedy.
func (e *Error) Advice() string {
	switch {
	case e.Remedy != "":
		return e.Remedy
	case errors.Is(e.Kind, proto.ErrNotFound):
		return "check that this is the store and prefix it was written to, and that it was not deleted"
	case errors.Is(e.Kind, proto.ErrExists):
		return "use another key: this one has other content"
	case errors.Is(e.Kind, proto.ErrCorrupt):
		return "if reading it again fails in the same way, restore it from a copy and look for what changed it"
	default:
		return "check that the store can be reached and works, then try again"
	}
}

// Unwrap returns the kind and the cause.
func (e *Error) Unwrap() []error { return []error{e.Kind, e.Err} }
