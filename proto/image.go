package proto

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// The limits of sandbox images.
const (
	MaxImages        = 256       // names in the registry
	MaxImageBytes    = 4 << 30   // of an image as it is stored, compressed
	MaxImageUnpacked = 16 << 30  // bytes of its files
	MaxImageEntries  = 1_000_000 // files, directories and links
	MaxImageNameLen  = 63
)

// Image describes a root file system of sandboxes in the registry.
type Image struct {
	Name         string `json:"name"`
	Digest       string `json:"digest"`        // of the stored form; see [ValidImageDigest]
	Size         int64  `json:"size"`          // bytes stored
	UnpackedSize int64  `json:"unpacked_size"` // bytes of all files
	// Architecture is the interpreters' architecture in Go's terms, such as "amd64", or empty if all are
	// scripts.
	Architecture string              `json:"architecture,omitempty"`
	Languages    map[Language]string `json:"languages"` // the absolute path of each interpreter inside the image
	Env          map[string]string   `json:"env"`       // the variables of [ImageEnv] that the image sets
	CreatedAt    time.Time           `json:"created_at"`
}

// ImagePart is a range of the bytes of a stored image. Images that have a part in common share it.
type ImagePart struct {
	Size   int64  `json:"size"`   // bytes
	Digest string `json:"digest"` // SHA-256, as "sha256:" and 64 hexadecimal digits
}

// maxName limits the names of images, profiles and organisations. Patterns omit it, because a
// counted repetition takes some ten KB of memory.
const maxName = 63

var (
	imageNamePattern   = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]*$`)
	imageDigestPattern = regexp.MustCompile(`^sha256:[0-9a-f]+$`)
)

// ValidImageName reports whether s may name an image.
func ValidImageName(s string) bool { return len(s) <= maxName && imageNamePattern.MatchString(s) }

// ValidImageDigest reports whether s has the form of an image's digest.
func ValidImageDigest(s string) bool {
	return len(s) == len("sha256:")+2*sha256.Size && imageDigestPattern.MatchString(s)
}

// CheckImageName checks the name of an image that a client chose. Its error is a [*FieldError].
func CheckImageName(s string) error {
	if !ValidImageName(s) {
		return FieldErrorf("name", "must be 1 to %d characters of a-z, 0-9, ., _ and -, the first a letter or digit",
			MaxImageNameLen)
	}
	return nil
}

// ImageEnv lists the environment variables of an image that programs get: the locations of its
// programs and data, and its locale. Variables that change how programs are loaded or started must
// not be added.
func ImageEnv() []string {
	return []string{
		"CONDA_DEFAULT_ENV", "CONDA_PREFIX", "JAVA_HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "NODE_VERSION", "PATH",
		"PYTHON_VERSION", "R_HOME", "TZ", "VIRTUAL_ENV",
	}
}

// Interpreter returns the path of a language's interpreter inside the image, or a [*FieldError] if
// it is missing.
func (i *Image) Interpreter(l Language) (string, error) {
	path, ok := i.Languages[l]
	if !ok {
		has := make([]string, 0, len(i.Languages))
		for _, name := range slices.Sorted(maps.Keys(i.Languages)) {
			has = append(has, string(name))
		}
		return "", &FieldError{
			Field: "language", Message: fmt.Sprintf("language '%s' is not available in this sandbox image, which has %s", l,
				strings.Join(has, ", ")),
		}
	}
	return path, nil
}
