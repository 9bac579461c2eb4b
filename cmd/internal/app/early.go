package app

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"
)

// dispatcherCheckInterval is how often a worker checks that a dispatcher answers.
const dispatcherCheckInterval = 5 * time.Second

var errNeedsRoot = errors.New("the worker role needs root for the users and control groups of jails")

// checkMachine returns an error if the worker role cannot start on this machine. It changes
// nothing. See Doctor for a full check.
func (c *Config) checkMachine() error {
	if !c.Has(RoleWorker) {
		return nil
	}
	if os.Geteuid() != 0 {
		return errNeedsRoot
	}
	path, err := findNsjail(c.NsjailPath)
	if err != nil {
		return err
	}
	if _, err := exec.LookPath(path); err != nil {
		return fmt.Errorf("find nsjail: %w: name it with --nsjail", err)
	}
	return nil
}

// watchDispatcher logs when the dispatcher stops or resumes answering.
func (s *system) watchDispatcher(ctx context.Context) error {
	ticker := time.NewTicker(dispatcherCheckInterval)
	defer ticker.Stop()
	missing := false
	for {
		_, err := s.queue.Stats(ctx) // waits some seconds for an answer
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !missing:
			s.log.Warn("no dispatcher: start a gateway or scheduler on this NATS", "error", err)
		case err == nil && missing:
			s.log.Info("dispatcher found")
		}
		missing = err != nil
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}
