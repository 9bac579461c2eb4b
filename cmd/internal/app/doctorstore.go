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
	// storePatience is how long all that the store is asked may take.
	storePatience = 20 * time.Second
	// storeTries is how often each request is made: whoever waits for a doctor wants to see what fails now and then.
	storeTries = 2
)

// checkStore puts a small object into the blob store, reads, lists and removes it. Where it is to be a directory that is not
// there, it is tried beside: doctor leaves nothing behind.
func checkStore(ctx context.Context, c *Config) Check {
	check := Check{Name: "blob store", Remedy: "correct --store and --store-key"}
	fail := func(err error) Check {
		check.Found = err.Error()
		if e, ok := errors.AsType[*blob.Error](err); ok {
			check.Found, check.Remedy = e.Problem(), e.Advice()
		}
		if errors.Is(err, fs.ErrPermission) {
			check.Remedy = fmt.Sprintf("let user id %d own the directory of the store, and read the key file if there is one, or run it as the user who may", os.Geteuid())
		}
		check.Found = strings.ReplaceAll(check.Found, "\n", ": ") // it is a cell of a table
		return check
	}
	elsewhere, remove, err := storeToTry(c)
	if err != nil {
		return fail(err)
	}
	defer remove()
	store, err := openStore(ctx, elsewhere)
	if err != nil {
		return fail(err)
	}
	defer func() { _ = store.Close() }() // what it had ends with this process at the latest
	store.Retry.Attempts = storeTries
	ctx, cancel := context.WithTimeoutCause(ctx, storePatience, fmt.Errorf("not done within %s", storePatience))
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
	check.Found = fmt.Sprintf("%s, written, read, listed and removed within %.1f ms", redactURL(location), float64(took.Microseconds())/1000)
	if c.StoreKey != "" {
		check.Found += ", encrypted"
	}
	return check
}

// storeToTry gives the settings with a store that is there, or whose absence is an error.
func storeToTry(c *Config) (elsewhere *Config, remove func(), err error) {
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

// tryStore does everything to a store once, with an object below doctor/ that it removes again.
func tryStore(ctx context.Context, store *blob.Store) (err error) {
	content := []byte("written by bullpen doctor, " + rand.Text())
	sum := sha256.Sum256(content)
	b := proto.Blob{Key: "doctor/" + rand.Text(), Size: int64(len(content)), Digest: "sha256:" + hex.EncodeToString(sum[:])}
	if err := store.Put(ctx, b, bytes.NewReader(content)); err != nil {
		return err
	}
	removed := false
	defer func() {
		if !removed {
			clearing, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTime)
			defer cancel()
			_ = store.Delete(clearing, b.Key) // what went wrong before is told
		}
	}()
	r, err := store.Get(ctx, b)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, r) // the store checks what it gives
	if err := errors.Join(err, r.Close()); err != nil {
		return err
	}
	listed := false
	for entry, err := range store.List(ctx, "doctor/") {
		if err != nil {
			return err
		}
		listed = listed || entry.Key == b.Key && entry.Size == b.Size
	}
	if !listed {
		return &blob.Error{
			Op: "list", Key: "doctor/", Kind: blob.ErrUnavailable, Err: errors.New("what was just put is not there"),
			Remedy: "use a store that lists what it has: one that lags behind loses files of threads and images",
		}
	}
	removed = true
	return store.Delete(ctx, b.Key)
}
