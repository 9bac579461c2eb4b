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

// maxBody is how much of an answer's body is read, in bytes.
const maxBody = 64 << 10

// errLong says that a body is longer than that.
var errLong = errors.New("the body is too long")

// readBody reads the body of an answer, so that its connection can be kept, and gives what was read of it.
func readBody(resp *http.Response) ([]byte, error) {
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return nil, nil // what follows is no body, and nobody waits for it
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err == nil && len(body) > maxBody {
		err = errLong
	}
	return body, err
}

// responseHead gives the beginning of an answer: status line, headers, and body.
func responseHead(resp *http.Response, body []byte) string {
	var b strings.Builder
	b.WriteString(resp.Proto + " " + resp.Status + "\r\n")
	_ = resp.Header.Write(&b) // a strings.Builder takes everything
	b.WriteString("\r\n")
	b.Write(body)
	return beginning(b.String(), proto.MaxResponseHead)
}

// beginning gives the beginning of a text, of at most that many bytes, in valid UTF-8.
func beginning(s string, most int) string {
	s = strings.ToValidUTF8(s[:min(len(s), most+utf8.UTFMax)], "\uFFFD")
	return strings.ToValidUTF8(s[:min(len(s), most)], "")
}

// retryAfter reads the header of that name: a number of seconds, or a date. What is neither, or past, is 0.
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

// classify tells what went wrong in an attempt. The sentence about it is for the owner of the receiver: it tells nothing of our network.
func classify(ctx context.Context, err error, steps *steps) (proto.DeliveryError, string) {
	what, handshake := steps.doing()
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errTimeout):
		return proto.DeliveryTimeout, "the time for the attempt was over " + what
	case errors.Is(cause, errTooMany):
		return proto.DeliveryBroken, "the receiver sent the request away on every connection"
	case cause != nil:
		return proto.DeliveryInternal, "the attempt was broken off " + what
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
	if handshake != nil {
		return proto.DeliveryTLS, reason(err)
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return proto.DeliveryConnect, reason(err)
	}
	return proto.DeliveryBroken, reason(err) + " " + what
}

// reason gives the cause of an error without the addresses that the errors around it name.
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
