package nsjail

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"

	"github.com/bullpen-run/bullpen/worker/jail/cgroup"
)

// ServiceConfig configures a process that serves a jail from outside.
type ServiceConfig struct {
	Path   string     // the executable
	Argv   []string   // the command
	Env    []string   // the whole environment, as NAME=value
	Files  []*os.File // from descriptor 3 on
	Memory int64      // limit in bytes
	Tasks  int        // limit of threads
}

// Service is an unprivileged process beside the jails, with its own uid and control group. Like a
// jail, it is removed if the worker dies.
type Service struct {
	m     *Maker
	uids  *uidSet
	group *cgroup.Group
	proc  *os.Process
	kill  func()
}

// StartService starts a process.
func (m *Maker) StartService(cfg ServiceConfig) (*Service, error) {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil, errClosing
	}
	m.jails.Add(1)
	m.mu.Unlock()
	s := &Service{m: m}
	s.kill = sync.OnceFunc(func() { _ = s.proc.Kill() }) // it may have ended
	if err := s.start(cfg); err != nil {
		return nil, errors.Join(fmt.Errorf("start a service: %w", err), s.Close())
	}
	return s, nil
}

func (s *Service) start(cfg ServiceConfig) (err error) {
	if s.uids, err = s.m.uids.acquire(); err != nil {
		return err
	}
	if s.group, err = s.m.tree.New("service"+strconv.FormatUint(s.m.seq.Add(1), 10), false); err != nil {
		return err
	}
	id := uint32(s.uids.first)
	files := append([]*os.File{s.m.null, s.m.null, s.m.null}, cfg.Files...)
	s.proc, err = s.group.StartConfined(cfg.Path, cfg.Argv, &os.ProcAttr{
		Dir: "/", Env: cfg.Env,
		Files: append(files, s.uids.lock), // its uid is not used by others as long as it lives
		Sys:   &syscall.SysProcAttr{Setpgid: true, Credential: &syscall.Credential{Uid: id, Gid: id}},
	})
	if err != nil {
		return err
	}
	return s.group.Limit(cgroup.Limits{Memory: cfg.Memory, Tasks: cfg.Tasks})
}

// Kill kills the process. It does not block.
func (s *Service) Kill() { s.kill() }

// Close kills the process, waits until it is gone and releases its resources. It is called once.
func (s *Service) Close() error {
	var errs []error
	if s.proc != nil {
		s.Kill()
		_, err := s.proc.Wait()
		errs = append(errs, err)
	}
	if s.group != nil {
		errs = append(errs, s.group.Remove())
	}
	if s.uids != nil {
		s.m.uids.release(s.uids)
	}
	s.m.jails.Done()
	return errors.Join(errs...)
}
