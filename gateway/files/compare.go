package files

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/diff"

	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// maxDiffBytes limits each of the two contents of a unified diff.
	maxDiffBytes = 256 << 10
	// diffMemory is the memory in bytes of a comparison: its changes, two contents, their lines and
	// the diff.
	diffMemory = 24 << 20
)

// compare answers with the difference of two versions.
func (s *FileRoutes) compare(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.FileCompareRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	files, name, err := s.OpenPath(r, &req.FileRequest, req.Path, proto.CleanFilePath)
	if err != nil {
		return err
	}
	defer files.Close()
	done, err := files.Begin(r.Context())
	if err != nil {
		return err
	}
	defer done()
	if !s.Reserve(r.Info, diffMemory) {
		return web.ErrOverloaded
	}
	changes, truncated, err := files.Compare(r.Context(), req.From, req.To, name)
	if err != nil {
		return err
	}
	answer := api.FileDifference{Changes: []api.FileChange{}, Truncated: truncated}
	for i := range changes {
		answer.Changes = append(answer.Changes, api.NewFileChange(&changes[i]))
	}
	if len(changes) == 1 && changes[0].Path == name && isFile(changes[0].Before) && isFile(changes[0].After) {
		if answer.Diff, err = diffOf(r.Context(), files, req, name, &changes[0]); err != nil {
			return err
		}
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

// isFile reports whether s is a file or nothing.
func isFile(s *proto.FileState) bool { return s == nil || s.Type == proto.FileRegular }

// diffOf returns the difference in the text of a file.
func diffOf(
	ctx context.Context, files *filestore.Store, req *api.FileCompareRequest, name string, c *proto.FileChange,
) (*api.FileDiff, error) {
	before, err := textOf(ctx, files, req.From, name, c.Before)
	if err != nil {
		return nil, err
	}
	after, err := textOf(ctx, files, req.To, name, c.After)
	switch {
	case err != nil:
		return nil, err
	case len(before) > maxDiffBytes || len(after) > maxDiffBytes:
		return &api.FileDiff{Kind: api.DiffTooLarge}, nil
	case !isText(before) || !isText(after):
		return &api.FileDiff{Kind: api.DiffBinary}, nil
	}
	// Paths may have line breaks, so the diff names versions. Its first line is for programs.
	text := diff.Diff(labelOf(req.From, c.Before), before, labelOf(req.To, c.After), after)
	_, text, _ = bytes.Cut(text, []byte("\n"))
	return &api.FileDiff{Kind: api.DiffText, Text: string(text)}, nil
}

// labelOf names a side of a diff.
func labelOf(version int64, state *proto.FileState) string {
	switch {
	case state == nil:
		return "/dev/null"
	case version == 0:
		return "now"
	default:
		return fmt.Sprintf("version %d", version)
	}
}

func isText(content []byte) bool { return utf8.Valid(content) && bytes.IndexByte(content, 0) < 0 }

// textOf returns the content of a file in a version: of a larger one, the first maxDiffBytes + 1
// bytes.
func textOf(
	ctx context.Context, files *filestore.Store, version int64, name string, state *proto.FileState,
) ([]byte, error) {
	if state == nil {
		return nil, nil
	}
	if err := files.At(version); err != nil {
		return nil, err
	}
	content, err := files.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	return beginning(ctx, files, content, maxDiffBytes+1)
}
