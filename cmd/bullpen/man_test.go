package main

import (
	"regexp"
	"strings"
	"testing"
)

// TestManPages checks that the page of each command has text in each section, and that the pages it refers to exist.
func TestManPages(t *testing.T) {
	pages := manPages(docsParser(t, streams{}).Model)
	for name, page := range pages {
		sections := map[string]string{}
		for section := range strings.SplitSeq(string(page), ".SH ") {
			title, text, _ := strings.Cut(section, "\n")
			sections[strings.Trim(title, `"`)] = text
		}
		for _, title := range []string{"NAME", "SYNOPSIS", "DESCRIPTION", "EXIT STATUS", "EXAMPLES", "SEE ALSO"} {
			if strings.TrimSpace(sections[title]) == "" {
				t.Errorf("%s(1) has no %s", name, title)
			}
		}
		text := strings.ReplaceAll(string(page), `\-`, "-")
		for _, other := range regexp.MustCompile(`(bullpen[a-z-]*)\(1\)`).FindAllStringSubmatch(text, -1) {
			if pages[other[1]] == nil {
				t.Errorf("%s(1) refers to %s(1), which does not exist", name, other[1])
			}
		}
	}
}
