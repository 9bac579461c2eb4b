package proto

import "errors"

// ErrNoSecretsKey is returned if the operator has given a process no key for secrets.
var ErrNoSecretsKey = errors.New("this server has no key for secrets: set --secrets-key or --secrets-command")
