package app

import (
	"runtime"
	"runtime/debug"
)

// The Makefile sets these through the linker, since Go records nothing in a linked worktree of git.
var version, commit, date string

// Build describes this program.
type Build struct {
	// Version is a tag such as v1.2.0, or names the commit after it. It ends with -dirty if files
	// were changed.
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	// Date is the time of the commit, RFC 3339.
	Date     string `json:"date,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// BuildInfo returns the Makefile's record of this program, or otherwise the Go toolchain's.
func BuildInfo() Build {
	b := Build{
		Version: version, Commit: commit, Date: date, Go: runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	if b.Version != "" {
		return b
	}
	b.Version = "unknown"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if info.Main.Version != "" {
		b.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.time":
			b.Date = s.Value
		}
	}
	return b
}

// Version returns the version of this program.
func Version() string { return BuildInfo().Version }
