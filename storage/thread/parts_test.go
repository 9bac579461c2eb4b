package thread_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

func TestUploadInParts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := must[string](t)(w.versions.BeginUpload(w.ctx, org, 7))
	put := func(id string, number int, content string) error {
		return w.versions.PutPart(w.ctx, org, id, 7, number, []byte(content))
	}
	check(t, put(id, 10, "g"), put(id, 2, "def"), put(id, 1, "xyz"), put(id, 1, "abc"), put(id, 1, "abc"))
	parts := must[[]proto.UploadedPart](t)(w.versions.UploadedParts(w.ctx, org, id, 7))
	if !slices.Equal(parts, []proto.UploadedPart{{Number: 1, Size: 3}, {Number: 2, Size: 3}, {Number: 10, Size: 1}}) {
		t.Errorf("%+v", parts)
	}
	body := must[io.ReadCloser](t)(w.versions.OpenUpload(w.ctx, org, id))
	if content := must[[]byte](t)(io.ReadAll(body)); string(content) != "abcdefg" {
		t.Errorf("%q", content)
	}
	check(t, body.Close())
	for what, err := range map[string]error{
		"other size":         w.versions.PutPart(w.ctx, org, id, 8, 1, []byte("a")),
		"other organisation": w.versions.PutPart(w.ctx, "other", id, 7, 1, []byte("a")), "other id": put("X"+id, 1, "a"),
	} {
		if !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("%s: %v", what, err)
		}
	}
	check(t, w.versions.RemoveUpload(w.ctx, org, id, 7))
	if left := w.backend.keys("uploads/"); len(left) > 0 {
		t.Errorf("%q", left)
	}
	if err := put(id, 1, "abc"); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

// Abandoned uploads are collected, and those that are in use are not.
func TestCollectionOfParts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	abandoned := must[string](t)(w.versions.BeginUpload(w.ctx, org, 6))
	used := must[string](t)(w.versions.BeginUpload(w.ctx, org, 6))
	for _, id := range []string{abandoned, used} {
		check(t, w.versions.PutPart(w.ctx, org, id, 6, 1, []byte("abc")))
	}
	w.backend.age()
	check(t, w.versions.PutPart(w.ctx, org, used, 6, 1, []byte("abc")),
		w.versions.PutPart(w.ctx, org, used, 6, 2, []byte("def")))
	if c := must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge)); c.Uploads.Blobs != 2 {
		t.Errorf("%+v", c)
	}
	body := must[io.ReadCloser](t)(w.versions.OpenUpload(w.ctx, org, used))
	if content := must[[]byte](t)(io.ReadAll(body)); !bytes.Equal(content, []byte("abcdef")) {
		t.Errorf("%q", content)
	}
	check(t, body.Close())
	if _, err := w.versions.UploadedParts(w.ctx, org, abandoned, 6); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

// Of two requests that store the same part at the same time, one remains.
func TestPartStoredTwiceAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := must[string](t)(w.versions.BeginUpload(w.ctx, org, 3))
	var both, stored sync.WaitGroup
	both.Add(2)
	w.backend.watch(nil, func(op, key string) {
		if op == "put" && strings.HasPrefix(key, "uploads/"+org+"/part-") {
			both.Done()
			both.Wait() // both are stored before one of them deletes anything
		}
	})
	for _, content := range []string{"abc", "xyz"} {
		stored.Go(func() {
			if err := w.versions.PutPart(w.ctx, org, id, 3, 1, []byte(content)); err != nil {
				t.Error(err)
			}
		})
	}
	stored.Wait()
	w.backend.watch(nil, nil)
	parts := must[[]proto.UploadedPart](t)(w.versions.UploadedParts(w.ctx, org, id, 3))
	if !slices.Equal(parts, []proto.UploadedPart{{Number: 1, Size: 3}}) {
		t.Errorf("%+v", parts)
	}
	check(t, w.versions.PutPart(w.ctx, org, id, 3, 1, []byte("new")))
	body := must[io.ReadCloser](t)(w.versions.OpenUpload(w.ctx, org, id))
	if content := must[[]byte](t)(io.ReadAll(body)); string(content) != "new" {
		t.Errorf("%q", content)
	}
	check(t, body.Close())
}

// An organisation has a number of uploads, however small they are.
func TestUploadsAreLimitedInNumber(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range 999 {
		check(t, w.backend.Put(w.ctx, fmt.Sprintf("uploads/%s/upload-%d-1", org, i), 0, strings.NewReader(""), false))
	}
	must[string](t)(w.versions.BeginUpload(w.ctx, org, 1))
	var limit *proto.PendingUploadsError
	if _, err := w.versions.BeginUpload(w.ctx, org, 1); !errors.As(err, &limit) || !strings.Contains(err.Error(), "1000") {
		t.Errorf("%v", err)
	}
	must[string](t)(w.versions.BeginUpload(w.ctx, "other", 1))
}
