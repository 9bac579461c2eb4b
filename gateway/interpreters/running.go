package interpreters

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/proto"
)

// Running returns where programs of a thread run while its sandbox runs, nil if there is none. It waits for a sandbox
// that starts or stops.
func (s *Service) Running(ctx context.Context, org, thread string) (p *proto.Place, err error) {
	id := sandboxID(org, thread)
	err = s.retry(ctx, func(ctx context.Context) error {
		p = nil
		x, err := s.Live.Store.Get(ctx, org, id)
		switch {
		case errors.Is(err, proto.ErrNotFound):
			return nil
		case err != nil:
			return err
		case x.State == proto.SandboxStarting:
			if err := s.Live.Ping(ctx, org, id); err != nil {
				return fmt.Errorf("%w: %w", errChanging, err)
			}
		case x.State == proto.SandboxStopping:
			return errChanging
		case x.State != proto.SandboxRunning:
			return nil
		}
		p = &proto.Place{Start: x.Execution}
		return nil
	})
	return p, err
}

// Home returns the files of a thread's sandbox while that runs, otherwise nil.
func (s *Service) Home(ctx context.Context, org, thread string) (*sandboxes.Home, error) {
	p, err := s.Running(ctx, org, thread)
	if p == nil || err != nil {
		return nil, err
	}
	return s.Live.Home(org, sandboxID(org, thread))
}

// LastUse returns when the sandbox of a thread was used last, at the latest; zero if that is not known.
func (s *Service) LastUse(ctx context.Context, org, thread string) (time.Time, error) {
	x, err := s.Live.Store.Get(ctx, org, sandboxID(org, thread))
	switch {
	case errors.Is(err, proto.ErrNotFound):
		return time.Time{}, nil
	case err != nil:
		return time.Time{}, err
	case x.State.Active():
		return time.Now(), nil
	default:
		return x.StoppedAt, nil
	}
}

// Exec runs a program at a place, and saves the files. A tag that was given before there means the same program. If
// the place is gone, the error is a [*LostError].
func (s *Service) Exec(
	ctx context.Context, org, thread string, p *proto.Place, command *client.Command,
) (client.Exit, error) {
	if err := s.check(ctx, org, thread, p); err != nil {
		return client.Exit{}, err
	}
	guest, err := s.Live.Guest(org, sandboxID(org, thread))
	if err != nil {
		return client.Exit{}, err
	}
	exit, err := guest.Exec(ctx, command)
	if err != nil {
		if ctx.Err() == nil && s.check(ctx, org, thread, p) != nil {
			return exit, &LostError{"its sandbox ended while the program was running"}
		}
		return exit, err
	}
	s.Save(ctx, org, thread)
	return exit, nil
}

// Stop stops the sandbox of a thread, if it runs, on behalf of an API key.
func (s *Service) Stop(ctx context.Context, org, key, thread string) error {
	p, err := s.Running(ctx, org, thread)
	if p == nil || err != nil {
		return err
	}
	caller := proto.Caller{Key: &proto.Key{Org: org, ID: key}}
	_, err = s.Live.Stop(ctx, sandboxID(org, thread), proto.SandboxKill, caller)
	return err
}
