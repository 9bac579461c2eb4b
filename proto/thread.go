package proto

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Limits of threads.
const (
	MaxThreadIDLen = 128
	// MaxStaged is how many staged files a thread may have.
	MaxStaged = 500
	// MaxStagedBytes is how many bytes the list of a thread's staged files may take as JSON: a head has to fit into one message.
	MaxStagedBytes = 256 << 10
	// KeptVersions is how many versions of a thread, the newest included, can be gone back to.
	KeptVersions = 20
)

var threadPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)

// CheckThreadID checks a thread's id in the field of that name. Its error is a [*FieldError].
func CheckThreadID(field, id string) error {
	if len(id) > MaxThreadIDLen || !threadPattern.MatchString(id) {
		return FieldErrorf(field, "must be 1 to %d characters of A-Z, a-z, 0-9, _ and -, the first a letter or digit",
			MaxThreadIDLen)
	}
	return nil
}

// Thread is the head of a thread: all that is known of it. It is one value, changed by compare-and-set only.
type Thread struct {
	Org       string    `json:"org"`
	ID        string    `json:"id"`
	CreatedAt time.Time `json:"created_at"`
	UsedAt    time.Time `json:"used_at"` // when an execution last took it, or a file was last staged
	// Holder is the execution that has the thread to itself, until it is terminal. HeldAt is when it took it.
	Holder TraceID   `json:"holder,omitempty"`
	HeldAt time.Time `json:"held_at,omitzero"`
	// Fence counts holders, and attempts of a holder that were given up. A commit names the one that it was made under.
	Fence   int64    `json:"fence"`
	Version *Version `json:"version,omitempty"` // the newest; nil while the home is empty
	// History has the versions before that can be gone back to, the newest first, without their layers.
	History []Version `json:"history,omitempty"`
	// Staged are files that were uploaded and are in no version yet, the oldest first.
	Staged []StagedFile `json:"staged,omitempty"`
}

// Version is one state of a thread's home. It never changes, but for its layers: others may take their place that make the same home.
type Version struct {
	Number    int64     `json:"number"` // 1 for the first
	CreatedAt time.Time `json:"created_at"`
	Trace     TraceID   `json:"trace_id,omitempty"` // the execution that made it; empty for one that was forked
	Bytes     int64     `json:"bytes"`              // content of its files without holes; a file counts under each of its names
	Files     int64     `json:"files"`              // files, directories, symlinks
	// Attributes are bytes of the extended attributes of all these.
	Attributes int64   `json:"attributes,omitempty"`
	Manifest   Blob    `json:"manifest"`         // describes it in the store, see [Manifest]
	Layers     []Layer `json:"layers,omitempty"` // that make it, the first of an empty directory, each of the version before
	// Chain is the digest of the layers that the manifest describes: those here, unless others have taken their place since.
	Chain string `json:"chain,omitempty"`
	Base  *Base  `json:"base,omitempty"` // of the manifest; nil where that has all layers itself
}

// Base is a manifest that another one goes on from: it has the first of its layers.
type Base struct {
	Manifest Blob   `json:"manifest"`
	Layers   int    `json:"layers"` // how many
	Chain    string `json:"chain"`  // their digest, see [Chain]
}

