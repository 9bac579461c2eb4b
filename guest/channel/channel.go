// Package channel passes connections of the sandbox's programs on to the gateway, also where the sandbox has no
// network. It listens on the loopback interface, and the gateway fetches one connection after another.
package channel

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/guest/answer"
)

// Protocol is what a request for a connection upgrades to.
const Protocol = "bullpen-channel"

// maxWaiting is how many connections wait for the gateway. More are refused.
const maxWaiting = 64

// handshakeTimeout limits the answer to a request for a connection.
const handshakeTimeout = 10 * time.Second

// Channel serves the gateway. It is safe for concurrent use.
type Channel struct {
	mu       sync.Mutex
	listener net.Listener // nil before it is needed
	waiting  chan net.Conn
}

// New returns a channel. It does not listen yet.
func New() *Channel { return &Channel{waiting: make(chan net.Conn, maxWaiting)} }

// Open answers with the port on which the channel listens.
func (c *Channel) Open(w http.ResponseWriter, _ *http.Request) {
	port, err := c.listen()
	if err != nil {
		answer.Error(w, http.StatusServiceUnavailable, err.Error())
		return
	}
	answer.JSON(w, http.StatusOK, struct {
		Port int `json:"port"`
	}{port})
}

func (c *Channel) listen() (port int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.listener == nil {
		if c.listener, err = net.Listen("tcp4", "127.0.0.1:0"); err != nil {
			c.listener = nil
			return 0, err
		}
		go c.accept(c.listener)
	}
	address, ok := c.listener.Addr().(*net.TCPAddr)
	if !ok {
		return 0, errors.New("the channel has no port")
	}
	return address.Port, nil
}

// accept queues connections until the program ends.
func (c *Channel) accept(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil { // too many descriptors are open, perhaps
			time.Sleep(time.Second)
			continue
		}
		select {
		case c.waiting <- conn:
		default:
			_ = conn.Close() // the gateway does not fetch any
		}
	}
}

// Accept waits for a connection, and turns the connection of the request into it.
func (c *Channel) Accept(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != Protocol {
		answer.Error(w, http.StatusBadRequest, "the request must ask for an upgrade to "+Protocol)
		return
	}
	var program net.Conn
	select {
	case program = <-c.waiting:
	case <-r.Context().Done():
		return
	}
	defer func() { _ = program.Close() }()
	gateway, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		answer.Error(w, http.StatusInternalServerError, err.Error())
		return
	}
	defer func() { _ = gateway.Close() }()
	_ = gateway.SetDeadline(time.Now().Add(handshakeTimeout))
	_, err = io.WriteString(gateway,
		"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+Protocol+"\r\n\r\n")
	if err != nil || gateway.SetDeadline(time.Time{}) != nil {
		return
	}
	done := make(chan struct{}, 2)
	pass := func(to io.Writer, from io.Reader) {
		_, _ = io.Copy(to, from) // whoever is left learns of the end
		done <- struct{}{}
	}
	go pass(program, buffered.Reader)
	go pass(gateway, program)
	<-done
}
