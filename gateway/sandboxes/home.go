package sandboxes

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/guest/filesystempb"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// maxGuestMessage is the largest message that is read from a guest, in bytes.
	maxGuestMessage = 4 << 20
	// reconnectWait is how long a guest is tried again after its connection was lost.
	reconnectWait = 10 * time.Second
)

// Guest returns the client of the guest of a running sandbox.
func (s *Service) Guest(org, id string) (*client.Guest, error) {
	c, err := client.New(client.Config{
		URL: "http://sandbox", Key: "none", Patience: reconnectWait,
		HTTP: &http.Client{Transport: &guestTransport{&Transport{Service: s, Org: org, ID: id}}},
	})
	if err != nil {
		return nil, err
	}
	return c.Guest(id, ""), nil
}

// guestTransport sends a client's requests for a guest to it.
type guestTransport struct{ to http.RoundTripper }

// RoundTrip implements [http.RoundTripper].
func (t *guestTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if _, route, ok := strings.Cut(r.URL.Path, "/guest/"); ok {
		r.URL.Path, r.URL.RawPath = "/"+route, ""
	}
	r.Header.Del("Authorization") // of the client
	return t.to.RoundTrip(r)
}

// Home gives access to the files of a sandbox that runs, as its programs see them. Paths are relative to the home.
// Errors are [*api.Error], with [api.CodeNotFound] if there is nothing at a path.
type Home struct {
	guest *client.Guest
	files filesystempb.FilesystemClient
}

// Home returns the files of a running sandbox.
func (s *Service) Home(org, id string) (*Home, error) {
	guest, err := s.Guest(org, id)
	if err != nil {
		return nil, err
	}
	return &Home{guest, filesystempb.NewFilesystemClient(guest.HTTP, guest.URL,
		connect.WithReadMaxBytes(maxGuestMessage))}, nil
}

func at(name string) string { return path.Join(proto.SandboxHome, name) }

// homeError returns the error for the client.
func homeError(err error) error {
	if err == nil {
		return nil
	}
	code := connect.CodeOf(err).String()
	failed, isGuests := errors.AsType[*client.GuestError](err)
	if isGuests {
		code = failed.Code
	}
	switch code {
	case connect.CodeNotFound.String():
		return api.Errorf(api.CodeNotFound, "there is nothing at that path")
	case connect.CodeInvalidArgument.String(), connect.CodeFailedPrecondition.String(),
		connect.CodePermissionDenied.String(), connect.CodeAlreadyExists.String():
		return api.Errorf(api.CodeConflict, "%s", proto.Shorten(err.Error()))
	case connect.CodeResourceExhausted.String():
		return api.Errorf(api.CodePayloadTooLarge, "%s", proto.Shorten(err.Error()))
	default:
		return fmt.Errorf("%w: %w",
			api.Errorf(api.CodeConflict, "the sandbox does not answer; try again"), err)
	}
}

// List calls each for the entries of a directory.
func (h *Home) List(ctx context.Context, dir string, each func(proto.File) error) error {
	list, err := h.files.ListDir(ctx, connect.NewRequest(&filesystempb.ListDirRequest{Path: at(dir), Depth: 1}))
	if err != nil {
		return homeError(err)
	}
	for _, e := range list.Msg.GetEntries() {
		f := proto.File{
			Path: path.Join(dir, e.GetName()), Size: e.GetSize(), Modified: e.GetModifiedTime().AsTime(),
			IsDirectory: e.GetType() == filesystempb.FileType_FILE_TYPE_DIRECTORY && !e.GetIsSymlink(),
			Link:        e.GetIsSymlink(),
			Special:     e.GetType() == filesystempb.FileType_FILE_TYPE_UNSPECIFIED && !e.GetIsSymlink(),
		}
		f.Executable = e.GetType() == filesystempb.FileType_FILE_TYPE_FILE && !f.Link && e.GetMode()&0o100 != 0
		if f.IsDirectory {
			f.Size = 0
		}
		if err := each(f); err != nil {
			return err
		}
	}
	return nil
}

