package acp

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// keyHost is a host with an API key that may be revoked.
type keyHost struct {
	Host
	checks  atomic.Int64
	revoked atomic.Pointer[error]
}

func (h *keyHost) CheckCaller() error {
	h.checks.Add(1)
	if err := h.revoked.Load(); err != nil {
		return *err
	}
	return nil
}

// A stream ends cleanly soon after its API key was revoked, also if it is never silent.
func TestStreamsEndWithTheirKey(t *testing.T) {
	for _, pause := range []time.Duration{time.Second, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			h, events, ended := &keyHost{}, make(chan found), make(chan error, 1)
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				for ctx.Err() == nil {
					select {
					case <-time.After(pause):
					case <-ctx.Done():
						return
					}
					select {
					case events <- found{[]byte("data: {}\n\n"), func() {}}:
					case <-ctx.Done():
					}
				}
			}()
			go func() { ended <- send(ctx, flusher{httptest.NewRecorder()}, h, events) }()
			time.Sleep(40 * time.Second)
			synctest.Wait()
			if n := h.checks.Load(); n != 2 {
				t.Errorf("%d checks in 40 seconds", n)
			}
			h.revoked.Store(new(errors.New("revoked")))
			time.Sleep(16 * time.Second)
			synctest.Wait()
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
			default:
				t.Error("the stream goes on")
			}
			cancel()
			synctest.Wait()
		})
	}
}

// flusher is an answer that can be flushed.
type flusher struct{ http.ResponseWriter }

func (flusher) Flush() {}
