package gateway

import (
	"fmt"
	"net/http"
	"time"
)

// backup answers with the whole content of JetStream, secrets included.
func (s *Server) backup(w http.ResponseWriter, r *http.Request) error {
	done, err := s.transfers.begin(r.Context(), infoOf(r.Context()).key.Org)
	if err != nil {
		return err
	}
	defer done()
	name := "bullpen-" + time.Now().UTC().Format("20060102-150405") + ".backup"
	out := &lazyWriter{w: w, head: r.Method == http.MethodHead, begin: func(h http.Header) {
		h.Set("Content-Type", "application/zstd")
		h.Set("Content-Disposition", attachment(name))
		h.Set("Cache-Control", "private, no-store")
	}}
	if err := s.Backups.Backup(r.Context(), out); err != nil {
		return fmt.Errorf("back up: %w", err)
	}
	return nil
}
