package web

import (
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto/api"
)

// Span is a part of a file, in bytes.
type Span struct{ Offset, Length int64 }

// ParseRange returns the part of size bytes that a Range header asks for. A header that is not a
// single range of bytes is ignored: whole is true then, and also for an empty file.
func ParseRange(header string, size int64) (part Span, whole bool, err error) {
	text, ok := strings.CutPrefix(header, "bytes=")
	from, to, dash := strings.Cut(strings.TrimSpace(text), "-")
	first, hasFirst := decimal(from)
	last, hasLast := decimal(to)
	switch {
	case !ok || !dash || size == 0:
		return Span{0, size}, true, nil
	case from == "" && hasLast: // the last bytes
		first, last = max(0, size-last), size-1
	case hasFirst && to == "":
		last = size - 1
	case hasFirst && hasLast && first <= last:
		last = min(last, size-1)
	default:
		return Span{0, size}, true, nil
	}
	if first >= size {
		return Span{}, false, api.Errorf(api.CodeRange, "the range begins after the end of the file")
	}
	return Span{first, last - first + 1}, false, nil
}

// decimal parses a whole number without a sign.
func decimal(text string) (n int64, ok bool) {
	u, err := strconv.ParseUint(text, 10, 63)
	return int64(u), err == nil
}
