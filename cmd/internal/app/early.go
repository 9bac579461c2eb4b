package app

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"
)

// dispatcherLook is how often a worker asks whether there is a dispatcher.
const dispatcherLook = 5 * time.Second

// checkMachine finds what would make a start fail for sure, before anything is made. Doctor tells more.
func (c *Config) checkMachine() error {
	if !c.Has(RoleWorker) {
		return nil
	}
	if os.Geteuid() != 0 {
		return errors.New("the worker role needs root, to give jails users and control groups of their own: run it as root, or leave " +
			"the role out with --roles and --nats")
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

// watchDispatcher logs when nobody hands out jobs, and when somebody does again: a worker without a dispatcher only waits.
func (s *system) watchDispatcher(ctx context.Context) error {
	look := time.NewTicker(dispatcherLook)
	defer look.Stop()
	missing := false
	for {
		_, err := s.queue.Stats(ctx) // waits a few seconds for an answer
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !missing:
			s.log.Warn("no dispatcher answers, so no jobs come; a gateway or scheduler on this NATS is one", "error", err)
		case err == nil && missing:
			s.log.Info("a dispatcher answers")
		}
		missing = err != nil
		select {
		case <-ctx.Done():
			return nil
		case <-look.C:
		}
	}
}
