package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
)

// pages lists what path has, page by page of a size; of gives the entries of a page and where the next one begins.
func pages[P, T any](ctx context.Context, c *Client, path string, size int, of func(*P) ([]T, *string)) ([]T, error) {
	all := []T{}
	query := url.Values{"limit": {strconv.Itoa(size)}}
	for {
		page := new(P)
		if _, _, err := c.getJSON(ctx, call{method: http.MethodGet, path: path + "?" + query.Encode(), resend: true}, page); err != nil {
			return nil, err
		}
		some, next := of(page)
		all = append(all, some...)
		if next == nil {
			return all, nil
		}
		query.Set("cursor", *next)
	}
}
