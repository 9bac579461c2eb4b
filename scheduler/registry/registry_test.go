package registry_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// keys opens the list like a gateway.
func keys(t *testing.T, s nats.InProcessConnProvider) *registry.Keys {
	t.Helper()
	k, err := registry.OpenKeys(storetest.Context(t), storetest.Open(t, s), nil, "local", storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	runUntilEnd(t, k.Run)
	return k
}

// runUntilEnd runs a part of a gateway until the end of the test.
func runUntilEnd(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestKeyIsKnownToEveryGatewayUntilItIsRevoked(t *testing.T) {
	s := storetest.Server(t)
	here, there := keys(t, s), keys(t, s)
	ctx := storetest.Context(t)
	key, secret, err := here.Create(ctx, proto.Key{Name: "ci", Org: "acme", Plan: "pro", Scopes: proto.UserScopes()})
	if err != nil {
		t.Fatal(err)
	}
	known := func(k *registry.Keys) bool {
		got, ok := k.Authenticate(secret)
		return ok && got.ID == key.ID && got.Org == "acme"
	}
	if !known(here) {
		t.Fatal("not known where it was created")
	}
	eventually(t, "known elsewhere", func() bool { return known(there) })
	late := keys(t, s)
	if !known(late) {
		t.Fatal("not known to a gateway that starts later")
	}
	for _, wrong := range []string{
		"", secret[:len(secret)-1], secret + "a", strings.ToUpper(secret),
		strings.Repeat("x", 10_000),
	} {
		if _, ok := here.Authenticate(wrong); ok {
			t.Errorf("%.40q was accepted as the key", wrong)
		}
	}
	if _, err := here.Revoke(ctx, key.ID); err != nil {
		t.Fatal(err)
	}
	if known(here) {
		t.Fatal("accepted after it was revoked")
	}
	eventually(t, "revoked elsewhere", func() bool { return !known(there) && !known(late) })
	list := there.List("")
	if len(list) != 1 || list[0].RevokedAt == nil || strings.Contains(list[0].Hint, secret[16:]) {
		t.Fatalf("%+v", list)
	}
	if _, err := here.Revoke(ctx, "key_unknown"); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("an unknown key: %v", err)
	}
}

func TestKeysAreFollowedAfterTheServerWasRestarted(t *testing.T) {
	s := storetest.NewRestartable(t)
	here, there := keys(t, s), keys(t, s)
	ctx := storetest.Context(t)
	key, secret, err := here.Create(ctx, proto.Key{Name: "ci", Org: "acme", Plan: "pro", Scopes: proto.UserScopes()})
	if err != nil {
		t.Fatal(err)
	}
	known := func() bool { _, ok := there.Authenticate(secret); return ok }
	eventually(t, "known elsewhere", known)
	s.Restart()
	eventually(t, "revoked", func() bool {
		once, cancel := context.WithTimeout(ctx, time.Second) // requests sent to the old server are never answered
		defer cancel()
		_, err := here.Revoke(once, key.ID)
		return err == nil
	})
	eventually(t, "revoked elsewhere", func() bool { return !known() })
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx := storetest.Context(t)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			t.Fatalf("never: %s", what)
		case <-tick.C:
		}
	}
}

func TestSecretsAreNotStored(t *testing.T) {
	s := storetest.Server(t)
	k := keys(t, s)
	ctx := storetest.Context(t)
	_, secret, err := k.Create(ctx, proto.Key{Name: "n", Org: "o", Plan: "free", Scopes: proto.UserScopes()})
	if err != nil {
		t.Fatal(err)
	}
	st := storetest.Open(t, s)
	names, err := st.Keys.Keys(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		e, err := st.Keys.Get(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(e.Value()), secret[16:40]) {
			t.Fatalf("%s contains the key", name)
		}
	}
}

