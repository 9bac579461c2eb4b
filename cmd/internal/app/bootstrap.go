package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
)

// bootstrap ensures that there is a first API key. A new one is written to a file next to the data,
// and never shown. It is in the file before it becomes a key, so that a crash cannot leave an
// unknown key.
func (s *system) bootstrap(ctx context.Context, keys *registry.Keys) error {
	if err := s.createFirstKey(ctx, keys); err != nil {
		return err
	}
	if !keys.Administrable() {
		s.log.Error("no API key of a global administrator: set BULLPEN_BOOTSTRAP_KEY to a new key and start again")
	}
	return nil
}

// adoptOrgs creates the missing organisations of API keys: the first key has none at the first start,
// and the keys of earlier versions have none either.
func adoptOrgs(ctx context.Context, orgs *registry.Orgs, keys *registry.Keys) error {
	return orgs.Adopt(ctx, keys.List(""))
}

func (s *system) createFirstKey(ctx context.Context, keys *registry.Keys) error {
	if s.cfg.BootstrapKey != "" {
		err := keys.Bootstrap(ctx, s.cfg.BootstrapKey)
		if errors.Is(err, registry.ErrRevoked) {
			s.log.Warn("configured bootstrap key is revoked: set a new one, or none")
			return nil
		}
		return err
	}
	name, written := filepath.Join(s.cfg.Data, "bootstrap.key"), false
	created, err := keys.BootstrapOnce(ctx, func() (string, error) {
		if err := os.MkdirAll(s.cfg.Data, 0o700); err != nil { // an embedded NATS has created it already
			return "", fmt.Errorf("create the data directory for the bootstrap key: %w", err)
		}
		secret, err := PersistKey(name, s.cfg.Region)
		written = err == nil
		return secret, err
	})
	switch {
	case err != nil:
		return err
	case created:
		s.log.Info("first API key created, a global administrator's; it is in this file only", "file", name)
	case written: // another gateway, with another data directory, was faster
		if err := os.Remove(name); err != nil {
			return fmt.Errorf("remove the unused bootstrap key: %w", err)
		}
	default:
		if secret, err := readSecret(name); err == nil {
			if _, ok := keys.Authenticate(secret); !ok {
				s.log.Warn("API key in this file was revoked or replaced: remove the file", "file", name)
			}
		}
	}
	return nil
}

// PersistKey returns the API key in the named file, which an interrupted start may have left, or
// creates one for the region and writes it there, readable by this user only.
func PersistKey(name, region string) (string, error) {
	if secret, err := readSecret(name); err == nil {
		return secret, nil
	}
	// Anything else there may be readable by others, or a link: it is replaced, not written to.
	if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("replace the old bootstrap key: %w", err)
	}
	secret := proto.NewKeySecret(region)
	err := writeSecret(name, secret)
	if errors.Is(err, os.ErrExist) {
		return readSecret(name) // another process with the same data directory was faster
	}
	if err != nil {
		return "", fmt.Errorf("write the bootstrap key: %w", err)
	}
	return secret, nil
}

// readSecret reads a key's secret from a file inaccessible to other users.
func readSecret(name string) (string, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", fmt.Errorf("read the bootstrap key: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	info, err := f.Stat()
	if err != nil {
		return "", fmt.Errorf("read the bootstrap key: %w", err)
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 || !ok || int(owner.Uid) != os.Geteuid() ||
		owner.Nlink != 1 {
		return "", fmt.Errorf("read the bootstrap key: %s is not a file of this user alone", name)
	}
	const maxSize = 1 << 10
	text, err := io.ReadAll(io.LimitReader(f, maxSize))
	if err != nil {
		return "", fmt.Errorf("read the bootstrap key: %w", err)
	}
	secret := strings.TrimSpace(string(text))
	return secret, proto.CheckKeyForm(secret)
}

// writeSecret creates a file. As soon as it has its name, it is durable, complete and readable by
// this user only.
func writeSecret(name, secret string) (err error) {
	dir, err := os.Open(filepath.Dir(name))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }() // only read
	f, err := os.CreateTemp(dir.Name(), ".bootstrap-*")
	if err != nil {
		return err
	}
	_, err = f.WriteString(secret + "\n")
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Link(f.Name(), name)
	}
	if err = errors.Join(err, os.Remove(f.Name())); err != nil {
		return err
	}
	return dir.Sync()
}
