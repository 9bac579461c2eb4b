package main_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/net/websocket"
)

// listenAlone listens on a loopback address, at a port that nobody has at 127.0.0.1: the guest tries that first.
func listenAlone(t *testing.T, address string) net.Listener {
	t.Helper()
	for {
		listener, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
		check(t, err)
		if address == "127.0.0.1" {
			return listener
		}
		// A socket that does not listen keeps the port from others, and refuses connections.
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		check(t, err)
		t.Cleanup(func() { check(t, syscall.Close(fd)) })
		port := listener.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // it is one
		if syscall.Bind(fd, &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}) == nil {
			return listener
		}
		check(t, listener.Close())
	}
}

// listen starts a server on a loopback address and returns its port.
func listen(t *testing.T, address string, h http.Handler) string {
	t.Helper()
	listener := listenAlone(t, address)
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: h}}
	server.Start()
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(listener.Addr().String())
	check(t, err)
	return port
}

func TestPorts(t *testing.T) {
	s := newSandbox(t)
	echo := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		w.Header().Set("X-Answer", "yes")
		w.WriteHeader(http.StatusTeapot)
		_, _ = fmt.Fprintf(w, "%s %s %s %q %v", r.Method, r.Host, r.RequestURI, b, r.Header)
	})
	for name, address := range map[string]string{"IPv4": "127.0.0.1", "IPv6": "::1"} {
		t.Run(name, func(t *testing.T) {
			port := listen(t, address, echo)
			r := s.request("PUT", "/files/a%2Fb?q=1&x", strings.NewReader("body"),
				"E2b-Sandbox-Port", port, "E2b-Sandbox-Id", "abc", "X-Own", "1", "X-Forwarded-For", "192.0.2.1")
			r.Host = "4711-abc.example.org"
			code, header, body := s.do(r)
			if code != http.StatusTeapot || header.Get("X-Answer") != "yes" ||
				!strings.HasPrefix(body, `PUT 4711-abc.example.org /files/a%2Fb?q=1&x "body"`) ||
				!strings.Contains(body, "X-Own:[1]") || !strings.Contains(body, "X-Forwarded-For:[192.0.2.1]") ||
				strings.Contains(body, "E2b") {
				t.Fatalf("%d %s", code, body)
			}
		})
	}
	t.Run("the guest's own", func(t *testing.T) {
		if code, _, _ := s.do(s.request("GET", "/health", nil, "E2b-Sandbox-Port", "49983")); code != 204 {
			t.Fatal(code)
		}
	})
	for _, port := range []string{"0", "x", "70000"} {
		if code, _, body := s.do(s.request("GET", "/", nil, "E2b-Sandbox-Port", port)); code != 400 {
			t.Errorf("%s: %d %s", port, code, body)
		}
	}
}

func TestClosedPort(t *testing.T) {
	s := newSandbox(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	_, port, err := net.SplitHostPort(listener.Addr().String())
	check(t, err)
	check(t, listener.Close())
	code, header, body := s.do(s.request("GET", "/", nil, "E2b-Sandbox-Port", port, "E2b-Sandbox-Id", "abc"))
	want := `{"sandboxId":"abc","message":"The sandbox is running but port is not open","port":` +
		port + `,"code":502}` + "\n"
	if code != 502 || body != want || header.Get("Content-Type") != "application/json" {
		t.Fatalf("%d %s", code, body)
	}
}

// TestStreams gets what a server sends at once, and has it notice a client that goes away.
func TestStreams(t *testing.T) {
	s := newSandbox(t)
	gone := make(chan struct{})
	port := listen(t, "127.0.0.1", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintln(w, "first")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		close(gone)
	}))
	answer, err := s.http.Do(s.request("GET", "/", nil, "E2b-Sandbox-Port", port))
	check(t, err)
	line, err := bufio.NewReader(answer.Body).ReadString('\n')
	check(t, err)
	if line != "first\n" {
		t.Fatal(line)
	}
	check(t, answer.Body.Close())
	<-gone
}

func TestWebSocket(t *testing.T) {
	s := newSandbox(t)
	port := listen(t, "127.0.0.1", websocket.Handler(func(c *websocket.Conn) { _, _ = io.Copy(c, c) }))
	conn, err := net.Dial("unix", s.path("socket"))
	check(t, err)
	config, err := websocket.NewConfig("ws://guest/socket", "http://guest")
	check(t, err)
	config.Header.Set("E2b-Sandbox-Port", port)
	ws, err := websocket.NewClient(config, conn)
	check(t, err)
	defer func() { _ = ws.Close() }()
	for i := range 100 {
		text := strings.Repeat("x", 1+10*i)
		check(t, websocket.Message.Send(ws, text))
		var got string
		check(t, websocket.Message.Receive(ws, &got))
		if got != text {
			t.Fatalf("%d bytes instead of %d", len(got), len(text))
		}
	}
}
