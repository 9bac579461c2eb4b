package proto

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/bits"
	"strconv"
	"unicode/utf8"
)

// EventType is the type of a line of an execution's event stream.
type EventType string

// The closed list of event types: clients raise on any other.
const (
	EventStatus    EventType = "status"
	EventOutput    EventType = "output"
	EventDisplay   EventType = "display" // of an execution with rich
	EventKeepalive EventType = "keepalive"
	EventResult    EventType = "result"
)

// Stream names one of a program's two outputs.
type Stream string

// The two outputs.
const (
	Stdout Stream = "stdout"
	Stderr Stream = "stderr"
)

// Events is a run of consecutive events in their wire form: one JSON object a line, each with its
// newline. The result event is not encoded, because it may be large.
type Events struct {
	First, Last int64 // sequence numbers of the first and the last event
	Lines       []byte
	Result      *Record // set in a result event only: write it with [WriteResultEvent] after Lines
}

// AppendStatusEvent appends the event that an execution has started. Its sequence number is always
// 1.
func AppendStatusEvent(dst []byte, id TraceID) []byte {
	dst = append(dst, `{"type":"status","trace_id":"`...)
	dst = append(dst, id...)
	return append(dst, `","status":"running","seq":1}`+"\n"...)
}

// AppendOutputEvent appends an event with a piece of output. Invalid UTF-8 in data becomes U+FFFD,
// and the event then carries the exact bytes, too.
func AppendOutputEvent(dst []byte, stream Stream, data []byte, seq int64) []byte {
	dst = append(dst, `{"type":"output","stream":"`...)
	dst = append(dst, stream...)
	dst = append(dst, `","data":`...)
	dst = AppendJSONString(dst, data)
	if !utf8.Valid(data) {
		dst = append(dst, `,"base64":"`...)
		dst = base64.StdEncoding.AppendEncode(dst, data)
		dst = append(dst, '"')
	}
	return appendSeq(dst, seq)
}

// maxDisplayEvent is the size of a display in an event. An event must fit into a message, together
// with its overhead.
const maxDisplayEvent = 384 << 10

// AppendDisplayEvent appends an event with a display, which is the result with that index. Parts of a
// larger display than an event can have are left out, and the event names them.
func AppendDisplayEvent(dst []byte, index int, d *Display, seq int64) []byte {
	small := *d
	small.Data = maps.Clone(d.Data)
	small.Truncated = nil
	small.Cut(func(size int) bool { return size <= maxDisplayEvent })
	omitted := small.Truncated
	small.Truncated = d.Truncated
	dst = append(dst, `{"type":"display","index":`...)
	dst = strconv.AppendInt(dst, int64(index), 10)
	dst = append(dst, `,"display":`...)
	dst = append(dst, small.JSON()...)
	for i, name := range omitted {
		dst = append(dst, map[bool]string{true: `,"omitted":[`, false: ","}[i == 0]...)
		dst = AppendJSONString(dst, name)
	}
	if len(omitted) > 0 {
		dst = append(dst, ']')
	}
	return appendSeq(dst, seq)
}

// AppendKeepaliveEvent appends a keepalive event. It repeats the sequence number of the last event
// sent, 0 before the first.
func AppendKeepaliveEvent(dst []byte, seq int64) []byte {
	return appendSeq(append(dst, `{"type":"keepalive"`...), seq)
}

// AppendMissingEvent appends a keepalive event that reports the numbers of lost events. seq is the
// number of the last event sent.
func AppendMissingEvent(dst []byte, seq, first, last int64) []byte {
	dst = append(dst, `{"type":"keepalive","missing":{"first":`...)
	dst = strconv.AppendInt(dst, first, 10)
	dst = append(dst, `,"last":`...)
	dst = strconv.AppendInt(dst, last, 10)
	return appendSeq(append(dst, '}'), seq)
}

// WriteResultEvent writes the last event of an execution. It encodes outputs in pieces, so that
// many MiB need no memory. Unless the error is w's, nothing was written.
func WriteResultEvent(w io.Writer, r *Record) error {
	if r.Result == nil {
		return fmt.Errorf("result event of %s: the execution has not ended", r.TraceID)
	}
	head := append([]byte(`{"type":"result","trace_id":"`), r.TraceID...)
	head = append(head, `","status":"`...)
	head = append(head, r.Status.Stream()...)
	head = append(head, `","result":`...)
	tail := strconv.AppendBool([]byte(`,"output_truncated":`), r.OutputTruncated)
	return writeResult(w, head, r.Result, appendSeq(tail, r.ResultSeq))
}

// WriteResult writes the JSON form of r in pieces, as [WriteResultEvent] does. Its strings are escaped like the strings
// of events.
func WriteResult(w io.Writer, r *Result) error { return writeResult(w, nil, r, nil) }

func writeResult(w io.Writer, head []byte, r *Result, tail []byte) error {
	rest := r.WithoutOutput()
	small, err := json.Marshal(rest)
	if err != nil {
		return fmt.Errorf("encode result: %w", err)
	}
	before, after, _ := bytes.Cut(small, []byte(`"stdout":"","stderr":""`))
	return WriteOutputs(w, append(head, before...), r.Stdout, r.Stderr, r.Results, append(after, tail...))
}

