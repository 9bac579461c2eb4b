package gateway

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
)

// imageView is the JSON form of an image.
type imageView struct {
	Name         string                    `json:"name"`
	Digest       string                    `json:"digest"`
	Size         int64                     `json:"size"`
	UnpackedSize int64                     `json:"unpacked_size"`
	Languages    map[proto.Language]string `json:"languages"`
	Env          map[string]string         `json:"env"`
	CreatedAt    string                    `json:"created_at"`
}

func viewImage(i *proto.Image) imageView {
	return imageView{
		Name: i.Name, Digest: i.Digest, Size: i.Size, UnpackedSize: i.UnpackedSize, Languages: i.Languages, Env: i.Env,
		CreatedAt: i.CreatedAt.UTC().Format(timeLayout),
	}
}

func (s *Server) putImage(w http.ResponseWriter, r *http.Request) error {
	name, digest := chi.URLParam(r, "name"), r.URL.Query().Get("digest")
	if err := proto.CheckImageName(name); err != nil {
		return err
	}
	if !proto.ValidImageDigest(digest) {
		return &proto.FieldError{Field: "digest", Message: "digest must be sha256: and 64 hexadecimal digits, of the body"}
	}
	if err := plainBody(w, r); err != nil {
		return err
	}
	if r.ContentLength > proto.MaxImageBytes {
		return &bodyTooLargeError{proto.MaxImageBytes}
	}
	body := &longBody{from: http.MaxBytesReader(w, r.Body, proto.MaxImageBytes), control: infoOf(r.Context()).rec.control, limit: proto.MaxImageBytes}
	img, replaced, err := s.ImageAdmin.Put(r.Context(), name, digest, body)
	// Clear the deadline at once, because the server keeps reading to notice a disconnected client.
	_ = body.control.SetReadDeadline(time.Time{}) // not supported: no connection that could stall
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not worth reading
		return fmt.Errorf("store image %s: %w", name, err)
	}
	status := http.StatusCreated
	if replaced {
		status = http.StatusOK
	}
	return writeValue(w, status, viewImage(img))
}

// longBody is a body without a limit on its total time. It fails if it stalls for longer than bodyTimeout.
type longBody struct {
	from    io.Reader
	control *http.ResponseController
	limit   int64 // bytes, for messages
}

func (b *longBody) Read(p []byte) (int, error) {
	_ = b.control.SetReadDeadline(time.Now().Add(bodyTimeout)) // as above
	n, err := b.from.Read(p)
	switch {
	case errors.Is(err, io.EOF): // the server keeps reading without a deadline
		_ = b.control.SetReadDeadline(time.Time{})
		return n, io.EOF
	case err != nil:
		err = bodyError(err, b.limit)
	}
	return n, err
}

func (s *Server) listImages(w http.ResponseWriter, r *http.Request) error {
	images, err := s.ImageAdmin.List(r.Context())
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	views := make([]imageView, len(images))
	for i := range images {
		views[i] = viewImage(&images[i])
	}
	return writeValue(w, http.StatusOK, map[string][]imageView{"images": views})
}

// usedImageError means that sandbox profiles name the image, which would break if it were removed.
type usedImageError struct {
	image    string
	profiles []string // their names
}

func (e *usedImageError) Error() string {
	const most = 3
	list := strings.Join(e.profiles[:min(len(e.profiles), most)], ", ")
	if more := len(e.profiles) - most; more > 0 {
		list += fmt.Sprintf(" and %d more", more)
	}
	return fmt.Sprintf("image %s is that of the sandbox %s; give that another image or remove it first", e.image, list)
}

// removeImage removes an image. A profile that starts to name it at the same moment reports the missing image when it is used.
func (s *Server) removeImage(w http.ResponseWriter, r *http.Request) error {
	name := chi.URLParam(r, "name")
	profiles, err := s.Profiles.List(r.Context())
	if err != nil {
		return fmt.Errorf("look for sandboxes with image %s: %w", name, err)
	}
	used := &usedImageError{image: name}
	for i := range profiles {
		if image, ok := profiles[i].ImageName(); ok && image == name {
			used.profiles = append(used.profiles, profiles[i].Name)
		}
	}
	if len(used.profiles) > 0 {
		return used
	}
	img, err := s.ImageAdmin.Remove(r.Context(), name)
	if err != nil {
		return fmt.Errorf("remove image: %w", err)
	}
	return writeValue(w, http.StatusOK, viewImage(img))
}
