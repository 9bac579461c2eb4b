package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// uploadsPath is the prefix of signed URLs of uploads in parts.
	uploadsPath = "/v1/files/uploads/"
	// methodParts is the method of the grant of an upload in parts, which several methods use.
	methodParts = "PARTS"
	// uploadLife is the time in which an upload in parts must be completed. The collector removes
	// parts of proto.DefaultSafeAge: until then, a completion that began at the last moment must
	// have ended.
	uploadLife = 20 * time.Hour
	// joinTimeout bounds the completion of an upload, which reads and stores up to 10 GiB.
	joinTimeout = 30 * time.Minute
	// maxUploadID is the length of the longest id of an upload that the server of a bucket may
	// choose, in bytes.
	maxUploadID = 2048
)

// uploads returns the uploads of a file of size bytes in parts. Buckets store the parts themselves;
// those of other files are in the blob store, and joined in the end.
func (s *Server) uploads(f *fileStore, size int64) PartUploads {
	if !f.partsInBlobs() {
		return f.bucket
	}
	return &blobUploads{parts: s.Parts, beginning: &s.beginning, files: f.files, org: f.org, size: size}
}

// blobUploads are uploads with parts in the blob store.
type blobUploads struct {
	parts     Parts
	beginning *web.Transfers
	files     MountFiles
	org       string
	size      int64
}

// BeginUpload implements [PartUploads]. Gateways do not wait for each other: each beyond the first
// can exceed the limits by one upload.
func (b *blobUploads) BeginUpload(ctx context.Context, _ string, size int64) (string, error) {
	done, err := b.beginning.Acquire(ctx, b.org, 1)
	if err != nil {
		return "", err
	}
	defer done()
	return b.parts.BeginUpload(ctx, b.org, size)
}

// PutPart implements [PartUploads].
func (b *blobUploads) PutPart(ctx context.Context, _, id string, number int, content []byte) error {
	return b.parts.PutPart(ctx, b.org, id, b.size, number, content)
}

// UploadedParts implements [PartUploads].
func (b *blobUploads) UploadedParts(ctx context.Context, _, id string) ([]proto.UploadedPart, error) {
	return b.parts.UploadedParts(ctx, b.org, id, b.size)
}

// CompleteUpload implements [PartUploads].
func (b *blobUploads) CompleteUpload(
	ctx context.Context, path, id string, check func([]proto.UploadedPart) error,
) error {
	parts, err := b.UploadedParts(ctx, path, id)
	if err == nil {
		err = check(parts)
	}
	if err != nil {
		return err
	}
	body, err := b.parts.OpenUpload(ctx, b.org, id)
	if err != nil {
		return err
	}
	err = b.files.Put(ctx, path, b.size, body)
	if err := errors.Join(err, body.Close()); err != nil {
		return err
	}
	return b.AbortUpload(ctx, path, id) // the file has its own copy
}

// AbortUpload implements [PartUploads].
func (b *blobUploads) AbortUpload(ctx context.Context, _, id string) error {
	return b.parts.RemoveUpload(ctx, b.org, id, b.size)
}

// partCount returns the number of parts of a file of size bytes, which is not empty.
func partCount(size int64) int {
	return int((size + proto.UploadPartBytes - 1) / proto.UploadPartBytes)
}

// partSize returns the size of a part of a file of size bytes.
func partSize(size int64, number int) int64 {
	return min(proto.UploadPartBytes, size-int64(number-1)*proto.UploadPartBytes)
}

// createUpload begins an upload in parts.
func (s *Server) createUpload(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.PartUploadRequest](&s.Core, w, r)
	if err != nil {
		return err
	}
	files, name, err := s.openRequested(r, &req.FileRequest, req.Path, proto.CleanFileName)
	if err != nil {
		return err
	}
	defer files.close()
	if err := s.checkUpload(r.Context(), files, name, req.ContentLength, files.partsInBlobs()); err != nil {
		return err
	}
	sub, err := files.writablePath(name)
	if err != nil {
		return err
	}
	id, err := s.uploads(files, req.ContentLength).BeginUpload(r.Context(), sub, req.ContentLength)
	if err != nil {
		return files.wrap("begin an upload to", err)
	}
	if len(id) > maxUploadID || strings.ContainsFunc(id, unicode.IsControl) {
		return api.Errorf(api.CodeConflict,
			"the server of the storage connection %s answered with an id of an upload that is not valid", files.id)
	}
	key := &r.Key
	g := &grant{
		method: methodParts, key: key.ID, org: key.Org, source: req.Source, id: req.ID, upload: id, path: name,
		size: req.ContentLength,
	}
	signed, err := s.signedPath(r, g, uploadsPath, uploadLife)
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, api.PartUpload{
		URL: signed, PartSize: proto.UploadPartBytes, Parts: partCount(g.size), ExpiresAt: api.Time{Time: g.expiresAt},
	})
}

// upload is an upload in parts that a request addresses.
type upload struct {
	*grant
	files *fileStore
	sub   string // the path below the prefix of files
	parts PartUploads
}

