package api

import "github.com/bullpen-run/bullpen/proto"

// SecretRequest is a secret to store.
type SecretRequest struct {
	Value     string           `json:"value" doc:"4 bytes to 16 KiB of text."`
	Injection *proto.Injection `json:"injection,omitempty" doc:"If set, programs never get the value: the worker adds it to their requests. It stays until it is replaced by another or the secret is removed."`
}

// Validate checks the value and the injection.
func (r *SecretRequest) Validate() error {
	if _, err := proto.CheckSecretValue(r.Value); err != nil || r.Injection == nil {
		return err
	}
	if err := r.Injection.Check("injection"); err != nil {
		return err
	}
	return r.Injection.CheckValue(r.Value)
}

// Secret is a named secret, without its value.
type Secret struct {
	Org       string           `json:"org"`
	Name      string           `json:"name"`
	Bytes     int              `json:"bytes" doc:"The size of the value."`
	Variable  bool             `json:"variable" doc:"Whether the value can be an environment variable: at most 4,096 characters, no control characters."`
	Injection *proto.Injection `json:"injection,omitempty" doc:"How the worker adds the value to requests of programs, which never get it. Absent for other secrets."`
	CreatedAt Time             `json:"created_at"`
	UpdatedAt Time             `json:"updated_at"`
}

// Secrets is the list of the secrets of an organisation.
type Secrets struct {
	Secrets    []Secret `json:"secrets"`
	NextCursor *string  `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// NewSecret returns the form of a secret.
func NewSecret(s *proto.Secret) Secret {
	return Secret{s.Org, s.Name, s.Bytes, s.Variable, s.Injection, Time{s.CreatedAt}, Time{s.UpdatedAt}}
}

// RotatedKey is the answer to the rotation of the operator's key.
type RotatedKey struct {
	WrappedFor string `json:"wrapped_for" doc:"The public keys, or the command, that can decrypt the secrets from now on."`
}
