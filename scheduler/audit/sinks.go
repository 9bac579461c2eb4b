package audit

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	httpTimeout   = 30 * time.Second
	syslogTimeout = 30 * time.Second // of a connection with its messages
	syslogClose   = 2 * time.Second  // for the server to close its side
	// syslogPriority is facility 13, log audit, with severity 5, notice.
	syslogPriority = 13*8 + 5
)

// HTTPSink posts records as JSONL. Every answer but 2xx is a failure, and redirects are not
// followed.
type HTTPSink struct {
	URL       string
	UserAgent string
}

// Send implements [Sink].
func (s *HTTPSink) Send(ctx context.Context, records []Entry) error {
	ctx, cancel := context.WithTimeout(ctx, httpTimeout)
	defer cancel()
	var body bytes.Buffer
	for i := range records {
		body.Write(records[i].Line)
		body.WriteByte('\n')
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL, &body)
	if err != nil {
		return fmt.Errorf("post audit records: %w", withoutURL(err))
	}
	req.Header.Set("Content-Type", "application/x-ndjson")
	req.Header.Set("User-Agent", s.UserAgent)
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("post audit records: %w", withoutURL(err))
	}
	defer func() { _ = resp.Body.Close() }() // its content is not needed
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("post audit records: the endpoint answered %s", resp.Status)
	}
	return nil
}

// withoutURL returns the cause of a net/http error, whose text has the URL with its secrets.
func withoutURL(err error) error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		return wrapped.Err
	}
	return err
}

// SyslogSink sends records as messages of RFC 5424 with their JSON as the text: over UDP, over TCP
// with octet counting (RFC 6587), or over TLS (RFC 5425). Syslog has no acknowledgements, so each
// batch uses a new connection to detect a dead server.
type SyslogSink struct {
	network, address string
	hostname         string
}

// NewSyslogSink returns the sink at udp://HOST:PORT, tcp://HOST:PORT or tls://HOST:PORT.
func NewSyslogSink(text string) (*SyslogSink, error) {
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || u.Port() == "" || text != u.Scheme+"://"+u.Host ||
		u.Scheme != "udp" && u.Scheme != "tcp" && u.Scheme != "tls" {
		return nil, fmt.Errorf("%q must be udp://HOST:PORT, tcp://HOST:PORT or tls://HOST:PORT", text)
	}
	hostname, err := os.Hostname()
	if err != nil || strings.ContainsFunc(hostname, func(r rune) bool { return r <= ' ' || r > '~' }) {
		hostname = "-"
	}
	return &SyslogSink{network: u.Scheme, address: u.Host, hostname: hostname}, nil
}

// Send implements [Sink].
func (s *SyslogSink) Send(ctx context.Context, records []Entry) error {
	ctx, cancel := context.WithTimeout(ctx, syslogTimeout)
	defer cancel()
	conn, err := s.dial(ctx)
	if err != nil {
		return fmt.Errorf("connect to syslog: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(0, 0)) })
	defer stop()
	for i := range records {
		message := s.message(&records[i])
		if s.network != "udp" {
			message = append(fmt.Appendf(nil, "%d ", len(message)), message...)
		}
		if _, err := conn.Write(message); err != nil {
			return errors.Join(fmt.Errorf("send audit record %d to syslog: %w", records[i].Sequence, err), conn.Close())
		}
	}
	if err := finish(conn); err != nil {
		return fmt.Errorf("send audit records to syslog: %w", err)
	}
	return nil
}

// finish closes a connection after the last write. A server that has read everything closes its
// side, too, or does nothing; a reset is an error.
func finish(conn net.Conn) error {
	half, ok := conn.(interface{ CloseWrite() error })
	if !ok {
		return conn.Close()
	}
	err := half.CloseWrite()
	if err == nil {
		err = conn.SetReadDeadline(time.Now().Add(syslogClose))
	}
	if err == nil {
		_, err = io.Copy(io.Discard, conn)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = nil
	}
	return errors.Join(err, conn.Close())
}

func (s *SyslogSink) dial(ctx context.Context) (net.Conn, error) {
	if s.network == "tls" {
		return (&tls.Dialer{Config: &tls.Config{MinVersion: tls.VersionTLS12}}).DialContext(ctx, "tcp", s.address)
	}
	return new(net.Dialer).DialContext(ctx, s.network, s.address)
}

func (s *SyslogSink) message(r *Entry) []byte {
	head := fmt.Appendf(nil, "<%d>1 %s %s bullpen - %s - ", syslogPriority, r.Time.UTC().Format(proto.TimeLayout),
		s.hostname, r.Action)
	return append(head, r.Line...)
}
