package proto

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The limits of a request. Lengths are in characters unless the name says bytes.
const (
	MaxCodeBytes         = 1 << 20
	DefaultTimeout       = 60 // seconds
	MaxThreadIDLen       = 128
	MaxMetadataKeys      = 10
	MaxMetadataKeyLen    = 40
	MaxMetadataValueLen  = 256
	MaxWebhookURLLen     = 2048
	MaxAttemptsLimit     = 10
	MaxSubPaths          = 10
	MaxSubPathLen        = 512
	MaxIdempotencyKeyLen = 255
)

// Request is the body of an execute request, checked and with its defaults filled in. Its JSON form decodes to the same
// request again.
type Request struct {
	Code        string            `json:"code"`
	Language    Language          `json:"language"`
	Timeout     int               `json:"timeout"` // seconds, at least 1; the plan's maximum is not checked here
	ThreadID    string            `json:"thread_id,omitempty"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	WebhookURL  string            `json:"webhook_url,omitempty"`
	Env         map[string]string `json:"env_vars,omitempty"`
	MaxAttempts int               `json:"max_attempts"`
	SubPaths    []string          `json:"sub_paths,omitempty"`
}

var (
	threadPattern   = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)
	metadataPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*$`)
	subPathPattern  = regexp.MustCompile(`^/data/([^/]+)/[^/]`)
	subPathRefused  = regexp.MustCompile(`(?i)\.\.|\x00|\\|%(?:2e|2f|5c|00|25|c0|c1)`)
)

// DecodeRequest reads and checks the body of an execute request. What is wrong with it is a [*FieldError].
func DecodeRequest(body []byte) (*Request, error) {
	members, err := decodeObject(body, "code", "language", "timeout", "thread_id", "metadata", "webhook_url", envField,
		"max_attempts", "sub_paths")
	if err != nil {
		return nil, err
	}
	r := &Request{Language: Python, Timeout: DefaultTimeout, MaxAttempts: 1}
	if members["code"] == nil {
		return nil, errCodeSize()
	}
	steps := []struct {
		field string
		read  func(raw []byte) error
	}{
		{"code", r.readCode},
		{"language", r.readLanguage},
		{"timeout", r.readTimeout},
		{"thread_id", r.readThreadID},
		{"metadata", r.readMetadata},
		{"webhook_url", r.readWebhookURL},
		{envField, r.readEnv},
		{"max_attempts", r.readMaxAttempts},
		{"sub_paths", r.readSubPaths},
	}
	for _, step := range steps {
		if raw := members[step.field]; raw != nil {
			if err := step.read(raw); err != nil {
				return nil, err
			}
		}
	}
	return r, nil
}

// Hash identifies what the request asks for, however it was written: white space, the order of members and explicit
// defaults make no difference.
func (r *Request) Hash() (string, error) {
	canonical, err := json.Marshal(r)
	if err != nil {
		return "", fmt.Errorf("hash request: %w", err)
	}
	sum := sha256.Sum256(canonical)
	return hex.EncodeToString(sum[:]), nil
}

func errCodeSize() error { return fieldErrorf("code", "must be between 1 byte and 1 MB") }

func (r *Request) readCode(raw []byte) (err error) {
	if r.Code, err = decodeString("code", raw); err != nil {
		return err
	}
	if r.Code == "" || len(r.Code) > MaxCodeBytes {
		return errCodeSize()
	}
	return nil
}

func (r *Request) readLanguage(raw []byte) error {
	name, err := decodeString("language", raw)
	if err != nil {
		return err
	}
	if r.Language = Language(name); !slices.Contains(Languages(), r.Language) {
		return fieldErrorf("language", "must be one of %s, %s, %s", Python, Node, Bash)
	}
	return nil
}

func (r *Request) readTimeout(raw []byte) error {
	n, err := decodeInt(raw)
	if err != nil || n < 1 {
		return fieldErrorf("timeout", "must be a whole number of seconds, at least 1")
	}
	r.Timeout = n
	return nil
}

