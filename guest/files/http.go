package files

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
	"github.com/bullpen-run/bullpen/guest/answer"
)

// maxUploads limits the files of one upload.
const maxUploads = 10_000

// httpError is an error with the status that it has.
type httpError struct {
	code    int
	message string
}

func (e httpError) Error() string { return e.message }

func badRequest(format string, args ...any) error {
	return httpError{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

// ServeHTTP serves up- and downloads, on one route.
func (t *Tree) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	user, err := t.Users.Lookup(r.URL.Query().Get("username"))
	if err != nil {
		answer.Error(w, http.StatusUnauthorized, err.Error())
		return
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		err = t.download(w, r, user)
	case http.MethodPost:
		err = t.upload(w, r, user)
	default:
		w.Header().Set("Allow", "GET, HEAD, POST")
		err = httpError{http.StatusMethodNotAllowed, "files are read with GET and written with POST"}
	}
	if err != nil {
		answer.Error(w, httpCode(err), err.Error())
	}
}

func httpCode(err error) int {
	if known, ok := errors.AsType[httpError](err); ok {
		return known.code
	}
	for _, row := range []struct {
		err  error
		code int
	}{
		{os.ErrNotExist, http.StatusNotFound},
		{os.ErrPermission, http.StatusForbidden},
		{errProc, http.StatusForbidden},
		{errLinked, http.StatusForbidden},
		{unix.EROFS, http.StatusForbidden},
		{errDirectory, http.StatusBadRequest},
		{errNotRegular, http.StatusBadRequest},
		{unix.EISDIR, http.StatusBadRequest},
		{unix.ENOTDIR, http.StatusBadRequest},
		{unix.ELOOP, http.StatusBadRequest},
		{unix.ENAMETOOLONG, http.StatusBadRequest},
		{unix.EINVAL, http.StatusBadRequest},
		{unix.ENXIO, http.StatusBadRequest}, // a pipe without a reader
		{unix.ETXTBSY, http.StatusConflict},
		{unix.ENOSPC, http.StatusInsufficientStorage},
		{unix.EDQUOT, http.StatusInsufficientStorage},
		{unix.ENOTSUP, http.StatusNotImplemented},
	} {
		if errors.Is(err, row.err) {
			return row.code
		}
	}
	return http.StatusInternalServerError
}

// download sends a file.
func (t *Tree) download(w http.ResponseWriter, r *http.Request, user account.User) error {
	path, err := resolve(r.URL.Query().Get("path"), user)
	if err != nil {
		return badRequest("%v", err)
	}
	if refusesIdentity(r.Header.Values("Accept-Encoding")) {
		return httpError{http.StatusNotAcceptable, "files are sent as they are: accept the encoding identity"}
	}
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0) //nolint:gosec // clients may name any
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	switch {
	case info.IsDir():
		return badRequest("%s is a directory", path)
	case !info.Mode().IsRegular():
		return badRequest("%s is not a regular file", path)
	}
	name := filepath.Base(path)
	w.Header().Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": name}))
	if info.Size() == 0 {
		// Files of /proc have the size 0 whatever they contain.
		return sendUnsized(w, r, file, name)
	}
	w.Header().Set("ETag", fmt.Sprintf(`"%x-%x"`, info.ModTime().UnixNano(), info.Size()))
	http.ServeContent(w, r, name, info.ModTime(), file)
	return nil
}

// sendUnsized sends a file of unknown size.
func sendUnsized(w http.ResponseWriter, r *http.Request, file *os.File, name string) error {
	first := make([]byte, 4096)
	n, err := io.ReadFull(file, first)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	contentType := mime.TypeByExtension(filepath.Ext(name))
	if contentType == "" {
		contentType = http.DetectContentType(first[:n])
	}
	w.Header().Set("Content-Type", contentType)
	if n == 0 {
		w.Header().Set("Content-Length", "0")
	}
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		return nil
	}
	if _, err := w.Write(first[:n]); err == nil {
		_, _ = io.Copy(w, file)
	}
	return nil
}

// refusesIdentity reports whether a client does not accept files as they are.
func refusesIdentity(accept []string) bool {
	refused := false
	for part := range strings.SplitSeq(strings.Join(accept, ","), ",") {
		coding, parameter, _ := strings.Cut(strings.ToLower(strings.ReplaceAll(part, " ", "")), ";")
		value, weighted := strings.CutPrefix(parameter, "q=")
		zero := weighted && strings.Trim(value, "0.") == ""
		switch coding {
		case "identity":
			return zero
		case "*":
			refused = zero
		}
	}
	return refused
}