// WriteOutputs writes head, the members stdout, stderr and results of a JSON object, and tail. It
// encodes the outputs in pieces. Without results their member is absent.
func WriteOutputs(w io.Writer, head []byte, stdout, stderr string, results []Display, tail []byte) error {
	if _, err := w.Write(append(head, `"stdout":`...)); err != nil {
		return err
	}
	if err := WriteJSONString(w, stdout); err != nil {
		return err
	}
	if _, err := io.WriteString(w, `,"stderr":`); err != nil {
		return err
	}
	if err := WriteJSONString(w, stderr); err != nil {
		return err
	}
	if err := writeDisplays(w, results); err != nil {
		return err
	}
	_, err := w.Write(tail)
	return err
}

func appendSeq(dst []byte, seq int64) []byte {
	dst = append(dst, `,"seq":`...)
	dst = strconv.AppendInt(dst, seq, 10)
	return append(dst, '}', '\n')
}

const hexDigits = "0123456789abcdef"

// AppendJSONString appends s as a JSON string. U+0085, U+2028 and U+2029 are escaped, because
// clients split lines on them; bytes that are not UTF-8 become U+FFFD; NUL and other controls are
// kept, escaped.
func AppendJSONString[T string | []byte](dst []byte, s T) []byte {
	return append(appendText(append(dst, '"'), s), '"')
}

// pieceBytes is the part of a string that is encoded at a time. It may become six times as long.
const pieceBytes = 16 << 10

// WriteJSONString writes s as [AppendJSONString] encodes it, in pieces of up to about 96 KiB.
func WriteJSONString(w io.Writer, s string) error {
	buf := append(make([]byte, 0, min(len(s), pieceBytes)+len(`""`)), '"')
	for len(s) > pieceBytes {
		cut := CutUTF8(s[:pieceBytes])
		buf = appendText(buf, s[:cut])
		s = s[cut:]
		if _, err := w.Write(buf); err != nil {
			return err
		}
		buf = buf[:0]
	}
	_, err := w.Write(append(appendText(buf, s), '"'))
	return err
}

// appendText appends s as the content of a JSON string, without the quotes.
func appendText[T string | []byte](dst []byte, s T) []byte {
	start := 0
	for i := 0; i < len(s); {
		b := s[i]
		if b < utf8.RuneSelf {
			if b >= 0x20 && b != '"' && b != '\\' {
				if i-start < 8 { // short runs are not worth the call
					i++
				} else {
					i += max(1, plainPrefix(s[i:]))
				}
				continue
			}
			dst = append(dst, s[start:i]...)
			dst = appendEscaped(dst, b)
			i++
			start = i
			continue
		}
		n := min(len(s)-i, utf8.UTFMax)
		r, size := utf8.DecodeRuneInString(string(s[i : i+n]))
		switch {
		case r == utf8.RuneError && size == 1:
			dst = append(dst, s[start:i]...)
			dst = append(dst, "\ufffd"...)
			start = i + size
		case r == 0x85 || r == 0x2028 || r == 0x2029:
			dst = append(dst, s[start:i]...)
			dst = append(dst, '\\', 'u', hexDigits[r>>12&0xf], hexDigits[r>>8&0xf], hexDigits[r>>4&0xf], hexDigits[r&0xf])
			start = i + size
		}
		i += size
	}
	return append(dst, s[start:]...)
}

// plainPrefix returns the number of bytes at the beginning of s that are ASCII and need no escape
// in a JSON string. It compares eight bytes at a time, because outputs may be many MiB, and does
// not count an incomplete group at the end of s.
func plainPrefix[T string | []byte](s T) int {
	const each, high = 0x0101010101010101, 0x8080808080808080
	n := 0
	for ; len(s)-n >= 8; n += 8 {
		b := s[n : n+8]
		x := uint64(b[0]) | uint64(b[1])<<8 | uint64(b[2])<<16 | uint64(b[3])<<24 |
			uint64(b[4])<<32 | uint64(b[5])<<40 | uint64(b[6])<<48 | uint64(b[7])<<56
		// In each of the three differences the lowest new high bit marks a special byte. Higher
		// ones may result from a borrow.
		quote, slash := x^each*'"', x^each*'\\'
		special := (x | (x-each*' ')&^x | (quote-each)&^quote | (slash-each)&^slash) & high
		if special != 0 {
			return n + bits.TrailingZeros64(special)/8
		}
	}
	return n
}

func appendEscaped(dst []byte, b byte) []byte {
	switch b {
	case '"', '\\':
		return append(dst, '\\', b)
	case '\n':
		return append(dst, '\\', 'n')
	case '\r':
		return append(dst, '\\', 'r')
	case '\t':
		return append(dst, '\\', 't')
	default:
		return append(dst, '\\', 'u', '0', '0', hexDigits[b>>4], hexDigits[b&0xf])
	}
}

// CutUTF8 returns the length of b without an incomplete character at its end: len(b), or up to
// three bytes less.
func CutUTF8[T string | []byte](b T) int {
	for i := len(b) - 1; i >= 0 && i > len(b)-utf8.UTFMax; i-- {
		if utf8.RuneStart(b[i]) {
			if !utf8.FullRuneInString(string(b[i:])) {
				return i
			}
			return len(b)
		}
	}
	return len(b)
}
