package app

import (
	"fmt"
	"os"
	"strings"

	"github.com/bullpen-run/bullpen/gateway/login"
)

// login returns the identity provider, nil if there is none.
func (c *Config) login() (*login.Provider, error) {
	if c.OIDCIssuer == "" {
		return nil, nil
	}
	if _, err := c.oidcSecret(); err != nil {
		return nil, err
	}
	return &login.Provider{
		Issuer: c.OIDCIssuer, ClientID: c.OIDCClientID, Secret: c.oidcSecret,
		Redirect: c.PublicURL + "/login/callback",
	}, nil
}

// oidcSecret returns the client secret at the identity provider, or "".
func (c *Config) oidcSecret() (string, error) {
	if c.OIDCSecretFile == "" {
		return "", nil
	}
	text, err := os.ReadFile(c.OIDCSecretFile)
	if err != nil {
		return "", fmt.Errorf("--oidc-secret-file: %w", err)
	}
	secret := strings.TrimSpace(string(text))
	if secret == "" {
		return "", fmt.Errorf("--oidc-secret-file: %s is empty: write the client's secret into it, or leave the setting "+
			"out for a public client", c.OIDCSecretFile)
	}
	return secret, nil
}