// Open opens a regular file.
func (h *Home) Open(ctx context.Context, name string) (*proto.FileContent, error) {
	stat, err := h.files.Stat(ctx, connect.NewRequest(&filesystempb.StatRequest{Path: at(name)}))
	if err != nil {
		return nil, homeError(err)
	}
	e := stat.Msg.GetEntry()
	if e.GetIsSymlink() || e.GetType() != filesystempb.FileType_FILE_TYPE_FILE {
		return nil, api.Errorf(api.CodeNotFound, "there is no file at that path; links are not followed")
	}
	return &proto.FileContent{
		File: proto.File{Path: name, Size: e.GetSize(), Modified: e.GetModifiedTime().AsTime()},
		Tag:  fmt.Sprintf("live-%d-%d", e.GetModifiedTime().AsTime().UnixNano(), e.GetSize()),
		Read: func(ctx context.Context, offset, length int64) (io.ReadCloser, error) {
			reader, writer := io.Pipe()
			go func() { _ = writer.CloseWithError(homeError(h.guest.Download(ctx, at(name), writer))) }()
			if _, err := io.CopyN(io.Discard, reader, offset); err != nil {
				return nil, err
			}
			return struct {
				io.Reader
				io.Closer
			}{io.LimitReader(reader, length), reader}, nil
		},
	}, nil
}

// Put stores size bytes of body as a file.
func (h *Home) Put(ctx context.Context, name string, size int64, body io.Reader) error {
	return homeError(h.guest.Upload(ctx, at(name), body, size))
}

// PutBody stores the body of a request as a file, and returns its size.
func (h *Home) PutBody(r *web.Request, name string, limit int64) (size int64, err error) {
	body := r.LongBody(r.Body, limit)
	defer body.ClearDeadline()
	counted := &countingReader{from: body}
	err = h.guest.Upload(r.Context(), at(name), counted, r.ContentLength)
	return counted.n, homeError(err)
}

// countingReader counts the bytes that are read.
type countingReader struct {
	from io.Reader
	n    int64
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.from.Read(p)
	c.n += int64(n)
	return n, err
}

// MakeDirectory creates a directory and its parents, unless they exist.
func (h *Home) MakeDirectory(ctx context.Context, dir string) error {
	_, err := h.files.MakeDir(ctx, connect.NewRequest(&filesystempb.MakeDirRequest{Path: at(dir)}))
	if connect.CodeOf(err) == connect.CodeAlreadyExists {
		return nil
	}
	return homeError(err)
}

// Unpack unpacks a tar into a directory. It calls each with the path of every entry.
func (h *Home) Unpack(ctx context.Context, in io.Reader, dir string, each func(path string)) error {
	archive := tar.NewReader(in)
	for {
		entry, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return api.Errorf(api.CodeValidation, "the body is no tar: %v", err)
		}
		clean, err := proto.CleanFilePath("/", path.Join("/", entry.Name)) //nolint:gosec // the join leads nowhere else
		if err != nil {
			return api.Errorf(api.CodeValidation, "the tar has the entry %.200q: %v", entry.Name, err)
		}
		name := path.Join(dir, clean)
		switch entry.Typeflag {
		case tar.TypeDir:
			err = h.MakeDirectory(ctx, name)
		case tar.TypeReg:
			err = homeError(h.guest.Upload(ctx, at(name), archive, entry.Size))
		case tar.TypeXGlobalHeader:
			continue
		default:
			err = api.Errorf(api.CodeValidation,
				"the tar has the entry %.200q, which is neither a file nor a directory", entry.Name)
		}
		if err != nil {
			return err
		}
		each(entry.Name)
	}
}

// Delete deletes the file or directory at a path. A directory that is not empty needs recursive.
func (h *Home) Delete(ctx context.Context, name string, recursive bool) error {
	if !recursive {
		empty := true
		err := h.List(ctx, name, func(proto.File) error { empty = false; return nil })
		known, isKnown := errors.AsType[*api.Error](err)
		switch {
		case isKnown && known.Code == api.CodeNotFound:
			return err
		case !empty:
			return api.Errorf(api.CodeConflict, "the directory is not empty; delete it with recursive")
		}
	}
	if _, err := h.files.Stat(ctx, connect.NewRequest(&filesystempb.StatRequest{Path: at(name)})); err != nil {
		return homeError(err)
	}
	_, err := h.files.Remove(ctx, connect.NewRequest(&filesystempb.RemoveRequest{Path: at(name)}))
	return homeError(err)
}

// Move renames a file or directory. It creates the parents of the new path.
func (h *Home) Move(ctx context.Context, from, to string) error {
	_, err := h.files.Move(ctx, connect.NewRequest(&filesystempb.MoveRequest{Source: at(from), Destination: at(to)}))
	return homeError(err)
}
