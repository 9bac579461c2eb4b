package app

import "runtime/debug"

// version is set by the linker in builds of the Makefile.
var version string

// Version names the version of this program: what the build said, else what the Go toolchain knows.
func Version() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