func TestBootstrapKey(t *testing.T) {
	s := storetest.Server(t)
	k, late := keys(t, s), keys(t, s)
	ctx := storetest.Context(t)
	first := proto.NewKeySecret("local")
	kept := func() (string, error) { return first, nil }
	if made, err := k.BootstrapOnce(ctx, kept); err != nil || !made {
		t.Fatalf("%v, %v", made, err)
	}
	if key, ok := k.Authenticate(first); !ok || !key.GlobalAdmin() || key.Plan != "" {
		t.Fatalf("%+v, %v", key, ok)
	}
	// Another gateway, which may have seen the key or not.
	if made, err := late.BootstrapOnce(ctx, func() (string, error) {
		return proto.NewKeySecret("local"), nil
	}); err != nil || made {
		t.Fatalf("made another: %v, %v", made, err)
	}
	if _, ok := late.Authenticate(first); !ok {
		t.Fatal("the first is rejected")
	}
	if made, err := k.BootstrapOnce(ctx, func() (string, error) { return "", errors.New("asked") }); err != nil || made {
		t.Fatalf("asked for another: %v, %v", made, err)
	}
	set := "sk-local-" + strings.Repeat("a", 24)
	if err := k.Bootstrap(ctx, set); err != nil {
		t.Fatal(err)
	}
	if _, ok := k.Authenticate(set); !ok {
		t.Fatal("the configured key is rejected")
	}
	if _, ok := k.Authenticate(first); ok {
		t.Fatal("the replaced key is still accepted")
	}
}

