package agents

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Files stores the files of organisations' agents, without their content.
type Files interface {
	// Put stores a file, replacing an existing one with its id. It returns a [*proto.QuotaError] if
	// the organisation has too many.
	Put(ctx context.Context, f proto.AgentFile) error
	// Get returns a file, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (proto.AgentFile, error)
	// List returns the files of an organisation, the newest first.
	List(org string) []proto.AgentFile
	// Remove removes a file, or returns [proto.ErrNotFound].
	Remove(ctx context.Context, org, id string) error
}

// SaveFile stores a file of the organisation, with its content.
func (a *Agent) SaveFile(ctx context.Context, f *proto.AgentFile, body io.Reader) error {
	f.Org = a.org()
	if err := a.removeExpired(ctx); err != nil {
		return a.public(err)
	}
	if err := a.PutFile(ctx, f.Thread(), proto.AgentFileContent, f.Bytes, body); err != nil {
		return err
	}
	err := a.m.Files.Put(ctx, *f)
	if quota, full := errors.AsType[*proto.QuotaError](err); full { // there was none of its id
		cleanup, cancel := web.Detached(ctx)
		defer cancel()
		err = errors.Join(quota, a.m.Versions.Remove(cleanup, f.Org, f.Thread()))
	}
	return a.public(err)
}

// KeepFiles extends the expiry of a container's files to a time, if it is much earlier.
func (a *Agent) KeepFiles(ctx context.Context, container string, until time.Time) error {
	const much = 24 * time.Hour
	for _, f := range a.m.Files.List(a.org()) {
		if f.Container != container || f.ExpiresAt == nil || until.Sub(*f.ExpiresAt) < much || f.Expired(time.Now()) {
			continue
		}
		f.ExpiresAt = &until
		if err := a.m.Files.Put(ctx, f); err != nil {
			return a.public(fmt.Errorf("keep file %s: %w", f.ID, err))
		}
	}
	return nil
}

// File returns a file of the organisation.
func (a *Agent) File(ctx context.Context, id string) (*proto.AgentFile, error) {
	f, err := a.file(ctx, id)
	return f, a.public(err)
}

func (a *Agent) file(ctx context.Context, id string) (*proto.AgentFile, error) {
	if !proto.ValidAgentFileID(id) {
		return nil, errNoFile
	}
	f, err := a.m.Files.Get(ctx, a.org(), id)
	if errors.Is(err, proto.ErrNotFound) || err == nil && f.Expired(time.Now()) {
		return nil, errNoFile
	}
	if err != nil {
		return nil, fmt.Errorf("look up file %s: %w", id, err)
	}
	return &f, nil
}

var errNoFile = api.Errorf(api.CodeNotFound, "there is no file of that id, or it has expired")

// Files returns the organisation's unexpired files, newest first.
func (a *Agent) Files() []proto.AgentFile {
	var list []proto.AgentFile
	for _, f := range a.m.Files.List(a.org()) {
		if !f.Expired(time.Now()) {
			list = append(list, f)
		}
	}
	return list
}

// RemoveFile removes a file of the organisation.
func (a *Agent) RemoveFile(ctx context.Context, id string) error {
	f, err := a.file(ctx, id)
	if err == nil {
		err = a.removeFile(ctx, f)
	}
	return a.public(err)
}

// removeExpired removes a few expired files of the organisation. A call for each new file keeps
// their number from growing.
func (a *Agent) removeExpired(ctx context.Context) error {
	const most = 3
	removed := 0
	for _, f := range a.m.Files.List(a.org()) {
		if !f.Expired(time.Now()) {
			continue
		}
		if err := a.removeFile(ctx, &f); err != nil {
			return err
		}
		if removed++; removed == most {
			break
		}
	}
	return nil
}

// removeFile removes the content first: without it, the file can be removed again.
func (a *Agent) removeFile(ctx context.Context, f *proto.AgentFile) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), web.VersionsTimeout)
	defer cancel()
	if err := a.m.Versions.Remove(ctx, f.Org, f.Thread()); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("remove the content of file %s: %w", f.ID, err)
	}
	if err := a.m.Files.Remove(ctx, f.Org, f.ID); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("remove file %s: %w", f.ID, err)
	}
	return nil
}
