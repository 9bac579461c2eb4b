package rest

import (
	"bufio"
	"errors"
	"io"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// maxUploaded bounds the paths in the response to an upload.
const maxUploaded = 1024

// requestHome is the home that a request addresses.
type requestHome struct {
	Host
	Home

	root      string // path of the home in sandboxes
	directory string // base of relative paths, relative to the home
}

// home returns the home that a request addresses: the home of a session, or the home of the API key
// if the query names no session.
func (s *Server) home(r *http.Request, q query) (*requestHome, error) {
	host := s.Host(r)
	org, key := host.Caller()
	at := &requestHome{Host: host, root: host.HomePath()}
	id, ok := q.get("sessionId", "session_id")
	if !ok {
		at.Home = host.Home(proto.AgentHomeThread(key))
		return at, nil
	}
	x, err := s.Service.Get(r.Context(), org, id)
	if err != nil {
		return nil, err
	}
	if at.directory, err = host.CleanPath(x.Directory); err != nil {
		return nil, sessions.Invalidf("directory: %v", err)
	}
	at.Home = host.Home(x.ThreadID())
	return at, nil
}

// location is a path in a home. name is relative to the home, and full is the path in sandboxes.
type location struct {
	name string // cleaned; empty for the home itself
	full string
}

// resolve returns the location of a path. The path is relative to p.directory, or absolute within
// the home.
func (p *requestHome) resolve(name string) (location, error) {
	relative := !path.IsAbs(name)
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." && relative {
			return location{}, sessions.Invalidf("invalid relative path: %s", proto.Shorten(name))
		}
	}
	if relative {
		name = path.Join(p.root, p.directory, name)
	}
	clean, err := p.CleanPath(name)
	if err != nil {
		return location{}, sessions.Invalidf("invalid path: %s: %v", proto.Shorten(name), err)
	}
	return location{clean, path.Join(p.root, clean)}, nil
}

// locate returns the home and the location that a request addresses. Requests without a path get
// fallback, or an error if fallback is empty.
func (s *Server) locate(r *http.Request, fallback string) (*requestHome, location, query, error) {
	q, err := queryOf(r)
	if err != nil {
		return nil, location{}, q, err
	}
	name, ok := q.get("path")
	if !ok {
		if fallback == "" {
			return nil, location{}, q, badQuery("missing field `path`")
		}
		name = fallback
	}
	p, err := s.home(r, q)
	if err != nil {
		return nil, location{}, q, err
	}
	at, err := p.resolve(name)
	return p, at, q, err
}

// wrap returns err, or this API's error if there is nothing at the location.
func (at *location) wrap(err error) error {
	e, ok := errors.AsType[*api.Error](err)
	if ok && e.Code == api.CodeNotFound {
		return sessions.Invalidf("path not found: %s", proto.Shorten(at.full))
	}
	return err
}

// checkChange returns an error if the location is the home itself.
func (at *location) checkChange() error {
	if at.name == "" {
		return sessions.Invalidf("invalid path: %s is the home itself", at.full)
	}
	return nil
}

// entry describes a file or directory.
type entry struct {
	Name     string `json:"name,omitempty"` // only in lists
	Path     string `json:"path"`
	Type     string `json:"entryType"`
	Size     int64  `json:"size"`
	Modified string `json:"modified,omitempty"`
}

func newEntry(f *proto.File, full string) entry {
	e := entry{Path: full, Type: "file", Size: f.Size}
	if f.IsDirectory {
		e.Type = "directory"
	}
	if !f.Modified.IsZero() {
		e.Modified = f.Modified.UTC().Format(time.RFC3339Nano)
	}
	return e
}

// errFound stops a list.
var errFound = errors.New("found")

// stat describes the file at a location. It does not follow links.
func (p *requestHome) stat(r *http.Request, at location) (*proto.File, error) {
	if at.name == "" {
		return &proto.File{IsDirectory: true}, nil
	}
	parent := path.Dir(at.name)
	if parent == "." {
		parent = ""
	}
	var found *proto.File
	err := p.List(r.Context(), parent, func(f proto.File) error {
		if f.Path != at.name {
			return nil
		}
		found = &f
		return errFound
	})
	switch {
	case found != nil:
		return found, nil
	case err != nil:
		return nil, at.wrap(err)
	default:
		return nil, sessions.Invalidf("path not found: %s", proto.Shorten(at.full))
	}
}

// locateFile is locate with the description of the file at the location.
func (s *Server) locateFile(r *http.Request, fallback string) (*requestHome, location, *proto.File, error) {
	p, at, _, err := s.locate(r, fallback)
	if err != nil {
		return nil, location{}, nil, err
	}
	f, err := p.stat(r, at)
	return p, at, f, err
}

func (s *Server) statFile(w http.ResponseWriter, r *http.Request) error {
	_, at, f, err := s.locateFile(r, "")
	if err != nil {
		return err
	}
	return writeJSON(w, newEntry(f, at.full))
}

