package storage_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/s3"
)

// An execution waits at most half a minute for its store, and one request without an answer is
// retried.
func TestDefaultRetryIsBounded(t *testing.T) {
	for name, test := range map[string]struct {
		each  time.Duration // duration of a request
		tries int
		least time.Duration
		most  time.Duration
	}{
		"refuses": {0, 8, 5 * time.Second, 20 * time.Second},
		"silent":  {s3.DefaultIdleTimeout, 2, 2 * s3.DefaultIdleTimeout, 31 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began, tries := time.Now(), 0
				err := blob.DefaultRetry().Do(t.Context(), func() error {
					tries++
					time.Sleep(test.each) // on the fake clock
					return &blob.Error{Op: "put", Key: "a", Kind: blob.ErrUnavailable, Retryable: true}
				})
				took := time.Since(began)
				if !errors.Is(err, blob.ErrUnavailable) || tries != test.tries || took < test.least || took > test.most {
					t.Errorf("%d tries in %s: %v", tries, took, err)
				}
			})
		})
	}
}
