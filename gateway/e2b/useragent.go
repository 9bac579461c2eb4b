package e2b

import (
	"strconv"
	"strings"
)

// asksForMemory reports whether a client asks to keep the memory at a pause although nobody chose that:
// E2B's clients before 2.51.
func asksForMemory(userAgent string) bool {
	const major, minor = 2, 51
	for _, prefix := range []string{"e2b-python-sdk/", "e2b-js-sdk/"} {
		version, ok := strings.CutPrefix(userAgent, prefix)
		if !ok {
			continue
		}
		version, _, _ = strings.Cut(version, " ")
		parts := strings.Split(version, ".")
		first, err := strconv.Atoi(parts[0])
		if err != nil || len(parts) < 2 {
			return false
		}
		second, err := strconv.Atoi(parts[1])
		return err == nil && (first < major || first == major && second < minor)
	}
	return false
}