func (s *Server) listFiles(w http.ResponseWriter, r *http.Request) error {
	p, at, f, err := s.locateFile(r, ".")
	if err != nil {
		return err
	}
	if !f.IsDirectory {
		return sessions.Invalidf("path is not a directory: %s", proto.Shorten(at.full))
	}
	out := bufio.NewWriterSize(&jsonAnswer{w: w}, bufferSize)
	separator := "["
	err = p.List(r.Context(), at.name, func(f proto.File) error {
		x := newEntry(&f, path.Join(p.root, f.Path))
		x.Name = path.Base(f.Path)
		body, err := encode(x)
		if err != nil {
			return err
		}
		_, _ = out.WriteString(separator) // the next write returns the error again
		separator = ","
		_, err = out.Write(body)
		return err
	})
	if err != nil {
		return at.wrap(err)
	}
	if separator == "[" {
		_, _ = out.WriteString("[") // Flush returns the error
	}
	_, _ = out.WriteString("]")
	return out.Flush()
}

func (s *Server) readFile(w http.ResponseWriter, r *http.Request) error {
	p, at, f, err := s.locateFile(r, "")
	if err != nil {
		return err
	}
	if f.Type() != proto.FileRegular {
		return sessions.Invalidf("path is not a file: %s", proto.Shorten(at.full))
	}
	content, err := p.Open(r.Context(), at.name)
	if err != nil {
		return at.wrap(err)
	}
	body, err := content.Read(r.Context(), 0, content.Size)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }() // it was only read
	in := bufio.NewReaderSize(body, bufferSize)
	if _, err := in.Peek(1); err != nil && content.Size > 0 {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Length", strconv.FormatInt(content.Size, 10))
	h.Set("Cache-Control", "private, no-store")
	w.WriteHeader(http.StatusOK)
	_, err = io.CopyN(w, in, content.Size)
	return err
}

func (s *Server) writeFile(w http.ResponseWriter, r *http.Request) error {
	p, at, _, err := s.locate(r, "")
	if err == nil {
		err = at.checkChange()
	}
	if err != nil {
		return err
	}
	size, err := p.PutBody(w, at.name)
	if err != nil {
		return at.wrap(err)
	}
	return writeJSON(w, map[string]any{"path": at.full, "bytesWritten": size})
}

func (s *Server) deleteFile(w http.ResponseWriter, r *http.Request) error {
	p, at, q, err := s.locate(r, "")
	if err == nil {
		err = at.checkChange()
	}
	if err != nil {
		return err
	}
	recursive, err := q.flag("recursive")
	if err != nil {
		return err
	}
	if err := p.Delete(r.Context(), at.name, recursive); err != nil {
		return at.wrap(err)
	}
	return writeJSON(w, map[string]string{"path": at.full})
}

func (s *Server) makeDirectory(w http.ResponseWriter, r *http.Request) error {
	p, at, _, err := s.locate(r, "")
	if err != nil {
		return err
	}
	if at.name != "" {
		if err := p.MakeDirectory(r.Context(), at.name); err != nil {
			return at.wrap(err)
		}
	}
	return writeJSON(w, map[string]string{"path": at.full})
}

// moveFile moves a file or directory. It first deletes an existing destination, in a separate
// change.
func (s *Server) moveFile(w http.ResponseWriter, r *http.Request) error {
	q, err := queryOf(r)
	if err != nil {
		return err
	}
	p, err := s.home(r, q)
	if err != nil {
		return err
	}
	var request moveRequest
	if err := decode(p.Host, w, r, &request, false); err != nil {
		return err
	}
	from, err := p.resolve(*request.From)
	if err != nil {
		return err
	}
	to, err := p.resolve(*request.To)
	if err != nil {
		return err
	}
	for _, at := range []location{from, to} {
		if err := at.checkChange(); err != nil {
			return err
		}
	}
	if err := p.move(r, from, to, request.Overwrite); err != nil {
		return err
	}
	return writeJSON(w, map[string]string{"from": from.full, "to": to.full})
}

func (p *requestHome) move(r *http.Request, from, to location, overwrite bool) error {
	if _, err := p.stat(r, from); err != nil {
		return err
	}
	if _, err := p.stat(r, to); err == nil {
		switch {
		case !overwrite:
			return sessions.Invalidf("destination already exists: %s", proto.Shorten(to.full))
		case from.name == to.name:
			return nil
		case strings.HasPrefix(from.name, to.name+"/"):
			return sessions.Invalidf("destination contains the source: %s", proto.Shorten(to.full))
		}
		if err := p.Delete(r.Context(), to.name, true); err != nil {
			return to.wrap(err)
		}
	}
	return from.wrap(p.Move(r.Context(), from.name, to.name))
}

func (s *Server) uploadFiles(w http.ResponseWriter, r *http.Request) error {
	if !strings.HasPrefix(r.Header.Get("Content-Type"), "application/x-tar") {
		return sessions.Invalidf("content-type must be application/x-tar")
	}
	p, at, _, err := s.locate(r, ".")
	if err != nil {
		return err
	}
	paths, truncated := []string{}, false
	err = p.UnpackBody(w, at.name, func(name string) {
		full := path.Join(at.full, name)
		switch {
		case full == at.full:
		case len(paths) == maxUploaded:
			truncated = true
		default:
			paths = append(paths, full)
		}
	})
	if err != nil {
		return at.wrap(err)
	}
	return writeJSON(w, map[string]any{"paths": paths, "truncated": truncated})
}
