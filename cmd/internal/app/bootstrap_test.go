package app

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// newGateway returns a gateway that starts with an empty store and data directory.
func newGateway(t *testing.T) (*system, *registry.Keys, string) {
	t.Helper()
	st := storetest.Open(t, storetest.Server(t))
	keys, err := registry.OpenKeys(storetest.Context(t), st, nil, "local", storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	s := &system{cfg: &Config{Data: t.TempDir(), Region: "local"}, log: storetest.Log(t), store: st}
	return s, keys, filepath.Join(s.cfg.Data, "bootstrap.key")
}

func TestWrittenBootstrapKeyIsCreatedAfterACrash(t *testing.T) {
	s, keys, name := newGateway(t)
	secret := proto.NewKeySecret("local")
	if err := os.WriteFile(name, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.bootstrap(storetest.Context(t), keys); err != nil {
			t.Fatal(err)
		}
		if _, ok := keys.Authenticate(secret); !ok {
			t.Fatal("the key of the file is rejected")
		}
	}
}

func TestServerStartsWithARevokedBootstrapKey(t *testing.T) {
	s, keys, _ := newGateway(t)
	ctx := storetest.Context(t)
	if _, _, err := keys.Create(
		ctx, proto.Key{Name: "spare", Org: "o", Plan: "pro", Scopes: proto.Scopes(), Global: true}); err != nil {
		t.Fatal(err)
	}
	s.cfg.BootstrapKey = proto.NewKeySecret("local")
	for range 2 {
		if err := s.bootstrap(ctx, keys); err != nil {
			t.Fatal(err)
		}
		if _, err := keys.Revoke(ctx, "key_bootstrap"); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok := keys.Authenticate(s.cfg.BootstrapKey); ok {
		t.Error("a revoked key is accepted")
	}
}

// A start logs that the key in the file, or all keys of global administrators, are revoked.
func TestRevokedKeysAreLogged(t *testing.T) {
	s, keys, name := newGateway(t)
	ctx := storetest.Context(t)
	var log bytes.Buffer
	s.log = slog.New(slog.NewTextHandler(&log, nil))
	start := func(want string) {
		t.Helper()
		log.Reset()
		if err := s.bootstrap(ctx, keys); err != nil {
			t.Fatal(err)
		}
		if got := log.String(); want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("logged %q, want %q", got, want)
		}
	}
	start("first API key created")
	start("")
	other, _, err := keys.Create(
		ctx, proto.Key{Name: "other", Org: "o", Plan: "pro", Scopes: proto.Scopes(), Global: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := keys.Revoke(ctx, "key_bootstrap"); err != nil {
		t.Fatal(err)
	}
	start(name)
	// Revoked by an earlier version, which allowed it.
	entry, err := s.store.Keys.Get(ctx, "key."+other.Org+"."+other.ID)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.store.Keys.Put(ctx, entry.Key(), bytes.Replace(entry.Value(), []byte(`"revoked_at":null`),
		[]byte(`"revoked_at":"2026-01-02T03:04:05Z"`), 1)); err != nil {
		t.Fatal(err)
	}
	if keys, err = registry.OpenKeys(ctx, s.store, nil, "local", s.log); err != nil {
		t.Fatal(err)
	}
	start("no API key of a global administrator")
}

func TestBootstrapKeyIsReadableByUsOnly(t *testing.T) {
	known := proto.NewKeySecret("local")
	for what, lay := range map[string]func(name string) error{
		"nothing":     func(string) error { return nil },
		"others read": func(name string) error { return os.WriteFile(name, []byte(known), 0o644) },
		"not a key":   func(name string) error { return os.WriteFile(name, []byte("sk"), 0o600) },
		"another link": func(name string) error {
			if err := os.WriteFile(name+".2", []byte(known), 0o600); err != nil {
				return err
			}
			return os.Link(name+".2", name)
		},
		"a symlink": func(name string) error {
			if err := os.WriteFile(name+".2", []byte(known), 0o600); err != nil {
				return err
			}
			return os.Symlink(name+".2", name)
		},
	} {
		t.Run(what, func(t *testing.T) {
			s, keys, name := newGateway(t)
			if err := lay(name); err != nil {
				t.Fatal(err)
			}
			if err := s.bootstrap(storetest.Context(t), keys); err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if _, ok := keys.Authenticate(strings.TrimSpace(string(text))); !ok {
				t.Error("the file does not contain the key")
			}
			if _, ok := keys.Authenticate(known); ok {
				t.Error("a key was created that others know")
			}
			if info, err := os.Lstat(name); err != nil || info.Mode() != 0o600 {
				t.Errorf("%v, %v", info.Mode(), err)
			}
			if names, err := filepath.Glob(filepath.Join(s.cfg.Data, ".bootstrap-*")); err != nil || len(names) != 0 {
				t.Errorf("left over: %v, %v", names, err)
			}
		})
	}
}
