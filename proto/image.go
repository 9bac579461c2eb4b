package proto

import (
	"crypto/sha256"
	"fmt"
	"regexp"
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

// Image is a sandbox's root file system as the registry knows it.
type Image struct {
	Name         string              `json:"name"`
	Digest       string              `json:"digest"`        // of what is stored, sha256:<64 hexadecimal digits>; see [ValidImageDigest]
	Size         int64               `json:"size"`          // bytes stored
	UnpackedSize int64               `json:"unpacked_size"` // bytes of all files
	Languages    map[Language]string `json:"languages"`     // the absolute path of each interpreter inside the image
	Env          map[string]string   `json:"env"`           // what the image asks to be set, of the names in [ImageEnv]
	CreatedAt    time.Time           `json:"created_at"`
}

// maxName is how many characters names of images, profiles and organisations have. It is no part of patterns, since a counted repetition takes
// some ten KB of memory.
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
		return FieldErrorf("name", "must be 1 to %d characters of a-z, 0-9, ., _ and -, the first a letter or digit", MaxImageNameLen)
	}
	return nil
}

// ImageEnv lists the environment variables that are taken over from an image: where its programs and data are, and how they write
// text. No other variable of an image reaches a program; one that changes how programs are loaded or started, never.
func ImageEnv() []string {
	return []string{
		"CONDA_DEFAULT_ENV", "CONDA_PREFIX", "JAVA_HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "NODE_VERSION", "PATH",
		"PYTHON_VERSION", "R_HOME", "TZ", "VIRTUAL_ENV",
	}
}

// Interpreter gives the path of a language's interpreter inside the image. Where the image has none, its error is a [*FieldError],
// in the words for the client.
func (i *Image) Interpreter(l Language) (string, error) {
	path, ok := i.Languages[l]
	if !ok {
		return "", &FieldError{Field: "language", Message: fmt.Sprintf("language '%s' is not available in this sandbox image", l)}
	}
	return path, nil
}
