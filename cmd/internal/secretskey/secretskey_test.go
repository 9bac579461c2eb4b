package secretskey_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/cmd/internal/secretskey"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/backup"
	"github.com/bullpen-run/bullpen/scheduler/keyring"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

const (
	apiKey = "sk-local-canarycanarycanarycanary"
	canary = "canary-signing-secret"
)

// keyFile creates a key file.
func keyFile(t *testing.T) secretskey.File {
	t.Helper()
	f := secretskey.File{Path: filepath.Join(t.TempDir(), "secrets.key")}
	if err := f.Create(); err != nil {
		t.Fatal(err)
	}
	return f
}

func open(t *testing.T, st *store.Store, w keyring.Wrapper) *keyring.Keyring {
	t.Helper()
	ring, err := keyring.Open(storetest.Context(t), st, w, true, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	return ring
}

// registries opens the keys and the webhook settings of a deployment.
func registries(t *testing.T, st *store.Store, ring *keyring.Keyring) (*registry.Keys, *registry.Webhooks) {
	t.Helper()
	ctx := storetest.Context(t)
	keys, err := registry.OpenKeys(ctx, st, ring, "local", storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	webhooks, err := registry.OpenWebhooks(ctx, st, ring, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	return keys, webhooks
}

func setSecret(t *testing.T, webhooks *registry.Webhooks, key, secret string) {
	t.Helper()
	_, err := webhooks.Change(storetest.Context(t), "acme", key, func(*proto.Webhook) (proto.Webhook, error) {
		w := proto.DefaultWebhook()
		w.Secret = secret
		return w, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// holds returns the files below a directory that contain a text.
func holds(t *testing.T, dir string, text []byte) (found []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		content, err := os.ReadFile(path)
		if bytes.Contains(content, text) {
			found = append(found, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// decompressed returns what is compressed with zstd.
func decompressed(t *testing.T, packed []byte) []byte {
	t.Helper()
	r, err := zstd.NewReader(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	content, err := r.DecodeAll(packed, nil)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func TestJetStreamAndBackupsHoldNoSecret(t *testing.T) {
	dir, file := t.TempDir(), keyFile(t)
	s, err := natsembed.Open(dir, 1<<20, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	st, ctx := storetest.Open(t, s), storetest.Context(t)
	ring := open(t, st, file)
	keys, webhooks := registries(t, st, ring)
	if err := keys.Bootstrap(ctx, apiKey); err != nil {
		t.Fatal(err)
	}
	setSecret(t, webhooks, "k", canary)
	setSecret(t, webhooks, "k2", canary+"2")
	body, err := ring.Seal(ctx, "name", []byte("canary-data"))
	if err != nil {
		t.Fatal(err)
	}
	secrets := []string{canary, apiKey, "canary", file.Path}
	for _, text := range secrets {
		if found := holds(t, dir, []byte(text)); found != nil {
			t.Errorf("%q is in %s", text, found)
		}
	}

	// Another process with the key reads them.
	keys, webhooks = registries(t, st, open(t, st, file))
	if _, ok := keys.Authenticate(apiKey); !ok || webhooks.Webhook("acme", "k").Secret != canary {
		t.Errorf("after a restart: %v, %q", ok, webhooks.Webhook("acme", "k").Secret)
	}

	// Ciphertexts cannot take each other's place.
	if _, err := ring.Open(ctx, "other", body); err == nil {
		t.Error("a ciphertext has two names")
	}
	entry, err := st.Webhooks.Get(ctx, "key.acme.k2")
	if err == nil {
		_, err = st.Webhooks.Put(ctx, "key.acme.k", entry.Value())
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := webhooks.Stored(ctx, "acme", "k"); err == nil {
		t.Error("the settings of one key were read with the secret of another")
	}

	var packed bytes.Buffer
	if err := (&backup.Maker{Store: st, Version: "v1"}).Backup(ctx, &packed); err != nil {
		t.Fatal(err)
	}
	stored := decompressed(t, packed.Bytes())
	for _, text := range secrets {
		if bytes.Contains(stored, []byte(text)) {
			t.Errorf("%q is in the backup", text)
		}
	}
	if !bytes.Contains(stored, []byte("key.acme.k2")) {
		t.Errorf("the backup, of %d bytes without compression, lacks the settings of k2", len(stored))
	}
	restored := storetest.Server(t)
	summary, err := backup.Restore(ctx, store.Access{InProcess: restored, Name: "restore"},
		store.Config{Replicas: 1, Retention: time.Hour}, &packed, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := keyring.Check(ctx, summary.DataKey, file); err != nil {
		t.Error(err)
	}
	for _, w := range []keyring.Wrapper{nil, keyFile(t), secretskey.File{Path: "/missing"}} {
		err := keyring.Check(ctx, summary.DataKey, w)
		if err == nil || !strings.Contains(err.Error(), "encrypted for age1") {
			t.Errorf("with the key %v: %v", w, err)
		}
		st := storetest.Open(t, restored)
		if _, err := keyring.Open(ctx, st, w, true, storetest.Log(t)); err == nil ||
			!strings.Contains(err.Error(), "encrypted for age1") {
			t.Errorf("a server with the key %v: %v", w, err)
		}
	}
	keys, _ = registries(t, storetest.Open(t, restored), open(t, storetest.Open(t, restored), file))
	if _, ok := keys.Authenticate(apiKey); !ok {
		t.Error("a restored key does not authenticate")
	}
}

func TestSecretsOfEarlierVersionsAreEncrypted(t *testing.T) {
	s := storetest.Server(t)
	st, ctx := storetest.Open(t, s), storetest.Context(t)
	keys, webhooks := registries(t, st, nil)
	if err := keys.Bootstrap(ctx, apiKey); err != nil {
		t.Fatal(err)
	}
	setSecret(t, webhooks, "k", canary)
	hash, err := st.Keys.Get(ctx, "hash_secret")
	if err != nil {
		t.Fatal(err)
	}

	keys, webhooks = registries(t, st, open(t, st, keyFile(t)))
	if _, ok := keys.Authenticate(apiKey); !ok || webhooks.Webhook("acme", "k").Secret != canary {
		t.Errorf("%v, %q", ok, webhooks.Webhook("acme", "k").Secret)
	}
	hashed, err := st.Keys.Get(ctx, "hash_secret")
	if err != nil || bytes.Contains(hashed.Value(), hash.Value()) {
		t.Errorf("the hash secret: %v, %q", err, hashed.Value())
	}
	settings, err := st.Webhooks.Get(ctx, "key.acme.k")
	if err != nil || bytes.Contains(settings.Value(), []byte(canary)) {
		t.Errorf("the settings: %v, %s", err, settings.Value())
	}
}

func TestRotation(t *testing.T) {
	st, ctx := storetest.Open(t, storetest.Server(t)), storetest.Context(t)
	old, next := keyFile(t), keyFile(t)
	ring := open(t, st, old)
	sealed, err := ring.Seal(ctx, "name", []byte("value"))
	if err != nil {
		t.Fatal(err)
	}
	usable := func(f secretskey.File) bool {
		ring, err := keyring.Open(ctx, st, f, true, storetest.Log(t))
		if err != nil {
			return false
		}
		value, err := ring.Open(ctx, "name", sealed)
		return err == nil && string(value) == "value"
	}
	was, err := os.ReadFile(old.Path)
	if err != nil {
		t.Fatal(err)
	}
	added, err := os.ReadFile(next.Path)
	if err != nil {
		t.Fatal(err)
	}
	before := secretskey.File{Path: filepath.Join(t.TempDir(), "before")}
	if err := os.WriteFile(before.Path, was, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		file        []byte
		old, next   bool
		recipients  int
		description string
	}{
		{append(bytes.Clone(was), added...), true, true, 2, "both keys"},
		{added, false, true, 1, "the new key"},
	} {
		if err := os.WriteFile(old.Path, step.file, 0o600); err != nil {
			t.Fatal(err)
		}
		keys, err := ring.Rotate(ctx)
		if err != nil || strings.Count(keys, "age1") != step.recipients {
			t.Errorf("%s: %q, %v", step.description, keys, err)
		}
		if usable(before) != step.old || usable(next) != step.next {
			t.Errorf("%s: old %v, new %v", step.description, usable(before), usable(next))
		}
	}
	if _, err := open(t, storetest.Open(t, storetest.Server(t)), nil).Rotate(ctx); !errors.Is(err, proto.ErrNoSecretsKey) {
		t.Errorf("without a key: %v", err)
	}
}

func TestCommand(t *testing.T) {
	script := func(text string) secretskey.Command {
		path := filepath.Join(t.TempDir(), "kms")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700); err != nil {
			t.Fatal(err)
		}
		return secretskey.Command{Path: path}
	}
	st, ctx := storetest.Open(t, storetest.Server(t)), storetest.Context(t)
	flip := `case $1 in wrap|unwrap) tr '\000-\177\200-\377' '\200-\377\000-\177';; esac`
	sealed, err := open(t, st, script(flip)).Seal(ctx, "name", []byte("value"))
	if err != nil {
		t.Fatal(err)
	}
	if value, err := open(t, st, script(flip)).Open(ctx, "name", sealed); err != nil || string(value) != "value" {
		t.Errorf("%q, %v", value, err)
	}
	for _, c := range []struct{ text, why string }{
		{"echo no such key >&2; exit 3", "no such key"},
		{"exit 0", "wrote nothing"},
		{"cat /dev/urandom | head -c 32", "not encrypted with the data key"},
		{"echo short", "bad key length"},
	} {
		if _, err := keyring.Open(ctx, st, script(c.text), true, storetest.Log(t)); err == nil ||
			!strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v", c.text, err)
		}
	}
	fresh := storetest.Open(t, storetest.Server(t))
	for _, c := range []struct{ text, why string }{
		{"cat", "must be an encrypted key"},
		{`[ $1 = unwrap ] || echo wrapped; echo other`, "cannot be unwrapped again"},
	} {
		if _, err := keyring.Open(ctx, fresh, script(c.text), true, storetest.Log(t)); err == nil ||
			!strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v", c.text, err)
		}
	}
}

func TestKeyFile(t *testing.T) {
	f, ctx := keyFile(t), storetest.Context(t)
	info, err := os.Stat(f.Path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	was, err := os.ReadFile(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Create(); err != nil {
		t.Error(err)
	}
	if now, err := os.ReadFile(f.Path); err != nil || !bytes.Equal(was, now) {
		t.Error("the file was replaced", err)
	}
	if err := os.Chmod(f.Path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.Wrap(ctx, []byte("x")); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("a file that others read: %v", err)
	}
	identity, err := age.GenerateHybridIdentity()
	if err != nil {
		t.Fatal(err)
	}
	for text, ok := range map[string]bool{identity.String(): true, "AGE-SECRET-KEY-1CANARY": false, "": false} {
		f := secretskey.File{Path: filepath.Join(t.TempDir(), "key")}
		if err := os.WriteFile(f.Path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, _, err := f.Wrap(ctx, []byte("x"))
		if (err == nil) != ok || err != nil && strings.Contains(err.Error(), "CANARY") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
