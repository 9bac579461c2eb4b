package nsjail

import (
	"embed"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/filter"
)

// embedded holds the init after `make build`. Before, it holds only a README.
//
//go:embed all:embedded
var embedded embed.FS

// initImage returns the init's executable as a sealed, read-only file in memory. It is executable
// even if RunDir is mounted noexec.
func initImage() (*os.File, error) {
	b, err := embedded.ReadFile("embedded/jailinit")
	if err != nil {
		return nil, errors.New("this binary was built without the jail's init: build it with `make build`")
	}
	return memfd("jailinit", b, unix.MFD_EXEC)
}

// openGuest returns the guest's executable as a sealed, read-only file in memory, which all guests
// share.
func openGuest() (*os.File, error) {
	b, err := embedded.ReadFile("embedded/guest")
	if err != nil {
		return nil, errors.New("this binary was built without the guest of live sandboxes: build it with `make build`")
	}
	return memfd("guest", b, unix.MFD_EXEC)
}

// filterFile returns the filter that also allows the added calls, as a sealed file in memory.
func filterFile(added []string) (*os.File, error) {
	code, err := filter.Bytes(added)
	if err != nil {
		return nil, err
	}
	return memfd("filter", code, unix.MFD_NOEXEC_SEAL)
}

// memfd returns a read-only descriptor of a sealed file in memory.
func memfd(name string, content []byte, flags int) (*os.File, error) {
	flags |= unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags)
	if errors.Is(err, unix.EINVAL) {
		// Before Linux 6.3, MFD_EXEC does not exist and is not needed.
		fd, err = unix.MemfdCreate(name, flags&^(unix.MFD_EXEC|unix.MFD_NOEXEC_SEAL))
	}
	if err != nil {
		return nil, fmt.Errorf("make a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer func() { _ = f.Close() }()
	if _, err := f.Write(content); err != nil {
		return nil, fmt.Errorf("make a file in memory: %w", err)
	}
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return nil, fmt.Errorf("seal a file in memory: %w", err)
	}
	// Reopened, because a file that is open for writing cannot be executed.
	ro, err := os.Open(selfFD(int(f.Fd())))
	if err != nil {
		return nil, fmt.Errorf("make a file in memory: %w", err)
	}
	return ro, nil
}
