package files

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"

	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// getContent sends a file, or the requested range of it.
func (s *FileRoutes) getContent(w http.ResponseWriter, r *web.Request) error {
	g, key, err := s.checkGrant(r, http.MethodGet)
	if err != nil {
		return err
	}
	files, err := s.Open(r.Context(), key, g.source, g.id)
	if err != nil {
		return err
	}
	defer files.Close()
	if err := files.At(g.version); err != nil {
		return err
	}
	content, err := files.Open(r.Context(), g.path)
	if err != nil {
		return err
	}
	name := path.Base(g.path)
	mediaType, known := web.InlineType(name)
	if g.inline && !known {
		if mediaType, err = sniff(r.Context(), files, content); err != nil {
			return err
		}
	}
	tag := `"` + content.Tag + `"`
	part, err := web.PartOf(w, r, content.Size, tag)
	if err != nil {
		return err
	}
	begin := func() {
		w.Header().Set("ETag", tag)
		w.Header().Set("Last-Modified", content.Modified.UTC().Format(http.TimeFormat))
		if g.inline {
			part.WriteInline(w, name, mediaType)
			return
		}
		part.WriteHeader(w, name)
	}
	if r.Method == http.MethodHead || part.Length == 0 {
		begin()
		return nil
	}
	done, err := files.Begin(r.Context())
	if err != nil {
		return err
	}
	defer done()
	return files.Wrap("send a file of", s.sendPart(w, r, content, part, begin))
}

// sniff returns the media type of a file by its beginning.
func sniff(ctx context.Context, files *filestore.Store, content *proto.FileContent) (string, error) {
	done, err := files.Begin(ctx)
	if err != nil {
		return "", err
	}
	defer done()
	head, err := beginning(ctx, files, content, web.SniffBytes)
	if err != nil {
		return "", err
	}
	return web.SniffType(head), nil
}

// beginning returns the content of a file, up to limit bytes.
func beginning(
	ctx context.Context, files *filestore.Store, content *proto.FileContent, limit int64,
) ([]byte, error) {
	body, err := content.Read(ctx, 0, min(content.Size, limit))
	if err != nil {
		return nil, files.Wrap("read a file of", err)
	}
	head, err := io.ReadAll(body)
	if err := errors.Join(err, body.Close()); err != nil {
		return nil, files.Wrap("read a file of", err)
	}
	return head, nil
}

// sendPart sends a part of a file. The end of the part is verified before it is sent: for a short
// file, an error becomes the answer; for a long one, it aborts the answer.
func (s *FileRoutes) sendPart(
	w http.ResponseWriter, r *web.Request, content *proto.FileContent, part *web.Part, begin func(),
) error {
	body, err := content.Read(r.Context(), part.Offset, part.Length)
	if err != nil {
		return fmt.Errorf("read %d bytes at %d of a file: %w", part.Length, part.Offset, err)
	}
	defer func() { _ = body.Close() }() // it was only read
	in := bufio.NewReaderSize(body, web.SmallOutput)
	end := min(part.Length, web.SmallOutput)
	long := part.Length > end
	if long {
		if _, err := in.Peek(1); err != nil {
			return fmt.Errorf("read a file at %d: %w", part.Offset, web.NoEOF(err))
		}
		begin()
		if sent, err := io.CopyN(w, in, part.Length-end); err != nil {
			return fmt.Errorf("send a file from %d, after %d of %d bytes: %w", part.Offset, sent, part.Length, web.NoEOF(err))
		}
	}
	rest, err := io.ReadAll(io.LimitReader(in, end+1))
	if err == nil && int64(len(rest)) != end {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("read the last %d bytes before %d of a file, got %d: %w", end, part.Offset+part.Length,
			len(rest), err)
	}
	if !long {
		begin()
	}
	_, err = w.Write(rest)
	return err
}

// putContent stores an uploaded file.
func (s *FileRoutes) putContent(w http.ResponseWriter, r *web.Request) error {
	g, key, err := s.checkGrant(r, http.MethodPut)
	if err == nil {
		err = web.RequireIdentity(w, r)
	}
	if err == nil {
		err = checkLength(r.ContentLength, g.size)
	}
	if err != nil {
		return err
	}
	files, err := s.Open(r.Context(), key, g.source, g.id)
	if err != nil {
		return err
	}
	defer files.Close()
	end, err := files.BeginUpload(r.Context(), g.size)
	if err != nil {
		return err
	}
	defer end()
	body := r.LongBody(r.Body, g.size)
	err = files.Put(r.Context(), g.path, g.size, body)
	body.ClearDeadline()
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, api.Uploaded{Path: g.path, Size: g.size})
}

// checkLength compares the length of an upload with the length allowed by its URL.
func checkLength(length, allowed int64) error {
	switch {
	case length < 0:
		return api.Errorf(api.CodeLengthRequired, "a file is sent with its Content-Length")
	case length > allowed:
		return web.BodyTooLarge(allowed)
	case length < allowed:
		return proto.FieldErrorf("Content-Length", "is %d, and the URL is for a file of %d bytes", length, allowed)
	default:
		return nil
	}
}
