package storage_test

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/s3"
)

// An execution waits at most half a minute for its store, and one request without an response is
// retried.
func TestDefaultRetryIsBounded(t *testing.T) {
	for name, test := range map[string]struct {
		each     time.Duration // duration of a request
		attempts int
		least    time.Duration
		most     time.Duration
	}{
		"refuses": {0, 8, 5 * time.Second, 20 * time.Second},
		"silent":  {s3.DefaultIdleTimeout, 2, 2 * s3.DefaultIdleTimeout, 31 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began, attempts := time.Now(), 0
				err := blob.DefaultRetry().Do(t.Context(), func() error {
					attempts++
					time.Sleep(test.each) // on the fake clock
					return &blob.Error{Op: "put", Key: "a", Kind: blob.ErrUnavailable, Retryable: true}
				})
				took := time.Since(began)
				if !errors.Is(err, blob.ErrUnavailable) || attempts != test.attempts || took < test.least || took > test.most {
					t.Errorf("%d attempts in %s: %v", attempts, took, err)
				}
			})
		})
	}
}

// OnError is called for requests that the store did not carry out, not for answers about objects.
func TestErrorsOfTheStoreAreReported(t *testing.T) {
	var reported []string
	policy := blob.RetryPolicy{Attempts: 2, MinWait: 1, MaxWait: 1, OnError: func(operation string) {
		reported = append(reported, operation)
	}}
	for _, failed := range []*blob.Error{
		{Op: "put", Kind: blob.ErrUnavailable, Retryable: true},
		{Op: "get", Kind: proto.ErrCorrupt},
		{Op: "stat", Kind: proto.ErrNotFound},
		{Op: "put", Kind: proto.ErrExists},
	} {
		if err := policy.Do(t.Context(), func() error { return failed }); !errors.Is(err, failed.Kind) {
			t.Error(err)
		}
	}
	if want := []string{"put", "put", "get"}; !slices.Equal(reported, want) {
		t.Errorf("reported %v, want %v", reported, want)
	}
}
