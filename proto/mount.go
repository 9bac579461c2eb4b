package proto

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"regexp"
	"strings"
	"time"
)

// MountsDir is the directory in sandboxes with the mounts of a job, each at its slug.
const MountsDir = "/data"

// The limits of mounts.
const (
	MaxMounts = 10 // of a job
	// MaxObjectKey is the maximum length of the key of an object, in bytes.
	MaxObjectKey = 1024
	// maxSegment is the maximum length of a name in a directory, in bytes.
	maxSegment = 255
)

// MountKind is the kind of storage behind a mount.
type MountKind string

// The closed list of kinds.
const (
	MountS3        MountKind = "s3"        // a bucket of a server with the S3 protocol
	MountDirectory MountKind = "directory" // a directory of the worker's machine, or of a file system that it shares
	MountVolume    MountKind = "volume"    // a volume in the blob store, see VolumeThread
)

// Mount is a part of a storage connection that a program sees as a directory, resolved when the job
// is accepted. Workers look nothing up.
type Mount struct {
	Slug     string    `json:"slug"` // the name in MountsDir
	Kind     MountKind `json:"kind"`
	ReadOnly bool      `json:"read_only,omitempty"`
	// Prefix is the part of the storage visible to the program: the prefixes of the connection, the
	// API key and the request, joined with slashes. It has no leading or trailing slash and is
	// empty for everything.
	Prefix string `json:"prefix,omitempty"`
	// At is Prefix without the connection's prefix: the path below MountsDir/{slug} of the mount,
	// so that a file has the same path in all programs that see it. The directories above it are
	// otherwise empty.
	At string `json:"at,omitempty"`
	// S3 is the bucket of a mount of kind s3, otherwise nil.
	S3 *S3Mount `json:"s3,omitempty"`
	// Directory is the absolute path of the connection's directory, for a mount of kind directory. It
	// must be in a directory that the worker's settings allow.
	Directory string `json:"directory,omitempty"`
	// Bytes is the quota of the volume, for a mount of kind volume.
	Bytes int64 `json:"bytes,omitempty"`
}

// S3Mount is the bucket of a mount.
type S3Mount struct {
	Endpoint  string `json:"endpoint,omitempty"` // URL of the server; empty for Amazon's
	Region    string `json:"region"`
	Bucket    string `json:"bucket"`
	PathStyle bool   `json:"path_style,omitempty"` // the bucket is in the path of URLs instead of the host name
	// Credential is the name of the [S3Credentials] in the job's sealed values.
	Credential string `json:"credential"`
}

var slugPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

// CheckMounts checks the mounts of a job.
func CheckMounts(mounts []Mount) error {
	if len(mounts) > MaxMounts {
		return fmt.Errorf("%d mounts are more than the %d that a program can have", len(mounts), MaxMounts)
	}
	seen := map[string]bool{}
	for _, m := range mounts {
		if err := m.check(); err != nil {
			return fmt.Errorf("mount %.64q: %w", m.Slug, err)
		}
		if seen[m.Slug] {
			return fmt.Errorf("mount %q: there are two of this name", m.Slug)
		}
		seen[m.Slug] = true
	}
	return nil
}

func (m *Mount) check() error {
	switch {
	case !slugPattern.MatchString(m.Slug):
		return errors.New("the name must be 1 to 63 characters of a-z, 0-9, _ and -, the first a letter or digit")
	case m.Prefix != "" && (!ValidObjectName(m.Prefix) || len(m.Prefix) >= MaxObjectKey):
		return errors.New("the prefix has an empty, a too long or a special component, or is too long")
	case m.At != "" && m.Prefix != m.At && !strings.HasSuffix(m.Prefix, "/"+m.At):
		return errors.New("the path at which it is mounted is not the end of the prefix")
	}
	if m.Kind != MountVolume && m.Bytes != 0 {
		return errors.New("only a mount of kind volume has a quota")
	}
	switch m.Kind {
	case MountS3:
		if m.S3 == nil || m.S3.Bucket == "" || m.S3.Region == "" || m.S3.Credential == "" || m.Directory != "" {
			return errors.New("a mount of kind s3 needs a bucket, a region and a credential, and nothing else")
		}
	case MountDirectory:
		if m.S3 != nil || !path.IsAbs(m.Directory) || path.Clean(m.Directory) != m.Directory || m.Directory == "/" {
			return errors.New("a mount of kind directory needs a clean absolute path, and nothing else")
		}
	case MountVolume:
		if m.S3 != nil || m.Directory != "" || m.Bytes <= 0 {
			return errors.New("a mount of kind volume needs a quota, and nothing else")
		}
	default:
		return fmt.Errorf("the kind %.20q is unknown to this version", m.Kind)
	}
	return nil
}

// ValidObjectName reports whether a name with slashes is a valid file path: no component is empty,
// "." or "..", longer than 255 bytes, or has a zero byte. Objects with other keys are hidden.
func ValidObjectName(name string) bool {
	for segment := range strings.SplitSeq(name, "/") {
		if !ValidSegment(segment) {
			return false
		}
	}
	return true
}

// ValidSegment reports whether name can be the name of a file in a directory.
func ValidSegment(name string) bool {
	return name != "" && name != "." && name != ".." && len(name) <= maxSegment && !strings.ContainsAny(name, "/\x00")
}

// StoredObject describes an object of a bucket.
type StoredObject struct {
	Name     string // its path below the mount's prefix, or in the listed directory
	Size     int64  // bytes
	Modified time.Time
	Tag      string // differs when the content differs; the ETag
}

// S3Credentials are the credentials of a bucket, a sealed value in JSON.
type S3Credentials struct {
	AccessKeyID     string `json:"access_key_id"`
	SecretAccessKey string `json:"secret_access_key"`
	SessionToken    string `json:"session_token,omitempty"`
}

// ParseS3Credentials parses a sealed value. Its error quotes nothing of the value. Credentials
// masked in the output have the minimum length of secrets, so that parts of ordinary words are not
// masked.
func ParseS3Credentials(value []byte) (c S3Credentials, err error) {
	if json.Unmarshal(value, &c) != nil || c.AccessKeyID == "" || c.SecretAccessKey == "" {
		return S3Credentials{}, errors.New(
			`the credentials of the bucket are not JSON with "access_key_id" and "secret_access_key"`)
	}
	if len(c.SecretAccessKey) < MinSecretBytes || c.SessionToken != "" && len(c.SessionToken) < MinSecretBytes {
		return S3Credentials{}, fmt.Errorf("secret_access_key and session_token of the bucket must have at least %d bytes",
			MinSecretBytes)
	}
	return c, nil
}
