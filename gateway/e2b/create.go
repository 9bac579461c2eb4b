package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// The timeouts of requests without one, in seconds.
const (
	timeoutV1 = 15
	timeoutV2 = 300
)

// The limits of metadata, in entries and bytes.
const (
	maxMetadata      = 50
	maxMetadataKey   = 256
	maxMetadataValue = 4096
	maxMetadataBytes = 16 << 10
)

// newSandbox is a request to create a sandbox.
type newSandbox struct {
	TemplateID          string                     `json:"templateID"`
	Timeout             *int                       `json:"timeout"`
	AutoPause           bool                       `json:"autoPause"`
	AutoPauseMemory     *bool                      `json:"autoPauseMemory"`
	AutoResume          autoResume                 `json:"autoResume"`
	Secure              any                        `json:"secure"` // E2B ignores it; sandboxes always have a token
	AllowInternetAccess *bool                      `json:"allow_internet_access"`
	Network             map[string]json.RawMessage `json:"network"`
	Metadata            map[string]string          `json:"metadata"`
	EnvVars             map[string]string          `json:"envVars"`
}

type autoResume struct {
	Enabled bool `json:"enabled"`
}

// knownFields are the fields of newSandbox.
var knownFields = []string{
	"templateID", "timeout", "autoPause", "autoPauseMemory", "autoResume", "secure", "allow_internet_access", "network",
	"metadata", "envVars",
}

// allAddresses in denyOut denies the internet.
const allAddresses = "0.0.0.0/0"

// decodeNewSandbox decodes a request. Its error names a field that this server does not honour.
func decodeNewSandbox(body []byte) (*newSandbox, error) {
	fields := map[string]json.RawMessage{}
	request := new(newSandbox)
	if err := decodeObject(body, &fields); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(knownFields, name) && !isEmpty(fields[name]) {
			return nil, unsupported(proto.Shorten(name))
		}
	}
	return request, decodeObject(body, request)
}

// decodeObject decodes the body of a request, which must be an object.
func decodeObject(body []byte, to any) error {
	err := json.Unmarshal(body, to)
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && wrong.Field != "" {
		return proto.FieldErrorf(wrong.Field, "must not be a JSON %s", wrong.Value)
	}
	if err != nil {
		return proto.FieldErrorf("body", "must be a JSON object: %v", err)
	}
	return nil
}

func unsupported(field string) error {
	return proto.FieldErrorf(field, "is not supported by this server; leave it out")
}

// isEmpty reports whether a JSON value asks for nothing.
func isEmpty(raw json.RawMessage) bool {
	var value any
	return json.Unmarshal(raw, &value) == nil && emptyValue(value)
}

func emptyValue(value any) bool {
	switch v := value.(type) {
	case nil:
		return true
	case bool:
		return !v
	case string:
		return v == ""
	case []any:
		return len(v) == 0
	case map[string]any:
		for _, field := range v {
			if !emptyValue(field) {
				return false
			}
		}
		return true
	default:
		return false
	}
}

// check checks the fields that do not depend on the template.
func (r *newSandbox) check() error {
	switch {
	case r.TemplateID == "":
		return proto.FieldErrorf("templateID", "must be the name of a template")
	case r.Timeout != nil && *r.Timeout < 1:
		return proto.FieldErrorf("timeout", "must be a positive number of seconds")
	case r.AutoResume.Enabled:
		return proto.FieldErrorf("autoResume.enabled", "must be false: requests do not wake a paused sandbox; connect to it")
	case r.AutoPauseMemory != nil && *r.AutoPauseMemory:
		return errMemory("autoPauseMemory", `{"action": "pause", "mode": "filesystem"}`)
	case r.AutoPauseMemory != nil && !r.AutoPause:
		return proto.FieldErrorf("autoPauseMemory", "goes with autoPause only")
	}
	if err := checkMetadata(r.Metadata); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(r.EnvVars)) {
		if err := checkEnv(name, r.EnvVars[name]); err != nil {
			return err
		}
	}
	return nil
}

// errMemory refuses to keep the memory of a sandbox.
func errMemory(field, instead string) error {
	return proto.FieldErrorf(field, "must not be true (snapshot_memory_unsupported): a pause keeps the files of a "+
		"sandbox and ends its processes; ask for that with %s", instead)
}

func checkMetadata(metadata map[string]string) error {
	size := 0
	for key, value := range metadata {
		size += len(key) + len(value)
		if key == "" || len(key) > maxMetadataKey || len(value) > maxMetadataValue || !utf8.ValidString(key+value) {
			return proto.FieldErrorf("metadata", "keys must be 1 to %d bytes, and values at most %d", maxMetadataKey,
				maxMetadataValue)
		}
	}
	if len(metadata) > maxMetadata || size > maxMetadataBytes {
		return proto.FieldErrorf("metadata", "must be at most %d entries of %d bytes together", maxMetadata,
			maxMetadataBytes)
	}
	return nil
}

