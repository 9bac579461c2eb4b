package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
	"github.com/bullpen-run/bullpen/guest/filesystempb"
)

// Limits of the lists that ListDir returns. Bytes are those of names, paths and metadata.
const (
	maxEntries   = 10_000
	maxListBytes = 4 << 20
	maxAllLists  = 8 << 20 // bytes of all lists that clients have not read yet
)

// Service is the service filesystem.Filesystem. Watches are not implemented.
type Service struct{ *Tree }

// Stat returns what is known about a path.
func (s Service) Stat(
	_ context.Context, r *connect.Request[filesystempb.StatRequest],
) (*connect.Response[filesystempb.StatResponse], error) {
	_, path, err := s.parse(r.Header(), r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	entry, err := s.entry(path)
	if err != nil {
		return nil, rpcError(path, err)
	}
	return connect.NewResponse(&filesystempb.StatResponse{Entry: entry}), nil
}

// MakeDir creates a directory and its parents, which belong to the user.
func (s Service) MakeDir(
	_ context.Context, r *connect.Request[filesystempb.MakeDirRequest],
) (*connect.Response[filesystempb.MakeDirResponse], error) {
	user, path, err := s.parse(r.Header(), r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if info, err := os.Stat(path); err == nil {
		if info.IsDir() {
			return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory %s already exists", path))
		}
		return nil, invalid("%s exists and is not a directory", path)
	}
	err = s.change(user, path, true, func(dir int, name string, owner *account.User) error {
		return makeDir(dir, name, owner)
	})
	if err != nil {
		return nil, rpcError(path, err)
	}
	entry, err := s.entry(path)
	if err != nil {
		return nil, rpcError(path, err)
	}
	return connect.NewResponse(&filesystempb.MakeDirResponse{Entry: entry}), nil
}

// Move renames a file or a directory. Between file systems, it copies and removes.
func (s Service) Move(
	ctx context.Context, r *connect.Request[filesystempb.MoveRequest],
) (*connect.Response[filesystempb.MoveResponse], error) {
	user, source, err := s.parse(r.Header(), r.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	_, destination, err := s.parse(r.Header(), r.Msg.GetDestination())
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(source); err != nil {
		return nil, rpcError(source, err)
	}
	if err := s.move(ctx, user, source, destination); err != nil {
		return nil, rpcError(destination, err)
	}
	entry, err := s.entry(destination)
	if err != nil {
		return nil, rpcError(destination, err)
	}
	return connect.NewResponse(&filesystempb.MoveResponse{Entry: entry}), nil
}

// ListDir returns the entries below a directory in lexical order, and those of its directories behind
// each. It does not follow symbolic links below it.
func (s Service) ListDir(
	ctx context.Context, r *connect.Request[filesystempb.ListDirRequest],
) (*connect.Response[filesystempb.ListDirResponse], error) {
	_, path, err := s.parse(r.Header(), r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, rpcError(path, err)
	}
	if !info.IsDir() {
		return nil, invalid("%s is not a directory", path)
	}
	select {
	case s.lists <- struct{}{}:
		defer func() { <-s.lists }()
	case <-ctx.Done():
		return nil, rpcError(path, ctx.Err())
	}
	l := listing{Tree: s.Tree}
	if err := l.add(ctx, path, max(r.Msg.GetDepth(), 1)); err != nil {
		return nil, rpcError(path, err)
	}
	if err := s.hold(ctx, l.bytes); err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystempb.ListDirResponse{Entries: l.entries}), nil
}

// listing is a list that is being made.
type listing struct {
	*Tree
	entries []*filesystempb.EntryInfo
	bytes   int
}

// sizeOf returns the bytes of an entry.
func sizeOf(e *filesystempb.EntryInfo) int {
	size := len(e.GetName()) + len(e.GetPath()) + len(e.GetSymlinkTarget())
	for key, value := range e.GetMetadata() {
		size += len(key) + len(value)
	}
	return size
}

// add appends the entries of a directory.
func (l *listing) add(ctx context.Context, dir string, depth uint32) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	// One more than there may be: a directory can have any number.
	names, err := f.Readdirnames(maxEntries + 1 - len(l.entries))
	_ = f.Close()
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		if len(l.entries) >= maxEntries {
			return connect.NewError(connect.CodeResourceExhausted,
				fmt.Errorf("there are more than %d entries, the most that one list can have", maxEntries))
		}
		path := filepath.Join(dir, name)
		entry, err := l.entry(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if l.bytes += sizeOf(entry); l.bytes > maxListBytes {
			return connect.NewError(connect.CodeResourceExhausted,
				fmt.Errorf("names and metadata take more than %d bytes, the most that one list can have", maxListBytes))
		}
		l.entries = append(l.entries, entry)
		if depth > 1 && entry.GetType() == filesystempb.FileType_FILE_TYPE_DIRECTORY && !entry.GetIsSymlink() {
			err := l.add(ctx, path, depth-1)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// Remove removes a file or a directory with everything in it. A missing one is a success.
func (s Service) Remove(
	_ context.Context, r *connect.Request[filesystempb.RemoveRequest],
) (*connect.Response[filesystempb.RemoveResponse], error) {
	user, path, err := s.parse(r.Header(), r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if path == "/" {
		return nil, invalid("the root directory cannot be removed")
	}
	if err := s.remove(user, path); err != nil {
		return nil, rpcError(path, err)
	}
	return connect.NewResponse(&filesystempb.RemoveResponse{}), nil
}

var errWatch = connect.NewError(connect.CodeUnimplemented,
	errors.New("this sandbox cannot watch directories: list them instead"))

// WatchDir is not implemented.
func (Service) WatchDir(
	context.Context, *connect.Request[filesystempb.WatchDirRequest],
	*connect.ServerStream[filesystempb.WatchDirResponse],
) error {
	return errWatch
}

// CreateWatcher is not implemented.
func (Service) CreateWatcher(
	context.Context, *connect.Request[filesystempb.CreateWatcherRequest],
) (*connect.Response[filesystempb.CreateWatcherResponse], error) {
	return nil, errWatch
}

// GetWatcherEvents is not implemented.
func (Service) GetWatcherEvents(
	context.Context, *connect.Request[filesystempb.GetWatcherEventsRequest],
) (*connect.Response[filesystempb.GetWatcherEventsResponse], error) {
	return nil, errWatch
}

// RemoveWatcher is not implemented.
func (Service) RemoveWatcher(
	context.Context, *connect.Request[filesystempb.RemoveWatcherRequest],
) (*connect.Response[filesystempb.RemoveWatcherResponse], error) {
	return nil, errWatch
}

// parse returns the user of a request and the absolute form of a path of it.
func (s Service) parse(h http.Header, path string) (account.User, string, error) {
	user, err := s.Users.Of(h)
	if err != nil {
		return user, "", connect.NewError(connect.CodeUnauthenticated, err)
	}
	path, err = resolve(path, user)
	if err != nil {
		return user, "", connect.NewError(connect.CodeInvalidArgument, err)
	}
	return user, path, nil
}

// rpcError gives an error its code.
func rpcError(path string, err error) error {
	if _, ok := errors.AsType[*connect.Error](err); ok {
		return err
	}
	code := connect.CodeInternal
	for _, row := range []struct {
		err  error
		code connect.Code
	}{
		{context.Canceled, connect.CodeCanceled},
		{context.DeadlineExceeded, connect.CodeDeadlineExceeded},
		{os.ErrNotExist, connect.CodeNotFound},
		{os.ErrPermission, connect.CodePermissionDenied},
		{unix.EROFS, connect.CodePermissionDenied},
		{unix.ENOTEMPTY, connect.CodeFailedPrecondition}, // os.ErrExist, too
		{os.ErrExist, connect.CodeAlreadyExists},
		{unix.ELOOP, connect.CodeFailedPrecondition},
		{unix.EBUSY, connect.CodeFailedPrecondition},
		{unix.ENOTDIR, connect.CodeInvalidArgument},
		{unix.EISDIR, connect.CodeInvalidArgument},
		{unix.EINVAL, connect.CodeInvalidArgument},
		{unix.ENAMETOOLONG, connect.CodeInvalidArgument},
		{unix.ENOSPC, connect.CodeResourceExhausted},
		{unix.EDQUOT, connect.CodeResourceExhausted},
	} {
		if errors.Is(err, row.err) {
			code = row.code
			break
		}
	}
	if !strings.Contains(err.Error(), path) {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return connect.NewError(code, err)
}

func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}
