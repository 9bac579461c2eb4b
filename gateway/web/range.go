package web

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto/api"
)

// Part is the requested part of a file, in bytes.
type Part struct {
	Offset, Length int64

	size  int64 // of the file
	whole bool  // the request asks for the file, and not for a part
}

// PartOf returns the requested part of a file with a size and a tag. The tag is empty for an
// immutable file. PartOf returns an error if the part begins after the end of the file. It does not
// accept times in If-Range: they do not distinguish contents.
func PartOf(w http.ResponseWriter, r *Request, size int64, tag string) (*Part, error) {
	asked, condition := r.Header.Get("Range"), r.Header.Get("If-Range")
	if asked == "" || r.Method != http.MethodGet || tag != "" && condition != "" && condition != tag {
		return &Part{Length: size, size: size, whole: true}, nil
	}
	part, err := parseRange(asked, size)
	if err != nil {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", size))
	}
	return part, err
}

// WriteHeader begins the answer with a part of a file, as a download with a name.
func (p *Part) WriteHeader(w http.ResponseWriter, name string) {
	p.begin(w, typeBytes, Attachment(name))
}

func (p *Part) begin(w http.ResponseWriter, mediaType, disposition string) {
	h, status := w.Header(), http.StatusOK
	if !p.whole {
		status = http.StatusPartialContent
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", p.Offset, p.Offset+p.Length-1, p.size))
	}
	h.Set("Content-Length", strconv.FormatInt(p.Length, 10))
	h.Set("Content-Type", mediaType)
	h.Set("Content-Disposition", disposition)
	h.Set("Cache-Control", "private, no-store")
	h.Set("Accept-Ranges", "bytes")
	w.WriteHeader(status)
}

// parseRange returns the part of size bytes selected by a Range header. It ignores a header that is
// not a single byte range, and any header for an empty file.
func parseRange(header string, size int64) (*Part, error) {
	text, ok := strings.CutPrefix(header, "bytes=")
	from, to, dash := strings.Cut(strings.TrimSpace(text), "-")
	first, hasFirst := decimal(from)
	last, hasLast := decimal(to)
	switch {
	case !ok || !dash || size == 0:
		return &Part{Length: size, size: size, whole: true}, nil
	case from == "" && hasLast: // the last bytes
		first, last = max(0, size-last), size-1
	case hasFirst && to == "":
		last = size - 1
	case hasFirst && hasLast && first <= last:
		last = min(last, size-1)
	default:
		return &Part{Length: size, size: size, whole: true}, nil
	}
	if first >= size {
		return nil, api.Errorf(api.CodeRange, "the range begins after the end of the file")
	}
	return &Part{Offset: first, Length: last - first + 1, size: size}, nil
}

// decimal parses a whole number without a sign.
func decimal(text string) (n int64, ok bool) {
	u, err := strconv.ParseUint(text, 10, 63)
	return int64(u), err == nil
}