var envPattern = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_]*$`)

// checkEnv checks a variable of all processes. Its name may be in lower case, unlike an execution's.
func checkEnv(name, value string) error {
	const field = "envVars"
	if !envPattern.MatchString(name) || len(name) > proto.MaxEnvNameLen {
		return proto.FieldErrorf(field, "names must be 1 to %d letters, digits and _, the first a letter; %q is not",
			proto.MaxEnvNameLen, proto.Shorten(name))
	}
	if proto.ReservedEnv(name) {
		return proto.FieldErrorf(field, "must not set the reserved name %s for all processes; set it for each command",
			proto.Shorten(name))
	}
	return proto.CheckEnv(field, "X", value) // only the value
}

// checkNetwork returns whether the ports of a sandbox are public.
func (s *Server) checkNetwork(r *newSandbox, p *proto.Profile) (public bool, err error) {
	public = s.PublicPorts
	for _, name := range slices.Sorted(maps.Keys(r.Network)) {
		raw, field := r.Network[name], "network."+proto.Shorten(name)
		var flag *bool
		var list []string
		switch {
		case name == "allowPublicTraffic" && json.Unmarshal(raw, &flag) == nil:
			if flag != nil && *flag && !s.PublicPorts {
				return false, proto.FieldErrorf(field, "must not be true: the ports of this server's sandboxes need a token "+
					"(--sandbox-ports)")
			}
			public = public && (flag == nil || *flag)
		case name == "denyOut" && json.Unmarshal(raw, &list) == nil && slices.Equal(list, []string{allAddresses}):
			r.AllowInternetAccess = new(false)
		case !isEmpty(raw):
			return false, unsupported(field)
		}
	}
	if r.AllowInternetAccess != nil && !*r.AllowInternetAccess && p.Network.Effective() != proto.NetworkBlocked {
		return false, proto.FieldErrorf("allow_internet_access",
			"must not be false: the network is the template's, and this one's is %s; choose a template without a network",
			p.Network.Effective())
	}
	return public, nil
}

// create returns the handler that creates sandboxes, with the timeout of requests without one.
func (s *Server) create(timeout int) web.Handle {
	return func(w http.ResponseWriter, r *web.Request) error {
		request, err := decode(s, w, r, decodeNewSandbox)
		if err != nil {
			return err
		}
		if r.Header.Get("Idempotency-Key") != "" {
			return proto.FieldErrorf("Idempotency-Key", "is not supported for sandboxes; leave it out")
		}
		if err := request.check(); err != nil {
			return err
		}
		profile, p, err := s.template(r.Context(), &r.Key, request.TemplateID)
		if err != nil {
			return err
		}
		public, err := s.checkNetwork(request, &p)
		if err != nil {
			return err
		}
		timeout, _ := seconds(request.Timeout, timeout)
		asked := &api.SandboxRequest{Timeout: timeout, Env: request.EnvVars, Metadata: request.Metadata}
		if request.AutoPause {
			asked.OnTimeout = proto.SandboxPause
		}
		c := web.CallerOf(r)
		x := sandboxes.NewSandbox(asked, c)
		x.Profile, x.PublicPorts = profile, public
		if err := s.Sandboxes.Create(r.Context(), r.Info, x, c); err != nil {
			s.endAbandoned(r, x.ID)
			return startError(err)
		}
		return web.WriteValue(w, http.StatusCreated, s.started(x))
	}
}

// endAbandoned ends a sandbox whose client has left before it learnt the id.
func (s *Server) endAbandoned(r *web.Request, id string) {
	if r.Context().Err() == nil {
		return
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	_, _ = s.Sandboxes.Stop(ctx, id, proto.SandboxKill, web.CallerOf(r)) // it ends at its timeout otherwise
}

// startError returns the error for a client whose sandbox was not started.
func startError(err error) error {
	if rejection, ok := errors.AsType[*proto.Rejection](err); ok {
		switch rejection.Reason {
		case proto.RejectedTimeout, proto.RejectedKeyTimeout: // E2B answers 429 only to what may pass
			return api.Errorf(api.CodeValidation, "%s", api.NewError(err).Message)
		case proto.RejectedNoProfile, proto.RejectedProfile:
			return api.Errorf(api.CodeNotFound, "%s", api.NewError(err).Message)
		}
	}
	return err
}

// decode reads and decodes the body of a request. An absent one is an empty object.
func decode[T any](s *Server, w http.ResponseWriter, r *web.Request, parse func([]byte) (*T, error)) (x *T, err error) {
	err = s.Core.WithBody(w, r, func(body []byte) error {
		if len(body) == 0 {
			body = []byte("{}")
		}
		x, err = parse(body)
		return err
	})
	return x, err
}

// decodeAs decodes a request in which unknown fields ask for nothing that could be refused.
func decodeAs[T any](body []byte) (*T, error) {
	x := new(T)
	return x, decodeObject(body, x)
}

// seconds returns the time in so many seconds, or of the default if n is nil.
func seconds(n *int, otherwise int) (int, time.Duration) {
	if n == nil {
		n = &otherwise
	}
	return *n, time.Duration(*n) * time.Second
}

// The templates of clients that name none: of E2B's SDK, and of its code interpreter. Each is the sandbox
// profile of that name, or else the API key's own.
const (
	baseTemplate        = "base"
	interpreterTemplate = "code-interpreter-v1"
)

// template returns the name and the profile of a template that an API key may use. The name is empty for
// the key's own profile.
func (s *Server) template(ctx context.Context, key *proto.Key, name string) (string, proto.Profile, error) {
	unknown := api.Errorf(api.CodeNotFound, "template %q was not found: there is no sandbox profile of that name for "+
		"this API key", proto.Shorten(name))
	if proto.CheckProfileForm("templateID", name) != nil {
		return "", proto.Profile{}, unknown
	}
	p, err := s.Profiles.ProfileFor(ctx, key, name)
	if err == nil {
		return name, p, nil
	}
	_, missing := errors.AsType[*proto.FieldError](err)
	if rejection, ok := errors.AsType[*proto.Rejection](err); !missing && (!ok ||
		rejection.Reason != proto.RejectedProfile && rejection.Reason != proto.RejectedNoProfile) {
		return "", p, err
	}
	if name != baseTemplate && name != interpreterTemplate {
		return "", p, unknown
	}
	p, err = s.Profiles.ProfileFor(ctx, key, "")
	return "", p, startError(err)
}
