package gateway

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
)

// contentPolicy keeps what tenants wrote from ever being a page of this server, even where a browser shows it.
const contentPolicy = "default-src 'none'; sandbox; frame-ancestors 'none'"

// fileView is the JSON form of a file.
type fileView struct {
	Name        string `json:"name"`
	Path        string `json:"path"`
	Size        int64  `json:"size"`
	Modified    string `json:"modified"`
	IsDirectory bool   `json:"is_directory"`
}

// late is an answer of status 200 that begins with its first byte, so that what goes wrong before that can still be told.
type late struct {
	w     http.ResponseWriter
	begin func(http.Header)
	begun bool
}

func (l *late) Write(p []byte) (int, error) {
	if !l.begun {
		l.begun = true
		l.begin(l.w.Header())
	}
	return l.w.Write(p)
}

// readFileRequest reads a request about files of a thread.
func (s *Server) readFileRequest(w http.ResponseWriter, r *http.Request, decode func([]byte) (*proto.FileRequest, error)) (
	*proto.FileRequest, error,
) {
	body, err := s.readBody(w, r)
	if err != nil {
		return nil, err
	}
	req, err := decode(body)
	if err != nil {
		return nil, err
	}
	if req.Source == proto.SourceVolume {
		return nil, &unimplementedError{"source volume is", "use source thread"}
	}
	return req, nil
}

// listFiles sends the list as it comes: that of a large home, with long paths, need not fit into memory.
func (s *Server) listFiles(w http.ResponseWriter, r *http.Request) error {
	req, err := s.readFileRequest(w, r, proto.DecodeFileList)
	if err != nil {
		return err
	}
	dir, err := proto.CleanFilePath(s.Home, req.Path)
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(&late{w: w, begin: jsonHeader}, smallOutput)
	separator := `{"files":[`
	err = s.eachFile(r, req, dir, func(f proto.File) error {
		text, err := json.Marshal(fileView{path.Base(f.Path), f.Path, f.Size, f.Modified.UTC().Format(timeLayout), f.IsDirectory})
		if err != nil {
			return fmt.Errorf("encode %q: %w", f.Path, err)
		}
		_, _ = out.WriteString(separator) // the next write gives the error again
		separator = ","
		_, err = out.Write(text)
		return err
	})
	if err != nil {
		return fmt.Errorf("list files of thread %s: %w", req.ID, err)
	}
	end := "]}\n"
	if separator != "," {
		end = separator + end
	}
	_, _ = out.WriteString(end) // Flush gives the error
	return out.Flush()
}

// eachFile calls f for what a list has: of a directory what is in it, of a file that alone.
func (s *Server) eachFile(r *http.Request, req *proto.FileRequest, name string, f func(proto.File) error) error {
	org := infoOf(r.Context()).key.Org
	err := s.Files.List(r.Context(), org, req.ID, name, req.Recursive, f)
	if !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	content, err := s.Files.Open(r.Context(), org, req.ID, name)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return f(content.File)
}

func (s *Server) uploadURL(w http.ResponseWriter, r *http.Request) error {
	req, err := s.readFileRequest(w, r, proto.DecodeUpload)
	if err != nil {
		return err
	}
	name, err := proto.CleanFileName(s.Home, req.Path)
	if err != nil {
		return err
	}
	key := infoOf(r.Context()).key
	most, err := s.room(r, &key)
	if err != nil {
		return err
	}
	if req.Size > most.Bytes {
		return &proto.FieldError{Field: "content_length", Message: fmt.Sprintf(
			"content_length is %d bytes, and the home directory of this API key's sandbox has %d", req.Size, most.Bytes)}
	}
	if err := s.Files.CheckRoom(r.Context(), key.Org, req.ID, name, req.Size, most); err != nil {
		return fmt.Errorf("find out whether thread %s has room: %w", req.ID, err)
	}
	return s.answerSigned(w, r, &grant{method: http.MethodPut, key: key.ID, org: key.Org, thread: req.ID, path: name, size: req.Size})
}

