package proto

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// The limits of secrets. All values of an execution fit into one message.
const (
	MaxSecretBytes    = 16 << 10 // of a value
	MinSecretBytes    = 4        // shorter ones could not be recognised in the output
	MaxSecrets        = 1000     // of an organisation
	MaxSecretBindings = 16       // of an execution, after the merge of both levels
	maxSecretName     = 63
)

// ErrNoSecretsKey is returned if the operator has given a process no key for secrets.
var ErrNoSecretsKey = errors.New("this server has no key for secrets: set --secrets-key or --secrets-command")

// MissingSecretError is returned if a key or profile refers to a secret that does not exist.
type MissingSecretError struct{ Secret string }

func (e *MissingSecretError) Error() string { return "the secret " + e.Secret + " does not exist" }

// SecretInUseError is returned if a secret cannot be removed because it is in use.
type SecretInUseError struct {
	Secret      string
	Keys        []string // ids of unrevoked API keys that refer to it, directly or by their profile
	Connections []string // slugs of storage connections that have it as their credential
}

func (e *SecretInUseError) Error() string {
	var holders []string
	if len(e.Keys) > 0 {
		holders = append(holders, "API keys or their sandboxes: "+ListSome(e.Keys)+"; change or revoke them first")
	}
	if len(e.Connections) > 0 {
		holders = append(holders, "storage connections: "+ListSome(e.Connections)+"; change or remove them first")
	}
	return fmt.Sprintf("the secret %s is named by %s", e.Secret, strings.Join(holders, ", and by "))
}

// Conflict marks the error's text as meant for the client.
func (*SecretInUseError) Conflict() {}

// Secret describes a named secret of an organisation, without its value.
type Secret struct {
	Org      string `json:"org"`
	Name     string `json:"name"`
	Bytes    int    `json:"bytes"`    // of the value
	Variable bool   `json:"variable"` // whether the value can be an environment variable
	// Injection, if not nil, is how the worker adds the secret to requests; programs never get it.
	Injection *Injection `json:"injection,omitempty"`
	CreatedAt time.Time  `json:"created_at"`
	UpdatedAt time.Time  `json:"updated_at"`
}

// SecretBinding binds a secret of an organisation to its programs: as a variable, or else as a
// file. A secret with an injection is neither.
type SecretBinding struct {
	Secret string `json:"secret"`         // the name
	Env    string `json:"env,omitempty"`  // the variable; empty for a file
	Mask   bool   `json:"mask,omitempty"` // whether the output has *** in its place
	// Injection is the secret's injection at the time the execution was accepted.
	Injection *Injection `json:"injection,omitempty"`
}

// parseBinding parses NAME, NAME=VARIABLE, and either with a ! at its end.
func parseBinding(text string) (b SecretBinding) {
	text, b.Mask = strings.CutSuffix(text, "!")
	b.Secret, b.Env, _ = strings.Cut(text, "=")
	return b
}

// String returns the text of a binding, as a key or a profile has it.
func (b SecretBinding) String() string {
	text := b.Secret
	if b.Env != "" {
		text += "=" + b.Env
	}
	if b.Mask {
		text += "!"
	}
	return text
}

var secretPattern = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]*$`)

// CheckSecretName checks the name of a secret in a field. Its error is a [*FieldError].
func CheckSecretName(field, name string) error {
	if len(name) > maxSecretName || !secretPattern.MatchString(name) {
		return FieldErrorf(field, "must be 1 to %d characters of A-Z, a-z, 0-9, _ and -, the first a letter", maxSecretName)
	}
	if name == "rotate-key" { // a path of the API beside those of secrets
		return FieldErrorf(field, "must not be rotate-key")
	}
	return nil
}

// CheckSecretValue checks the value of a secret, and reports whether it can be a variable. Its
// error is a [*FieldError].
func CheckSecretValue(value string) (variable bool, err error) {
	if len(value) < MinSecretBytes || len(value) > MaxSecretBytes {
		return false, FieldErrorf("value", "must be %d to %d bytes", MinSecretBytes, MaxSecretBytes)
	}
	return CheckEnv("value", "VALUE", value) == nil, nil
}

// CheckSecretBindings checks the bindings of a key or a profile. Its error is a [*FieldError].
func CheckSecretBindings(field string, list []string) error {
	if len(list) > MaxSecretBindings {
		return FieldErrorf(field, "must have at most %d secrets; there are %d", MaxSecretBindings, len(list))
	}
	seen := make([]SecretBinding, 0, len(list))
	for _, text := range list {
		b := parseBinding(text)
		if CheckSecretName(field, b.Secret) != nil {
			return FieldErrorf(field, "must have NAME or NAME=VARIABLE of secrets; %q is neither", Shorten(text))
		}
		if strings.Contains(text, "=") {
			if err := CheckEnv(field, b.Env, ""); err != nil {
				return err
			}
		}
		if slices.ContainsFunc(seen, b.conflicts) {
			return FieldErrorf(field, "must not have two secrets for one variable, or one file twice")
		}
		seen = append(seen, b)
	}
	return nil
}

// conflicts reports whether two bindings set the same variable or the same file.
func (b SecretBinding) conflicts(other SecretBinding) bool {
	return b.Env == other.Env && (b.Env != "" || b.Secret == other.Secret)
}

// MergeSecrets merges the bindings of a profile and a key; the key's win. Its error is a
// [*FieldError].
func MergeSecrets(profile, key []string) (merged []SecretBinding, err error) {
	for _, text := range slices.Concat(key, profile) {
		if b := parseBinding(text); !slices.ContainsFunc(merged, b.conflicts) {
			merged = append(merged, b)
		}
	}
	if len(merged) > MaxSecretBindings {
		return nil, FieldErrorf("secrets",
			"must be at most %d for an execution; the API key and its sandbox have %d together", MaxSecretBindings, len(merged))
	}
	return merged, nil
}

// CheckSecretEnv checks secret variables together with the rest of the environment. requested are
// the request's variables, which cannot replace a secret. Its error is a [*FieldError].
func CheckSecretEnv(env, requested map[string]string, bound []SecretBinding, secrets map[string]Secret) error {
	size, n := 0, len(env)
	for name, value := range env {
		size += len(name) + len(value)
	}
	for _, b := range bound {
		if b.Env == "" {
			continue
		}
		if _, ok := requested[b.Env]; ok {
			return FieldErrorf("env_vars", "must not set %s, which is a secret of the API key or its sandbox", b.Env)
		}
		if !secrets[b.Secret].Variable {
			return FieldErrorf("secrets",
				"must not set the variable %s: the value of %s is too long for a variable, or has control characters; "+
					"the administrator can bind it as a file", b.Env, b.Secret)
		}
		if old, ok := env[b.Env]; ok { // of the key or the profile
			size, n = size-len(b.Env)-len(old), n-1
		}
		size, n = size+len(b.Env)+secrets[b.Secret].Bytes, n+1
	}
	if n > MaxEnvVars || size > MaxEnvBytes {
		return FieldErrorf("env_vars",
			"must be at most %d variables and %d bytes, with the variables and secrets of the key and the sandbox; there are "+
				"%d with %d bytes",
			MaxEnvVars, MaxEnvBytes, n, size)
	}
	return nil
}
