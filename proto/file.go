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

// FileRequest is the body of a request about files, checked but for its path, whose meaning depends on where the home is.
type FileRequest struct {
	Source    FileSource
	ID        string // of the thread
	Path      string // as the client wrote it, see [CleanFilePath]; empty where a list names none
	Recursive bool   // of a list: with everything below
	Size      int64  // of an upload: bytes of content
}

// DecodeFileList reads the body of a request for a list of files. What is wrong with it is a [*FieldError].
func DecodeFileList(body []byte) (*FileRequest, error) {
	r := new(FileRequest)
	d, err := r.begin(body, "path", "recursive")
	if err != nil {
		return nil, err
	}
	d.read("path", r.readPath)
	d.read("recursive", func(raw []byte) error {
		switch string(raw) {
		case "true":
			r.Recursive = true
		case "false":
		default:
			return FieldErrorf("recursive", "must be true or false")
		}
		return nil
	})
	return r, d.err
}

// DecodeDownload reads the body of a request for a URL to download a file from. What is wrong with it is a [*FieldError].
func DecodeDownload(body []byte) (*FileRequest, error) {
	r := new(FileRequest)
	d, err := r.begin(body, "path")
	if err != nil {
		return nil, err
	}
	d.need("path", r.readPath)
	return r, d.err
}

// DecodeUpload reads the body of a request for a URL to upload a file to. What is wrong with it is a [*FieldError].
func DecodeUpload(body []byte) (*FileRequest, error) {
	r := new(FileRequest)
	d, err := r.begin(body, "path", "content_length", "content_type")
	if err != nil {
		return nil, err
	}
	d.need("path", r.readPath)
	d.need("content_length", func(raw []byte) error {
		n, err := decodeInt(raw)
		if r.Size = int64(n); err != nil || r.Size < 0 || r.Size > MaxFileBytes {
			return FieldErrorf("content_length", "must be a whole number of bytes from 0 to %d", MaxFileBytes)
		}
		return nil
	})
	// Files in a home have no type, so it is only checked.
	d.read("content_type", func(raw []byte) error { _, err := decodeString("content_type", raw); return err })
	return r, d.err
}

// begin reads what every request about files has, and gives a decoder for the rest. What a source names an id is checked only for threads.
func (r *FileRequest) begin(body []byte, more ...string) (*memberDecoder, error) {
	members, err := decodeObject(body, append([]string{"source", "id"}, more...)...)
	if err != nil {
		return nil, err
	}
	d := &memberDecoder{members: members}
	d.need("source", func(raw []byte) error {
		name, err := decodeString("source", raw)
		if r.Source = FileSource(name); err == nil && r.Source != SourceThread && r.Source != SourceVolume {
			err = FieldErrorf("source", "must be %s or %s", SourceThread, SourceVolume)
		}
		return err
	})
	d.need("id", func(raw []byte) (err error) {
		if r.ID, err = decodeString("id", raw); err != nil || r.Source != SourceThread {
			return err
		}
		return CheckThreadID("id", r.ID)
	})
	return d, nil
}

func (r *FileRequest) readPath(raw []byte) (err error) {
	r.Path, err = decodeString("path", raw)
	return err
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
