package app

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/bullpen-run/bullpen/scheduler/backup"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// BackupSummary describes a backup.
type BackupSummary = backup.Summary

// CheckBackup reads a backup to its end. It returns an error if the backup is not complete.
func CheckBackup(r io.Reader) (BackupSummary, error) { return backup.Check(r) }

// Restore restores the backup in r into the JetStream that a server with the settings cfg would
// use. Nothing may be stored there.
func Restore(ctx context.Context, cfg *Config, r io.Reader) (BackupSummary, error) {
	log := NewLogger(os.Stderr, cfg.LogLevel, cfg.LogFormat)
	access := cfg.access("bullpen restore")
	if cfg.Embedded() {
		if _, err := os.Stat(filepath.Join(cfg.Data, "bootstrap.key")); err == nil {
			return BackupSummary{}, fmt.Errorf(
				"%s was used by a server already: its bootstrap.key would not be a key; choose a new --data", cfg.Data)
		}
		server, err := natsembed.Open(cfg.Data, minDiskReserve, log)
		if err != nil {
			return BackupSummary{}, err
		}
		defer server.Close()
		access.InProcess = server
	}
	summary, err := backup.Restore(ctx, access,
		store.Config{Replicas: cfg.Replicas, Retention: cfg.Retention, AuditRetention: cfg.AuditRetention}, r, log)
	if err == nil {
		cfg.warnSecrets(ctx, summary.DataKey, log)
	}
	return summary, err
}
