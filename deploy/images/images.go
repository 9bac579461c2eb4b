// Package images has the recipes of sandbox images that bullpen brings along, for
// `bullpen image build --from`.
package images

import (
	"embed"
	"fmt"
	"io/fs"
	"strings"

	"github.com/goccy/go-yaml"
)

//go:embed *.yaml *.txt
var files embed.FS

// Recipe describes an image. An image also has Bash, the GNU tools and certificates.
type Recipe struct {
	Description string   `yaml:"description"`
	Suite       string   `yaml:"suite"`    // of Debian
	Python      string   `yaml:"python"`   // Debian's package with Python; empty for none
	Node        string   `yaml:"node"`     // version of Node, whole or in part; empty for none
	Packages    []string `yaml:"packages"` // more packages of Debian
	Pip         string   `yaml:"pip"`      // file with pip's requirements, beside the recipe; empty for none
	Npm         string   `yaml:"npm"`      // package.json with npm's dependencies, beside the recipe; empty for none
}

// Files returns the recipes, each in NAME.yaml, and the files that they name.
func Files() fs.FS { return files }

// Names returns the names of the recipes, sorted.
func Names() (names []string) {
	found, err := fs.Glob(files, "*.yaml")
	if err != nil {
		panic(err) // a malformed pattern
	}
	for _, file := range found {
		names = append(names, strings.TrimSuffix(file, ".yaml"))
	}
	return names
}

// Read reads the recipe in a file. Unknown keys are errors.
func Read(from fs.FS, file string) (*Recipe, error) {
	text, err := fs.ReadFile(from, file)
	if err != nil {
		return nil, fmt.Errorf("read the recipe: %w", err)
	}
	r := &Recipe{}
	if err := yaml.UnmarshalWithOptions(text, r, yaml.DisallowUnknownField()); err != nil {
		return nil, fmt.Errorf("read the recipe %s: %w", file, err)
	}
	if r.Suite == "" {
		return nil, fmt.Errorf("the recipe %s names no suite of Debian", file)
	}
	return r, nil
}
