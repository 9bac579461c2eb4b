package main_test

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

// openChannel opens the channel of the sandbox and returns the address on which programs reach it.
func (s *sandbox) openChannel() string {
	s.t.Helper()
	code, _, body := s.do(s.request("POST", "/channel", nil))
	var channel struct{ Port int }
	if err := json.Unmarshal([]byte(body), &channel); err != nil || code != http.StatusOK || channel.Port == 0 {
		s.t.Fatalf("%d %s", code, body)
	}
	return "127.0.0.1:" + strconv.Itoa(channel.Port)
}

// acceptConnection fetches the next connection to the channel, as the gateway does.
func (s *sandbox) acceptConnection() io.ReadWriteCloser {
	s.t.Helper()
	resp, err := s.http.Transport.RoundTrip(s.request("POST", "/channel/accept", nil,
		"Connection", "Upgrade", "Upgrade", "bullpen-channel"))
	check(s.t, err)
	conn, ok := resp.Body.(io.ReadWriteCloser)
	if resp.StatusCode != http.StatusSwitchingProtocols || !ok {
		s.t.Fatalf("%s", resp.Status)
	}
	return conn
}

// Programs reach whoever fetches their connections, also before anybody has fetched them.
func TestChannel(t *testing.T) {
	s := newSandbox(t)
	address := s.openChannel()
	if again := s.openChannel(); again != address {
		t.Errorf("the channel is at %s and at %s", address, again)
	}
	host, _, err := net.SplitHostPort(address)
	check(t, err)
	if host != "127.0.0.1" {
		t.Errorf("the channel listens on %s", host)
	}
	for _, first := range []bool{true, false} { // the program connects first
		var program net.Conn
		connect := func() {
			program, err = net.Dial("tcp", address)
			check(t, err)
		}
		var gateway io.ReadWriteCloser
		if first {
			connect()
			gateway = s.acceptConnection()
		} else {
			accepted := make(chan io.ReadWriteCloser)
			go func() { accepted <- s.acceptConnection() }()
			connect()
			gateway = <-accepted
		}
		_, err = io.WriteString(program, "question\n")
		check(t, err)
		line, err := bufio.NewReader(gateway).ReadString('\n')
		if line != "question\n" || err != nil {
			t.Errorf("%q, %v", line, err)
		}
		_, err = io.WriteString(gateway, "answer")
		check(t, err)
		check(t, gateway.Close())
		answer, err := io.ReadAll(program)
		if string(answer) != "answer" || err != nil {
			t.Errorf("%q, %v", answer, err)
		}
		check(t, program.Close())
	}
	code, _, body := s.do(s.request("POST", "/channel/accept", nil))
	if code != http.StatusBadRequest || !strings.Contains(body, "upgrade") {
		t.Errorf("%d %s", code, body)
	}
}

// Connections that nobody fetches do not pile up.
func TestChannelRefusesMore(t *testing.T) {
	s := newSandbox(t)
	address := s.openChannel()
	for range 200 {
		conn, err := net.Dial("tcp", address)
		check(t, err)
		t.Cleanup(func() { _ = conn.Close() })
	}
	last, err := net.Dial("tcp", address)
	check(t, err)
	if _, err := last.Read(make([]byte, 1)); err == nil {
		t.Error("the channel keeps all connections")
	}
	check(t, last.Close())
}
