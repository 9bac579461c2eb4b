package app

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

// Clients that poll must not keep a server from ending.
func TestLaterRequestsAreNotWaitedFor(t *testing.T) {
	began, end := make(chan struct{}), make(chan struct{})
	f := newRequests(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		began <- struct{}{}
		<-end
	}))
	serve := func() (ended chan struct{}) {
		ended = make(chan struct{})
		go func() { f.ServeHTTP(nil, nil); close(ended) }()
		<-began
		return ended
	}
	first, done := serve(), f.done()
	later := serve()
	end <- struct{}{}
	end <- struct{}{}
	<-first
	<-done
	<-later
	done, last := f.done(), serve()
	<-done
	end <- struct{}{}
	<-last
}

// A client that sends frames without end, none of which the server answers, loses its connection.
func TestEndlessFrames(t *testing.T) {
	const flags, stream = 0, 1
	frame := func(kind byte, payload string) string {
		return string([]byte{0, 0, byte(len(payload)), kind, flags, 0, 0, 0, stream}) + payload
	}
	const headers, priority, continuation, unknown = 1, 2, 9, 77
	path := "\x82\x84\x86" // GET / of http
	for name, endless := range map[string]struct{ first, then string }{
		"continuations": {frame(headers, path), frame(continuation, "")},
		"priorities":    {"", frame(priority, "\x00\x00\x00\x00\x00")},
		"unknown":       {"", frame(unknown, "")},
	} {
		for _, secure := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " TLS ", secure), func(t *testing.T) {
				cfg := &Config{Listen: "127.0.0.1:0", Memory: minMemory}
				if secure {
					dir := t.TempDir()
					cfg.TLSCert, cfg.TLSKey = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
					writeCertificate(t, cfg.TLSCert, cfg.TLSKey, 1)
				}
				h, err := listen(cfg, slog.New(slog.NewTextHandler(t.Output(), nil)))
				if err != nil {
					t.Fatal(err)
				}
				ctx, stop := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- h.run(ctx) }()
				t.Cleanup(func() {
					stop()
					if err := <-done; err != nil {
						t.Error(err)
					}
				})
				conn, err := net.Dial("tcp", h.listener.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = conn.Close() })
				if secure {
					conn = tls.Client(conn, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
				}
				const settings = "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
				if _, err := io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"+settings+endless.first); err != nil {
					t.Fatal(err)
				}
				many, sent := []byte(strings.Repeat(endless.then, 4<<10)), 0
				for err == nil && sent < 4*maxUnanswered {
					var n int
					n, err = conn.Write(many)
					sent += n
				}
				if err == nil {
					t.Errorf("the server has taken %d bytes", sent)
				}
			})
		}
	}
}

func TestConnectionsAreLimited(t *testing.T) {
	cfg := &Config{Listen: "127.0.0.1:0", Memory: minMemory}
	h, err := listen(cfg, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	limited := h.listener.(*limitedListener)
	if limited.limit != cfg.maxConnections() || limited.limit < 1000 {
		t.Fatalf("%d connections of %s", limited.limit, cfg.Memory)
	}
	limited.limit = 2
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- h.run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	// get requests the health of the server on a new connection and leaves the connection open.
	get := func() (net.Conn, *http.Response) {
		conn, err := net.Dial("tcp", limited.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		if _, err := conn.Write([]byte("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		return conn, resp
	}
	first, one := get()
	_, two := get()
	if one.StatusCode != http.StatusOK || two.StatusCode != http.StatusOK {
		t.Fatalf("the first two: %s, %s", one.Status, two.Status)
	}
	_, resp := get()
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") != "1" {
		t.Errorf("one too many: %s, %v", resp.Status, resp.Header)
	}
	_ = first.Close()
	for resp.StatusCode != http.StatusOK && t.Context().Err() == nil { // the server notices a moment later
		_, resp = get()
	}
}
