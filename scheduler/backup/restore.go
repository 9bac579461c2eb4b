package backup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/scheduler/store"
)

// ErrUsed says that there is something where a backup should be restored.
var ErrUsed = errors.New("there is something of bullpen in this JetStream already")

// Restore makes the JetStream of a hold what the backup in r does, and tells of it. Nothing of bullpen may run there, or have been there:
// that is [ErrUsed]. What a restore left that did not come to its end is removed first. After an error no server starts there before another
// restore has succeeded.
func Restore(ctx context.Context, a store.Access, cfg store.Config, r io.Reader, log *slog.Logger) (s Summary, err error) {
	nc, err := store.Dial(a, log)
	if err != nil {
		return s, err
	}
	defer nc.Close()
	st, used, err := store.OpenForRestore(ctx, nc)
	if err != nil {
		return s, err
	}
	unfinished, err := st.RestoreUnfinished(ctx)
	if err != nil {
		return s, err
	}
	if len(used) > 0 && !unfinished {
		return s, fmt.Errorf("%w: %s: a backup is restored only where there is nothing, such as in a new data directory", ErrUsed, strings.Join(used, ", "))
	}
	cfg.Restoring = true
	if err := st.BeginRestore(ctx, cfg); err != nil {
		return s, err
	}
	var pending []jetstream.PubAckFuture
	s, err = read(r, func(e *entry, body []byte) error {
		if !store.InBackup(e.Subject) {
			return fmt.Errorf("%w: it has a message on %q", ErrDamaged, e.Subject)
		}
		ack, err := st.Restore(ctx, e.Subject, store.BackupHeader(e.Header), body, e.Time)
		if err != nil {
			return err
		}
		if pending = append(pending, ack); len(pending) < store.MaxPendingRestores {
			return nil
		}
		ack, pending = pending[0], pending[1:]
		return stored(ctx, ack)
	})
	for _, ack := range pending {
		if err == nil {
			err = stored(ctx, ack)
		}
	}
	if err == nil {
		err = st.EndRestore(ctx)
	}
	if err != nil {
		return s, fmt.Errorf("restore: %w", err)
	}
	return s, nil
}

// stored waits until a message is stored.
func stored(ctx context.Context, ack jetstream.PubAckFuture) error {
	select {
	case <-ack.Ok():
		return nil
	case err := <-ack.Err():
		return fmt.Errorf("store %s: %w", ack.Msg().Subject, err)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
