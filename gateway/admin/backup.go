package admin

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
)

// Backups creates backups of the content of JetStream.
type Backups interface {
	// Backup writes a backup to w. After an error, the written part is not a backup.
	Backup(ctx context.Context, w io.Writer) error
}

// BackupRoutes are the routes of backups.
type BackupRoutes struct {
	*web.Core
	Backups Backups
}

// Handlers returns the handlers of the routes.
func (s *BackupRoutes) Handlers() []web.Handler {
	return []web.Handler{{ID: "backup", Handle: s.backup}}
}

// backup answers with the whole content of JetStream, secrets included.
func (s *BackupRoutes) backup(w http.ResponseWriter, r *web.Request) error {
	done, err := s.Transfers.Begin(r.Context(), r.Key.Org)
	if err != nil {
		return err
	}
	defer done()
	name := "bullpen-" + time.Now().UTC().Format("20060102-150405") + ".backup"
	out := web.NewLazyWriter(w, r, func(h http.Header) {
		h.Set("Content-Type", "application/zstd")
		h.Set("Content-Disposition", web.Attachment(name))
		h.Set("Cache-Control", "private, no-store")
	})
	if err := s.Backups.Backup(r.Context(), out); err != nil {
		return fmt.Errorf("back up: %w", err)
	}
	return nil
}
