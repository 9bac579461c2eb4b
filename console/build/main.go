// Command build bundles the console into console/embedded. It fetches the packages of
// console/packages.json into bin/console, checked by hash, and writes the types of the HTTP API to
// console/api/schema.ts. It runs at the root of the repository and needs no Node.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/evanw/esbuild/pkg/api"
)

const (
	source   = "console"
	packages = "bin/console/node_modules"
	output   = "console/embedded"
)

func main() {
	if err := build(); err != nil {
		fmt.Fprintln(os.Stderr, "console:", err)
		os.Exit(1)
	}
}

func build() error {
	if err := fetchPackages(filepath.Join(source, "packages.json"), packages); err != nil {
		return err
	}
	if err := writeSchema(filepath.Join(source, "api", "schema.ts")); err != nil {
		return err
	}
	if err := removeOutput(); err != nil {
		return err
	}
	result := api.Build(api.BuildOptions{
		EntryPoints: []string{filepath.Join(source, "main.tsx"), filepath.Join(source, "style.css")},
		NodePaths:   []string{packages},
		Outdir:      output,
		EntryNames:  "[name]-[hash]",
		ChunkNames:  "chunk-[hash]",
		Bundle:      true, Splitting: true, Format: api.FormatESModule, Write: true, Metafile: true,
		MinifyWhitespace: true, MinifyIdentifiers: true, MinifySyntax: true,
		Target: api.ES2022, JSX: api.JSXAutomatic, JSXImportSource: "preact",
		LegalComments: api.LegalCommentsEndOfFile,
		LogLevel:      api.LogLevelWarning,
	})
	if len(result.Errors) > 0 {
		return errors.New("the sources cannot be bundled")
	}
	return writePage(result.Metafile)
}

// removeOutput removes what an earlier build has written.
func removeOutput() error {
	old, err := filepath.Glob(filepath.Join(output, "*.*"))
	if err != nil {
		return fmt.Errorf("list the earlier output: %w", err)
	}
	for _, name := range old {
		if err := os.Remove(name); err != nil {
			return fmt.Errorf("remove the earlier output: %w", err)
		}
	}
	return nil
}

// writePage writes the page with the names of the bundled files.
func writePage(metafile string) error {
	var meta struct {
		Outputs map[string]struct {
			EntryPoint string `json:"entryPoint"`
		} `json:"outputs"`
	}
	if err := json.Unmarshal([]byte(metafile), &meta); err != nil {
		return fmt.Errorf("decode the list of bundled files: %w", err)
	}
	page, err := os.ReadFile(filepath.Join(source, "index.html"))
	if err != nil {
		return fmt.Errorf("read the page: %w", err)
	}
	var names []string
	for name, file := range meta.Outputs {
		if file.EntryPoint != "" {
			names = append(names, filepath.Base(file.EntryPoint), html.EscapeString(filepath.Base(name)))
		}
	}
	if !slices.Contains(names, "main.tsx") || !slices.Contains(names, "style.css") {
		return errors.New("the bundle has no main.tsx or no style.css")
	}
	text := strings.NewReplacer(names...).Replace(string(page))
	if err := os.WriteFile(filepath.Join(output, "index.html"), []byte(text), 0o644); err != nil { //nolint:gosec // public
		return fmt.Errorf("write the page: %w", err)
	}
	return nil
}
