package api

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

// The limits of a request to run a program that [ExecuteRequest.Validate] checks. Lengths are in
// characters.
const (
	maxMetadataKeyLen   = 40
	maxMetadataValueLen = 256
	maxSubPathLen       = 512
)

// ExecuteRequest asks for a program to be run.
type ExecuteRequest struct {
	_ struct{} `additionalProperties:"true" doc:"Unknown fields are ignored; null means absent. A field that is given twice is refused."`

	Code       string            `json:"code" minLength:"1" maxLength:"1048576" doc:"The program: 1 byte to 1 MiB of UTF-8."`
	Language   proto.Language    `json:"language,omitempty" default:"python"`
	Timeout    int               `json:"timeout,omitempty" default:"60" minimum:"1" must:"be a whole number of seconds, at least 1" doc:"Seconds. Above the plan's maximum: 429."`
	Profile    string            `json:"profile,omitempty" pattern:"^([a-z0-9][a-z0-9._-]{0,62})?$" doc:"The sandbox profile to use: the API key's own, or another one of its profiles. Others are refused with 403 and the reason profile_not_allowed. Empty for the key's own. An extension of the public contract."`
	Image      string            `json:"image,omitempty" pattern:"^([a-z0-9][a-z0-9._-]{0,62})?$" doc:"The image to use instead of the sandbox profile's, by its name. For keys of global administrators; others choose among the profiles of the key and are refused with 403 and the reason image_not_allowed. Empty for the profile's. An extension of the public contract."`
	ThreadID   string            `json:"thread_id,omitempty" format:"thread-id" doc:"The thread whose home directory the program uses. Each execution locks the thread from its acceptance to its end: meanwhile, other requests with the thread get 409 immediately. The home is saved before the answer is visible."`
	Metadata   map[string]string `json:"metadata,omitempty" maxProperties:"10" keyPattern:"^[A-Za-z0-9][A-Za-z0-9_.-]*$" keyMaxLength:"40" valueMaxLength:"256" doc:"For audit; the program does not see it."`
	WebhookURL string            `json:"webhook_url,omitempty" format:"webhook-url" doc:"Where the result of an async execution is delivered, instead of the key's own URL. In the other modes its form is checked, and it is not used."`
	// Env are the variables of the request alone, without the variables of the sandbox profile.
	Env           map[string]string `json:"env_vars,omitempty" maxProperties:"50" keyPattern:"^[A-Z][A-Z0-9_]*$" keyMaxLength:"128" valueMaxLength:"4096" doc:"At most 65,536 bytes of names plus values. Some names are reserved."`
	MaxAttempts   int               `json:"max_attempts,omitempty" default:"1" minimum:"1" maximum:"10" must:"be a whole number from 1 to 10" doc:"How often the program may be started if a worker is lost. 1: it runs at most once."`
	Args          []string          `json:"args,omitempty" maxItems:"256" valuePattern:"^[^\\u0000]*$" doc:"The program's arguments, after its file name: at most 65,536 bytes together, without NUL. An extension of the public contract."`
	Stdin         string            `json:"stdin,omitempty" maxLength:"1048576" doc:"The program's standard input, at most 1 MiB of UTF-8. Empty by default. An extension of the public contract."`
	RunAt         *Time             `json:"run_at,omitempty" doc:"When to start queueing an async execution, at most 30 days and the server's retention ahead; a time in the past means immediately. Until then its status is queued, it can be cancelled, counts against the plan's limit of queued executions, and locks its thread. An extension of the public contract."`
	Delay         proto.Seconds     `json:"delay,omitempty" minimum:"0" maximum:"2592000" doc:"The same in seconds from the request."`
	KillGrace     *proto.Seconds    `json:"kill_grace,omitempty" minimum:"0" maximum:"30" doc:"Seconds between SIGTERM and SIGKILL when the program exceeds its timeout or is cancelled: at most 3 in inline and streaming executions, and 30 in async ones. 0: no SIGTERM. By default, a cancelled program has 2 seconds, and a program that exceeds its timeout is killed immediately. duration_ms includes this time, and timeout plus kill_grace must be within the plan's maximum. An extension of the public contract."`
	StreamPartial bool              `json:"stream_partial,omitempty" default:"false" doc:"Makes an incomplete line an event after 100 ms, for prompts and for progress that is redrawn with \\r. An extension of the public contract."`
	Rich          bool              `json:"rich,omitempty" default:"false" doc:"Runs the program, which must be in Python, as one cell of a notebook: the value of its last expression, pictures and tables become results, and display events of streams. An extension of the public contract."`
	SubPaths      []string          `json:"sub_paths,omitempty" maxItems:"10" valueMaxLength:"512" valuePattern:"^/data/[^/]+/[^/]" doc:"Narrows storage connections of the API key for this execution: the program sees only /data/{slug}/{path} of the connection, at that path. A path outside the key's part is refused with 403. At most one per connection; other connections stay as the key has them. A missing part of a bucket is an empty directory, or 400 if the mount is read-only."`
}

