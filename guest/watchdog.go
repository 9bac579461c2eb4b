package main

import (
	"net/http"
	"sync/atomic"
	"time"
)

// requestGrace is how long a guest that got no time to run still waits for a request.
const requestGrace = 2 * time.Second

// watchdog notices that no requests come any more.
type watchdog struct {
	timeout time.Duration
	next    http.Handler
	began   time.Time
	last    atomic.Int64 // when the last request came, since began
}

func newWatchdog(timeout time.Duration, next http.Handler) *watchdog {
	return &watchdog{timeout: timeout, next: next, began: time.Now()}
}

func (w *watchdog) ServeHTTP(answer http.ResponseWriter, r *http.Request) {
	w.last.Store(int64(time.Since(w.began)))
	w.next.ServeHTTP(answer, r)
}

// wait closes abandoned when no request has come for the timeout.
func (w *watchdog) wait(abandoned chan<- struct{}) {
	for {
		if left := w.left(); left > 0 {
			time.Sleep(left)
			continue
		}
		time.Sleep(requestGrace)
		if w.left() <= 0 {
			close(abandoned)
			return
		}
	}
}

// left returns the time that is left for the next request.
func (w *watchdog) left() time.Duration {
	return time.Duration(w.last.Load()) + w.timeout - time.Since(w.began)
}
