package natsembed_test

import (
	"log/slog"
	"strings"
	"testing"

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
