package gateway

import (
	"fmt"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func (s *Server) putImage(w http.ResponseWriter, r *http.Request) error {
	name, digest := chi.URLParam(r, "name"), r.URL.Query().Get("digest")
	if err := proto.CheckImageName(name); err != nil {
		return err
	}
	if !proto.ValidImageDigest(digest) {
		return proto.FieldErrorf("digest", "must be sha256: and 64 hexadecimal digits, of the body")
	}
	if err := requireIdentity(w, r); err != nil {
		return err
	}
	if r.ContentLength > proto.MaxImageBytes {
		return bodyTooLarge(proto.MaxImageBytes)
	}
	if old, err := s.Images.Image(r.Context(), name); err == nil {
		auditBefore(r, "", name, auditImage(old))
	}
	body := &longBody{from: http.MaxBytesReader(w, r.Body, proto.MaxImageBytes), control: infoOf(r.Context()).rec.control, limit: proto.MaxImageBytes}
	img, replaced, err := s.ImageAdmin.Put(r.Context(), name, digest, body)
	body.clearDeadline() // the server goes on reading to notice that the client leaves
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
		return fmt.Errorf("store image %s: %w", name, err)
	}
	auditAfter(r, "", name, auditImage(img))
	status := http.StatusCreated
	if replaced {
		status = http.StatusOK
	}
	return writeValue(w, status, api.NewImage(img))
}

func (s *Server) listImages(w http.ResponseWriter, r *http.Request) error {
	images, err := s.ImageAdmin.List(r.Context())
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	answer := api.Images{Images: make([]api.Image, len(images))}
	for i := range images {
		answer.Images[i] = api.NewImage(&images[i])
	}
	return writeValue(w, http.StatusOK, answer)
}

// removeImage removes an image's name unless a profile names it. If a profile starts to name it at
// the same moment, executions with that profile are refused.
func (s *Server) removeImage(w http.ResponseWriter, r *http.Request) error {
	name := chi.URLParam(r, "name")
	profiles, err := s.Profiles.List(r.Context())
	if err != nil {
		return fmt.Errorf("look for sandboxes with image %s: %w", name, err)
	}
	var users []string
	profiles = append(profiles, s.Default)
	for i := range profiles {
		if image, ok := profiles[i].ImageName(); ok && image == name {
			users = append(users, profiles[i].Name)
		}
	}
	if len(users) > 0 {
		return imageInUse(name, users)
	}
	img, err := s.ImageAdmin.Remove(r.Context(), name)
	if err != nil {
		return fmt.Errorf("remove image: %w", err)
	}
	auditBefore(r, "", name, auditImage(img))
	return writeValue(w, http.StatusOK, api.NewImage(img))
}

// imageInUse rejects the removal of an image that sandbox profiles name.
func imageInUse(image string, profiles []string) error {
	return api.Errorf(api.CodeConflict, "image %s is used by the sandbox %s; change its image or remove the sandbox first", image, proto.ListSome(profiles))
}
