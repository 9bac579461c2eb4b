package api

// RotatedKey is the answer to the rotation of the operator's key.
type RotatedKey struct {
	WrappedFor string `json:"wrapped_for" doc:"The public keys that can decrypt the secrets from now on, or the command that can."`
}
