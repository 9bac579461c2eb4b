package doctest_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

var (
	codeBlock = regexp.MustCompile("(?ms)^```.*?^```$")
	code      = regexp.MustCompile("`[^`\n]*`")
	link      = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	heading   = regexp.MustCompile(`(?m)^#+ (.*)$`)
	anchor    = regexp.MustCompile(`<a id="([^"]+)"`)
	codeLink  = regexp.MustCompile("\\[`([\\w.]+)`\\]\\(([^()\\s]+\\.go)\\)")
	symbols   = regexp.MustCompile(`[^\p{L}\p{N}\p{M} _-]`)
)

// TestLinks checks that every relative link of a document leads to a file, and its fragment to a heading.
func TestLinks(t *testing.T) {
	root := filepath.Join("..", "..")
	for _, page := range pages(t, root) {
		for _, m := range link.FindAllStringSubmatch(code.ReplaceAllString(read(t, page), ""), -1) {
			target, fragment, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, ":") {
				continue
			}
			file := page
			if target != "" {
				file = filepath.Join(filepath.Dir(page), target)
			}
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s: %s: %v", page, m[1], err)
				continue
			}
			if fragment != "" && !anchors(t, file)[fragment] {
				t.Errorf("%s: %s: no such heading", page, m[1])
			}
		}
	}
}

// TestCodeLinks checks that a file contains the function that a document names and links to it.
func TestCodeLinks(t *testing.T) {
	for _, page := range pages(t, filepath.Join("..", "..")) {
		for _, m := range codeLink.FindAllStringSubmatch(read(t, page), -1) {
			source, err := os.ReadFile(filepath.Join(filepath.Dir(page), m[2]))
			if err != nil {
				t.Errorf("%s: %v", page, err)
				continue
			}
			name := m[1][strings.LastIndex(m[1], ".")+1:]
			if !regexp.MustCompile(`(?m)^func (\([^)]*\) )?` + name + `\(`).Match(source) {
				t.Errorf("%s: %s has no function %s", page, m[2], name)
			}
		}
	}
}

// pages returns the paths of the documents at the root and in docs.
func pages(t *testing.T, root string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(root, "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(filepath.Join(root, "docs"), func(path string, _ fs.DirEntry, err error) error {
		if filepath.Ext(path) == ".md" {
			all = append(all, path)
		}
		return err
	})
	if err != nil || len(all) < 20 {
		t.Fatalf("%d documents: %v", len(all), err)
	}
	return all
}

// read returns a document without its code blocks.
func read(t *testing.T, page string) string {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	return codeBlock.ReplaceAllString(string(text), "")
}

// anchors returns the fragments of a page, named as GitHub names those of headings.
func anchors(t *testing.T, page string) map[string]bool {
	t.Helper()
	text, all := read(t, page), map[string]bool{}
	for _, m := range anchor.FindAllStringSubmatch(text, -1) {
		all[m[1]] = true
	}
	for _, m := range heading.FindAllStringSubmatch(text, -1) {
		title := link.ReplaceAllString(m[1], "]")
		name := strings.ReplaceAll(symbols.ReplaceAllString(strings.ToLower(title), ""), " ", "-")
		unique := name
		for n := 1; all[unique]; n++ {
			unique = name + "-" + strconv.Itoa(n)
		}
		all[unique] = true
	}
	return all
}
