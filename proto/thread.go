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
	// MaxStaged is the largest number of staged files of a thread.
	MaxStaged = 500
	// MaxStagedBytes is the largest size of the list of a thread's staged files as JSON: a head
	// must fit into one message.
	MaxStagedBytes = 256 << 10
	// KeptVersions is the number of versions kept per thread, including the newest.
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

// Thread is the head of a thread: its whole state. It is one value, changed by compare-and-set
// only.
type Thread struct {
	Org       string    `json:"org"`
	ID        string    `json:"id"`
	CreatedAt time.Time `json:"created_at"`
	UsedAt    time.Time `json:"used_at"` // when an execution last locked it, or a file was last staged
	// Holder is the execution that holds the thread's lock, until it is terminal. HeldAt is when it
	// got the lock.
	Holder TraceID   `json:"holder,omitempty"`
	HeldAt time.Time `json:"held_at,omitzero"`
	// Fence counts holders and abandoned attempts of holders. A commit names the fence that it was
	// made under.
	Fence   int64    `json:"fence"`
	Version *Version `json:"version,omitempty"` // the newest; nil while the home is empty
	// History has the older kept versions, in descending order and without their layers.
	History []Version `json:"history,omitempty"`
	// Staged are the uploaded files that no version includes yet, oldest first.
	Staged []StagedFile `json:"staged,omitempty"`
	// Removal marks a tombstone: the thread is gone, and its manifests are being removed. It
	// identifies the tombstone. All other fields but Org and ID are zero then.
	Removal string `json:"removal,omitempty"`
}

// Version is one state of a thread's home. It is immutable, except that its layers may be replaced
// by others with the same content.
type Version struct {
	Number    int64     `json:"number"` // 1 for the first
	CreatedAt time.Time `json:"created_at"`
	// the execution that made it; empty for the first version of a fork and for a change of files
	Trace TraceID `json:"trace_id,omitempty"`
	// content of its files without holes; a file counts once for each of its names
	Bytes int64 `json:"bytes"`
	Files int64 `json:"files"` // files, directories, symlinks
	// Attributes is the size of the extended attributes of all these, in bytes.
	Attributes int64   `json:"attributes,omitempty"`
	Manifest   Blob    `json:"manifest"`         // its description in the store, see [Manifest]
	Layers     []Layer `json:"layers,omitempty"` // the changes that make it, starting from an empty directory
	// Chain is the digest of the layers in the manifest: Layers, unless other layers have replaced
	// them.
	Chain string `json:"chain,omitempty"`
	Base  *Base  `json:"base,omitempty"` // of the manifest; nil if the manifest has all layers itself
	// Supersedes is the number of versions directly before this one that are earlier saves of the same
	// running sandbox. The last layer of this version replaces theirs, so it does not apply to them.
	Supersedes int64 `json:"supersedes,omitempty"`
}

// Base is a manifest that shares its first layers with another one.
type Base struct {
	Manifest Blob   `json:"manifest"`
	Layers   int    `json:"layers"` // how many
	Chain    string `json:"chain"`  // their digest, see [Chain]
}

// Chain returns the digest of a chain of layers.
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
	Version     int64  `json:"version"`      // the version that it makes; 1 for all layers that a fork starts with
	Index       int64  `json:"index"`        // size of the table of contents at the end of the blob, in bytes
	IndexDigest string `json:"index_digest"` // of the table of contents, in the form of Digest
	Objects     int64  `json:"objects"`      // files whose content is a separate blob
}

// StagedFile is an uploaded file that is in no version yet.
type StagedFile struct {
	Path string    `json:"path"` // relative to the home, cleaned
	At   time.Time `json:"at"`
	Blob           // its key is unique to this upload
}

// Manifest describes a version in the store, as JSON. Heads can be rebuilt from manifests alone.
type Manifest struct {
	Form    int     `json:"form"` // 1
	Org     string  `json:"org"`
	Thread  string  `json:"thread"`
	Version Version `json:"version"` // without its manifest, and in the store without the layers of its base
	// Parent is the manifest of the version before; nil for the first.
	Parent *Blob `json:"parent,omitempty"`
}

// Commit is the change of a thread's head by an execution: by one whose program has ended, or by a live
// sandbox that saves its home while it runs.
type Commit struct {
	Fence   int64    `json:"fence"`   // of the head when the home was checked out
	Version Version  `json:"version"` // the next version, with only the layers that it adds
	Staged  []string `json:"staged"`  // keys of the staged files that the version contains
	// Replaces is the key of the newest version's last layer if that is an earlier save of the same
	// execution, which the commit's layer replaces. Otherwise it is empty.
	Replaces string `json:"replaces,omitempty"`
}

// CheckoutRequest requests a thread's files for the execution that holds it.
type CheckoutRequest struct {
	Org, Thread string
	Trace       TraceID
	Most        Space // that the files may take
}

