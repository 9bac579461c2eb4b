package main

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// settle makes of the namespaces of a jail that was forked what nsjail makes of others:
// it mounts what is the jail's own, and brings up the loopback.
func settle() error {
	typ, payload := receive()
	mounts, ok := wire.ParseMounts(payload)
	if typ != wire.Mounts || !ok {
		unix.Exit(exitFrame)
	}
	for _, m := range mounts {
		if err := unix.Mount(m.Source, m.Target, m.FSType, uintptr(m.Flags), m.Options); err != nil {
			return errors.New("mount " + m.Target + ": " + err.Error())
		}
	}
	if err := loopbackUp(); err != nil {
		return errors.New("bring up the loopback: " + err.Error())
	}
	return nil
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
}
