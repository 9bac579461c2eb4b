package proto

import (
	"context"
	"fmt"
	"io"
	"path"
	"strings"
	"time"
)

// Limits of files in a thread's home.
const (
	MaxFileBytes     = 10 * int64(GiB) // content of an uploaded file
	MaxFilePathBytes = 4096
	MaxFileNameBytes = 255 // one component of a path
	MaxFilePathParts = 512 // components: the largest depth of directories in a stored home, itself included
)

// FileSource is the kind of place that has files.
type FileSource string

// The sources of files.
const (
	SourceThread FileSource = "thread" // the home of a thread
	SourceVolume FileSource = "volume" // a storage connection of any kind
)

// File is an entry of a thread's home, or of a storage connection.
type File struct {
	Path        string    `json:"path"` // relative to the home or the connection, cleaned
	Size        int64     `json:"size"` // bytes of a file, or of the target of a link; 0 for a directory
	Modified    time.Time `json:"modified"`
	IsDirectory bool      `json:"is_directory"`
	Link        bool      `json:"link,omitempty"`       // a symbolic link
	Special     bool      `json:"special,omitempty"`    // a FIFO, socket or device
	Executable  bool      `json:"executable,omitempty"` // a file that its owner may execute
}

// FileType is the type of an entry in a list of files.
type FileType string

// The types.
const (
	FileRegular   FileType = "file"
	FileDirectory FileType = "directory"
	FileLink      FileType = "link"
	FileSpecial   FileType = "special"
)

// Type returns the type of the entry. Only regular files have content.
func (f *File) Type() FileType {
	switch {
	case f.IsDirectory:
		return FileDirectory
	case f.Link:
		return FileLink
	case f.Special:
		return FileSpecial
	default:
		return FileRegular
	}
}

// FileContent is a snapshot of the content of a file.
type FileContent struct {
	File
	// Tag identifies the content: equal tags mean equal bytes. It consists of letters, digits and
	// :_-.
	Tag string
	// Read returns length bytes from offset on, both within Size. The reader ends with io.EOF, or
	// with another error if the bytes are corrupt. If a file of a storage connection is replaced
	// before or during the read, the error is a [*FileChangedError] or the reader ends early.
	Read func(ctx context.Context, offset, length int64) (io.ReadCloser, error)
}

// FileState is what a version has at a path.
type FileState struct {
	Type     FileType
	Size     int64  // as in [File]
	Mode     uint32 // permission bits
	Modified time.Time
}

// FileChange is a difference between two versions.
type FileChange struct {
	Path          string     // as in [File]
	Before, After *FileState // nil if the version has nothing there
}

// FileChangedError is returned if a file was replaced since it was opened.
type FileChangedError struct{}

func (*FileChangedError) Error() string {
	return "the file was replaced after it was opened; send the request again"
}

// Conflict marks the error's text as meant for the client.
func (*FileChangedError) Conflict() {}

// NoFileError is returned if a path does not exist or is no directory. It wraps [ErrNotFound].
type NoFileError struct {
	Path      string // relative to the home or the storage connection
	Directory bool   // only a directory would do
}

func (e *NoFileError) Error() string {
	if e.Directory {
		return fmt.Sprintf("there is no directory %q; links are not followed; see /v1/files/list", Shorten(e.Path))
	}
	return fmt.Sprintf("there is nothing at %q; links are not followed; see /v1/files/list", Shorten(e.Path))
}

// Unwrap returns [ErrNotFound].
func (*NoFileError) Unwrap() error { return ErrNotFound }

// NoVersionError is returned if a thread or volume does not have a version, or does not exist. It
// wraps [ErrNotFound].
type NoVersionError struct{ Number int64 }

func (e *NoVersionError) Error() string { return fmt.Sprintf("there is no version %d", e.Number) }

// Unwrap returns [ErrNotFound].
func (*NoVersionError) Unwrap() error { return ErrNotFound }

// PathError refuses a change because of what is at a path.
type PathError struct {
	Path    string // relative to the home or the storage connection
	Message string // the problem and the remedy, after the path
}

func (e *PathError) Error() string { return fmt.Sprintf("%q %s", Shorten(e.Path), e.Message) }

// Conflict marks the error's text as meant for the client.
func (*PathError) Conflict() {}

// CleanFilePath returns name as a cleaned path relative to the home; empty for the home itself.
// name may be relative to the home, or absolute: below home (a cleaned absolute path), or with the
// home as its root. If name contains ".." or is no valid path, the error is a [*FieldError].
func CleanFilePath(home, name string) (string, error) {
	switch {
	case len(name) > MaxFilePathBytes:
		return "", FieldErrorf("path", "must be at most %d bytes long", MaxFilePathBytes)
	case strings.ContainsRune(name, 0):
		return "", FieldErrorf("path", "must not contain NUL")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", FieldErrorf("path", `must not contain ".."`)
		}
		if len(part) > MaxFileNameBytes {
			return "", FieldErrorf("path", "must have components of at most %d bytes", MaxFileNameBytes)
		}
	}
	// Cleaning cannot lead out of the root, because there is no "..".
	clean := path.Clean("/" + name)
	if rest, ok := strings.CutPrefix(clean, home); ok && path.IsAbs(name) && (rest == "" || rest[0] == '/') {
		clean = rest
	}
	clean = strings.TrimPrefix(clean, "/")
	if strings.Count(clean, "/") >= MaxFilePathParts {
		return "", FieldErrorf("path", "must have at most %d components", MaxFilePathParts)
	}
	return clean, nil
}

// CleanFileName is [CleanFilePath] for a path that must name a file.
func CleanFileName(home, name string) (string, error) {
	clean, err := CleanFilePath(home, name)
	if err == nil && (clean == "" || strings.HasSuffix(name, "/") || strings.HasSuffix(name, "/.")) {
		err = FieldErrorf("path", "must name a file")
	}
	return clean, err
}

// UploadPartBytes is the size of each part of a multipart upload except the last.
const UploadPartBytes = 8 << 20

// UploadedPart is a part of a file that is uploaded in parts.
type UploadedPart struct {
	Number int   `json:"number"` // from 1
	Size   int64 `json:"size"`   // bytes
}

// TarUpload is a tar that is unpacked into a thread's home.
type TarUpload struct {
	Body io.Reader // of the tar
	Home string    // the home's path in sandboxes; absolute links may point into it
	Most Space     // limit of the home
	// Proceed is called before each entry with the bytes of memory that the entry takes until the
	// upload ends. Its error ends the upload and is returned unchanged.
	Proceed func(memory int64) error
	// Entry, if not nil, is called with the path of each entry that was read, as in the tar. The
	// path is relative to the directory to unpack into.
	Entry func(path string)
}
