package anthropic

import (
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	defaultPage, maxPage = 20, 1000
	maxIDs               = 100
	minExpiry, maxExpiry = 3600, 7_776_000 // seconds
	maxType              = 128             // bytes of a media type that a client gives
	// notDownloadable is the code of the error for a file that was uploaded.
	notDownloadable = api.Reason("file_not_downloadable")
)

// fileBody is the metadata of a file.
type fileBody struct {
	ID           string  `json:"id"`
	Type         string  `json:"type"`
	Filename     string  `json:"filename"`
	MIMEType     string  `json:"mime_type"`
	SizeBytes    int64   `json:"size_bytes"`
	CreatedAt    string  `json:"created_at"`
	Downloadable bool    `json:"downloadable"`
	ExpiresAt    *string `json:"expires_at"`
}

func newFileBody(f *proto.AgentFile) fileBody {
	b := fileBody{
		ID: f.ID, Type: "file", Filename: f.Name, MIMEType: f.MIMEType, SizeBytes: f.Bytes,
		CreatedAt: f.CreatedAt.Format(time.RFC3339Nano), Downloadable: f.Generated,
	}
	if f.ExpiresAt != nil {
		b.ExpiresAt = new(f.ExpiresAt.Format(time.RFC3339Nano))
	}
	return b
}

func (s *Server) uploadFile(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	up, err := host.ReadUpload(w, "")
	if err != nil {
		return err
	}
	defer func() { _ = up.Close() }() // it was only read
	f := proto.NewAgentFile(up.Name, up.Size)
	if kind, _, err := mime.ParseMediaType(up.ContentType); err == nil && kind != "application/octet-stream" &&
		len(kind) <= maxType {
		f.MIMEType = kind
	}
	if text := up.Fields["expires_in_seconds"]; text != "" {
		seconds, err := strconv.Atoi(text)
		if err != nil || seconds < minExpiry || seconds > maxExpiry {
			return proto.FieldErrorf("expires_in_seconds", "must be a whole number from %d to %d", minExpiry, maxExpiry)
		}
		f.ExpiresAt = new(f.CreatedAt.Add(time.Duration(seconds) * time.Second))
	}
	if err := host.SaveFile(r.Context(), f, up); err != nil {
		return agent.ClientError(err)
	}
	writeJSON(w, http.StatusOK, newFileBody(f))
	return nil
}

// page is a list in the forms of both ways to page through it.
type page[T any] struct {
	Data     []T     `json:"data"`
	HasMore  bool    `json:"has_more"`
	FirstID  *string `json:"first_id"`
	LastID   *string `json:"last_id"`
	NextPage *string `json:"next_page"`
}

func (s *Server) listFiles(w http.ResponseWriter, r *http.Request) error {
	p, err := newPage(s.Host(r).Files(), r.URL.Query(), func(f *proto.AgentFile) string { return f.ID }, newFileBody)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, p)
	return nil
}

// newPage returns the items selected by a query, in the form that body returns.
func newPage[T, B any](items []T, query url.Values, id func(*T) string, body func(*T) B) (*page[B], error) {
	items, more, err := choose(items, query, id)
	if err != nil {
		return nil, err
	}
	p := &page[B]{Data: []B{}, HasMore: more}
	for i := range items {
		p.Data = append(p.Data, body(&items[i]))
	}
	if n := len(items); n > 0 {
		p.FirstID, p.LastID = new(id(&items[0])), new(id(&items[n-1]))
		if more {
			p.NextPage = p.LastID
		}
	}
	return p, nil
}

// choose returns the items selected by a query, and whether there are more in its direction.
func choose[T any](items []T, query url.Values, id func(*T) string) (chosen []T, more bool, err error) {
	ids := append(query["ids[]"], query["ids"]...)
	page, after, before := query.Get("page"), query.Get("after_id"), query.Get("before_id")
	if page != "" {
		after = page
	}
	limit := defaultPage
	if text := query.Get("limit"); text != "" {
		if limit, err = strconv.Atoi(text); err != nil || limit < 1 || limit > maxPage {
			return nil, false, proto.FieldErrorf("limit", "must be a whole number from 1 to %d", maxPage)
		}
	}
	switch {
	case len(ids) > maxIDs:
		return nil, false, proto.FieldErrorf("ids", "must be at most %d", maxIDs)
	case len(ids) > 0:
		return slices.DeleteFunc(items, func(item T) bool { return !slices.Contains(ids, id(&item)) }), false, nil
	case after != "" && before != "":
		return nil, false, proto.FieldErrorf("before_id", "must not be given together with after_id")
	}
	at := slices.IndexFunc(items, func(item T) bool { return id(&item) == after || id(&item) == before })
	switch {
	case (after != "" || before != "") && at < 0:
		return nil, false, api.Errorf(api.CodeNotFound, "there is nothing of the id at which the page begins")
	case before != "":
		items = items[:at]
		more = len(items) > limit
		return items[max(0, len(items)-limit):], more, nil
	case after != "":
		items = items[at+1:]
	}
	return items[:min(len(items), limit)], len(items) > limit, nil
}

func (s *Server) getFile(w http.ResponseWriter, r *http.Request) error {
	f, err := s.Host(r).File(r.Context(), chi.URLParam(r, "id"))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, newFileBody(f))
	return nil
}

func (s *Server) getContent(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	f, err := host.File(r.Context(), chi.URLParam(r, "id"))
	if err != nil {
		return err
	}
	if !f.Generated {
		return &api.Error{
			Code: api.CodeValidation, Reason: notDownloadable,
			Message: "this file was uploaded; only files that programs have left are downloaded",
		}
	}
	content, err := host.OpenFile(r.Context(), f.Thread(), proto.AgentFileContent)
	if err != nil {
		return err
	}
	body, err := content.Read(r.Context(), 0, content.Size)
	if err != nil {
		return fmt.Errorf("read file %s: %w", f.ID, err)
	}
	defer func() { _ = body.Close() }() // it was only read
	h := w.Header()
	h.Set(requestIDHeader, h.Get("X-Request-Id"))
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": f.Name}))
	h.Set("Content-Length", strconv.FormatInt(content.Size, 10))
	h.Set("Cache-Control", "private, no-store")
	w.WriteHeader(http.StatusOK)
	if _, err := io.Copy(w, body); err != nil {
		return fmt.Errorf("send file %s: %w", f.ID, err)
	}
	return nil
}

func (s *Server) deleteFile(w http.ResponseWriter, r *http.Request) error {
	id := chi.URLParam(r, "id")
	if err := s.Host(r).RemoveFile(r.Context(), id); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]string{"id": id, "type": "file_deleted"})
	return nil
}
