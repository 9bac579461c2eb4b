package client

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// dial returns a client of a server.
func dial(t *testing.T, url string) *Client {
	t.Helper()
	c, err := New(Config{URL: url, Key: "sk-local-x"})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// zeros is a file of zeros.
type zeros struct{}

func (zeros) ReadAt(p []byte, _ int64) (int, error) {
	clear(p)
	return len(p), nil
}

// A part that fails is sent again, and nothing else.
func TestUploadPartsAreSentAgain(t *testing.T) {
	const size, each = PartsFrom + 1, 16 << 20
	var mu sync.Mutex
	requests := map[string]int{}
	var stored int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		mu.Lock()
		defer mu.Unlock()
		name := r.Method + " " + r.URL.RequestURI()
		requests[name]++
		switch {
		case r.URL.Path == "/v1/files/uploads":
			_, _ = fmt.Fprintf(w, `{"url":"http://%s/signed","part_size":%d,"parts":5,"expires_at":"2026-01-02T03:04:05Z"}`,
				r.Host, each)
			return
		case r.Header.Get("Authorization") != "":
			w.WriteHeader(http.StatusForbidden)
			return
		case name == "PUT /signed?part=2" && requests[name] == 1:
			panic(http.ErrAbortHandler)
		case name == "PUT /signed?part=3" && requests[name] == 1:
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		case r.Method == http.MethodPut:
			stored += n
		}
		_, _ = io.WriteString(w, "{}")
	}))
	t.Cleanup(server.Close)
	c := dial(t, server.URL)
	var most int64
	err := c.Upload(t.Context(), ThreadFiles("t"), "x", size, zeros{}, func(now int64) {
		mu.Lock()
		defer mu.Unlock()
		most = max(most, now)
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int{
		"POST /v1/files/uploads": 1, "PUT /signed?part=1": 1, "PUT /signed?part=2": 2, "PUT /signed?part=3": 2,
		"PUT /signed?part=4": 1, "PUT /signed?part=5": 1, "POST /signed": 1,
	}
	if fmt.Sprint(requests) != fmt.Sprint(want) || stored != size || most != size {
		t.Errorf("%v, %d bytes, progress %d", requests, stored, most)
	}
}

// A download continues where it broke off, unless the file is another.
func TestDownloadIsResumed(t *testing.T) {
	content := bytes.Repeat([]byte("0123456789"), 100_000)
	tag := `"a"`
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			_, _ = fmt.Fprintf(w, `{"url":"http://%s/signed","method":"GET","headers":[],"expires_at":"2026-01-02T03:04:05Z"}`,
				r.Host)
			return
		}
		var offset int
		w.Header().Set("ETag", tag)
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &offset); err == nil && r.Header.Get("If-Range") == tag {
			w.Header().Set("Content-Length", fmt.Sprint(len(content)-offset))
			w.WriteHeader(http.StatusPartialContent)
		} else {
			offset = 0
			w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		}
		_, _ = w.Write(content[offset:min(offset+300_000, len(content))]) // broken off, if it is not all
	}))
	t.Cleanup(server.Close)
	c := dial(t, server.URL)
	at := ConnectionFiles("data")
	sum := sha256.New()
	if err := c.Download(t.Context(), at, "x", sum); err != nil || string(sum.Sum(nil)) != string(sha(content)) {
		t.Errorf("%v", err)
	}
	changing := writerFunc(func(p []byte) (int, error) { tag = `"b"`; return len(p), nil })
	if err := c.Download(t.Context(), at, "x", changing); err == nil ||
		!strings.Contains(err.Error(), "the file has changed since") {
		t.Errorf("%v", err)
	}
}

func sha(content []byte) []byte {
	sum := sha256.Sum256(content)
	return sum[:]
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
