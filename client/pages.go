package client

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"net/url"
	"strconv"
)

// maxPage is the largest page that the server answers with.
const maxPage = 100

// Collect returns all entries of a list. It returns none if reading one of them fails.
func Collect[T any](list iter.Seq2[T, error]) ([]T, error) {
	all := []T{}
	for entry, err := range list {
		if err != nil {
			return nil, err
		}
		all = append(all, entry)
	}
	return all, nil
}

// pages returns the entries of a list in a field of the answer. It reads each page when the
// previous one is used up. An error ends the list.
func pages[T any](ctx context.Context, c *Client, path, field string, query url.Values) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		query := maps.Clone(query) // the list may be read again
		if query == nil {
			query = url.Values{}
		}
		for {
			page, err := read[map[string]json.RawMessage](ctx, c, withQuery(path, query))
			var entries []T
			var next *string
			if err == nil {
				entries, next, err = decodePage[T](*page, path, field)
			}
			if err != nil {
				yield(*new(T), err)
				return
			}
			for _, entry := range entries {
				if !yield(entry, nil) {
					return
				}
			}
			if next == nil {
				return
			}
			query.Set("cursor", *next)
		}
	}
}

func decodePage[T any](page map[string]json.RawMessage, path, field string) (entries []T, next *string, err error) {
	if err := json.Unmarshal(page[field], &entries); err != nil {
		return nil, nil, fmt.Errorf("GET %s: decode the answer's %s: %w", path, field, err)
	}
	if cursor, ok := page["next_cursor"]; ok {
		if err := json.Unmarshal(cursor, &next); err != nil {
			return nil, nil, fmt.Errorf("GET %s: decode the answer's next_cursor: %w", path, err)
		}
	}
	return entries, next, nil
}

// largestPages is the query of a list that has pages.
func largestPages() url.Values { return url.Values{"limit": {strconv.Itoa(maxPage)}} }

// largestPagesOf is the query for such a list of an organisation, or of all if org is empty.
func largestPagesOf(org string) url.Values {
	query := largestPages()
	query.Set("org", org)
	return query
}
