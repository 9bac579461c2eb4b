package app

import (
	"runtime"
	"runtime/debug"
)

// Build describes this program.
type Build struct {
	// Version is a tag such as v1.2.0, or a pseudo-version of Go for another commit. It ends with
	// +dirty if the commit was changed. It is (devel) in a build without version control.
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	// Date is the time of the commit, RFC 3339.
	Date     string `json:"date,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// BuildInfo returns what the Go toolchain has recorded in this program.
func BuildInfo() Build {
	b := Build{Version: "unknown", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
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
