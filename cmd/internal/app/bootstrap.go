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

// bootstrap makes sure that there is a first API key. One that had to be made is written beside the data and never shown. It lies there
// before it becomes a key, so that no crash leaves a key that nobody knows.
func (s *system) bootstrap(ctx context.Context, keys *registry.Keys) error {
	if s.cfg.BootstrapKey != "" {
		err := keys.Bootstrap(ctx, s.cfg.BootstrapKey)
		if errors.Is(err, registry.ErrRevoked) {
			s.log.Warn("the bootstrap key that is set was revoked, and stays so: set a new one, or none")
			return nil
		}
		return err
	}
	name, kept := filepath.Join(s.cfg.Data, "bootstrap.key"), false
	made, err := keys.BootstrapOnce(ctx, func() (string, error) {
		if err := os.MkdirAll(s.cfg.Data, 0o700); err != nil { // NATS has made it where it keeps its files there
			return "", fmt.Errorf("make the data directory for the bootstrap key: %w", err)
		}
		secret, err := keepSecret(name, s.cfg.Region)
		kept = err == nil
		return secret, err
	})
	switch {
	case err != nil:
		return err
	case made:
		s.log.Info("the first API key was made, with all rights; it is in this file only", "file", name)
	case kept: // another gateway, with other data, was faster: what lies there is no key
		if err := os.Remove(name); err != nil {
			return fmt.Errorf("remove the unused bootstrap key: %w", err)
		}
	}
	return nil
}

// keepSecret gives the secret that lies in the file name, where a start that went no further left it, or makes one and writes it
// there.
func keepSecret(name, region string) (string, error) {
	if secret, err := readSecret(name); err == nil {
		return secret, nil
	}
	// What else lies there may be readable by others, or a link: it is replaced, not written through.
	if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("replace the old bootstrap key: %w", err)
	}
	secret := proto.NewKeySecret(region)
	err := writeSecret(name, secret)
	if errors.Is(err, os.ErrExist) {
		return readSecret(name) // another process with the same data was faster
	}
	if err != nil {
		return "", fmt.Errorf("write the bootstrap key: %w", err)
	}
	return secret, nil
}

// readSecret reads a key's secret from a file that nobody else can have read or written.
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
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 || !ok || int(owner.Uid) != os.Geteuid() || owner.Nlink != 1 {
		return "", fmt.Errorf("read the bootstrap key: %s is not a file of ours alone", name)
	}
	const most = 1 << 10
	text, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return "", fmt.Errorf("read the bootstrap key: %w", err)
	}
	secret := strings.TrimSpace(string(text))
	return secret, proto.CheckKeyForm(secret)
}

// writeSecret writes a new file that is durable, whole and readable by us only as soon as it has its name.
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