// ErrFenced is returned to an execution that has lost the lock of its thread.
var ErrFenced = errors.New("another execution holds the thread now")

// BusyError refuses an operation on a thread that an execution holds.
type BusyError struct {
	Thread string
	Holder TraceID
}

func (e *BusyError) Error() string {
	if slug, ok := VolumeOf(e.Thread); ok {
		return fmt.Sprintf("volume %s is in use by execution %s; wait until that has ended, cancel it, or use a key that "+
			"only reads the volume", slug, e.Holder)
	}
	if ThreadOwned(e.Thread) {
		return fmt.Sprintf("%s is in use by execution %s; wait until that has ended, or cancel it",
			threadName(e.Thread), e.Holder)
	}
	return fmt.Sprintf("thread %s is in use by execution %s; wait until that has ended, cancel it, or use another thread",
		e.Thread, e.Holder)
}

// Conflict marks the error's text as meant for the client.
func (*BusyError) Conflict() {}

// RemovingError refuses to create a thread while one with the same id is being removed.
type RemovingError struct{ Thread string }

func (e *RemovingError) Error() string {
	return fmt.Sprintf("%s is being removed; try again, or remove it again if that was interrupted", threadName(e.Thread))
}

// Conflict marks the error's text as meant for the client.
func (*RemovingError) Conflict() {}

// LayersError refuses a change to a thread whose version has too many layers.
type LayersError struct {
	Thread string
	Most   int
}

func (e *LayersError) Error() string {
	return fmt.Sprintf("the files of %s were changed %d times since an execution combined the changes; run one that "+
		"writes a file first",
		threadName(e.Thread), e.Most)
}

// Conflict marks the error's text as meant for the client.
func (*LayersError) Conflict() {}

// StagedError refuses an upload to a thread that has too many staged files.
type StagedError struct {
	Thread string
	Files  int // that are staged
}

func (e *StagedError) Error() string {
	return fmt.Sprintf("%s has %d staged files already; at most %d, whose names and keys take %s, may wait for its "+
		"next execution; run one first",
		threadName(e.Thread), e.Files, MaxStaged, Bytes(MaxStagedBytes))
}

// Conflict marks the error's text as meant for the client.
func (*StagedError) Conflict() {}

// Space is the size of a home, of a part of it, or a limit.
type Space struct {
	Bytes int64 // content of files; staged files count in whole blocks, with their directories
	Files int64 // files, directories, symlinks
}

// Over reports whether s exceeds limit.
func (s Space) Over(limit Space) bool { return s.Bytes > limit.Bytes || s.Files > limit.Files }

// Add returns the sum of s and other.
func (s Space) Add(other Space) Space { return Space{s.Bytes + other.Bytes, s.Files + other.Files} }

// SpaceError refuses a change that would make the home exceed its sandbox's limits.
type SpaceError struct {
	Thread string
	// for an upload, the newest version without files that staged ones replace; otherwise all files
	Home    Space
	Waiting Space // of the files that are staged already
	New     Space // of the new file, or the growth by another change
	Most    Space
}

func (e *SpaceError) Error() string {
	return fmt.Sprintf("the home of %s has %d bytes in %d files and directories, files that wait for its next "+
		"execution take %d bytes and %d, "+
		"and this change %d bytes and %d more; the sandbox of this API key has room for %d bytes and %d; remove files in "+
		"an execution first, or "+
		"upload less in their place",
		threadName(e.Thread), e.Home.Bytes, e.Home.Files, e.Waiting.Bytes, e.Waiting.Files, e.New.Bytes, e.New.Files,
		e.Most.Bytes, e.Most.Files)
}

// Conflict marks the error's text as meant for the client.
func (*SpaceError) Conflict() {}

