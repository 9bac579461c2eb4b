package proto

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"unicode/utf8"
)

// EventType is the type of a line of an execution's event stream.
type EventType string

// The closed list of event types: clients raise on any other.
const (
	EventStatus    EventType = "status"
	EventOutput    EventType = "output"
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

// Batch is a run of consecutive events in their wire form: one JSON object a line, each with its newline.
type Batch struct {
	First, Last int64 // sequence numbers of the first and the last event
	Lines       []byte
}

// AppendStatusEvent appends the event that an execution has started, which always has sequence number 1.
func AppendStatusEvent(dst []byte, id TraceID) []byte {
	dst = append(dst, `{"type":"status","trace_id":"`...)
	dst = append(dst, id...)
	return append(dst, `","status":"running","seq":1}`+"\n"...)
}

// AppendOutputEvent appends an event with a piece of output. Bytes of data that are not UTF-8 become U+FFFD.
func AppendOutputEvent(dst []byte, stream Stream, data []byte, seq int64) []byte {
	dst = append(dst, `{"type":"output","stream":"`...)
	dst = append(dst, stream...)
	dst = append(dst, `","data":`...)
	dst = AppendJSONString(dst, data)
	return appendSeq(dst, seq)
}

// AppendKeepaliveEvent appends an event that says only that the stream is alive. It carries the sequence number of the last
// event sent, 0 before the first, and uses none up.
func AppendKeepaliveEvent(dst []byte, seq int64) []byte {
	return appendSeq(append(dst, `{"type":"keepalive"`...), seq)
}

// AppendResultEvent appends the last event of an execution that has ended.
func AppendResultEvent(dst []byte, r *Record) ([]byte, error) {
	if r.Result == nil {
		return dst, fmt.Errorf("result event of %s: the execution has not ended", r.TraceID)
	}
	dst = append(dst, `{"type":"result","trace_id":"`...)
	dst = append(dst, r.TraceID...)
	dst = append(dst, `","status":"`...)
	dst = append(dst, r.Status.Stream()...)
	dst = append(dst, `","result":`...)
	dst, err := AppendResult(dst, r.Result)
	if err != nil {
		return dst, err
	}
	dst = append(dst, `,"output_truncated":`...)
	dst = strconv.AppendBool(dst, r.OutputTruncated)
	return appendSeq(dst, r.ResultSeq), nil
}

// AppendResult appends the JSON form of r. Its strings are escaped as those of events are, and its outputs, which may be
// large, are not copied on the way.
func AppendResult(dst []byte, r *Result) ([]byte, error) {
	rest := *r
	rest.Stdout, rest.Stderr = "", ""
	small, err := json.Marshal(rest)
	if err != nil {
		return dst, fmt.Errorf("encode result: %w", err)
	}
	// Room for all of it at once, with some for escapes: output of many MiB is not to be copied as the slice grows.
	text := len(r.Stdout) + len(r.Stderr)
	dst = slices.Grow(dst, text+text/16+len(small))
	const head = `{"success":true,`
	dst = append(dst, `{"success":`...)
	dst = strconv.AppendBool(dst, r.Success)
	dst = append(dst, `,"stdout":`...)
	dst = AppendJSONString(dst, r.Stdout)
	dst = append(dst, `,"stderr":`...)
	dst = AppendJSONString(dst, r.Stderr)
	dst = append(dst, ',')
	cut := len(head) + len(`"stdout":"","stderr":"",`)
	if !r.Success {
		cut++ // "false" is a letter longer than "true"
	}
	return append(dst, small[cut:]...), nil
}

func appendSeq(dst []byte, seq int64) []byte {
	dst = append(dst, `,"seq":`...)
	dst = strconv.AppendInt(dst, seq, 10)
	return append(dst, '}', '\n')
}

const hexDigits = "0123456789abcdef"

// AppendJSONString appends s as a JSON string. U+0085, U+2028 and U+2029 are escaped, because clients split lines on them;
// bytes that are not UTF-8 become U+FFFD; NUL and other controls are kept, escaped.
func AppendJSONString[T string | []byte](dst []byte, s T) []byte {
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(s); {
		b := s[i]
		if b < utf8.RuneSelf {
			if b >= 0x20 && b != '"' && b != '\\' {
				i++
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
	dst = append(dst, s[start:]...)
	return append(dst, '"')
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

// CutUTF8 finds where b can be cut at its end without cutting a character: len(b), or up to three bytes less.
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
