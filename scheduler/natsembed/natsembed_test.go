package natsembed_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/scheduler/natsembed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDirectoryIsLocked(t *testing.T) {
	dir := t.TempDir()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	s, err := natsembed.Open(dir, 1, log)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := natsembed.Open(dir, 1, log); err == nil || !strings.Contains(err.Error(), "in use by another bullpen") {
		t.Fatalf("a second server: %v", err)
	}
	s.Close()
	s, err = natsembed.Open(dir, 1, log)
	if err != nil {
		t.Fatalf("after the first has gone: %v", err)
	}
	s.Close()
}

// A child process that a killed server was starting may hold its lock for a moment longer.
func TestLockThatIsGivenUpIsWaitedFor(t *testing.T) {
	dir := t.TempDir()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	ghost, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(ghost.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(200*time.Millisecond, func() { _ = ghost.Close() })
	s, err := natsembed.Open(dir, 1, log)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
}
