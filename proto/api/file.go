package api

import (
	"fmt"
	"mime"
	"path"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

const maxContentType = 255 // characters

// FileRequest is the part that all requests about files have.
type FileRequest struct {
	Source proto.FileSource `json:"source" required:"true" must:"be thread or volume" doc:"thread: the home of a thread. volume: a storage connection of any kind that the API key has."`
	ID     string           `json:"id" required:"true" minLength:"1" maxLength:"128" doc:"The thread's id, or the connection's slug."`
}

// Validate checks the id of a thread. A connection of another form is one that does not exist.
func (r *FileRequest) Validate() error {
	if r.Source != proto.SourceThread {
		return nil
	}
	return proto.CheckThreadID("id", r.ID)
}

// FileListRequest asks for the files at a path.
type FileListRequest struct {
	FileRequest
	Path      string `json:"path,omitempty" maxLength:"4096" format:"path" doc:"Absent: the home or the connection itself. Relative to it, or absolute, with or without the home or /data/{slug} in front; up to 4,096 bytes and 512 components of up to 255 bytes, none of them .., without NUL."`
	Recursive bool   `json:"recursive,omitempty" default:"false"`
	Version   int64  `json:"version,omitempty" minimum:"1" must:"be a whole number, at least 1" doc:"A version of the thread or volume. Absent: the newest, for a thread with the uploads that are not in a version yet. Buckets and directories have no versions."`
}

// FileDeleteRequest asks to delete what is at a path.
type FileDeleteRequest struct {
	FileRequest
	Path      string `json:"path" required:"true" minLength:"1" maxLength:"4096" format:"path" doc:"As in a list of files; not the home or the connection itself."`
	Recursive bool   `json:"recursive,omitempty" default:"false" doc:"Delete a directory with its content."`
}

// FileRenameRequest asks to give what is at a path another path.
type FileRenameRequest struct {
	FileRequest
	Path string `json:"path" required:"true" minLength:"1" maxLength:"4096" format:"path" doc:"As in a list of files; not the home or the connection itself."`
	To   string `json:"to" required:"true" minLength:"1" maxLength:"4096" format:"path" doc:"The new path, where nothing may be. Missing directories above it are created."`
}

// FileDownloadRequest asks for a URL to download a file from.
type FileDownloadRequest struct {
	FileRequest
	Path    string `json:"path" required:"true" minLength:"1" maxLength:"4096" format:"path" doc:"As in a list of files."`
	Version int64  `json:"version,omitempty" minimum:"1" must:"be a whole number, at least 1" doc:"As in a list of files."`
	Inline  bool   `json:"inline,omitempty" default:"false" doc:"The URL answers with the media type of images, PDF, HTML, CSV, audio, video and text, so that pages of this server can show the file. The content cannot run scripts or load anything. Browsers save other files."`
}

// FileUploadRequest asks for a URL to upload a file to.
type FileUploadRequest struct {
	FileRequest
	Path          string  `json:"path" required:"true" minLength:"1" maxLength:"4096" format:"path" doc:"As in a list of files."`
	ContentLength int64   `json:"content_length" required:"true" minimum:"0" maximum:"10737418240" must:"be a whole number of bytes from 0 to 10737418240" doc:"The exact number of bytes."`
	ContentType   *string `json:"content_type,omitempty" maxLength:"255" doc:"A media type. It is one of the headers to send with the upload; the file does not keep it."`
}

// PartUploadRequest asks for a URL to upload a file to in parts.
type PartUploadRequest struct {
	FileRequest
	Path          string `json:"path" required:"true" minLength:"1" maxLength:"4096" format:"path" doc:"As in a list of files."`
	ContentLength int64  `json:"content_length" required:"true" minimum:"1" maximum:"10737418240" must:"be a whole number of bytes from 1 to 10737418240" doc:"The exact number of bytes."`
}

// PartUpload is a URL to upload a file to in parts.
type PartUpload struct {
	URL       string `json:"url" doc:"Absolute. It needs no API key."`
	PartSize  int64  `json:"part_size" minimum:"1" doc:"Bytes of each part but the last, which has the rest."`
	Parts     int    `json:"parts" minimum:"1" doc:"The number of parts."`
	ExpiresAt Time   `json:"expires_at" doc:"When the upload must be complete."`
}

// UploadedPart is a part that is stored.
type UploadedPart struct {
	Number int   `json:"number" minimum:"1"`
	Size   int64 `json:"size" minimum:"0" doc:"Bytes."`
}

// PartUploadState describes an upload in parts.
type PartUploadState struct {
	Path      string         `json:"path" doc:"Relative to the home or the connection."`
	Size      int64          `json:"size" minimum:"1" doc:"Bytes of the file."`
	PartSize  int64          `json:"part_size" minimum:"1" doc:"Bytes of each part but the last."`
	Parts     int            `json:"parts" minimum:"1" doc:"The number of parts."`
	Uploaded  []UploadedPart `json:"uploaded" doc:"The parts that are stored, by number."`
	ExpiresAt Time           `json:"expires_at" doc:"When the upload must be complete."`
}

// Validate checks the source and the content type.
func (r *FileUploadRequest) Validate() error {
	if r.ContentType != nil {
		ascii := !strings.ContainsFunc(*r.ContentType, func(c rune) bool { return c < ' ' || c > '~' })
		kind, _, err := mime.ParseMediaType(*r.ContentType)
		if err != nil || !ascii || !strings.Contains(kind, "/") || len(*r.ContentType) > maxContentType {
			return proto.FieldErrorf("content_type", "must be a media type such as text/csv, at most %d characters",
				maxContentType)
		}
	}
	return r.FileRequest.Validate()
}

// File is an entry of a thread's home, or of a storage connection.
type File struct {
	Name        string `json:"name"`
	Path        string `json:"path" doc:"Relative to the home or the connection."`
	Size        int64  `json:"size" minimum:"0" doc:"Bytes."`
	Modified    Time   `json:"modified"`
	IsDirectory bool   `json:"is_directory"`

	Type       proto.FileType `json:"type" enum:"file,directory,link,special" doc:"What it is. Only a file can be downloaded. special: a FIFO, socket or device in a directory of the operator."`
	Executable bool           `json:"executable,omitempty" doc:"A file that its owner may execute. Absent for others, and in buckets, which do not store it."`
}

// Files answers a request for a list of files.
type Files struct {
	Files []File `json:"files"`
}

// FileCompareRequest asks to compare two versions.
type FileCompareRequest struct {
	FileRequest
	From int64  `json:"from" required:"true" minimum:"0" must:"be a whole number, at least 0" doc:"A version. 0: nothing, as before the first version."`
	To   int64  `json:"to,omitempty" minimum:"1" must:"be a whole number, at least 1" doc:"Another version. Absent: the newest, for a thread with the uploads that are not in a version yet."`
	Path string `json:"path,omitempty" maxLength:"4096" format:"path" doc:"A directory to compare, or a file. Absent: everything."`
}

// FileDifference is the difference between two versions.
type FileDifference struct {
	Changes   []FileChange `json:"changes" doc:"By path, at most 1,000."`
	Truncated bool         `json:"truncated" doc:"There may be more changes: compare directories one by one."`
	Diff      *FileDiff    `json:"diff" doc:"The difference in the text of a file; null unless the path of the request is that of a changed file."`
}

// FileChange is what differs at a path.
type FileChange struct {
	Path   string     `json:"path" doc:"Relative to the home or the connection."`
	Change string     `json:"change" enum:"added,removed,changed"`
	Before *FileState `json:"before" doc:"Null if it was added."`
	After  *FileState `json:"after" doc:"Null if it was removed."`
}

// FileState is what a version has at a path.
type FileState struct {
	Type     proto.FileType `json:"type" enum:"file,directory,link"`
	Size     int64          `json:"size" minimum:"0" doc:"Bytes."`
	Mode     string         `json:"mode" pattern:"^[0-7]{4}$" doc:"The permission bits, in octal."`
	Modified Time           `json:"modified"`
}

// FileDiff is the difference in the text of a file.
type FileDiff struct {
	Kind string `json:"kind" enum:"text,binary,too_large" doc:"binary: one of the contents is not text in UTF-8. too_large: one has more than 262,144 bytes."`
	Text string `json:"text" doc:"The unified diff; empty for another kind, and if only the mode has changed."`
}

// The kinds of differences in a file.
const (
	DiffText     = "text"
	DiffBinary   = "binary"
	DiffTooLarge = "too_large"
)

// NewFileChange returns the form of a change.
func NewFileChange(c *proto.FileChange) FileChange {
	change := FileChange{c.Path, "changed", newFileState(c.Before), newFileState(c.After)}
	switch {
	case c.Before == nil:
		change.Change = "added"
	case c.After == nil:
		change.Change = "removed"
	}
	return change
}

func newFileState(s *proto.FileState) *FileState {
	if s == nil {
		return nil
	}
	return &FileState{s.Type, s.Size, fmt.Sprintf("%04o", s.Mode), Time{s.Modified}}
}

// NewFile returns the form of a file in lists.
func NewFile(f *proto.File) File {
	return File{path.Base(f.Path), f.Path, f.Size, Time{f.Modified}, f.IsDirectory, f.Type(), f.Executable}
}

// SignedURL is a URL that needs no API key.
type SignedURL struct {
	URL       string   `json:"url" doc:"Absolute."`
	Method    string   `json:"method" enum:"GET,PUT"`
	Headers   []Header `json:"headers" doc:"Headers to send with the request."`
	ExpiresAt Time     `json:"expires_at" doc:"When the request must have begun."`
}

// Header is a header of a request.
type Header struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// ChangedFile answers a change of files.
type ChangedFile struct {
	Path    string `json:"path" doc:"Relative to the home or the connection; the new path after a rename."`
	Version int64  `json:"version" minimum:"0" doc:"The number of the newest version of the thread or volume after the change; 0 if there is none, and for other storage connections, which have no versions."`
}

// Uploaded answers an upload.
type Uploaded struct {
	Path string `json:"path" doc:"Relative to the home or the connection."`
	Size int64  `json:"size" minimum:"0" doc:"Bytes."`
}