// room gives what a home may be in the sandbox of an API key.
func (s *Server) room(r *http.Request, key *proto.Key) (proto.Room, error) {
	profile, err := s.profileOf(r.Context(), key)
	return proto.Room{Bytes: int64(profile.Disk.Home), Files: profile.Disk.Inodes}, err
}

func (s *Server) downloadURL(w http.ResponseWriter, r *http.Request) error {
	req, err := s.readFileRequest(w, r, proto.DecodeDownload)
	if err != nil {
		return err
	}
	name, err := proto.CleanFileName(s.Home, req.Path)
	if err != nil {
		return err
	}
	key := infoOf(r.Context()).key
	g := &grant{method: http.MethodGet, key: key.ID, org: key.Org, thread: req.ID, path: name}
	if _, err := s.open(r, g); err != nil {
		return err // rather now than when the URL is used
	}
	return s.answerSigned(w, r, g)
}

func (s *Server) open(r *http.Request, g *grant) (*proto.FileContent, error) {
	content, err := s.Files.Open(r.Context(), g.org, g.thread, g.path)
	if errors.Is(err, proto.ErrNotFound) {
		return nil, errNoFile
	}
	if err != nil {
		return nil, fmt.Errorf("open a file of thread %s: %w", g.thread, err)
	}
	return content, nil
}

