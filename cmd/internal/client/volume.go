package client

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/bullpen-run/bullpen/proto/api"
)

// Volume is what is stored of a volume.
type Volume = api.Volume

// ForkVolumeRequest asks for a volume that begins with the files of another.
type ForkVolumeRequest = api.ForkVolumeRequest

// volumePath returns the path of a part of a storage connection of kind volume.
func volumePath(org, slug, part string, query url.Values) string {
	if org != "" {
		query.Set("org", org)
	}
	path := ConnectionsPath + "/" + url.PathEscape(slug) + "/" + part
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	return path
}

// Volume returns what is stored of a volume. org is empty for that of the API key.
func (c *Client) Volume(ctx context.Context, org, slug string) (*Volume, json.RawMessage, error) {
	return get[Volume](ctx, c, call{method: http.MethodGet, path: volumePath(org, slug, "volume", url.Values{}), resend: true})
}

// ForkVolume creates a volume that begins with the files of another, and returns its connection.
func (c *Client) ForkVolume(ctx context.Context, org, slug string, fork *ForkVolumeRequest) (*Connection, json.RawMessage, error) {
	return get[Connection](ctx, c, call{method: http.MethodPost, path: volumePath(org, slug, "fork", url.Values{}), body: fork})
}

// VolumeArchive writes a directory of a version of a volume to w as a tar: everything if dir is empty,
// and the newest version for 0.
func (c *Client) VolumeArchive(ctx context.Context, org, slug string, version int64, dir string, w io.Writer) error {
	query := url.Values{}
	if version > 0 {
		query.Set("version", strconv.FormatInt(version, 10))
	}
	if dir != "" {
		query.Set("path", dir)
	}
	resp, err := c.do(ctx, call{
		method: http.MethodGet, path: volumePath(org, slug, "archive", query), header: map[string]string{"Accept": "application/x-tar"},
	})
	if err != nil {
		return err
	}
	return save(resp, w)
}