// StagedSpace returns the size of staged files in a home: whole blocks, and the directories above
// them. The directories count even if the home has them already, because they are copied into the
// home's volume.
func StagedSpace(files []StagedFile) Space {
	const block = 4096
	var r Space
	last := ""
	// Sorted paths have their common directories side by side.
	for _, f := range slices.SortedFunc(slices.Values(files), func(a, b StagedFile) int {
		return strings.Compare(a.Path, b.Path)
	}) {
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

// ThreadSummary is a thread in a list.
type ThreadSummary struct {
	Org       string    `json:"-"`
	ID        string    `json:"-"`
	CreatedAt time.Time `json:"created_at"`
	UsedAt    time.Time `json:"used_at"`
	Holder    TraceID   `json:"holder,omitempty"` // the last holder, which may have ended
	Version   int64     `json:"version"`          // the number of the newest; 0 while the home is empty
	Bytes     int64     `json:"bytes"`            // of that version
	Files     int64     `json:"files"`            // of that version
	Staged    int       `json:"staged"`           // files
	// StagedBytes is the size of these files; 0 if an older version stored the summary.
	StagedBytes int64 `json:"staged_bytes,omitempty"`
}

// Summary returns the form of t in lists.
func (t *Thread) Summary() ThreadSummary {
	s := ThreadSummary{
		Org: t.Org, ID: t.ID, CreatedAt: t.CreatedAt, UsedAt: t.UsedAt, Holder: t.Holder, Version: t.Number(),
		Staged: len(t.Staged),
	}
	if t.Version != nil {
		s.Bytes, s.Files = t.Version.Bytes, t.Version.Files
	}
	for i := range t.Staged {
		s.StagedBytes += t.Staged[i].Size
	}
	return s
}

// LimitError is returned if a home is larger than its sandbox allows.
type LimitError struct {
	Bytes, Files       int64 // of the home
	MaxBytes, MaxFiles int64
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("the home has %d bytes in %d files and directories, and the sandbox allows %d bytes in %d",
		e.Bytes, e.Files, e.MaxBytes, e.MaxFiles)
}

// AttributesError is returned if the files of a home have too many extended attributes.
type AttributesError struct{ Most int64 }

func (e *AttributesError) Error() string {
	return fmt.Sprintf("the extended attributes of all its files take more than %d bytes together", e.Most)
}

// DepthError is returned if the directories of a home are too deep.
type DepthError struct{ Most int }

func (e *DepthError) Error() string {
	return fmt.Sprintf("the home has more than %d directories in each other, itself included", e.Most)
}

// FileError is returned if a file or directory of a home exceeds a limit and cannot be saved.
type FileError struct {
	Path string // in the home; "." is the home itself
	Size int64
	Unit string // of Size and Most, and what they count
	Most int64
}

func (e *FileError) Error() string {
	path := e.Path
	if len(path) > 200 {
		path = "…" + path[len(path)-200:]
	}
	return fmt.Sprintf("%q has %d %s, more than %d", path, e.Size, e.Unit, e.Most)
}

// UploadsError is returned if a thread's staged files do not fit into the sandbox's home.
type UploadsError struct {
	Bytes, Files       int64 // of the uploads
	MaxBytes, MaxFiles int64
}

func (e *UploadsError) Error() string {
	return fmt.Sprintf("%d bytes in %d files were uploaded to the thread, and the sandbox has room for %d bytes in %d "+
		"files and directories",
		e.Bytes, e.Files, e.MaxBytes, e.MaxFiles)
}

// Number returns the number of the newest version, 0 if there is none.
func (t *Thread) Number() int64 {
	if t.Version == nil {
		return 0
	}
	return t.Version.Number
}

// Committed reports whether t contains c already.
func (t *Thread) Committed(c *Commit) bool {
	same := func(v *Version) bool { return v.Number == c.Version.Number && v.Manifest == c.Version.Manifest }
	if t.Version != nil && same(t.Version) {
		return true
	}
	return slices.ContainsFunc(t.History, func(v Version) bool { return same(&v) })
}

// Superseded reports whether a later version has replaced the last layer of a version in t's history,
// so that the layers after that version do not lead from it to the newest one.
func (t *Thread) Superseded(number int64) bool {
	by := func(v *Version) bool { return number < v.Number && number >= v.Number-v.Supersedes }
	return t.Version != nil && by(t.Version) || slices.ContainsFunc(t.History, func(v Version) bool { return by(&v) })
}

// kept returns the layers of the newest version that c keeps.
func (t *Thread) kept(c *Commit) ([]Layer, error) {
	var layers []Layer
	var superseded int64
	last := t.Version
	if last != nil {
		layers = last.Layers
	}
	if n := len(layers) - 1; c.Replaces != "" {
		if n < 0 || layers[n].Key != c.Replaces || layers[n].Version != last.Number || last.Trace != c.Version.Trace {
			return nil, ErrFenced
		}
		layers, superseded = layers[:n], last.Supersedes+1
	}
	if c.Version.Supersedes != superseded {
		return nil, ErrFenced
	}
	return layers, nil
}

// Commit returns the head after c. The error is [ErrFenced] if c was made under another fence or
// from another version.
func (t *Thread) Commit(c *Commit) (*Thread, error) {
	kept, err := t.kept(c)
	if err != nil || c.Fence != t.Fence || c.Version.Number != t.Number()+1 {
		return nil, fmt.Errorf("commit version %d of thread %s: %w", c.Version.Number, t.ID, ErrFenced)
	}
	next, version := *t, c.Version
	version.Layers = append(slices.Clone(kept), version.Layers...)
	if t.Version != nil {
		last := *t.Version
		last.Layers, last.Base = nil, nil
		next.History = append([]Version{last}, t.History...)
		next.History = next.History[:min(len(next.History), KeptVersions-1)]
	}
	next.Version = &version
	next.Staged = slices.DeleteFunc(slices.Clone(t.Staged), func(f StagedFile) bool {
		return slices.Contains(c.Staged, f.Key)
	})
	return &next, nil
}
