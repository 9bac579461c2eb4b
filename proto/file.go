package proto

import (
	"context"
	"io"
	"path"
	"strings"
	"time"
)

// Limits of files in a thread's home that are uploaded or asked for.
const (
	MaxFileBytes     = 10 * int64(GiB) // content of an uploaded file
	MaxFilePathBytes = 4096
	MaxFileNameBytes = 255 // one component of a path
	MaxFilePathParts = 512 // components: a home can be stored with as many directories in each other, itself included
)

// FileSource says what kind of thing files are asked of.
type FileSource string

// The sources of files.
const (
	SourceThread FileSource = "thread"
	SourceVolume FileSource = "volume"
)

// File is an entry of a thread's home.
type File struct {
	Path        string    `json:"path"` // relative to the home, cleaned
	Size        int64     `json:"size"` // bytes: of a file, or of a link's target; 0 of a directory
	Modified    time.Time `json:"modified"`
	IsDirectory bool      `json:"is_directory"`
}

// FileContent is the content of one file in a thread's home, as it was when it was asked for.
type FileContent struct {
	File
	// Tag names the content: whenever it is the same, the bytes are. It is of letters, digits and :_-.
	Tag string
	// Read gives length bytes from offset on, both within Size. Its reader ends after them with io.EOF, and with another error where they
	// are not those that were stored.
	Read func(ctx context.Context, offset, length int64) (io.ReadCloser, error)
}

// CleanFilePath gives a path in a thread's home relative to it, without ./ and further slashes; empty for the home itself. It may be
// written relative to the home, or absolute: below home, a cleaned absolute path, or as if the home were the root. One that leads up or
// that no file can have is a [*FieldError].
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
	// As an absolute path it cannot become another by being cleaned, since nothing in it leads up.
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

// CleanFileName is [CleanFilePath] for a path that has to name a file.
func CleanFileName(home, name string) (string, error) {
	clean, err := CleanFilePath(home, name)
	if err == nil && (clean == "" || strings.HasSuffix(name, "/") || strings.HasSuffix(name, "/.")) {
		err = FieldErrorf("path", "must name a file")
	}
	return clean, err
}