// openUpload returns the upload of a request's URL, whose files must be closed.
func (s *Server) openUpload(r *web.Request) (*upload, error) {
	g, key, err := s.checkGrant(r, methodParts)
	if err != nil {
		return nil, err
	}
	files, err := s.openFiles(r.Context(), key, g.source, g.id)
	if err != nil {
		return nil, err
	}
	sub, err := files.writablePath(g.path)
	if err != nil {
		files.close()
		return nil, err
	}
	return &upload{g, files, sub, s.uploads(files, g.size)}, nil
}

// wrap returns the error for the client.
func (u *upload) wrap(operation string, err error) error {
	_, atPath := errors.AsType[*proto.NoFileError](err)
	if errors.Is(err, proto.ErrNotFound) && !atPath {
		return api.Errorf(api.CodeNotFound,
			"there is no such upload any more: it was completed, which /v1/files/list shows, or it was removed")
	}
	return u.files.wrap(operation, err)
}

// getUpload lists the parts of an upload.
func (s *Server) getUpload(w http.ResponseWriter, r *web.Request) error {
	u, err := s.openUpload(r)
	if err != nil {
		return err
	}
	defer u.files.close()
	parts, err := u.parts.UploadedParts(r.Context(), u.sub, u.upload)
	if err != nil {
		return u.wrap("list the parts of an upload to", err)
	}
	answer := api.PartUploadState{
		Path: u.path, Size: u.size, PartSize: proto.UploadPartBytes, Parts: partCount(u.size),
		Uploaded: []api.UploadedPart{}, ExpiresAt: api.Time{Time: u.expiresAt},
	}
	for _, p := range parts {
		answer.Uploaded = append(answer.Uploaded, api.UploadedPart(p))
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

// putPart stores a part of an upload.
func (s *Server) putPart(w http.ResponseWriter, r *web.Request) error {
	err := s.storePart(w, r)
	if err != nil {
		w.Header().Set("Connection", "close") // the body, or the rest of it, is not read
	}
	return err
}

func (s *Server) storePart(w http.ResponseWriter, r *web.Request) error {
	u, err := s.openUpload(r)
	if err != nil {
		return err
	}
	defer u.files.close()
	number, err := web.QueryInt(r, "part", 1, int64(partCount(u.size)), 0)
	if err == nil && number == 0 {
		err = proto.FieldErrorf("part", "must be given, such as ?part=1")
	}
	if err == nil {
		err = web.RequireIdentity(w, r)
	}
	size := int64(0)
	if err == nil {
		size = partSize(u.size, int(number))
		err = checkLength(r.ContentLength, size)
	}
	if err != nil {
		return err
	}
	if u.files.partsInBlobs() {
		if err := s.Admission.CheckQuota(r.Context(), u.files.org, proto.QuotaStored); err != nil {
			return err
		}
	}
	end, err := s.beginUpload(r.Context(), u.files, size)
	if err != nil {
		return err
	}
	defer end()
	body := r.LongBody(r.Body, size)
	var content bytes.Buffer // grows with the content, not with the announced size
	_, err = io.CopyN(&content, body, size)
	body.ClearDeadline()
	if err != nil {
		return fmt.Errorf("read part %d: %w", number, web.NoEOF(err))
	}
	if err := u.parts.PutPart(r.Context(), u.sub, u.upload, int(number), content.Bytes()); err != nil {
		return u.wrap("store a part of a file of", err)
	}
	return web.WriteValue(w, http.StatusOK, api.UploadedPart{Number: int(number), Size: size})
}

// completeUpload turns the parts into the file. It goes on if the client leaves.
func (s *Server) completeUpload(w http.ResponseWriter, r *web.Request) error {
	u, err := s.openUpload(r)
	if err != nil {
		return err
	}
	defer u.files.close()
	end, err := s.beginUpload(r.Context(), u.files, u.size)
	if err != nil {
		return err
	}
	defer end()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), joinTimeout)
	defer cancel()
	err = u.parts.CompleteUpload(ctx, u.sub, u.upload, func(parts []proto.UploadedPart) error {
		return checkParts(parts, u.size)
	})
	if err != nil {
		return u.wrap("complete an upload to", err)
	}
	return web.WriteValue(w, http.StatusOK, api.Uploaded{Path: u.path, Size: u.size})
}

// checkParts returns an error that names the parts of a file of size bytes that are missing.
func checkParts(parts []proto.UploadedPart, size int64) error {
	has := make(map[int]bool, len(parts))
	for _, p := range parts {
		if p.Number < 1 || p.Number > partCount(size) {
			return api.Errorf(api.CodeConflict, "the upload has a part %d, which it should not have; begin another", p.Number)
		}
		has[p.Number] = p.Size == partSize(size, p.Number)
	}
	var missing []string
	for number := 1; number <= partCount(size); number++ {
		if !has[number] {
			missing = append(missing, strconv.Itoa(number))
		}
	}
	if missing != nil {
		return api.Errorf(api.CodeConflict, "parts are missing: %s; send them first", proto.ListSome(missing))
	}
	return nil
}

// abortUpload removes an upload.
func (s *Server) abortUpload(w http.ResponseWriter, r *web.Request) error {
	u, err := s.openUpload(r)
	if err != nil {
		return err
	}
	defer u.files.close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), web.VersionsTimeout)
	defer cancel()
	if err := u.parts.AbortUpload(ctx, u.sub, u.upload); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return u.wrap("remove an upload to", err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
