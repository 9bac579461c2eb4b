package files

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

	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// uploadsPath is the prefix of signed URLs of uploads in parts.
	uploadsPath = "/v1/files/uploads/"
	// methodParts is the method of a multipart upload's grant, which covers several HTTP methods.
	methodParts = "PARTS"
	// uploadLife is how long a multipart upload may take. The collector removes parts older than
	// proto.DefaultSafeAge, and a completion that began at the last moment must end before that.
	uploadLife = 20 * time.Hour
	// joinTimeout limits the completion of an upload, which reads and stores up to 10 GiB.
	joinTimeout = 30 * time.Minute
	// maxUploadID limits the upload ids chosen by a bucket's server, in bytes.
	maxUploadID = 2048
)

// partCount returns the number of parts of a file of size bytes, which is not empty.
func partCount(size int64) int {
	return int((size + proto.UploadPartBytes - 1) / proto.UploadPartBytes)
}

// partSize returns the size of a part of a file of size bytes.
func partSize(size int64, number int) int64 {
	return min(proto.UploadPartBytes, size-int64(number-1)*proto.UploadPartBytes)
}

// createUpload begins an upload in parts.
func (s *FileRoutes) createUpload(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.PartUploadRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	files, name, err := s.OpenPath(r, &req.FileRequest, req.Path, proto.CleanFileName)
	if err != nil {
		return err
	}
	defer files.Close()
	if err := s.checkUpload(r.Context(), files, name, req.ContentLength, files.PartsInBlobs()); err != nil {
		return err
	}
	sub, err := files.WritablePath(name)
	if err != nil {
		return err
	}
	id, err := files.Uploads(req.ContentLength).BeginUpload(r.Context(), sub, req.ContentLength)
	if err != nil {
		return files.Wrap("begin an upload to", err)
	}
	if len(id) > maxUploadID || strings.ContainsFunc(id, unicode.IsControl) {
		return api.Errorf(api.CodeConflict,
			"the server of the storage connection %s answered with an id of an upload that is not valid", files.ID)
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
	files *filestore.Store
	sub   string // the path below the prefix of files
	parts filestore.PartUploads
}

// openUpload returns the upload in a request's URL. Its files must be closed.
func (s *FileRoutes) openUpload(r *web.Request) (*upload, error) {
	g, key, err := s.checkGrant(r, methodParts)
	if err != nil {
		return nil, err
	}
	files, err := s.Open(r.Context(), key, g.source, g.id)
	if err != nil {
		return nil, err
	}
	sub, err := files.WritablePath(g.path)
	if err != nil {
		files.Close()
		return nil, err
	}
	return &upload{g, files, sub, files.Uploads(g.size)}, nil
}

// wrap returns the error for the client.
func (u *upload) wrap(operation string, err error) error {
	_, atPath := errors.AsType[*proto.NoFileError](err)
	if errors.Is(err, proto.ErrNotFound) && !atPath {
		return api.Errorf(api.CodeNotFound,
			"there is no such upload any more: it was completed, which /v1/files/list shows, or it was removed")
	}
	return u.files.Wrap(operation, err)
}

// getUpload lists the parts of an upload.
func (s *FileRoutes) getUpload(w http.ResponseWriter, r *web.Request) error {
	u, err := s.openUpload(r)
	if err != nil {
		return err
	}
	defer u.files.Close()
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
func (s *FileRoutes) putPart(w http.ResponseWriter, r *web.Request) error {
	u, err := s.openUpload(r)
	if err != nil {
		return err
	}
	defer u.files.Close()
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
	if u.files.PartsInBlobs() {
		if err := s.Quotas.CheckQuota(r.Context(), u.files.Org, proto.QuotaStored); err != nil {
			return err
		}
	}
	end, err := u.files.BeginUpload(r.Context(), size)
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

// completeUpload joins the parts into the file. It continues if the client leaves.
func (s *FileRoutes) completeUpload(w http.ResponseWriter, r *web.Request) error {
	u, err := s.openUpload(r)
	if err != nil {
		return err
	}
	defer u.files.Close()
	end, err := u.files.BeginUpload(r.Context(), u.size)
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

// checkParts returns an error that names the missing parts of a file of size bytes.
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
func (s *FileRoutes) abortUpload(w http.ResponseWriter, r *web.Request) error {
	u, err := s.openUpload(r)
	if err != nil {
		return err
	}
	defer u.files.Close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), web.VersionsTimeout)
	defer cancel()
	if err := u.parts.AbortUpload(ctx, u.sub, u.upload); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return u.wrap("remove an upload to", err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
