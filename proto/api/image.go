package api

import "github.com/bullpen-run/bullpen/proto"

// Image is a sandbox image.
type Image struct {
	Name         string            `json:"name"`
	Digest       string            `json:"digest" pattern:"^sha256:[0-9a-f]{64}$"`
	Size         int64             `json:"size" doc:"Bytes stored."`
	UnpackedSize int64             `json:"unpacked_size" doc:"Bytes of all files."`
	Architecture *string           `json:"architecture" enum:"amd64,arm64" doc:"Of its interpreters: only workers of it run programs in the image. null if all interpreters are scripts: any worker does."`
	Languages    map[string]string `json:"languages" doc:"The path of each interpreter inside the image. Programs in other languages are refused."`
	Env          map[string]string `json:"env" doc:"Environment variables that the image sets for programs."`
	CreatedAt    Time              `json:"created_at"`
}

// Images is the list of all sandbox images.
type Images struct {
	Images     []Image `json:"images"`
	NextCursor *string `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// NewImage returns the form of an image.
func NewImage(i *proto.Image) Image {
	languages := make(map[string]string)
	for language, path := range i.Languages {
		languages[string(language)] = path
	}
	return Image{
		Name: i.Name, Digest: i.Digest, Size: i.Size, UnpackedSize: i.UnpackedSize, Architecture: optional(i.Architecture),
		Languages: languages, Env: i.Env, CreatedAt: Time{i.CreatedAt},
	}
}
