// Package console has the web page for tenants and operators, which `make console` bundles from the
// TypeScript sources in this directory. The page uses the public HTTP API and nothing else.
package console

import (
	"embed"
	"io/fs"
)

//go:embed embedded
var embedded embed.FS

// Files returns the bundled page: index.html and the files that it loads. It has no index.html in a
// program that was built without `make console`.
func Files() fs.FS {
	files, err := fs.Sub(embedded, "embedded")
	if err != nil {
		panic(err) // the name is valid
	}
	return files
}
