package gateway

import (
	"io/fs"
	"net/http"
	"path"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// consolePolicy lets the console load from this server only, and keeps text from becoming a
	// script.
	consolePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
		"frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
		"require-trusted-types-for 'script'; trusted-types 'none'"
	consolePage = "index.html"
	// hashedFor is how long browsers keep the files of the console, whose names change with their
	// content.
	hashedFor = "public, max-age=31536000, immutable"
)

// consoleTypes are the media types of the console's files, by extension, whatever the host's tables say.
var consoleTypes = map[string]string{
	".css": "text/css; charset=utf-8", ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
}

var errNoConsole = api.Errorf(api.CodeNotFound, "this program was built without the console: build it with make")

// routeConsole serves the console at /console/. Its page has relative addresses only, so that it
// works behind a path prefix.
func (s *Server) routeConsole(r chi.Router) {
	web.Get(r, "/", redirect("console/"))
	web.Get(r, "/console", redirect("console/"))
	files, err := fs.ReadDir(s.Console, ".")
	if err != nil {
		panic(err) // they are embedded
	}
	found := false
	for _, file := range files {
		contentType, ok := consoleTypes[path.Ext(file.Name())]
		if !ok {
			continue
		}
		route, cache := "/console/"+file.Name(), hashedFor
		if file.Name() == consolePage {
			route, cache, found = "/console/", "no-cache", true
		}
		web.Get(r, route, static(contentType, consolePolicy, cache, func() []byte {
			content, err := fs.ReadFile(s.Console, file.Name())
			if err != nil {
				panic(err) // it is embedded
			}
			return content
		}))
	}
	if !found {
		web.Get(r, "/console/", s.Handle(func(http.ResponseWriter, *web.Request) error { return errNoConsole }))
	}
}
