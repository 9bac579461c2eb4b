package s3

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// openHostile opens a bucket whose server answers with what a tenant wants.
func openHostile(t *testing.T, answer http.HandlerFunc) *Files {
	t.Helper()
	server := httptest.NewServer(answer)
	t.Cleanup(server.Close)
	b, err := OpenBucket(BucketConfig{
		S3Mount:     proto.S3Mount{Endpoint: server.URL, Region: "r", Bucket: "b", PathStyle: true},
		Credentials: proto.S3Credentials{AccessKeyID: "id", SecretAccessKey: "secret"}, MaxConns: 4,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return &Files{Bucket: b}
}

// A server whose directories have no end takes neither memory nor connections without bounds.
func TestBottomlessBucket(t *testing.T) {
	t.Parallel()
	var lists, deletes atomic.Int32
	f := openHostile(t, func(w http.ResponseWriter, r *http.Request) {
		prefix := r.URL.Query().Get("prefix")
		switch r.Method {
		case http.MethodDelete:
			deletes.Add(1)
			w.WriteHeader(http.StatusNoContent)
		case http.MethodGet:
			lists.Add(1)
			_, _ = fmt.Fprintf(w, "<ListBucketResult><CommonPrefixes><Prefix>%sd/</Prefix></CommonPrefixes>", prefix)
			_, _ = fmt.Fprintf(w, "<Contents><Key>%sf</Key></Contents></ListBucketResult>", prefix)
		}
	})
	entries := 0
	err := f.List(t.Context(), "", true, func(proto.File) error { entries++; return nil })
	if _, ok := errors.AsType[*proto.PathError](err); !ok || !strings.Contains(err.Error(), "128") {
		t.Errorf("%v", err)
	}
	if got := lists.Swap(0); got > maxDepth || entries > 2*maxDepth {
		t.Errorf("%d requests, %d entries", got, entries)
	}
	_, err = f.Delete(t.Context(), "x", true)
	if _, ok := errors.AsType[*proto.PathError](err); !ok {
		t.Errorf("%v", err)
	}
	if lists.Load() > 2*maxDepth || deletes.Load() > maxDepth {
		t.Errorf("%d lists, %d deletions", lists.Load(), deletes.Load())
	}
}

// A server that sends more than it was asked for takes no memory for that, and nothing is left out
// of a list.
func TestLongPage(t *testing.T) {
	t.Parallel()
	for what, entry := range map[string]string{
		"entries": "<Contents><Key>%d</Key></Contents>", "empty entries": "<Contents/><!--%d-->",
		"bytes": "<Contents><Key>%d" + strings.Repeat("x", 3*listEntry) + "</Key></Contents>",
	} {
		f := openHostile(t, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte("<ListBucketResult>"))
			for i := range listPage + 1 {
				_, _ = fmt.Fprintf(w, entry, i)
			}
			_, _ = w.Write([]byte("</ListBucketResult>"))
		})
		if err := f.List(t.Context(), "", true, func(proto.File) error { return errBroken }); !errors.Is(err, syscall.EIO) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// A token that continues a list is kept until the directories of its page are listed.
func TestLongToken(t *testing.T) {
	t.Parallel()
	f := openHostile(t, func(w http.ResponseWriter, _ *http.Request) {
		_,
			_ = fmt.Fprintf(
			w,
			"<ListBucketResult><IsTruncated>true</IsTruncated>"+
				"<NextContinuationToken>%s</NextContinuationToken></ListBucketResult>",
			strings.Repeat("x", maxToken+1))
	})
	if err := f.List(t.Context(), "", true, func(proto.File) error { return nil }); err == nil ||
		!strings.Contains(err.Error(), "token") {
		t.Errorf("%v", err)
	}
}

// A server that lists parts without end, or with tags that are long, takes no memory without
// bounds.
func TestHostileParts(t *testing.T) {
	t.Parallel()
	for what, part := range map[string]string{
		"long tags":  "<PartNumber>%d</PartNumber><ETag>" + strings.Repeat("x", maxTag+1) + "</ETag>",
		"no numbers": "<ETag>%d</ETag>",
		"no end":     "<PartNumber>%d</PartNumber><ETag>x</ETag>",
	} {
		var number atomic.Int32
		f := openHostile(t, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte("<ListPartsResult><IsTruncated>true</IsTruncated>"))
			for range listPage {
				_, _ = fmt.Fprintf(w, "<Part>"+part+"</Part>", number.Add(1))
			}
			_, _ = fmt.Fprintf(w, "<NextPartNumberMarker>%d</NextPartNumberMarker></ListPartsResult>", number.Load())
		})
		if _, err := f.UploadedParts(t.Context(), "x", "id"); err == nil || number.Load() > int32(maxUploaded+listPage) {
			t.Errorf("%s: %v after %d parts", what, err, number.Load())
		}
	}
}

// A server that claims an object of any size is not believed.
func TestCopyOfImpossibleObject(t *testing.T) {
	t.Parallel()
	f := openHostile(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) })
	if err := f.Bucket.CopyObject(t.Context(), proto.StoredObject{Name: "x", Size: 1 << 62}, "y"); !errors.Is(
		err, syscall.EFBIG) {
		t.Errorf("%v", err)
	}
}
