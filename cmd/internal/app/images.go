package app

import (
	"context"
	"errors"
	"io"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/storage/image"
)

// images opens the registry of sandbox images.
func (s *system) images(ctx context.Context) (*registry.Images, error) {
	return registry.OpenImages(ctx, registry.ImagesConfig{
		Store: s.store, Blobs: s.blobs, Inspect: inspect, Keep: s.cfg.QueueExpiry, Full: s.dataDiskFull, Log: s.log,
	})
}

// logDefaultImage logs the root file system of sandboxes without an image, unless it is a stored
// image.
func (s *system) logDefaultImage(ctx context.Context, images *registry.Images) {
	if s.cfg.DefaultImage == "" {
		s.log.Info("sandboxes without an image use the runtimes of the workers' hosts", "remedy",
			"bullpen image build default, then --default-image default")
		return
	}
	if _, err := images.Image(ctx, s.cfg.DefaultImage); err != nil {
		s.log.Warn("default image not found; nothing runs in sandboxes without another image", "image", s.cfg.DefaultImage,
			"error", err,
			"remedy", "bullpen image build "+s.cfg.DefaultImage+" builds and stores one")
	}
}

// inspect describes an image. Errors of the image become errors of the request.
func inspect(r io.Reader) (*proto.Image, []proto.ImagePart, error) {
	img, parts, err := image.Inspect(r, image.DefaultLimits())
	if errors.Is(err, image.ErrForm) || errors.Is(err, image.ErrTooLarge) || errors.Is(err, image.ErrNoLanguage) ||
		errors.Is(err, image.ErrArchitecture) {
		return nil, nil, &proto.FieldError{Field: "body", Message: "body is refused: " + err.Error()}
	}
	return img, parts, err
}
