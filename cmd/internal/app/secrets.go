package app

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/bullpen-run/bullpen/cmd/internal/secretskey"
	"github.com/bullpen-run/bullpen/scheduler/keyring"
)

// secretsKeyFile is the default file of the key of secrets, in the data directory.
const secretsKeyFile = "secrets.key"

// wrapper returns the wrapper of the secrets' data key, nil if the operator gave no key.
func (c *Config) wrapper() keyring.Wrapper {
	switch file := c.secretsKey(); {
	case c.SecretsCommand != "":
		return secretskey.Command{Path: c.SecretsCommand}
	case file != "":
		return secretskey.File{Path: file}
	default:
		return nil
	}
}

// secretsKey returns the path of the key file, empty for none.
func (c *Config) secretsKey() string {
	if c.defaultSecretsKey() {
		return filepath.Join(c.Data, secretsKeyFile)
	}
	return c.SecretsKey
}

// defaultSecretsKey reports whether the key file is the one in the data directory.
func (c *Config) defaultSecretsKey() bool {
	return c.SecretsKey == "" && c.SecretsCommand == "" && !c.SecretsPlain && c.Embedded()
}

// checkSecrets returns an error if a gateway would store secrets unencrypted without being told to.
func (c *Config) checkSecrets() error {
	return setting("secrets-key", !c.Has(RoleGateway) || c.SecretsPlain || c.wrapper() != nil,
		"secrets would be stored without encryption: make a key with age-keygen -o secrets.key and give it to every "+
			"gateway, scheduler "+
			"and webhook process, or set --secrets-plain")
}

// openKeyring opens the key of secrets, and creates its default file if nothing is encrypted yet.
func (s *system) openKeyring(ctx context.Context) (err error) {
	if s.cfg.defaultSecretsKey() {
		exists, err := keyring.Exists(ctx, s.store)
		if err == nil && !exists {
			err = secretskey.File{Path: s.cfg.secretsKey()}.Create()
		}
		if err != nil {
			return fmt.Errorf("create the key of secrets: %w", err)
		}
	}
	s.keyring, err = keyring.Open(ctx, s.store, s.cfg.wrapper(), s.cfg.Has(RoleGateway), s.log)
	return err
}

// warnSecrets logs that a server on a restored backup would lack the operator's key. dataKey is the
// data key of the backup, or nil if the backup has none.
func (c *Config) warnSecrets(ctx context.Context, dataKey []byte, log *slog.Logger) {
	if dataKey == nil {
		return
	}
	if err := keyring.Check(ctx, dataKey, c.wrapper()); err != nil {
		log.Warn("key of secrets missing: no server starts here without it", "error", err)
	}
}