// A revoked key stays revoked, even if a start still configures it.
func TestRevokedKeyDoesNotComeBackByBootstrap(t *testing.T) {
	k := keys(t, storetest.Server(t))
	ctx := storetest.Context(t)
	first, second := "sk-local-"+strings.Repeat("a", 24), "sk-local-"+strings.Repeat("b", 24)
	if _, _, err := k.Create(
		ctx, proto.Key{Name: "spare", Org: "acme", Plan: "pro", Scopes: proto.Scopes(), Global: true}); err != nil {
		t.Fatal(err)
	}
	other, made, err := k.Create(
		ctx, proto.Key{Name: "ci", Org: "acme", Plan: "pro", Scopes: proto.Scopes(), Global: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Bootstrap(ctx, first); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"key_bootstrap", other.ID} {
		if _, err := k.Revoke(ctx, id); err != nil {
			t.Fatal(err)
		}
	}
	refused := func() {
		t.Helper()
		for _, secret := range []string{first, made} {
			if err := k.Bootstrap(ctx, secret); !errors.Is(err, registry.ErrRevoked) {
				t.Errorf("a revoked key is set: %v", err)
			}
			if _, ok := k.Authenticate(secret); ok {
				t.Error("a revoked key is accepted")
			}
		}
	}
	refused()
	for range 2 {
		if err := k.Bootstrap(ctx, second); err != nil {
			t.Fatal(err)
		}
		if _, ok := k.Authenticate(second); !ok {
			t.Error("another one that is set is not taken")
		}
		refused()
	}
	if list := k.List(""); len(list) != 4 {
		t.Errorf("%d keys", len(list))
	}
}

// Without a key of a global administrator nobody could create another key.
func TestLastKeyOfAdministratorsIsNotRevoked(t *testing.T) {
	s := storetest.Server(t)
	here, there := keys(t, s), keys(t, s)
	ctx := storetest.Context(t)
	var ids, secrets []string
	for _, global := range []bool{true, true, false} {
		key, secret, err := here.Create(
			ctx, proto.Key{Name: "n", Org: "o", Plan: "pro", Scopes: proto.Scopes(), Global: global})
		if err != nil {
			t.Fatal(err)
		}
		ids, secrets = append(ids, key.ID), append(secrets, secret)
	}
	eventually(t, "known elsewhere", func() bool { _, ok := there.Authenticate(secrets[2]); return ok })
	refused := make(chan error, 1)
	go func() {
		_, err := there.Revoke(ctx, ids[1])
		refused <- err
	}()
	_, err := here.Revoke(ctx, ids[0])
	for _, err := range []error{err, <-refused} {
		var last *proto.LastKeyError
		if err != nil && !errors.As(err, &last) {
			t.Error(err)
		}
	}
	left := 0
	for _, id := range ids[:2] {
		if _, err := here.Revoke(ctx, id); err != nil {
			left++
		}
	}
	if left != 1 {
		t.Errorf("%d keys of global administrators could not be revoked, want 1", left)
	}
	alive := func() bool {
		_, first := there.Authenticate(secrets[0])
		_, second := there.Authenticate(secrets[1])
		return first != second
	}
	eventually(t, "one of them is accepted", alive)
	if _, err := here.Revoke(ctx, ids[2]); err != nil {
		t.Errorf("a key with fewer rights: %v", err)
	}
}

// The owner of a replaced bootstrap key knows its webhook secret.
func TestNewBootstrapKeyHasNoWebhookSettings(t *testing.T) {
	s := storetest.Server(t)
	k, w := keys(t, s), webhooks(t, s, storetest.Log(t))
	ctx := storetest.Context(t)
	first, second := "sk-local-"+strings.Repeat("a", 24), "sk-local-"+strings.Repeat("b", 24)
	for i, secret := range []string{first, first, second} {
		if err := k.Bootstrap(ctx, secret); err != nil {
			t.Fatal(err)
		}
		stored, err := w.Stored(ctx, proto.DefaultOrg, "key_bootstrap")
		if want := i == 1; (err == nil) != want {
			t.Errorf("start %d: settings %+v, %v", i, stored, err)
		}
		if _, err := w.Change(ctx, proto.DefaultOrg, "key_bootstrap", func(*proto.Webhook) (proto.Webhook, error) {
			return proto.DefaultWebhook(), nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNoKeyIsMadeThatCouldNotBeKept(t *testing.T) {
	k := keys(t, storetest.Server(t))
	ctx := storetest.Context(t)
	if _, err := k.BootstrapOnce(ctx, func() (string, error) { return "", errors.New("disk full") }); err == nil {
		t.Fatal("no error")
	}
	if list := k.List(""); len(list) != 0 {
		t.Fatalf("%+v", list)
	}
}

func TestBindings(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	b := &registry.Bindings{Store: st}
	ctx := storetest.Context(t)
	one := proto.Binding{Trace: proto.NewTraceID(), BodyHash: "h", BoundAt: time.Now().UTC()}
	mine, bound, err := b.Bind(ctx, "acme", "key1", "again", one)
	if err != nil || !bound {
		t.Fatalf("%v, %v", bound, err)
	}
	two := proto.Binding{Trace: proto.NewTraceID(), BodyHash: "h"}
	have, bound, err := b.Bind(ctx, "acme", "key1", "again", two)
	if err != nil || bound || have.Trace != one.Trace || have.BodyHash != "h" || !have.BoundAt.Equal(one.BoundAt) {
		t.Fatalf("%+v, %v, %v", have, bound, err)
	}
	if _, bound, err := b.Bind(ctx, "acme", "key2", "again", two); err != nil || !bound {
		t.Fatalf("another key's: %v, %v", bound, err)
	}
	if _, err := b.Bound(ctx, "other", "key1", "again"); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("another organisation's: %v", err)
	}
	if _, err := b.Replace(ctx, "acme", "key1", "again", have, two); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Replace(ctx, "acme", "key1", "again", have, two); !errors.Is(err, proto.ErrConflict) {
		t.Fatalf("replaced twice: %v", err)
	}
	if err := b.Release(ctx, "acme", "key1", "again", mine); err != nil {
		t.Fatal(err)
	}
	if _, bound, err := b.Bind(ctx, "acme", "key1", "again", one); err != nil || bound {
		t.Fatalf("a binding that was replaced was released: %v, %v", bound, err)
	}
}
