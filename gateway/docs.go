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
	document := sync.OnceValue(func() []byte { // few servers are asked for it
		b, err := api.OpenAPI(s.Version, s.SurfaceRoutes()...)
		if err != nil {
			panic(err) // a mistake in the types of the API
		}
		return b
	})
	compressed := sync.OnceValue(func() []byte { return gzipped(document()) })
	web.Get(r, "/", http.RedirectHandler("docs", http.StatusFound))
	web.Get(r, "/openapi.json", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Vary", "Accept-Encoding")
		if acceptsGzip(r.Header) {
			w.Header().Set("Content-Encoding", "gzip")
			static(web.TypeJSON, compressed())(w, r)
			return
		}
		static(web.TypeJSON, document())(w, r)
	}))
	web.Get(r, "/docs", static("text/html; charset=utf-8", docsPage))
	web.Get(r, "/docs/start.js", static("text/javascript; charset=utf-8", docsScript))
	web.Get(r, "/docs/", http.RedirectHandler("../docs", http.StatusMovedPermanently))
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

func static(contentType string, body []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Content-Type", contentType)
		h.Set("Cache-Control", "no-cache")
		h.Set("Content-Security-Policy", docsPolicy)
		_, _ = w.Write(body) // the client may be gone
	}
}
