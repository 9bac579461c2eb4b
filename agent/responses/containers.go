package responses

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
)

type (
	containerBody struct {
		ID           string       `json:"id"`
		Object       string       `json:"object"`
		CreatedAt    int64        `json:"created_at"`
		LastActiveAt int64        `json:"last_active_at"`
		Name         string       `json:"name"`
		Status       string       `json:"status"`
		ExpiresAfter expiresAfter `json:"expires_after"`
	}
	expiresAfter struct {
		Anchor  string `json:"anchor"`
		Minutes int    `json:"minutes"`
	}
	deleted struct {
		ID      string `json:"id"`
		Object  string `json:"object"`
		Deleted bool   `json:"deleted"`
	}
)

// lifeOfContainers is when containers expire.
var lifeOfContainers = expiresAfter{"last_active_at", int(containerLife.Minutes())}

// newContainerBody returns the container of a thread. Names are not kept.
func newContainerBody(id string, created, used time.Time, name string) *containerBody {
	return &containerBody{id, "container", created.Unix(), used.Unix(), name, "running", lifeOfContainers}
}

func (s *Server) createContainer(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	var in struct {
		containerRef
		Name         string        `json:"name"`
		ExpiresAfter *expiresAfter `json:"expires_after"`
	}
	err := host.ReadBody(w, func(body []byte) error {
		if err := json.Unmarshal(body, &in); err != nil {
			return proto.FieldErrorf("body", "is not a valid request: %v", err)
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case in.Name == "":
		return proto.FieldErrorf("name", "is required")
	case in.ExpiresAfter != nil && *in.ExpiresAfter != lifeOfContainers:
		return proto.FieldErrorf("expires_after", "must have the anchor %s and %d minutes, or be left out",
			lifeOfContainers.Anchor, lifeOfContainers.Minutes)
	case len(in.Skills) > 0:
		return proto.FieldErrorf("skills", "must be empty: this server has none")
	}
	if err := in.check(r.Context(), host); err != nil {
		return err
	}
	c := &container{agent.Container{Host: host, ID: agent.NewContainerID(openAIContainer)}}
	if err := host.CreateThread(r.Context(), c.ID); err != nil {
		return agent.ClientError(err)
	}
	if err := c.stage(r.Context(), in.FileIDs); err != nil {
		return err
	}
	thread, err := host.Thread(r.Context(), c.ID)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, newContainerBody(thread.ID, thread.CreatedAt, thread.UsedAt, in.Name))
	return nil
}

func (s *Server) getContainer(w http.ResponseWriter, r *http.Request) error {
	thread, err := findContainer(r.Context(), s.Host(r), chi.URLParam(r, "id"))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, newContainerBody(thread.ID, thread.CreatedAt, thread.UsedAt, thread.ID))
	return nil
}

func (s *Server) deleteContainer(w http.ResponseWriter, r *http.Request) error {
	host, id := s.Host(r), chi.URLParam(r, "id")
	if _, err := findContainer(r.Context(), host, id); err != nil {
		return err
	}
	if err := host.RemoveThread(r.Context(), id); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, &deleted{id, "container.deleted", true})
	return nil
}

// addFile puts a file into a container: one that is uploaded, or one of the organisation.
func (s *Server) addFile(w http.ResponseWriter, r *http.Request) error {
	host, id := s.Host(r), chi.URLParam(r, "id")
	if _, err := findContainer(r.Context(), host, id); err != nil {
		return err
	}
	name, err := s.putFile(w, r, host, &container{agent.Container{Host: host, ID: id}})
	if err != nil {
		return err
	}
	f, err := host.OpenFile(r.Context(), id, name)
	if err != nil {
		return err
	}
	file := newContainerFile(id, &f.File)
	file.Source = "user"
	writeJSON(w, http.StatusOK, &file)
	return nil
}

func (s *Server) putFile(
	w http.ResponseWriter, r *http.Request, host agent.RequestHost, c *container,
) (name string, err error) {
	const fileID = "file_id"
	var in struct {
		FileID string `json:"file_id"`
	}
	if strings.HasPrefix(r.Header.Get("Content-Type"), "multipart/") {
		up, err := host.ReadUpload(w, fileID)
		if err != nil {
			return "", err
		}
		defer func() { _ = up.Close() }() // it was only read
		if in.FileID = up.Fields[fileID]; in.FileID == "" {
			name = proto.NewAgentFile(up.Name, up.Size).Name
			return name, host.PutFile(r.Context(), c.ID, name, up.Size, up)
		}
		if up.Size > 0 {
			return "", proto.FieldErrorf(fileID, "must not be sent together with a file")
		}
	} else {
		err := host.ReadBody(w, func(body []byte) error {
			if json.Unmarshal(body, &in) != nil || in.FileID == "" {
				return proto.FieldErrorf(fileID, "is required, unless the file is sent as a form")
			}
			return nil
		})
		if err != nil {
			return "", err
		}
	}
	f, err := host.File(r.Context(), in.FileID)
	if err != nil {
		return "", err
	}
	return f.Name, agent.ClientError(c.Upload(r.Context(), f, f.Name))
}

// fileBody is a file of the organisation.
type fileBody struct {
	ID        string `json:"id"`
	Object    string `json:"object"`
	Bytes     int64  `json:"bytes"`
	CreatedAt int64  `json:"created_at"`
	ExpiresAt *int64 `json:"expires_at,omitempty"`
	Filename  string `json:"filename"`
	Purpose   string `json:"purpose"`
	Status    string `json:"status"`
}

// userData is the purpose of all files: to be the input of a request.
const userData = "user_data"

func newFileBody(f *proto.AgentFile) *fileBody {
	b := &fileBody{
		ID: f.ID, Object: "file", Bytes: f.Bytes, CreatedAt: f.CreatedAt.Unix(), Filename: f.Name,
		Purpose: userData, Status: "processed",
	}
	if f.ExpiresAt != nil {
		b.ExpiresAt = new(f.ExpiresAt.Unix())
	}
	return b
}

func (s *Server) uploadFile(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	up, err := host.ReadUpload(w, "")
	if err != nil {
		return err
	}
	defer func() { _ = up.Close() }() // it was only read
	switch up.Fields["purpose"] {
	case userData, "assistants":
	default:
		return proto.FieldErrorf("purpose", "must be %s or assistants: this server has files for containers alone", userData)
	}
	for name := range up.Fields {
		if strings.HasPrefix(name, "expires_after") {
			return proto.FieldErrorf("expires_after", "must be left out: files are kept until they are deleted")
		}
	}
	f := proto.NewAgentFile(up.Name, up.Size)
	if err := host.SaveFile(r.Context(), f, up); err != nil {
		return agent.ClientError(err)
	}
	writeJSON(w, http.StatusOK, newFileBody(f))
	return nil
}

func (s *Server) getUpload(w http.ResponseWriter, r *http.Request) error {
	f, err := s.Host(r).File(r.Context(), chi.URLParam(r, "id"))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, newFileBody(f))
	return nil
}

func (s *Server) deleteUpload(w http.ResponseWriter, r *http.Request) error {
	id := chi.URLParam(r, "id")
	if err := s.Host(r).RemoveFile(r.Context(), id); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, &deleted{id, "file", true})
	return nil
}
