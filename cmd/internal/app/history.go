package app

import (
	"path/filepath"

	schedulerhistory "github.com/bullpen-run/bullpen/scheduler/history"
	"github.com/bullpen-run/bullpen/storage/history"
)

// historyFile is the name of the index of executions in the data directory.
const historyFile = "history.db"

// openHistory opens the index of executions: the file in the data directory, or PostgreSQL.
func (s *system) openHistory() (err error) {
	address, shared := s.cfg.History, true
	if address == "" {
		address, shared = filepath.Join(s.cfg.Data, historyFile), false
	}
	if s.historyIndex, err = history.Open(address, s.log); err != nil {
		return err
	}
	s.history = &schedulerhistory.History{
		Store: s.store, Index: s.historyIndex, Shared: shared, Instance: s.instance,
		Retention: s.cfg.Retention, Log: s.log,
	}
	if !shared {
		s.history.DiskFull = (&dataDisk{dir: s.cfg.Data, reserve: int64(s.cfg.DiskReserve)}).full
	}
	return nil
}
