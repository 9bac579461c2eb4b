package proto

import (
	"errors"
	"fmt"
	"net/url"
	"path"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// The limits of storage connections.
const (
	MaxConnections = 100 // of an organisation
	// maxMountPrefix is the maximum length of the prefix of a connection or of a key, in bytes.
	maxMountPrefix        = 256
	maxConnectionText     = 256  // characters of a description
	maxEndpointLen        = 2048 // characters
	maxConnectionDirBytes = 1024
)

// Connection is storage of an organisation that API keys can name. Programs see it in [MountsDir].
type Connection struct {
	Org  string    `json:"org"`
	Slug string    `json:"slug"` // the name in MountsDir
	Kind MountKind `json:"kind"`
	// S3 is the bucket of a connection of kind s3, otherwise nil. Its credential is the name of a
	// secret of the organisation, with [S3Credentials].
	S3          *S3Mount `json:"s3,omitempty"`
	Directory   string   `json:"directory,omitempty"` // the absolute path of a connection of kind directory
	Bytes       int64    `json:"bytes,omitempty"`     // the quota of a connection of kind volume
	Prefix      string   `json:"prefix,omitempty"`    // the part of the storage that it has, as in a [Mount]
	ReadOnly    bool     `json:"read_only,omitempty"`
	Snapshot    bool     `json:"snapshot,omitempty"` // a volume that is read-only for good
	Description string   `json:"description,omitempty"`
	// TestedAt is when a gateway last used the storage successfully; nil if none has since the
	// connection was changed. A gateway may be unable to reach it, while workers can.
	TestedAt *time.Time `json:"tested_at,omitempty"`
	// Removing marks a volume whose removal has begun: its files may be gone, so nothing uses it.
	// Repeating the removal completes it.
	Removing  bool      `json:"removing,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	UpdatedAt time.Time `json:"updated_at"`
}

// SameStorage reports whether both connections use the same storage in the same way, so that a test
// of one is valid for the other.
func (c *Connection) SameStorage(other *Connection) bool {
	s3 := c.S3 == other.S3 || c.S3 != nil && other.S3 != nil && *c.S3 == *other.S3
	return s3 && c.Kind == other.Kind && c.Directory == other.Directory && c.Prefix == other.Prefix &&
		c.ReadOnly == other.ReadOnly
}

// KeyMount is a connection that programs of an API key see.
type KeyMount struct {
	Connection string `json:"connection" pattern:"^[a-z0-9][a-z0-9_-]{0,62}$" doc:"The slug of a storage connection of the organisation. Programs see it at /data/{slug}."`
	Prefix     string `json:"prefix,omitempty" maxLength:"256" doc:"The part of the connection that programs see: a path below the connection's prefix. They see it at /data/{slug}/{prefix}. Empty for everything."`
	ReadOnly   bool   `json:"read_only,omitempty" default:"false" doc:"Programs cannot change anything. A connection that is read-only is so in any case."`
}

var (
	bucketPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)
	regionPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)
)

// CheckSlug checks the slug of a connection. Its error is a [*FieldError].
func CheckSlug(field, slug string) error {
	if !slugPattern.MatchString(slug) {
		return FieldErrorf(field, "must be 1 to 63 characters of a-z, 0-9, _ and -, the first a letter or digit")
	}
	return nil
}

// CheckMountPrefix checks the prefix of a connection or of a key. Its error is a [*FieldError].
func CheckMountPrefix(field, prefix string) error {
	if prefix != "" && (len(prefix) > maxMountPrefix || !ValidObjectName(prefix) ||
		strings.ContainsFunc(prefix, unicode.IsControl)) {
		return FieldErrorf(field,
			"must be a relative path of at most %d bytes such as tenants/acme: without a slash at its ends, empty components, "+
				". and .., components of more than %d bytes, and control characters", maxMountPrefix, maxSegment)
	}
	return nil
}

// Check checks a connection. It checks neither where the endpoint leads nor that the secret exists.
// Its error is a [*FieldError].
func (c *Connection) Check() error {
	if err := CheckSlug("slug", c.Slug); err != nil {
		return err
	}
	if err := CheckMountPrefix("prefix", c.Prefix); err != nil {
		return err
	}
	if utf8.RuneCountInString(c.Description) > maxConnectionText ||
		strings.ContainsFunc(c.Description, unicode.IsControl) {
		return FieldErrorf("description", "must be at most %d characters, without control characters", maxConnectionText)
	}
	if c.Bytes != 0 && c.Kind != MountVolume {
		return FieldErrorf("bytes", "must be absent for the kind %.20s", c.Kind)
	}
	switch c.Kind {
	case MountS3:
		if c.Directory != "" {
			return FieldErrorf("directory", "must be absent for the kind s3")
		}
		if c.S3 == nil {
			return FieldErrorf("bucket", "must be given for the kind s3")
		}
		return c.S3.check()
	case MountDirectory:
		if c.S3 != nil {
			return FieldErrorf("kind",
				"must be s3 for a connection with an endpoint, a region, a bucket, a path_style or a credential")
		}
		d := c.Directory
		if len(d) > maxConnectionDirBytes || !path.IsAbs(d) || path.Clean(d) != d || d == "/" ||
			strings.ContainsFunc(d, unicode.IsControl) {
			return FieldErrorf("directory", "must be an absolute path of at most %d bytes without . or .., and not /",
				maxConnectionDirBytes)
		}
		return nil
	case MountVolume:
		switch {
		case c.S3 != nil:
			return FieldErrorf("kind",
				"must be s3 for a connection with an endpoint, a region, a bucket, a path_style or a credential")
		case c.Directory != "":
			return FieldErrorf("directory", "must be absent for the kind volume")
		case Bytes(c.Bytes) < MinVolume || Bytes(c.Bytes) > MaxVolume:
			return FieldErrorf("bytes", "must be between %s and %s for the kind volume", MinVolume, MaxVolume)
		}
		return nil
	default:
		return FieldErrorf("kind", "must be s3, directory or volume")
	}
}

func (m *S3Mount) check() error {
	switch {
	case !bucketPattern.MatchString(m.Bucket) || strings.Contains(m.Bucket, ".."):
		return FieldErrorf("bucket",
			"must be 3 to 63 characters of a-z, 0-9, . and -, the first and the last a letter or digit")
	case !regionPattern.MatchString(m.Region):
		return FieldErrorf("region",
			"must be 1 to 63 characters of a-z, 0-9 and -; most servers other than Amazon's accept us-east-1")
	}
	if err := CheckSecretName("credential", m.Credential); err != nil {
		return err
	}
	if m.Endpoint == "" {
		return nil
	}
	u, err := url.Parse(m.Endpoint)
	ok := err == nil && len(m.Endpoint) <= maxEndpointLen && (u.Scheme == "https" || u.Scheme == "http") &&
		u.Hostname() != "" && u.User == nil &&
		(u.Path == "" || u.Path == "/") && !strings.ContainsAny(m.Endpoint, "?#")
	if !ok {
		return FieldErrorf("endpoint",
			"must be an https URL of a server such as https://s3.example.com, without a user, a path and a query")
	}
	return nil
}

// CheckKeyMounts checks the mounts of an API key, but not that their connections exist. Its error
// is a [*FieldError].
func CheckKeyMounts(field string, mounts []KeyMount) error {
	if len(mounts) > MaxMounts {
		return FieldErrorf(field, "must have at most %d entries", MaxMounts)
	}
	seen := map[string]bool{}
	for _, m := range mounts {
		if err := CheckSlug(field+".connection", m.Connection); err != nil {
			return err
		}
		if seen[m.Connection] {
			return FieldErrorf(field, "must name the connection %s only once", m.Connection)
		}
		seen[m.Connection] = true
		if err := CheckMountPrefix(field+".prefix", m.Prefix); err != nil {
			return err
		}
	}
	return nil
}

// Errors of [Connection.Mount].
var (
	// ErrOutsideMount means that a sub path is outside the key's part of a connection.
	ErrOutsideMount = errors.New("the path is not in the part of the connection that the API key has")
	// ErrMountTooDeep means that the storage key of an object at this path would be too long.
	ErrMountTooDeep = fmt.Errorf("the path is too long: with the connection's prefix it must have less than %d bytes",
		MaxObjectKey)
)

// Mount returns the part of a connection left by a key and a sub path. sub is empty or a valid path
// below MountsDir/{slug}. Mount never widens the key's access. Paths below MountsDir always mean
// paths below the connection's prefix.
func (c *Connection) Mount(k KeyMount, sub string) (Mount, error) {
	if c.Removing {
		return Mount{}, &RemovingConnectionError{c.Slug}
	}
	at := k.Prefix
	if sub != "" {
		if !IsBelow(sub, k.Prefix) {
			return Mount{}, ErrOutsideMount
		}
		at = sub
	}
	m := Mount{
		Slug: c.Slug, Kind: c.Kind, ReadOnly: c.ReadOnly || k.ReadOnly, Prefix: path.Join(c.Prefix, at), At: at,
		Directory: c.Directory, Bytes: c.Bytes,
	}
	if len(m.Prefix) >= MaxObjectKey {
		return Mount{}, ErrMountTooDeep
	}
	if c.S3 != nil {
		s3 := *c.S3
		m.S3 = &s3
	}
	return m, nil
}

// IsBelow reports whether a path is dir or below it. Both are without slashes at their ends. An empty
// dir has all paths below it.
func IsBelow(name, dir string) bool {
	return dir == "" || name == dir || strings.HasPrefix(name, dir+"/")
}

// BoundConnectionError is returned if a connection cannot be removed because API keys name it.
type BoundConnectionError struct {
	Connection string
	Keys       []string // their ids
}

func (e *BoundConnectionError) Error() string {
	return fmt.Sprintf("the storage connection %s is named by API keys: %s; change or revoke them first", e.Connection,
		ListSome(e.Keys))
}

// Conflict marks the error's text as meant for the client.
func (*BoundConnectionError) Conflict() {}

// RemovingConnectionError refuses the use of a connection that is being removed.
type RemovingConnectionError struct{ Connection string }

func (e *RemovingConnectionError) Error() string {
	return fmt.Sprintf("the storage connection %s is being removed; if that was interrupted, remove it again",
		e.Connection)
}

// Conflict marks the error's text as meant for the client.
func (*RemovingConnectionError) Conflict() {}

// StorageTestError is returned if the test of a connection fails. It has no credentials.
type StorageTestError struct {
	Step string // such as "list the objects"
	Why  string // such as what the store answered
}

func (e *StorageTestError) Error() string {
	return fmt.Sprintf("the test of the storage connection failed: it could not %s: %s", e.Step, e.Why)
}

// Conflict marks the error's text as meant for the client.
func (*StorageTestError) Conflict() {}

// NoDirectoryError means that a gateway does not have the directory of a connection.
type NoDirectoryError struct{ Why string }

func (e *NoDirectoryError) Error() string {
	return "this server does not have the directory of the storage connection: " + e.Why
}
