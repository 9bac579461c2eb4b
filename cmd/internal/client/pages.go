package client

import (
	"context"
	"net/http"
	"net/url"
)

// pages lists the entries of path page by page. entries returns the entries of a page and the
// cursor of the next one.
func pages[P, T any](ctx context.Context, c *Client, path string, entries func(*P) ([]T, *string)) ([]T, error) {
	all := []T{}
	query := url.Values{"limit": {"100"}} // the largest that the server accepts
	for {
		page, _, err := get[P](ctx, c, call{method: http.MethodGet, path: path + "?" + query.Encode(), resend: true})
		if err != nil {
			return nil, err
		}
		some, next := entries(page)
		all = append(all, some...)
		if next == nil {
			return all, nil
		}
		query.Set("cursor", *next)
	}
}
