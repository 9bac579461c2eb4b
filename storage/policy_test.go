package storage_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/s3"
)

// An execution waits for its store no longer than half a minute, however the store fails, and one request without an answer is no failure.
func TestDefaultPolicyIsBounded(t *testing.T) {
	for name, test := range map[string]struct {
		each  time.Duration // that a request takes
		tries int
		least time.Duration
		most  time.Duration
	}{
		"refuses": {0, 8, 5 * time.Second, 20 * time.Second},
		"silent":  {s3.DefaultSilence, 2, 2 * s3.DefaultSilence, 31 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began, tries := time.Now(), 0
				err := blob.DefaultPolicy().Do(t.Context(), func() error {
					tries++
					time.Sleep(test.each) // of a clock that does not wait
					return &blob.Error{Op: "put", Key: "a", Kind: blob.ErrUnavailable, Again: true}
				})
				took := time.Since(began)
				if !errors.Is(err, blob.ErrUnavailable) || tries != test.tries || took < test.least || took > test.most {
					t.Errorf("%d tries in %s: %v", tries, took, err)
				}
			})
		})
	}
}