var (
	metadataPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*$`)
	subPathPattern  = regexp.MustCompile(`^/data/([^/]+)/[^/]`)
	subPathRefused  = regexp.MustCompile(`(?i)\.\.|\x00|\\|%(?:2e|2f|5c|00|25|c0|c1)`)
)

// Validate checks the values of the fields, but neither the plan's limits nor where webhook_url
// leads.
func (r *ExecuteRequest) Validate() error {
	if r.Code == "" || len(r.Code) > proto.MaxCodeBytes {
		return proto.FieldErrorf("code", "must be between 1 byte and 1 MB")
	}
	if r.Profile != "" {
		if err := proto.CheckProfileForm("profile", r.Profile); err != nil {
			return err
		}
	}
	if r.Image != "" && !proto.ValidImageName(r.Image) {
		return proto.FieldErrorf("image", "must be the name of an image: see `bullpen image list`")
	}
	if err := checkMetadata(r.Metadata); err != nil {
		return err
	}
	for _, name := range sortedKeys(r.Env) {
		if err := proto.CheckEnv("env_vars", name, r.Env[name]); err != nil {
			return err
		}
	}
	size := 0
	for _, arg := range r.Args {
		if strings.Contains(arg, "\x00") {
			return proto.FieldErrorf("args", "must not contain NUL")
		}
		size += len(arg)
	}
	if size > proto.MaxArgsBytes {
		return proto.FieldErrorf("args", "must have at most %d bytes together", proto.MaxArgsBytes)
	}
	if len(r.Stdin) > proto.MaxStdinBytes {
		return proto.FieldErrorf("stdin", "must be at most %d bytes", proto.MaxStdinBytes)
	}
	if r.Rich && r.Language != proto.Python {
		return proto.FieldErrorf("rich", "must not be given with the language %s: only Python programs have rich results",
			r.Language)
	}
	if r.RunAt != nil && r.Delay > 0 {
		return proto.FieldErrorf("delay", "must not be given together with run_at")
	}
	return checkSubPaths(r.SubPaths)
}

func checkMetadata(metadata map[string]string) error {
	for _, key := range sortedKeys(metadata) {
		if len(key) > maxMetadataKeyLen || !metadataPattern.MatchString(key) {
			return proto.FieldErrorf("metadata",
				"keys must be 1 to %d characters of A-Z, a-z, 0-9, _, . and -, the first a letter or digit; %q is not",
				maxMetadataKeyLen, proto.Shorten(key))
		}
		if utf8.RuneCountInString(metadata[key]) > maxMetadataValueLen {
			return proto.FieldErrorf("metadata", "values must be at most %d characters; the value of %s is longer",
				maxMetadataValueLen, key)
		}
	}
	return nil
}

// SplitSubPath returns the slug of a valid sub path and the path below it, without a slash at its
// end.
func SplitSubPath(path string) (slug, below string) {
	slug, below, _ = strings.Cut(strings.TrimPrefix(path, proto.MountsDir+"/"), "/")
	return slug, strings.TrimSuffix(below, "/")
}

func checkSubPaths(paths []string) error {
	slugs := make(map[string]bool)
	for _, path := range paths {
		if utf8.RuneCountInString(path) > maxSubPathLen {
			return proto.FieldErrorf("sub_paths", "must be at most %d characters each", maxSubPathLen)
		}
		if subPathRefused.MatchString(path) {
			return proto.FieldErrorf("sub_paths", `must not contain "..", a backslash, NUL or an escape of such a character`)
		}
		parts := subPathPattern.FindStringSubmatch(path)
		if parts == nil {
			return proto.FieldErrorf("sub_paths", "must have the form /data/{slug}/{path}")
		}
		if _, below := SplitSubPath(path); !proto.ValidObjectName(below) {
			return proto.FieldErrorf("sub_paths", "must not have empty components, \".\", and components of more than 255 bytes")
		}
		if slugs[parts[1]] {
			return proto.FieldErrorf("sub_paths", "must have at most one path per slug; %q has two", parts[1])
		}
		slugs[parts[1]] = true
	}
	return nil
}

// FillJob copies the request into the job that carries it out. It leaves the fields that do not
// come from the request alone.
func (r *ExecuteRequest) FillJob(job *proto.Job) {
	job.Code, job.Language, job.Timeout, job.ThreadID = r.Code, r.Language, r.Timeout, r.ThreadID
	job.Metadata, job.MaxAttempts = r.Metadata, r.MaxAttempts
	job.Args, job.Stdin, job.KillGrace, job.StreamPartial, job.Rich = r.Args, r.Stdin, r.KillGrace, r.StreamPartial, r.Rich
	job.Requested = &proto.Requested{EnvNames: sortedKeys(r.Env), SubPaths: r.SubPaths, Image: r.Image}
}

// Hash identifies what the request asks for, however it is written: white space, the order of
// members and explicit defaults make no difference.
func (r *ExecuteRequest) Hash() (string, error) {
	canonical, err := json.Marshal(r)
	if err != nil {
		return "", fmt.Errorf("hash request: %w", err)
	}
	sum := sha256.Sum256(canonical)
	return hex.EncodeToString(sum[:]), nil
}

// Accepted answers a request whose execution continues after the answer.
type Accepted struct {
	TraceID proto.TraceID `json:"trace_id" format:"trace-id"`
	Status  string        `json:"status" enum:"running,queued" doc:"queued: it has a run_at."`
}
