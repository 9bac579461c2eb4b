package web

import (
	"net/http"
	"path"
	"strings"
	"unicode/utf8"
)

// InlinePolicy lets this server's own pages show a file of a tenant: without scripts, forms,
// plug-ins, an origin, or any request. Images and fonts must be in the file itself.
const InlinePolicy = "default-src 'none'; img-src data:; font-src data:; style-src 'unsafe-inline'; base-uri 'none'; " +
	"form-action 'none'; sandbox; frame-ancestors 'self'"

// mediaPolicy also lets the page that a browser generates around an audio or video file load that
// file. Such a file has no markup.
const mediaPolicy = InlinePolicy + "; media-src 'self'"

// inlineTypes are the media types that are shown as such, by extension. JSON is shown as text: some
// browsers have a viewer of their own for it.
var inlineTypes = map[string]string{
	".avif": "image/avif", ".bmp": "image/bmp", ".gif": "image/gif", ".ico": "image/x-icon", ".jpeg": "image/jpeg",
	".jpg": "image/jpeg", ".png": "image/png", ".svg": "image/svg+xml", ".webp": "image/webp",
	".pdf": "application/pdf", ".htm": "text/html; charset=utf-8", ".html": "text/html; charset=utf-8",
	".csv":  "text/csv; charset=utf-8",
	".flac": "audio/flac", ".m4a": "audio/mp4", ".mp3": "audio/mpeg", ".oga": "audio/ogg", ".ogg": "audio/ogg",
	".opus": "audio/ogg", ".wav": "audio/wav", ".weba": "audio/webm",
	".m4v": "video/mp4", ".mov": "video/quicktime", ".mp4": "video/mp4", ".ogv": "video/ogg", ".webm": "video/webm",
}

const (
	typeBytes = "application/octet-stream"
	typeText  = "text/plain; charset=utf-8"
)

// SniffBytes is how much of the beginning of a file [SniffType] needs.
const SniffBytes = 512

// InlineType returns the media type under which a file with a name is shown. ok is false if its
// content decides: see [SniffType].
func InlineType(name string) (mediaType string, ok bool) {
	mediaType, ok = inlineTypes[strings.ToLower(path.Ext(name))]
	return mediaType, ok
}

// SniffType returns the media type of a file that begins with head: that of text, or one that a
// browser saves.
func SniffType(head []byte) string {
	for len(head) > 0 {
		r, size := utf8.DecodeRune(head)
		cut := len(head) < utf8.UTFMax && !utf8.FullRune(head) // head ends within a character
		if r == utf8.RuneError && size == 1 && !cut || r < ' ' && !strings.ContainsRune("\t\n\f\r\x1b", r) {
			return typeBytes
		}
		head = head[size:]
	}
	return typeText
}

// WriteInline begins the answer with a part of a file, which this server's own pages may show.
func (p *Part) WriteInline(w http.ResponseWriter, name, mediaType string) {
	if mediaType == typeBytes {
		p.WriteHeader(w, name)
		return
	}
	policy := InlinePolicy
	if strings.HasPrefix(mediaType, "audio/") || strings.HasPrefix(mediaType, "video/") {
		policy = mediaPolicy
	}
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("X-Frame-Options", "SAMEORIGIN")
	p.begin(w, mediaType, disposition("inline", name))
}
