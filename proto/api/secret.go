package api

import "github.com/bullpen-run/bullpen/proto"

// SecretRequest is the value of a secret to store.
type SecretRequest struct {
	Value string `json:"value" doc:"4 bytes to 16 KiB of text."`
}

// Validate checks the value.
func (r *SecretRequest) Validate() error {
	_, err := proto.CheckSecretValue(r.Value)
	return err
}

// Secret is a named secret, without its value.
type Secret struct {
	Org       string `json:"org"`
	Name      string `json:"name"`
	Bytes     int    `json:"bytes" doc:"The size of the value."`
	Variable  bool   `json:"variable" doc:"Whether the value can be an environment variable: at most 4,096 characters, no control characters."`
	CreatedAt Time   `json:"created_at"`
	UpdatedAt Time   `json:"updated_at"`
}

// Secrets is the list of the secrets of an organisation.
type Secrets struct {
	Secrets []Secret `json:"secrets"`
}

// NewSecret returns the form of a secret.
func NewSecret(s *proto.Secret) Secret {
	return Secret{s.Org, s.Name, s.Bytes, s.Variable, Time{s.CreatedAt}, Time{s.UpdatedAt}}
}

// RotatedKey is the answer to the rotation of the operator's key.
type RotatedKey struct {
	WrappedFor string `json:"wrapped_for" doc:"The public keys that can decrypt the secrets from now on, or the command that can."`
}
