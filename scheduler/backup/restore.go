package backup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/scheduler/keyring"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// ErrUsed means that a backup cannot be restored here, because bullpen already has data here.
var ErrUsed = errors.New("there is something of bullpen in this JetStream already")

// Restore stores the backup in r in the JetStream that a connects to. It returns [ErrUsed] if
// bullpen has any data there, except the data of an unfinished restore, which it removes. No
// process of bullpen may run there. After an error, no server starts there until another restore
// has succeeded.
func Restore(
	ctx context.Context, a store.Access, cfg store.Config, r io.Reader, log *slog.Logger,
) (s Summary, err error) {
	nc, err := store.Dial(a, log)
	if err != nil {
		return s, err
	}
	defer nc.Close()
	restore, used, err := store.OpenForRestore(ctx, nc)
	if err != nil {
		return s, err
	}
	unfinished, err := restore.Unfinished(ctx)
	if err != nil {
		return s, err
	}
	if len(used) > 0 && !unfinished {
		return s, fmt.Errorf("%w: %s: a backup is restored only where there is nothing, such as in a new data directory",
			ErrUsed, strings.Join(used, ", "))
	}
	if err := restore.Begin(ctx, cfg, log); err != nil {
		return s, err
	}
	var pending []jetstream.PubAckFuture
	var dataKey []byte
	s, err = read(r, func(e *entry, body []byte) error {
		if !store.InBackup(e.Subject) {
			return fmt.Errorf("%w: it has a message on %q", ErrDamaged, e.Subject)
		}
		if keyring.IsDataKey(e.Subject) {
			dataKey = bytes.Clone(body)
		}
		ack, err := restore.Put(ctx, e.Subject, store.BackupHeader(e.Header), body, e.Time)
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
		err = restore.End(ctx)
	}
	if err != nil {
		return s, fmt.Errorf("restore: %w", err)
	}
	s.DataKey = dataKey
	return s, nil
}

// stored waits for the acknowledgement of a message.
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
