package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
)

// byHand is what to do when systemd does not do it for us.
const byHand = "start it outside of the login session, such as with `systemd-run --scope -p Delegate=yes -p TasksMax=infinity`"

// leaveSession moves this process out of a login session: systemd gives those no
// cpu controller, and the shell is in the same group. It goes into a scope that
// systemd makes and leaves to us, as is made for `systemd-run --scope`. A worker
// in any other place stays there, whatever it lacks: somebody put it there, and
// its limits shall count for jails.
func leaveSession(from location) (err error) {
	// It says where it is, and keeps the scope until we are in it.
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
