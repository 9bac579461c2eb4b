package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto/api"
)

const imagesPath = "/v1/admin/images"

func imagePath(name string) string { return imagesPath + "/" + url.PathEscape(name) }

// PutImage stores an image of size bytes under a name, and replaces the previous image of that
// name. It is sent once.
func (c *Client) PutImage(ctx context.Context, name, digest string, body io.Reader, size int64) (*Image, error) {
	path := imagePath(name) + "?digest=" + url.QueryEscape(digest)
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, c.address(path), io.NopCloser(body))
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	req.ContentLength = size
	req.Header.Set("Content-Type", "application/zstd")
	req.Header.Set("Expect", "100-continue") // so that a rejection comes before the body is sent
	resp, err := c.send(req)
	if err != nil {
		return nil, err
	}
	img := new(Image)
	err = json.NewDecoder(resp.Body).Decode(img)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return nil, fmt.Errorf("PUT %s: decode the answer: %w", path, err)
	}
	return img, nil
}

// Images lists all images.
func (c *Client) Images(ctx context.Context) ([]Image, error) {
	list, _, err := get[api.Images](ctx, c, call{method: http.MethodGet, path: imagesPath, resend: true})
	return list.Images, err
}

// RemoveImage removes the name of an image.
func (c *Client) RemoveImage(ctx context.Context, name string) (*Image, error) {
	img, _, err := get[Image](ctx, c, call{method: http.MethodDelete, path: imagePath(name)})
	return img, err
}