// Chain gives the digest of a chain of layers.
func Chain(layers []Layer) string {
	sum := sha256.New()
	for i := range layers {
		sum.Write([]byte(layers[i].Key + "\n"))
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

// Layer is a change of a home in the store.
type Layer struct {
	Blob
	Version     int64  `json:"version"`      // that it makes; 1 for all that a fork begins with
	Index       int64  `json:"index"`        // bytes at the end of the blob that say what is in it
	IndexDigest string `json:"index_digest"` // of these, in the form of Digest
	Objects     int64  `json:"objects"`      // files in it whose content is a blob of its own
}

// StagedFile is an uploaded file on its way into a version.
type StagedFile struct {
	Path string    `json:"path"` // relative to the home, cleaned
	At   time.Time `json:"at"`
	Blob           // its key names this upload and no other
}

// Manifest is the form in which a version is described in the store, as JSON, so that heads can be made again from that alone.
type Manifest struct {
	Form    int     `json:"form"` // 1
	Org     string  `json:"org"`
	Thread  string  `json:"thread"`
	Version Version `json:"version"` // without its manifest, and in the store without the layers that its base has
	// Parent is the manifest of the version before; nil for the first.
	Parent *Blob `json:"parent,omitempty"`
}

// Commit is what an execution makes of its thread's head when its program has ended.
type Commit struct {
	Fence   int64    `json:"fence"`   // of the head when the home was taken
	Version Version  `json:"version"` // the next one; its layers are those that are added to those of the one before
	Staged  []string `json:"staged"`  // keys of the staged files that are in it
}

// ErrFenced says that whoever wants to change a thread has it no longer.
var ErrFenced = errors.New("the thread was given to somebody else")

// BusyError refuses what needs a thread that an execution holds.
type BusyError struct {
	Thread string
	Holder TraceID
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("thread %s is in use by execution %s; wait until that has ended, cancel it, or use another thread", e.Thread, e.Holder)
}

// Conflict marks the error as one whose text is for the client.
func (*BusyError) Conflict() {}

// StagedError refuses a staged file for which a thread has no room before an execution has taken those that wait.
type StagedError struct {
	Thread string
	Files  int // that wait
}

func (e *StagedError) Error() string {
	return fmt.Sprintf("thread %s has %d staged files already; at most %d, whose names and keys take %s, may wait for its next execution; run one first",
		e.Thread, e.Files, MaxStaged, Bytes(MaxStagedBytes))
}

// Conflict marks the error as one whose text is for the client.
func (*StagedError) Conflict() {}

// Room is what a home may hold, or what something takes of it.
type Room struct {
	Bytes int64 // content of files; of what is staged, in blocks and with those of directories
	Files int64 // files, directories, symlinks
}

// Over reports whether r is more than most.
func (r Room) Over(most Room) bool { return r.Bytes > most.Bytes || r.Files > most.Files }

// Add gives r and other together.
func (r Room) Add(other Room) Room { return Room{r.Bytes + other.Bytes, r.Files + other.Files} }

// RoomError refuses a staged file that would make the home larger than its sandbox allows.
type RoomError struct {
	Thread  string
	Home    Room // of the newest version, without what the staged files take the place of
	Waiting Room // that files take which are staged already
	New     Room // that the new one takes besides
	Most    Room
}

func (e *RoomError) Error() string {
	return fmt.Sprintf("the home of thread %s has %d bytes in %d files and directories, files that wait for its next execution take %d bytes and %d, "+
		"and this one %d bytes and %d more; the sandbox of this API key has room for %d bytes and %d; remove files in an execution first, or "+
		"upload less in their place",
		e.Thread, e.Home.Bytes, e.Home.Files, e.Waiting.Bytes, e.Waiting.Files, e.New.Bytes, e.New.Files, e.Most.Bytes, e.Most.Files)
}

// Conflict marks the error as one whose text is for the client.
func (*RoomError) Conflict() {}

// StagedRoom gives what staged files take of a home while they are put there: whole blocks, and the directories on their ways, which lie in
// the home's volume from then on even if the home had them already.
func StagedRoom(files []StagedFile) Room {
	const block = 4096
	var r Room
	last := ""
	// What begins in the same way comes one after the other.
	for _, f := range slices.SortedFunc(slices.Values(files), func(a, b StagedFile) int { return strings.Compare(a.Path, b.Path) }) {
		same := 0
		for same < min(len(last), len(f.Path)) && last[same] == f.Path[same] {
			same++
		}
		entries := int64(1 + strings.Count(f.Path[same:], "/"))
		r.Files += entries
		r.Bytes += (entries-1)*block + (f.Size+block-1)/block*block
		last = f.Path
	}
	return r
}

// ThreadSummary is what a list tells of a thread.
type ThreadSummary struct {
	Org       string    `json:"-"`
	ID        string    `json:"-"`
	CreatedAt time.Time `json:"created_at"`
	UsedAt    time.Time `json:"used_at"`
	Holder    TraceID   `json:"holder,omitempty"` // who took it last, and may have ended
	Version   int64     `json:"version"`          // the number of the newest; 0 while the home is empty
	Bytes     int64     `json:"bytes"`            // of that version
	Files     int64     `json:"files"`            // of that version
	Staged    int       `json:"staged"`           // files
}

// Summary gives what a list tells of t.
func (t *Thread) Summary() ThreadSummary {
	s := ThreadSummary{
		Org: t.Org, ID: t.ID, CreatedAt: t.CreatedAt, UsedAt: t.UsedAt, Holder: t.Holder, Version: t.Number(), Staged: len(t.Staged),
	}
	if t.Version != nil {
		s.Bytes, s.Files = t.Version.Bytes, t.Version.Files
	}
	return s
}

// LimitError says that a home is larger than its sandbox allows.
type LimitError struct {
	Bytes, Files       int64 // of the home
	MaxBytes, MaxFiles int64
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("the home has %d bytes in %d files and directories, and the sandbox allows %d bytes in %d",
		e.Bytes, e.Files, e.MaxBytes, e.MaxFiles)
}

// AttributesError says that the files of a home have too many extended attributes.
type AttributesError struct{ Most int64 }

func (e *AttributesError) Error() string {
	return fmt.Sprintf("the extended attributes of all its files take more than %d bytes together", e.Most)
}

// DepthError says that a home has too many directories in each other.
type DepthError struct{ Most int }

func (e *DepthError) Error() string {
	return fmt.Sprintf("the home has more than %d directories in each other, itself included", e.Most)
}

// UploadsError says that the files which were uploaded to a thread do not fit into the home of an execution's sandbox.
type UploadsError struct {
	Bytes, Files       int64 // of the uploads
	MaxBytes, MaxFiles int64
}

func (e *UploadsError) Error() string {
	return fmt.Sprintf("%d bytes in %d files were uploaded to the thread, and the sandbox has room for %d bytes in %d files and directories",
		e.Bytes, e.Files, e.MaxBytes, e.MaxFiles)
}

// Number gives the number of the newest version, 0 where there is none.
func (t *Thread) Number() int64 {
	if t.Version == nil {
		return 0
	}
	return t.Version.Number
}

// Committed reports whether c was made in t already.
func (t *Thread) Committed(c *Commit) bool {
	same := func(v *Version) bool { return v.Number == c.Version.Number && v.Manifest == c.Version.Manifest }
	if t.Version != nil && same(t.Version) {
		return true
	}
	return slices.ContainsFunc(t.History, func(v Version) bool { return same(&v) })
}

// Commit gives the head that follows t by c. Its error is [ErrFenced] where c was made under another fence or of another version.
func (t *Thread) Commit(c *Commit) (*Thread, error) {
	if c.Fence != t.Fence || c.Version.Number != t.Number()+1 {
		return nil, fmt.Errorf("commit version %d of thread %s: %w", c.Version.Number, t.ID, ErrFenced)
	}
	next, version := *t, c.Version
	if t.Version != nil {
		last := *t.Version
		version.Layers = append(slices.Clone(last.Layers), version.Layers...)
		last.Layers, last.Base = nil, nil
		next.History = append([]Version{last}, t.History...)
		next.History = next.History[:min(len(next.History), KeptVersions-1)]
	}
	next.Version = &version
	next.Staged = slices.DeleteFunc(slices.Clone(t.Staged), func(f StagedFile) bool { return slices.Contains(c.Staged, f.Key) })
	return &next, nil
}
