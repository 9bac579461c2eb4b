// Package blob keeps immutable objects by key: in memory, in a directory, and in whatever else is a [Backend], such as that of package
// s3; encrypted on the way, if wanted. A [Store] stands before a backend. It is the one place where digests are checked and where
// requests that failed are made again. What the objects hold and who refers to them is not known here.
//
// # Keys
//
// A key is up to 512 bytes in components of up to 128, with slashes between them. A component is of A-Z a-z 0-9 . _ - and = and begins
// with a letter or digit. A key that is the beginning of another up to a slash cannot be there together with it. A key
// names the same content for ever: its user sees to that, by having a digest or an id in it that is never used again.
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

// componentPattern counts nothing, since a counted repetition takes a hundred KB of memory.
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

// Entry is what a store tells of an object without reading it.
type Entry = proto.BlobEntry

// Span is a part of an object.
type Span struct {
	Size           int64 // of the whole object, in bytes
	Offset, Length int64 // bytes; Length is over 0, and Offset+Length at most Size, unless all are 0
}

// Whole reports whether the span is the object.
func (s Span) Whole() bool { return s.Length == s.Size }

// Backend keeps bytes by key. A [Store] stands before it, gives it valid keys only, checks what it reads and writes, and asks again where
// that may help; so a backend makes each request once. All methods may be called at the same time. Their errors are [*Error], except
// those of content and of ctx, which come back as they are or wrapped.
type Backend interface {
	// Put stores what content gives: size bytes and then [io.EOF]. Nobody sees the object before it is whole and would survive a crash
	// of the store's machine; after an error of content there is none. An object of the same key is replaced, at once and as a
	// whole, if replace is true, and the error is [proto.ErrExists] if it is not. A backend that cannot do the latter replaces.
	Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error
	// Get opens a span. It may end too early, and what it gives may be wrong. An object that is found to be shorter is [proto.ErrCorrupt].
	Get(ctx context.Context, key string, span Span) (io.ReadCloser, error)
	// Stat tells of one object.
	Stat(ctx context.Context, key string) (Entry, error)
	// Delete removes an object; that there is none is no error.
	Delete(ctx context.Context, key string) error
	// List gives the objects whose keys begin with prefix and come after the key after, in the order of their bytes. An error is the
	// last that it gives.
	List(ctx context.Context, prefix, after string) iter.Seq2[Entry, error]
}

// ErrUnavailable says that a store did not do what it was asked for, and that nothing is known of the object.
var ErrUnavailable = errors.New("the store is unavailable")

// Error says what was not done to which object, and what to do about it.
type Error struct {
	Op   string // put, get, stat, delete, list
	Key  string // or the prefix of a list
	Kind error  // proto.ErrNotFound, proto.ErrExists, proto.ErrCorrupt or ErrUnavailable
	Do   string // what to do; empty for what the kind says
	// Again is true where the same request, made again at once, may succeed.
	Again bool
	Err   error // the cause; may be nil
}

func (e *Error) Error() string { return e.Problem() + ": " + e.Advice() }

// Problem says what was not done, and why.
func (e *Error) Problem() string {
	text := fmt.Sprintf("%s blob %q: %v", e.Op, e.Key, e.Kind)
	if e.Err != nil {
		text += fmt.Sprintf(": %v", e.Err)
	}
	return text
}

// Advice says what to do.
func (e *Error) Advice() string {
	switch {
	case e.Do != "":
		return e.Do
	case errors.Is(e.Kind, proto.ErrNotFound):
		return "see that this is the store, with the prefix, that it was put into, and that it was not removed"
	case errors.Is(e.Kind, proto.ErrExists):
		return "use another key: something else is there under this one"
	case errors.Is(e.Kind, proto.ErrCorrupt):
		return "if reading it again gives the same, put it back from a copy and look for what changed it"
	default:
		return "see that the store can be reached and is in order, then try again"
	}
}

// Unwrap gives the kind and the cause.
func (e *Error) Unwrap() []error { return []error{e.Kind, e.Err} }
