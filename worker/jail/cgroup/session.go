package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
)

// byHand is the remedy if systemd does not create a scope.
const byHand = "start it outside of the login session, such as with `systemd-run --scope -p Delegate=yes -p " +
	"TasksMax=infinity`"

// leaveSession moves this process out of a login session, whose group has no cpu controller and
// contains the shell. systemd creates a delegated scope, as for `systemd-run --scope`. A worker in
// any other group stays there, even if controllers are missing, because limits on that group must
// count for jails.
func leaveSession(from location) (err error) {
	// The helper prints the path of its group and keeps the scope alive until we are in it.
	holder := exec.Command("systemd-run", "--scope", "--quiet", "--collect", "--description=bullpen worker",
		"--property=Delegate=yes", "--property=TasksMax=infinity", "cat", "/proc/self/cgroup", "-")
	var said strings.Builder
	holder.Stderr = &said
	stay, err := holder.StdinPipe()
	if err != nil {
		return fmt.Errorf("cgroup: leave the session: %w", err)
	}
	out, err := holder.StdoutPipe()
	if err == nil {
		err = holder.Start()
	}
	if err != nil {
		return errors.Join(fmt.Errorf("cgroup: leave the session: %w: %s", err, byHand), stay.Close())
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err == nil {
		path := strings.TrimPrefix(strings.TrimSuffix(line, "\n"), "0::")
		err = write(filepath.Join(from.mount, path), "cgroup.procs", "0")
	}
	if err = errors.Join(err, stay.Close(), holder.Wait()); err != nil {
		return fmt.Errorf("cgroup: leave the session: systemd-run: %w: %s: %s", err, strings.TrimSpace(said.String()), byHand)
	}
	return nil
}