func (r *Request) readThreadID(raw []byte) (err error) {
	if r.ThreadID, err = decodeString("thread_id", raw); err != nil {
		return err
	}
	return CheckThreadID("thread_id", r.ThreadID)
}

// CheckThreadID checks a thread's id in the field of that name. Its error is a [*FieldError].
func CheckThreadID(field, id string) error {
	if len(id) > MaxThreadIDLen || !threadPattern.MatchString(id) {
		return fieldErrorf(field, "must be 1 to %d characters of A-Z, a-z, 0-9, _ and -, the first a letter or digit",
			MaxThreadIDLen)
	}
	return nil
}

func (r *Request) readMetadata(raw []byte) (err error) {
	r.Metadata, err = decodeStrings("metadata", raw, MaxMetadataKeys, func(key, value string) error {
		if len(key) > MaxMetadataKeyLen || !metadataPattern.MatchString(key) {
			return fieldErrorf("metadata",
				"keys must be 1 to %d characters of A-Z, a-z, 0-9, _, . and -, the first a letter or digit; %q is not",
				MaxMetadataKeyLen, shorten(key))
		}
		if utf8.RuneCountInString(value) > MaxMetadataValueLen {
			return fieldErrorf("metadata", "values must be at most %d characters; that of %s is longer", MaxMetadataValueLen, key)
		}
		return nil
	})
	return err
}

func (r *Request) readWebhookURL(raw []byte) (err error) {
	if r.WebhookURL, err = decodeString("webhook_url", raw); err != nil {
		return err
	}
	return CheckWebhookURL("webhook_url", r.WebhookURL)
}

func (r *Request) readEnv(raw []byte) (err error) {
	r.Env, err = decodeStrings(envField, raw, MaxEnvVars, CheckEnv)
	return err
}

func (r *Request) readMaxAttempts(raw []byte) error {
	n, err := decodeInt(raw)
	if err != nil || n < 1 || n > MaxAttemptsLimit {
		return fieldErrorf("max_attempts", "must be a whole number from 1 to %d", MaxAttemptsLimit)
	}
	r.MaxAttempts = n
	return nil
}

func (r *Request) readSubPaths(raw []byte) error {
	if kindOf(raw) != '[' {
		return fieldErrorf("sub_paths", "must be an array of strings")
	}
	slugs := make(map[string]bool)
	return eachElement(raw, func(raw []byte) error {
		path, err := decodeString("sub_paths", raw)
		if err != nil {
			return fieldErrorf("sub_paths", "must be an array of strings")
		}
		slug, err := checkSubPath(path)
		if err != nil {
			return err
		}
		if slugs[slug] {
			return fieldErrorf("sub_paths", "must have at most one path per slug; %q has two", slug)
		}
		slugs[slug] = true
		if r.SubPaths = append(r.SubPaths, path); len(r.SubPaths) > MaxSubPaths {
			return fieldErrorf("sub_paths", "must have at most %d entries", MaxSubPaths)
		}
		return nil
	})
}

func checkSubPath(path string) (slug string, err error) {
	if utf8.RuneCountInString(path) > MaxSubPathLen {
		return "", fieldErrorf("sub_paths", "must be at most %d characters each", MaxSubPathLen)
	}
	if subPathRefused.MatchString(path) {
		return "", fieldErrorf("sub_paths", `must not contain "..", a backslash, NUL or an escape of such a character`)
	}
	parts := subPathPattern.FindStringSubmatch(path)
	if parts == nil {
		return "", fieldErrorf("sub_paths", "must have the form /data/{slug}/{path}")
	}
	return parts[1], nil
}

// decodeInt reads a JSON number that is written as an integer. One that is too large for an int is the largest or smallest,
// so that it meets the limit of its field and not another error.
func decodeInt(raw []byte) (int, error) {
	n, err := strconv.Atoi(string(raw))
	if errors.Is(err, strconv.ErrRange) {
		if strings.HasPrefix(string(raw), "-") {
			return math.MinInt, nil
		}
		return math.MaxInt, nil
	}
	return n, err
}