// getContent sends a file, or the range of it that was asked for.
func (s *Server) getContent(w http.ResponseWriter, r *http.Request) error {
	g, _, err := s.allowed(r, chi.URLParam(r, "token"))
	if err != nil {
		return err
	}
	content, err := s.open(r, g)
	if err != nil {
		return err
	}
	h := w.Header()
	tag := `"` + content.Tag + `"`
	part := span{0, content.Size}
	whole := true
	if asked := r.Header.Get("Range"); asked != "" && r.Method == http.MethodGet && fresh(r.Header.Get("If-Range"), tag) {
		if part, whole, err = rangeOf(asked, content.Size); err != nil {
			h.Set("Content-Range", fmt.Sprintf("bytes */%d", content.Size))
			return err
		}
	}
	begin := func() {
		status := http.StatusOK
		if !whole {
			status = http.StatusPartialContent
			h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", part.offset, part.offset+part.length-1, content.Size))
		}
		h.Set("Content-Length", strconv.FormatInt(part.length, 10))
		h.Set("Content-Type", "application/octet-stream")
		h.Set("Content-Disposition", attachment(path.Base(g.path)))
		h.Set("Content-Security-Policy", contentPolicy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cache-Control", "private, no-store")
		h.Set("Accept-Ranges", "bytes")
		h.Set("ETag", tag)
		h.Set("Last-Modified", content.Modified.UTC().Format(http.TimeFormat))
		w.WriteHeader(status)
	}
	if r.Method == http.MethodHead || part.length == 0 {
		begin()
		return nil
	}
	done, err := s.transfers.begin(r.Context(), g.org)
	if err != nil {
		return err
	}
	defer done()
	return s.sendPart(w, r, content, part, begin)
}

// sendPart sends a part of a file. Its end is read, and with that verified, before that is sent; the answer begins when there is something
// to send. So what is wrong with a short file can still be told, and breaks a long one off.
func (s *Server) sendPart(w http.ResponseWriter, r *http.Request, content *proto.FileContent, part span, begin func()) error {
	body, err := content.Read(r.Context(), part.offset, part.length)
	if err != nil {
		return fmt.Errorf("read %d bytes at %d of a file: %w", part.length, part.offset, err)
	}
	defer func() { _ = body.Close() }() // it was only read
	in := bufio.NewReaderSize(body, smallOutput)
	end := min(part.length, smallOutput)
	long := part.length > end
	if long {
		if _, err := in.Peek(1); err != nil {
			return fmt.Errorf("read a file at %d: %w", part.offset, noEOF(err))
		}
		begin()
		if sent, err := io.CopyN(w, in, part.length-end); err != nil {
			return fmt.Errorf("send a file from %d, after %d of %d bytes: %w", part.offset, sent, part.length, noEOF(err))
		}
	}
	rest, err := io.ReadAll(io.LimitReader(in, end+1))
	if err == nil && int64(len(rest)) != end {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("read the last %d bytes before %d of a file, got %d: %w", end, part.offset+part.length, len(rest), err)
	}
	if !long {
		begin()
	}
	_, err = w.Write(rest)
	return err
}

// noEOF makes an end where none was to be an error that is not taken for a good end.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// attachment gives the Content-Disposition of a file of that name, which may have any characters.
func attachment(name string) string {
	// Without those that some browsers do not take as they are.
	name = strings.Map(func(r rune) rune {
		if r < ' ' || r == '\\' || r == '"' || r == 0x7f {
			return '_'
		}
		return r
	}, name)
	return mime.FormatMediaType("attachment", map[string]string{"filename": name})
}

// span is a part of a file, in bytes.
type span struct{ offset, length int64 }

// fresh reports whether a range of what has that tag was asked for. A time is not believed to tell contents apart.
func fresh(ifRange, tag string) bool { return ifRange == "" || ifRange == tag }

// rangeOf gives the part of size bytes that a Range header asks for. What is no single range of bytes is passed over, as it may be: whole
// is true then, and also for an empty file. The error is errRange where the range begins after the end.
func rangeOf(header string, size int64) (part span, whole bool, err error) {
	text, ok := strings.CutPrefix(header, "bytes=")
	from, to, dash := strings.Cut(strings.TrimSpace(text), "-")
	first, hasFirst := decimal(from)
	last, hasLast := decimal(to)
	switch {
	case !ok || !dash || size == 0:
		return span{0, size}, true, nil
	case from == "" && hasLast: // so many at the end
		first, last = max(0, size-last), size-1
	case hasFirst && to == "":
		last = size - 1
	case hasFirst && hasLast && first <= last:
		last = min(last, size-1)
	default:
		return span{0, size}, true, nil
	}
	if first >= size {
		return span{}, false, errRange
	}
	return span{first, last - first + 1}, false, nil
}

// decimal reads a whole number without a sign.
func decimal(text string) (n int64, ok bool) {
	u, err := strconv.ParseUint(text, 10, 63)
	return int64(u), err == nil
}

// putContent takes a file that was uploaded.
func (s *Server) putContent(w http.ResponseWriter, r *http.Request) error {
	g, key, err := s.allowed(r, chi.URLParam(r, "token"))
	if err == nil {
		err = plainBody(w, r)
	}
	if err == nil {
		err = checkLength(r.ContentLength, g.size)
	}
	var most proto.Room
	if err == nil {
		most, err = s.room(r, key)
	}
	var done func()
	if err == nil {
		done, err = s.transfers.begin(r.Context(), g.org)
	}
	if err != nil {
		w.Header().Set("Connection", "close") // the body is not worth reading
		return err
	}
	defer done()
	body := &longBody{from: r.Body, control: infoOf(r.Context()).rec.control, limit: g.size}
	err = s.Files.Stage(r.Context(), g.org, g.thread, g.path, g.size, most, body)
	_ = body.control.SetReadDeadline(time.Time{}) // not supported: no connection that could stall
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not worth reading
		return fmt.Errorf("stage a file of thread %s: %w", g.thread, err)
	}
	return writeValue(w, http.StatusOK, struct {
		Path string `json:"path"`
		Size int64  `json:"size"`
	}{g.path, g.size})
}

// checkLength compares the length of an upload with what its URL allows.
func checkLength(length, allowed int64) error {
	switch {
	case length < 0:
		return errLength
	case length > allowed:
		return &bodyTooLargeError{allowed}
	case length < allowed:
		return &proto.FieldError{Field: "Content-Length", Message: fmt.Sprintf(
			"Content-Length is %d, and the URL is for a file of %d bytes", length, allowed)}
	default:
		return nil
	}
}
