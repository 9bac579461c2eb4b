package app

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/blob"
)

const (
	// storeTimeout bounds all requests to the store.
	storeTimeout = 20 * time.Second
	// storeAttempts is the number of attempts of each request: doctor should show what fails
	// occasionally.
	storeAttempts = 2
	// doctorPrefix begins the keys of the objects that doctor stores.
	doctorPrefix = "doctor/"
)

// checkStore writes, reads, lists and removes a small object of the blob store. If the store is a
// directory that does not exist, it uses another one next to it: doctor leaves nothing behind.
func checkStore(ctx context.Context, c *Config) Check {
	check := Check{Name: "blob store", Remedy: "correct --store and --store-key"}
	fail := func(err error) Check {
		check.Found = err.Error()
		if e, ok := errors.AsType[*blob.Error](err); ok {
			check.Found, check.Remedy = e.Problem(), e.Advice()
		}
		if errors.Is(err, fs.ErrPermission) {
			check.Remedy = fmt.Sprintf(
				"let user id %d own the directory of the store, and read the key file if there is one, or run it as the "+
					"user who may", os.Geteuid())
		}
		check.Found = strings.ReplaceAll(check.Found, "\n", ": ") // it is printed in a table cell
		return check
	}
	settings, remove, err := testStore(c)
	if err != nil {
		return fail(err)
	}
	defer remove()
	store, err := openStore(ctx, settings)
	if err != nil {
		return fail(err)
	}
	defer func() { _ = store.Close() }() // closed when the process ends
	store.Retry.Attempts = storeAttempts
	ctx, cancel := context.WithTimeoutCause(ctx, storeTimeout, fmt.Errorf("not done within %s", storeTimeout))
	defer cancel()
	began := time.Now()
	if err := tryStore(ctx, store); err != nil {
		return fail(err)
	}
	took := time.Since(began)
	location, err := c.StoreLocation()
	if err != nil {
		return fail(err)
	}
	check.OK = true
	check.Found = fmt.Sprintf("%s, written, read, listed and removed within %.1f ms", redactURL(location),
		float64(took.Microseconds())/1000)
	if c.StoreKey != "" {
		check.Found += ", encrypted"
	}
	return check
}

// testStore returns settings with a store that exists, or whose absence is an error. remove deletes
// what it created.
func testStore(c *Config) (settings *Config, remove func(), err error) {
	location, err := c.StoreLocation()
	if err != nil {
		return nil, nil, err
	}
	u, err := url.Parse(location)
	if err != nil || u.Scheme != "file" {
		return c, func() {}, err
	}
	at, err := existing(u.Path)
	if err != nil {
		return nil, nil, err
	}
	if at == filepath.Clean(u.Path) {
		return c, func() {}, nil
	}
	if at, err = os.MkdirTemp(at, ".bullpen-doctor-"); err != nil {
		return nil, nil, err
	}
	own := *c
	own.StoreURL = directoryURL(at)
	return &own, func() { _ = os.RemoveAll(at) }, nil
}

// tryStore uses every operation of a store once, with an object below doctor/ that it removes.
func tryStore(ctx context.Context, store *blob.Store) (err error) {
	content := []byte("written by bullpen doctor, " + rand.Text())
	sum := sha256.Sum256(content)
	b := proto.Blob{
		Key: doctorPrefix + rand.Text(), Size: int64(len(content)),
		Digest: "sha256:" + hex.EncodeToString(sum[:]),
	}
	if err := store.Put(ctx, b, bytes.NewReader(content)); err != nil {
		return err
	}
	removed := false
	defer func() {
		if !removed {
			clearing, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTime)
			defer cancel()
			_ = store.Delete(clearing, b.Key) // the earlier error is returned
		}
	}()
	r, err := store.Get(ctx, b)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, r) // the store verifies the digest
	if err := errors.Join(err, r.Close()); err != nil {
		return err
	}
	listed := false
	for entry, err := range store.List(ctx, doctorPrefix) {
		if err != nil {
			return err
		}
		listed = listed || entry.Key == b.Key && entry.Size == b.Size
	}
	if !listed {
		return &blob.Error{
			Op: "list", Key: doctorPrefix, Kind: blob.ErrUnavailable,
			Err:    errors.New("an object that was just stored is missing"),
			Remedy: "use a store with consistent lists: one that lags behind loses files of threads and images",
		}
	}
	removed = true
	return store.Delete(ctx, b.Key)
}
