package nsjail

import (
	"errors"
	"log/slog"
	"testing"
)

// A worker that has no file descriptor left for a moment watches the host's memory afterwards.
func TestWatchSurvivesFailedReadings(t *testing.T) {
	readings, n := make(chan int), 0
	m := &Maker{cfg: Config{Log: slog.New(slog.DiscardHandler)}}
	w := m.watchHost(func() (reading, error) {
		n++
		readings <- n
		if n <= 3 {
			return reading{}, errors.New("too many open files")
		}
		return reading{}, nil
	})
	s := &sandbox{}
	w.add(s)
	for want := range 6 {
		if got := <-readings; got != want+1 {
			t.Errorf("reading %d is number %d", want+1, got)
		}
	}
	w.remove(s)
	go func() {
		for range readings { // a last one may be under way
		}
	}()
	w.close()
	close(readings)
}
