package agents

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	maxUploadField  = 4 << 10 // bytes of a part of a form that is no file
	maxUploadFields = 16      // also of one name
)

// ReadUpload reads the form in the request's body, with a file of at most the size of a home. If
// the form has a field named instead, it needs no file, and the content is empty. The result must
// be closed.
func (a *Agent) ReadUpload(w http.ResponseWriter, instead string) (*proto.AgentUpload, error) {
	up, err := a.readUpload(w, instead)
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
	}
	return up, a.public(err)
}

func (a *Agent) readUpload(w http.ResponseWriter, instead string) (up *proto.AgentUpload, err error) {
	m, i := a.m, a.i
	if err := web.RequireIdentity(w, a.r); err != nil {
		return nil, err
	}
	if err := m.Keys.CheckQuota(a.r.Context(), i.Key.Org, proto.QuotaStored); err != nil {
		return nil, err
	}
	most, err := m.Opener.HomeLimit(a.r.Context(), &i.Key)
	if err != nil {
		return nil, err
	}
	done, err := m.Opener.BeginUpload(a.r.Context(), i.Key.Org, web.SmallOutput)
	if err != nil {
		return nil, err
	}
	defer done()
	body := a.r.LongBody(a.r.Body, most.Bytes)
	defer body.ClearDeadline()
	a.r.Body = io.NopCloser(body)
	parts, err := a.r.MultipartReader()
	if err != nil {
		return nil, proto.FieldErrorf("body", "must be a form, with Content-Type multipart/form-data and a part named file")
	}
	up = &proto.AgentUpload{Fields: map[string]string{}}
	defer func() {
		if err != nil && up.ReadCloser != nil {
			err = errors.Join(err, up.Close())
		}
	}()
	for fields := 0; ; {
		part, err := parts.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return up, formError(err)
		}
		if part.FormName() != "file" {
			value, err := io.ReadAll(io.LimitReader(part, maxUploadField+1))
			if err != nil {
				return up, formError(err)
			}
			if fields++; len(value) > maxUploadField || fields > maxUploadFields {
				return up, proto.FieldErrorf("body", "has parts that are too long, or too many")
			}
			up.Fields[part.FormName()] = string(value)
			continue
		}
		if up.ReadCloser != nil {
			return up, proto.FieldErrorf("file", "must be given only once")
		}
		spool, err := m.Spool()
		if err != nil {
			return up, fmt.Errorf("spool an upload: %w", err)
		}
		up.ReadCloser, up.Name, up.ContentType = spool, part.FileName(), part.Header.Get("Content-Type")
		if up.Size, err = io.Copy(spool, io.LimitReader(part, most.Bytes+1)); err != nil {
			return up, formError(err)
		}
		if up.Size > most.Bytes {
			return up, web.BodyTooLarge(most.Bytes)
		}
		if _, err := spool.Seek(0, io.SeekStart); err != nil {
			return up, fmt.Errorf("spool an upload: %w", err)
		}
	}
	if up.ReadCloser == nil && up.Fields[instead] != "" {
		up.ReadCloser = http.NoBody
	}
	if up.ReadCloser == nil {
		return up, proto.FieldErrorf("file", "is missing: send the file as a part of this name")
	}
	return up, nil
}

// formError returns the error for a form that could not be read to its end.
func formError(err error) error {
	if _, ok := errors.AsType[*api.Error](err); ok {
		return err
	}
	if _, ok := errors.AsType[*os.PathError](err); ok {
		return fmt.Errorf("spool an upload: %w", err)
	}
	return proto.FieldErrorf("body", "is no valid form, or ended before it was complete")
}
