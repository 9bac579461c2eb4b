package app

import "runtime/debug"

// version is set by the Makefile through the linker.
var version string

// Version returns the version of this program, from the Makefile or from the Go toolchain.
func Version() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
