package proto

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

const (
	maxPatternLen = 512 // bytes
	// maxDoubleStars limits the ** components of a pattern, and so the cost of matching a path.
	maxDoubleStars = 4
)

// negatedClass matches the beginning of a class as shells negate it.
var negatedClass = regexp.MustCompile(`(^|[^\\])\[!`)

// CheckPathPattern returns the clean form of a pattern of paths in a home. A component matches as
// with [path.Match], with ! and ^ alike in a class; the component ** matches any number of
// directories, including none.
func CheckPathPattern(pattern string) (clean string, err error) {
	clean = path.Clean(negatedClass.ReplaceAllString(pattern, "${1}[^"))
	if pattern == "" || len(pattern) > maxPatternLen || path.IsAbs(pattern) || clean == "." || clean == ".." ||
		strings.HasPrefix(clean, "../") {
		return "", fmt.Errorf("%q must be a path below the workspace, of at most %d bytes", Shorten(pattern), maxPatternLen)
	}
	// Other systems do not take these for names.
	switch {
	case clean[0] == '!':
		return "", fmt.Errorf("%q would exclude files, which is not possible; list what to keep, or write \\! for a name",
			Shorten(pattern))
	case clean[0] == '~':
		return "", fmt.Errorf("%q must be relative to the workspace, which is the home directory: leave out ~/, or write "+
			"\\~ for a name", Shorten(pattern))
	case strings.Contains(strings.ReplaceAll(clean, `\{`, ""), "{"):
		return "", fmt.Errorf("%q has braces, which are not possible; list the paths, or write \\{ for a name",
			Shorten(pattern))
	}
	stars := 0
	for part := range strings.SplitSeq(clean, "/") {
		if part == "**" {
			stars++
			continue
		}
		if strings.Contains(part, "**") {
			return "", fmt.Errorf("%q has ** beside other characters; ** must be a whole component, as in **/*.xml",
				Shorten(pattern))
		}
		if _, err := path.Match(part, ""); err != nil {
			return "", fmt.Errorf("%q is not a valid pattern: *, ? and […] can be used, and \\ before a character of these",
				Shorten(pattern))
		}
	}
	if stars > maxDoubleStars {
		return "", fmt.Errorf("%q has more than %d components **", Shorten(pattern), maxDoubleStars)
	}
	return clean, nil
}

// PathMatcher selects the files and directories below a directory that patterns match. What is in a
// selected directory is selected too. The zero value selects nothing.
type PathMatcher struct {
	patterns [][]string // components
	active   []patternPosition
}

// patternPosition is a component of a pattern that a name may match next.
type patternPosition struct{ pattern, component int }

// NewPathMatcher returns the matcher of clean patterns, as CheckPathPattern returns them.
func NewPathMatcher(patterns []string) PathMatcher {
	var m PathMatcher
	for i, p := range patterns {
		m.patterns = append(m.patterns, strings.Split(p, "/"))
		m.active = append(m.active, patternPosition{i, 0})
	}
	return m
}

// Enter returns the matcher for the entries of a directory, and reports whether the patterns select
// the directory with everything below it.
func (m PathMatcher) Enter(name string) (below PathMatcher, selected bool) {
	below.patterns = m.patterns
	add := func(at patternPosition) {
		if !slices.Contains(below.active, at) {
			below.active = append(below.active, at)
		}
	}
	for _, at := range m.active {
		parts := m.patterns[at.pattern]
		for ; at.component < len(parts) && parts[at.component] == "**"; at.component++ {
			if at.component == len(parts)-1 {
				return PathMatcher{}, true
			}
			add(at)
		}
		if ok, err := path.Match(parts[at.component], name); err != nil || !ok {
			continue
		}
		if at.component == len(parts)-1 {
			return PathMatcher{}, true
		}
		add(patternPosition{at.pattern, at.component + 1})
	}
	return below, false
}

// Empty reports whether the matcher selects nothing, whatever the names.
func (m PathMatcher) Empty() bool { return len(m.active) == 0 }
