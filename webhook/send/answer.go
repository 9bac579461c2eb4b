package send

import (
	"context"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/webhook/guard"
)

// maxBody is how much of a response body is read, in bytes.
const maxBody = 64 << 10

var errBodyTooLong = errors.New("the body is too long")

// readBody reads up to maxBody bytes of a response body, so that the connection can be reused. It
// also returns the bytes read before an error.
func readBody(resp *http.Response) ([]byte, error) {
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return nil, nil // another protocol follows, and no body
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err == nil && len(body) > maxBody {
		err = errBodyTooLong
	}
	return body, err
}

// responseHead returns the beginning of a response: status line, headers and body.
func responseHead(resp *http.Response, body []byte) string {
	var b strings.Builder
	b.WriteString(resp.Proto + " " + resp.Status + "\r\n")
	_ = resp.Header.Write(&b) // writes to a strings.Builder do not fail
	b.WriteString("\r\n")
	b.Write(body)
	return truncate(b.String(), proto.MaxResponseHead)
}

// truncate returns the first n bytes of s or fewer, as valid UTF-8.
func truncate(s string, n int) string {
	s = strings.ToValidUTF8(s[:min(len(s), n+utf8.UTFMax)], "\uFFFD")
	return strings.ToValidUTF8(s[:min(len(s), n)], "")
}

// retryAfter parses a Retry-After header: a number of seconds, or a date. It returns 0 if value is
// neither, or a date in the past.
func retryAfter(value string, now time.Time) time.Duration {
	seconds, err := strconv.ParseUint(value, 10, 64)
	switch {
	case errors.Is(err, strconv.ErrRange), err == nil && seconds > uint64(math.MaxInt64/time.Second):
		return math.MaxInt64
	case err == nil:
		return time.Duration(seconds) * time.Second
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	return max(at.Sub(now), 0)
}

// classify returns the class of an attempt's error and a detail for the owner of the receiver. The
// detail discloses nothing about the server's network.
func classify(ctx context.Context, err error, steps *steps) (proto.DeliveryError, string) {
	step, errTLS := steps.current()
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errTimeout):
		return proto.DeliveryTimeout, "the time for the attempt was over " + step
	case errors.Is(cause, errTooManyConnections):
		return proto.DeliveryBroken, "the receiver sent the request away on every connection"
	case cause != nil:
		return proto.DeliveryInternal, "the attempt was broken off " + step
	}
	if refused, ok := errors.AsType[*guard.RefusedError](err); ok {
		return proto.DeliveryRefused, refused.Reason
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		switch {
		case dns.IsNotFound:
			return proto.DeliveryDNS, "the host's name has no address"
		case dns.IsTimeout:
			return proto.DeliveryDNS, "the host's name was not resolved in time"
		}
		return proto.DeliveryDNS, "the host's name could not be resolved"
	}
	if errTLS != nil {
		return proto.DeliveryTLS, reason(err)
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return proto.DeliveryConnect, reason(err)
	}
	return proto.DeliveryBroken, reason(err) + " " + step
}

// reason returns err's innermost message, without the addresses in the errors that wrap it.
func reason(err error) string {
	if number, ok := errors.AsType[syscall.Errno](err); ok {
		return number.Error()
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return "the receiver closed the connection"
	}
	for {
		op, ok := errors.AsType[*net.OpError](err)
		if !ok {
			return err.Error()
		}
		err = op.Err
	}
}
