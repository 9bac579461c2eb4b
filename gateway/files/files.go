package files

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Quotas knows how much of their monthly quotas organisations have used.
type Quotas interface {
	// CheckQuota rejects a use if the organisation has reached a hard limit this month: of the
	// named quotas, or of any if none are named.
	CheckQuota(ctx context.Context, org string, quotas ...proto.QuotaName) error
}

// Principals finds the API keys of signed URLs.
type Principals interface {
	// Principal returns the API key with an id, or the one for the member with that id.
	Principal(id string) (*proto.Key, bool)
}

// FileRoutes are the routes of files, of their signed URLs and of uploads in parts.
type FileRoutes struct {
	*filestore.Opener
	Quotas     Quotas
	Principals Principals
	// URLSecret signs the URLs of files. All gateways have the same random secret.
	URLSecret *[32]byte
}

// Handlers returns the handlers of the routes.
func (s *FileRoutes) Handlers() []web.Handler {
	return []web.Handler{
		{ID: "listFiles", Handle: s.list},
		{ID: "compareFiles", Handle: s.compare},
		{ID: "deleteFile", Handle: s.remove},
		{ID: "renameFile", Handle: s.rename},
		{ID: "fileUploadURL", Handle: signed(s.Core, s.SignUpload)},
		{ID: "fileDownloadURL", Handle: signed(s.Core, s.SignDownload)},
		{ID: "getContent", Handle: s.getContent},
		{ID: "putContent", Handle: web.CloseOnError(s.putContent)},
		{ID: "createUpload", Handle: s.createUpload},
		{ID: "getUpload", Handle: s.getUpload},
		{ID: "putPart", Handle: web.CloseOnError(s.putPart)},
		{ID: "completeUpload", Handle: s.completeUpload},
		{ID: "abortUpload", Handle: s.abortUpload},
	}
}

// list sends the list while it is read. The list of a large home may not fit into memory.
func (s *FileRoutes) list(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.FileListRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	files, dir, err := s.OpenPath(r, &req.FileRequest, req.Path, proto.CleanFilePath)
	if err != nil {
		return err
	}
	defer files.Close()
	if err := files.At(req.Version); err != nil {
		return err
	}
	out := bufio.NewWriterSize(web.NewLazyWriter(w, r, web.JSONHeader), web.SmallOutput)
	separator := `{"files":[`
	err = files.List(r.Context(), dir, req.Recursive, func(f proto.File) error {
		text, err := json.Marshal(api.NewFile(&f))
		if err != nil {
			return fmt.Errorf("encode %q: %w", f.Path, err)
		}
		_, _ = out.WriteString(separator) // the next write returns the error again
		separator = ","
		_, err = out.Write(text)
		return err
	})
	if err != nil {
		return err
	}
	end := "]}\n"
	if separator != "," {
		end = separator + end
	}
	_, _ = out.WriteString(end) // Flush returns the error
	return out.Flush()
}

// signed answers with the URL that sign returns.
func signed[T any](core *web.Core, sign func(*web.Request, *T) (*api.SignedURL, error)) web.Handle {
	return func(w http.ResponseWriter, r *web.Request) error {
		req, err := web.DecodeBody[T](core, w, r)
		if err != nil {
			return err
		}
		answer, err := sign(r, req)
		if err != nil {
			return err
		}
		return web.WriteValue(w, http.StatusOK, answer)
	}
}

// SignUpload returns a URL to upload a file to.
func (s *FileRoutes) SignUpload(r *web.Request, req *api.FileUploadRequest) (*api.SignedURL, error) {
	files, name, err := s.OpenPath(r, &req.FileRequest, req.Path, proto.CleanFileName)
	if err != nil {
		return nil, err
	}
	defer files.Close()
	if err := s.checkUpload(r.Context(), files, name, req.ContentLength, files.Blobs); err != nil {
		return nil, err
	}
	key := &r.Key
	g := &grant{
		method: http.MethodPut, key: key.ID, org: key.Org, source: req.Source, id: req.ID, path: name,
		size: req.ContentLength,
	}
	// The length is for clients that would otherwise stream without one.
	headers := []api.Header{{Name: "Content-Length", Value: strconv.FormatInt(g.size, 10)}}
	if req.ContentType != nil {
		headers = append(headers, api.Header{Name: "Content-Type", Value: *req.ContentType})
	}
	return s.signedURL(r, g, headers...)
}

// checkUpload returns the error with which an upload would be refused now. blobs reports that the
// file, or its parts, would be in the blob store.
func (s *FileRoutes) checkUpload(
	ctx context.Context, files *filestore.Store, name string, size int64, blobs bool,
) error {
	if blobs {
		if err := s.Quotas.CheckQuota(ctx, files.Org, proto.QuotaStored); err != nil {
			return err
		}
	}
	return files.CheckPut(ctx, name, size)
}

// SignDownload returns a URL to download a file from.
func (s *FileRoutes) SignDownload(r *web.Request, req *api.FileDownloadRequest) (*api.SignedURL, error) {
	files, name, err := s.OpenPath(r, &req.FileRequest, req.Path, proto.CleanFileName)
	if err != nil {
		return nil, err
	}
	defer files.Close()
	if err := files.At(req.Version); err != nil {
		return nil, err
	}
	if _, err := files.Open(r.Context(), name); err != nil {
		return nil, err // report it now rather than when the URL is used
	}
	key := &r.Key
	return s.signedURL(r, &grant{
		method: http.MethodGet, key: key.ID, org: key.Org, source: req.Source, id: req.ID,
		path: name, version: req.Version, inline: req.Inline,
	})
}

func (s *FileRoutes) remove(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.FileDeleteRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	files, name, err := s.OpenPath(r, &req.FileRequest, req.Path, changedPath("path"))
	if err != nil {
		return err
	}
	defer files.Close()
	return s.change(w, r, files, name, func(ctx context.Context) (int64, error) {
		return files.Remove(ctx, name, req.Recursive)
	})
}

func (s *FileRoutes) rename(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.FileRenameRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	files, from, err := s.OpenPath(r, &req.FileRequest, req.Path, changedPath("path"))
	if err != nil {
		return err
	}
	defer files.Close()
	to, err := changedPath("to")(files.Root, req.To)
	if err != nil {
		return err
	}
	return s.change(w, r, files, to, func(ctx context.Context) (int64, error) { return files.Rename(ctx, from, to) })
}

// change makes a change of files, which completes even if the client leaves, and answers with the
// new version. Changes count as transfers: each copies the names in directories of any size.
func (s *FileRoutes) change(
	w http.ResponseWriter, r *web.Request, files *filestore.Store, path string,
	change func(ctx context.Context) (version int64, err error),
) error {
	end, err := files.Begin(r.Context())
	if err != nil {
		return err
	}
	defer end()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), web.VersionsTimeout)
	defer cancel()
	version, err := change(ctx)
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, api.ChangedFile{Path: path, Version: version})
}

// changedPath returns a function that cleans the path of a file or directory that a request
// changes. field names the path in errors.
func changedPath(field string) func(root, name string) (string, error) {
	return func(root, name string) (string, error) {
		clean, err := proto.CleanFilePath(root, name)
		if wrong, ok := errors.AsType[*proto.FieldError](err); ok {
			return "", &proto.FieldError{Field: field, Message: field + strings.TrimPrefix(wrong.Message, wrong.Field)}
		}
		if err == nil && clean == "" {
			err = proto.FieldErrorf(field, "must not be the home itself, or the storage connection itself")
		}
		return clean, err
	}
}
