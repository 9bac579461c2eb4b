package admin

import (
	"context"
	"fmt"
	"io"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Images stores and removes the images of sandboxes.
type Images interface {
	imageFinder
	// Put stores body as the image with that name, and reports whether it replaced another. It
	// returns a [*proto.FieldError] for an invalid image, and a [*proto.Rejection] if there is no
	// space.
	Put(ctx context.Context, name, digest string, body io.Reader) (img *proto.Image, replaced bool, err error)
	// List returns all images.
	List(ctx context.Context) ([]proto.Image, error)
	// Remove removes the name of an image and returns the image. It returns [proto.ErrNotFound] if
	// no image has the name.
	Remove(ctx context.Context, name string) (*proto.Image, error)
}

// ImageRoutes are the routes of sandbox images.
type ImageRoutes struct {
	*web.Core
	Images   Images
	Profiles profileList
	Resolver ProfileResolver
}

// Handlers returns the handlers of the routes.
func (s *ImageRoutes) Handlers() []web.Handler {
	x := &web.Resource[proto.Image, api.Image]{
		Core: s.Core, Kind: "image", Path: "/v1/admin/images", Param: "name", Form: api.NewImage,
		Name:    func(i *proto.Image) (org, id string) { return "", i.Name },
		Audited: auditImage,
		Answer:  func(list []api.Image, next *string) any { return api.Images{Images: list, NextCursor: next} },
	}
	return []web.Handler{
		{ID: "putImage", Handle: s.put},
		{ID: "listImages", Handle: func(w http.ResponseWriter, r *web.Request) error {
			images, err := s.Images.List(r.Context())
			if err != nil {
				return fmt.Errorf("list images: %w", err)
			}
			list := web.Listed[proto.Image]{Values: images, Place: func(i *proto.Image) string { return i.Name }}
			return x.WritePage(w, r, list, "", nil)
		}},
		{ID: "removeImage", Handle: x.Remove(func(ctx context.Context, r *web.Request, name string) (*proto.Image, error) {
			if err := s.checkUnused(name); err != nil {
				return nil, err
			}
			img, err := s.Images.Remove(ctx, name)
			if err == nil {
				web.AuditBefore(r, "", name, auditImage(img))
			}
			return img, err
		})},
	}
}

func (s *ImageRoutes) put(w http.ResponseWriter, r *web.Request) error {
	name, digest := chi.URLParam(r.Request, "name"), r.URL.Query().Get("digest")
	if err := proto.CheckImageName(name); err != nil {
		return err
	}
	if !proto.ValidImageDigest(digest) {
		return proto.FieldErrorf("digest", "must be sha256: and 64 hexadecimal digits, of the body")
	}
	if err := web.RequireIdentity(w, r); err != nil {
		return err
	}
	if r.ContentLength > proto.MaxImageBytes {
		return web.BodyTooLarge(proto.MaxImageBytes)
	}
	if old, err := s.Images.Image(r.Context(), name); err == nil {
		web.AuditBefore(r, "", name, auditImage(old))
	}
	body := r.LongBody(http.MaxBytesReader(w, r.Body, proto.MaxImageBytes), proto.MaxImageBytes)
	img, replaced, err := s.Images.Put(r.Context(), name, digest, body)
	body.ClearDeadline() // the server keeps reading to notice that the client leaves
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
		return fmt.Errorf("store image %s: %w", name, err)
	}
	web.AuditAfter(r, "", name, auditImage(img))
	status := http.StatusCreated
	if replaced {
		status = http.StatusOK
	}
	return web.WriteValue(w, status, api.NewImage(img))
}

// checkUnused returns an error if a sandbox profile uses an image. If a profile starts to use it
// after that, executions with that profile are refused.
func (s *ImageRoutes) checkUnused(name string) error {
	var users []string
	profiles := append(s.Profiles.List(""), s.Resolver.DefaultProfile())
	for i := range profiles {
		if image, ok := profiles[i].ImageName(); ok && image == name {
			users = append(users, profiles[i].Name)
		}
	}
	if len(users) == 0 {
		return nil
	}
	return imageInUse(name, users)
}

// imageInUse rejects the removal of an image that sandbox profiles name.
func imageInUse(image string, profiles []string) error {
	return api.Errorf(api.CodeConflict, "image %s is used by the sandbox %s; change its image or remove the sandbox first",
		image, proto.ListSome(profiles))
}
