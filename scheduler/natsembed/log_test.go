package natsembed

import (
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
)

// The lines are copied from the server's source. Only they show that a store rejects writes.
func TestStoreFailuresAreRecognised(t *testing.T) {
	for line, failed := range map[string]bool{
		"Filestore [BULLPEN_EXECS] Critical write error: write 1.blk: input/output error":                     true,
		"JetStream stream '$G > BULLPEN_JOBS' critical write error: write 2.blk: no space left on device":     true,
		"JetStream failed to store a msg on stream '$G > BULLPEN_JOBS': write 2.blk: No space left on device": true,
		"JetStream out of File resources, will be DISABLED":                                                   true,
		"JetStream out of space, will be DISABLED":                                                            true,
		"JetStream resource limits exceeded for account":                                                      false,
		"insufficient resources":                     false,
		"Failed to write pidfile: permission denied": false,
	} {
		var fault atomic.Bool
		(&logger{log: slog.New(slog.NewTextHandler(t.Output(), nil)), fault: &fault}).Errorf("%s", line)
		if fault.Load() != failed {
			t.Errorf("%q counts as a failure of the store: %v", line, fault.Load())
		}
	}
}

// A cluster that starts or stops logs no errors.
func TestPeersThatComeAndGoAreNoErrors(t *testing.T) {
	for line, level := range map[string]string{
		"Error trying to connect to route (attempt 1): dial tcp 10.231.0.2:6222: connect: " +
			"connection refused": "INFO",
		"10.231.0.2:6222 - rid:11 - Error flushing: writev tcp 10.231.0.3:59314->10.231.0.2:6222: writev: connection " +
			"reset by peer": "INFO",
		"10.231.0.2:4222 - cid:11 - Error flushing: " +
			"broken pipe": "ERROR",
		"Failed to write pidfile: " +
			"permission denied": "ERROR",
	} {
		var log strings.Builder
		(&logger{log: slog.New(slog.NewTextHandler(&log, nil)), fault: new(atomic.Bool)}).Errorf("%s", line)
		if !strings.Contains(log.String(), "level="+level) {
			t.Errorf("%q is logged as %s", line, log.String())
		}
	}
}
