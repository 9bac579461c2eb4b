package gateway

import (
	"bytes"
	"compress/gzip"
	_ "embed" // for the page
	"net/http"
	"strings"
	"sync"

	"github.com/go-chi/chi/v5"
	"github.com/swaggest/swgui/v5emb"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto/api"
)

//go:embed docs/index.html
var docsPage []byte

//go:embed docs/start.js
var docsScript []byte

// docsPolicy lets the page load only what this server has. swagger-ui sets styles on elements and
// has images in its styles.
const docsPolicy = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; " +
	"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// routeDocs serves the OpenAPI document and a page that shows it. The page needs no other server.
func (s *Server) routeDocs(r chi.Router) {
	document := func() []byte {
		b, err := api.OpenAPI(s.Version, s.SurfaceRoutes()...)
		if err != nil {
			panic(err) // a mistake in the types of the API
		}
		return b
	}
	web.Get(r, "/openapi.json", static(web.TypeJSON, docsPolicy, "no-cache", document))
	page := func(contentType string, body []byte) http.Handler {
		return static(contentType, docsPolicy, "no-cache", func() []byte { return body })
	}
	web.Get(r, "/docs", page("text/html; charset=utf-8", docsPage))
	web.Get(r, "/docs/start.js", page("text/javascript; charset=utf-8", docsScript))
	web.Get(r, "/docs/", redirect("../docs"))
	assets := v5emb.New("", "", "/docs")
	for _, name := range []string{"swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png"} {
		web.Get(r, "/docs/"+name, assets)
	}
}

func gzipped(b []byte) []byte {
	var to bytes.Buffer
	w := gzip.NewWriter(&to)
	if _, err := w.Write(b); err != nil {
		panic(err) // a buffer takes everything
	}
	_ = w.Close()
	return to.Bytes()
}

// acceptsGzip reports whether Accept-Encoding allows gzip.
func acceptsGzip(h http.Header) bool {
	for _, item := range web.ListItems(h.Values("Accept-Encoding")) {
		parts := strings.Split(item, ";")
		if name := strings.TrimSpace(parts[0]); strings.EqualFold(name, "gzip") {
			return web.WeightOf(parts[1:]) > 0
		}
	}
	return false
}

// redirect redirects to another page of this server. Location is relative to the address of the
// request, because a proxy may have removed a prefix of the path.
func redirect(to string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", to)
		w.WriteHeader(http.StatusFound)
	}
}

// static answers with a body that never changes, compressed for clients that accept that. The body
// is generated at the first request, because most servers never get one.
func static(contentType, policy, cache string, body func() []byte) http.HandlerFunc {
	plain := sync.OnceValue(body)
	compressed := sync.OnceValue(func() []byte { return gzipped(plain()) })
	return func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Type", contentType)
		h.Set("Content-Security-Policy", policy)
		h.Set("Cache-Control", cache)
		h.Set("Vary", "Accept-Encoding")
		if acceptsGzip(r.Header) {
			h.Set("Content-Encoding", "gzip")
			_, _ = w.Write(compressed()) // the client may be gone
			return
		}
		_, _ = w.Write(plain()) // the client may be gone
	}
}