// uploaded describes a file that has been written.
type uploaded struct {
	Name     string            `json:"name"`
	Path     string            `json:"path"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// upload writes files from the parts of a form, or one from the whole body.
func (t *Tree) upload(w http.ResponseWriter, r *http.Request, user account.User) error {
	metadata, err := requestMetadata(r.Header)
	if err != nil {
		return err
	}
	body := io.Reader(r.Body)
	switch encoding := strings.ToLower(r.Header.Get("Content-Encoding")); encoding {
	case "", "identity":
	case "gzip":
		unzipped, err := gzip.NewReader(r.Body)
		if err != nil {
			return badRequest("the body is not gzip: %v", err)
		}
		body = unzipped
	default:
		return httpError{http.StatusUnsupportedMediaType, fmt.Sprintf("encoding %q is not supported, only gzip", encoding)}
	}
	u := upload{tree: t, user: user, metadata: metadata, seen: map[string]bool{}}
	path := r.URL.Query().Get("path")
	contentType, parameters, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	switch {
	case err == nil && contentType == "multipart/form-data" && parameters["boundary"] != "":
		err = u.form(multipart.NewReader(body, parameters["boundary"]), path)
	case err == nil && contentType == "application/octet-stream":
		if path == "" {
			return badRequest("path is missing")
		}
		err = u.write(path, body)
	default:
		return badRequest("the content type must be multipart/form-data or application/octet-stream")
	}
	if err != nil {
		return err
	}
	answer.JSON(w, http.StatusOK, u.files)
	return nil
}

// upload is the state of an upload.
type upload struct {
	tree     *Tree
	user     account.User
	metadata map[string]string
	seen     map[string]bool // paths
	files    []uploaded
}

// form writes the files of a form. With a path, the form must have one file, which gets it.
func (u *upload) form(form *multipart.Reader, path string) error {
	u.files = []uploaded{}
	for {
		part, err := form.NextRawPart()
		if err == io.EOF { // an end within a form is another error, which wraps this one
			return nil
		}
		if err != nil {
			return badRequest("read the form: %v", err)
		}
		if part.FormName() != "file" {
			continue
		}
		if len(u.files) >= maxUploads {
			return httpError{
				http.StatusRequestEntityTooLarge,
				fmt.Sprintf("the form has more than %d files, the most of one upload", maxUploads),
			}
		}
		target := path
		if target == "" {
			// Part.FileName has no directories.
			_, parameters, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			if target = parameters["filename"]; err != nil || target == "" {
				return badRequest("a part of the form has no file name")
			}
		}
		if err := u.write(target, part); err != nil {
			return err
		}
	}
}

// write writes a file.
func (u *upload) write(path string, content io.Reader) (err error) {
	path, err = resolve(path, u.user)
	if err != nil {
		return badRequest("%v", err)
	}
	if u.seen[path] {
		return badRequest("%s is in the upload twice", path)
	}
	u.seen[path] = true
	file, err := u.tree.create(u.user, path)
	if err != nil {
		return err
	}
	defer func() {
		if closeErr := file.Close(); err == nil && closeErr != nil {
			err = closeErr
		}
	}()
	if err := writeMetadata(file, u.metadata); err != nil {
		return fmt.Errorf("write the metadata of %s: %w", path, err)
	}
	if _, err := io.Copy(fileWriter{file}, clientReader{content}); err != nil {
		return err
	}
	u.files = append(u.files, uploaded{Name: filepath.Base(path), Path: path, Type: "file", Metadata: u.metadata})
	return nil
}

// fileWriter hides that a file can read from a reader by itself, which takes memory for nothing.
type fileWriter struct{ io.Writer }

// clientReader gives errors of reading from a client the status of a bad request.
type clientReader struct{ io.Reader }

func (c clientReader) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = badRequest("read the body: %v", err)
	}
	return n, err
}

// requestMetadata returns the metadata in the headers of an upload.
func requestMetadata(h http.Header) (map[string]string, error) {
	var metadata map[string]string
	total := 0
	for name, values := range h {
		key, ok := strings.CutPrefix(strings.ToLower(name), "x-metadata-")
		if !ok {
			continue
		}
		value := strings.Join(values, ",")
		if key == "" || len(key) > maxMetadataName {
			return nil, badRequest("the name of metadata must have 1 to %d bytes: %q", maxMetadataName, name)
		}
		for i := range len(value) {
			if value[i] < ' ' || value[i] > '~' {
				return nil, badRequest("the value of metadata %q has characters that are not printable ASCII", key)
			}
		}
		if total += len(key) + len(value); total > maxMetadataTotal {
			return nil, badRequest("metadata takes more than %d bytes", maxMetadataTotal)
		}
		if metadata == nil {
			metadata = map[string]string{}
		}
		metadata[key] = value
	}
	return metadata, nil
}
