package responses

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"mime"
	"net/http"
	"path"
	"strconv"
	"strings"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// filePrefix is the prefix of file ids in containers. The file's path in its home follows, so that
// files need no records of their own.
const filePrefix = "cfile_"

func fileID(p string) string { return filePrefix + base64.RawURLEncoding.EncodeToString([]byte(p)) }

// pathOf returns the path in a file id, which may be any text; [agent.Host] checks it.
func pathOf(id string) (string, error) {
	rest, ok := strings.CutPrefix(id, filePrefix)
	text, err := base64.RawURLEncoding.DecodeString(rest)
	if !ok || err != nil || len(text) == 0 {
		return "", errNoFile
	}
	return string(text), nil
}

var errNoFile = api.Errorf(api.CodeNotFound, "there is no file of that id in this container")

type (
	// containerFile is a file in a container of OpenAI.
	containerFile struct {
		ID          string `json:"id"`
		Object      string `json:"object"`
		ContainerID string `json:"container_id"`
		CreatedAt   int64  `json:"created_at"` // of its last change
		Bytes       int64  `json:"bytes"`
		Path        string `json:"path"`
		Source      string `json:"source"`
	}
	// sharedFile is a file of a response of Perplexity.
	sharedFile struct {
		ID        string `json:"id"`
		Object    string `json:"object"`
		Filename  string `json:"filename"`
		Bytes     int64  `json:"bytes"`
		CreatedAt int64  `json:"created_at"` // of its last change
	}
)

func newContainerFile(container string, f *proto.File) containerFile {
	return containerFile{
		fileID(f.Path), "container.file", container, f.Modified.Unix(), f.Size,
		proto.ContainerData + "/" + f.Path, "assistant",
	}
}

// homeFiles returns the files directly in a thread's home, without directories and links.
func homeFiles(ctx context.Context, host agent.RequestHost, thread string) ([]proto.File, error) {
	var files []proto.File
	err := host.ListFiles(ctx, thread, "", func(f proto.File) error {
		if f.Type() != proto.FileRegular {
			return nil
		}
		if len(files) == api.MaxToolFiles {
			return api.Errorf(api.CodeValidation, "there are more than %d files; pack them into one", api.MaxToolFiles)
		}
		files = append(files, f)
		return nil
	})
	return files, err
}

func (s *Server) listFiles(w http.ResponseWriter, r *http.Request) error {
	host, id := s.Host(r), chi.URLParam(r, "id")
	if _, err := findContainer(r.Context(), host, id); err != nil {
		return err
	}
	files, err := homeFiles(r.Context(), host, id)
	if err != nil {
		return agent.ClientError(err)
	}
	l, err := newPage(files, r.URL.Query(), defaultPage, maxPage,
		func(f *proto.File) listed { return listed{id: fileID(f.Path), created: f.Modified} },
		func(f *proto.File) containerFile { return newContainerFile(id, f) })
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, l)
	return nil
}

func (s *Server) deleteFile(w http.ResponseWriter, r *http.Request) error {
	host, id, file := s.Host(r), chi.URLParam(r, "id"), chi.URLParam(r, "file")
	if _, err := findContainer(r.Context(), host, id); err != nil {
		return err
	}
	content, err := openFile(r.Context(), host, id, file)
	if err != nil {
		return err
	}
	if err := host.DeleteFile(r.Context(), id, content.Path); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, &deleted{file, "container.file.deleted", true})
	return nil
}

// openFile opens the file of an id in a thread.
func openFile(ctx context.Context, host agent.RequestHost, thread, id string) (*proto.FileContent, error) {
	name, err := pathOf(id)
	if err != nil {
		return nil, err
	}
	clean, err := host.CleanPath(name)
	if err != nil || clean != name {
		return nil, errNoFile
	}
	return host.OpenFile(ctx, thread, clean)
}

func (s *Server) getFile(w http.ResponseWriter, r *http.Request) error {
	host, id := s.Host(r), chi.URLParam(r, "id")
	if _, err := findContainer(r.Context(), host, id); err != nil {
		return err
	}
	f, err := openFile(r.Context(), host, id, chi.URLParam(r, "file"))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, newContainerFile(id, &f.File))
	return nil
}

func (s *Server) getContent(w http.ResponseWriter, r *http.Request) error {
	host, id := s.Host(r), chi.URLParam(r, "id")
	if _, err := findContainer(r.Context(), host, id); err != nil {
		return err
	}
	return sendFile(w, r, host, id)
}

// getUploadContent answers with the content of a file of the organisation.
func (s *Server) getUploadContent(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	f, err := host.File(r.Context(), chi.URLParam(r, "id"))
	if err != nil {
		return err
	}
	content, err := host.OpenFile(r.Context(), f.Thread(), proto.AgentFileContent)
	if err != nil {
		return err
	}
	return sendContent(w, r, content, f.Name, f.ID)
}

// sendFile answers with the content of a file in a thread.
func sendFile(w http.ResponseWriter, r *http.Request, host agent.RequestHost, thread string) error {
	content, err := openFile(r.Context(), host, thread, chi.URLParam(r, "file"))
	if err != nil {
		return err
	}
	return sendContent(w, r, content, path.Base(content.Path), thread)
}

// sendContent answers with a file under a name. of is its container, for errors.
func sendContent(w http.ResponseWriter, r *http.Request, content *proto.FileContent, name, of string) error {
	body, err := content.Read(r.Context(), 0, content.Size)
	if err != nil {
		return fmt.Errorf("read a file of %s: %w", of, err)
	}
	defer func() { _ = body.Close() }() // it was only read
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": name}))
	h.Set("Content-Length", strconv.FormatInt(content.Size, 10))
	h.Set("Cache-Control", "private, no-store")
	w.WriteHeader(http.StatusOK)
	if _, err := io.Copy(w, body); err != nil {
		return fmt.Errorf("send a file of %s: %w", of, err)
	}
	return nil
}

// sandboxOf returns the thread of a response of Perplexity.
func sandboxOf(ctx context.Context, host agent.RequestHost, response string) (string, error) {
	rest, ok := strings.CutPrefix(response, responsePrefix)
	if !ok {
		return "", errNoSandbox
	}
	_, err := host.Thread(ctx, sandboxContainer+rest)
	if err != nil && agent.Public(err).Code == api.CodeNotFound {
		err = errNoSandbox
	}
	return sandboxContainer + rest, err
}

var errNoSandbox = api.Errorf(api.CodeNotFound, "there is no response of that id whose sandbox has files")

func (s *Server) listShared(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	thread, err := sandboxOf(r.Context(), host, chi.URLParam(r, "id"))
	if err != nil {
		return err
	}
	files, err := homeFiles(r.Context(), host, thread)
	if err != nil {
		return agent.ClientError(err)
	}
	l := list[sharedFile]{Object: "list", Data: []sharedFile{}}
	for i := range files {
		f := &files[i]
		l.Data = append(l.Data, sharedFile{fileID(f.Path), "file", path.Base(f.Path), f.Size, f.Modified.Unix()})
	}
	writeJSON(w, http.StatusOK, &l)
	return nil
}

func (s *Server) getShared(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	thread, err := sandboxOf(r.Context(), host, chi.URLParam(r, "id"))
	if err != nil {
		return err
	}
	return sendFile(w, r, host, thread)
}
