package registry_test

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// orgs opens the lists of organisations and plans like a gateway.
func orgs(t *testing.T, s nats.InProcessConnProvider) (*registry.Orgs, *registry.Plans) {
	t.Helper()
	st := storetest.Open(t, s)
	o, err := registry.OpenOrgs(storetest.Context(t), st, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	p, err := registry.OpenPlans(storetest.Context(t), st, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, run := range []func(context.Context) error{o.Run, p.Run} {
		runUntilEnd(t, run)
	}
	return o, p
}

func TestOrganisationIsKnownToEveryGateway(t *testing.T) {
	s := storetest.Server(t)
	here, _ := orgs(t, s)
	there, _ := orgs(t, s)
	ctx := storetest.Context(t)
	if err := here.Create(ctx, proto.Org{Name: "acme", Plan: "pro"}); err != nil {
		t.Fatal(err)
	}
	if err := there.Create(ctx, proto.Org{Name: "acme", Plan: "free"}); !errors.Is(err, proto.ErrExists) {
		t.Fatalf("created twice: %v", err)
	}
	if o, err := there.Org(ctx, "acme"); err != nil || o.Plan != "pro" { // at once, by a read
		t.Fatalf("%+v, %v", o, err)
	}
	if _, err := there.Org(ctx, "nobody"); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("an unknown organisation: %v", err)
	}
	refused := errors.New("refused")
	if _, err := here.Change(ctx, "acme", func(*proto.Org) error { return refused }); !errors.Is(err, refused) {
		t.Fatalf("refused change: %v", err)
	}
	if _, err := here.Change(ctx, "nobody", func(*proto.Org) error { return nil }); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("change of an unknown organisation: %v", err)
	}
	if _, err := here.Change(ctx, "acme", func(o *proto.Org) error { o.Suspended = true; return nil }); err != nil {
		t.Fatal(err)
	}
	eventually(t, "suspended elsewhere", func() bool {
		o, err := there.Org(ctx, "acme")
		return err == nil && o.Suspended
	})
	if list := there.List(); len(list) != 1 || list[0].Name != "acme" {
		t.Errorf("list %+v", list)
	}
}

// Versions before organisations were stored had a plan in each key, and no organisation.
func TestOrganisationsOfKeysAreAdopted(t *testing.T) {
	s := storetest.Server(t)
	here, _ := orgs(t, s)
	there, _ := orgs(t, s)
	ctx := storetest.Context(t)
	if err := here.Create(ctx, proto.Org{Name: "known", Plan: "free"}); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	keys := []proto.Key{
		{Org: "mixed", Plan: "pro"},
		{Org: "mixed", Plan: "free"},
		{Org: "known", Plan: "pro"},
		{Org: "default"},
		{Org: "gone", Plan: "pro", RevokedAt: &now},
		{Org: "mixed", Plan: "enterprise", RevokedAt: &now},
	}
	for _, o := range []*registry.Orgs{here, there, there} {
		if err := o.Adopt(ctx, keys); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "adopted", func() bool { return len(there.List()) == 3 })
	for name, plan := range map[string]string{"mixed": "pro", "known": "free", "default": "unlimited"} {
		if o, err := there.Org(ctx, name); err != nil || o.Plan != plan {
			t.Errorf("%s: %+v, %v", name, o, err)
		}
	}
}

func TestStoredPlansStandBesideTheBuiltInOnes(t *testing.T) {
	s := storetest.Server(t)
	hereOrgs, here := orgs(t, s)
	_, there := orgs(t, s)
	ctx := storetest.Context(t)
	anyPlan := func(proto.Plan) error { return nil }
	if err := here.Create(ctx, proto.Plan{Name: "free"}); !errors.Is(err, proto.ErrExists) {
		t.Fatalf("a built-in plan was created: %v", err)
	}
	if err := here.Create(ctx, proto.Plan{Name: "gold", Concurrent: 7}); err != nil {
		t.Fatal(err)
	}
	if err := here.Replace(ctx, proto.Plan{Name: "free", Concurrent: 3}, anyPlan); err != nil {
		t.Fatal(err)
	}
	if err := here.Replace(ctx, proto.Plan{Name: "silver"}, anyPlan); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("an unknown plan was replaced: %v", err)
	}
	concurrent := func(name string) int {
		p, err := there.Plan(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		return p.Concurrent
	}
	eventually(t, "known elsewhere", func() bool {
		return concurrent("gold") == 7 && concurrent("free") == 3 && concurrent("pro") == 100
	})
	var names []string
	for _, p := range there.List() {
		names = append(names, p.Name)
	}
	if want := []string{"free", "pro", "enterprise", "unlimited", "gold"}; !slices.Equal(names, want) {
		t.Errorf("plans %v, want %v", names, want)
	}
	if err := hereOrgs.Create(ctx, proto.Org{Name: "acme", Plan: "gold"}); err != nil {
		t.Fatal(err)
	}
	key, _, err := keys(t, s).Create(ctx, proto.Key{Name: "n", Org: "acme", Plan: "gold", Scopes: proto.UserScopes()})
	if err != nil {
		t.Fatal(err)
	}
	_, err = here.Remove(ctx, "gold", anyPlan)
	if used, ok := errors.AsType[*proto.PlanInUseError](err); !ok || len(used.Users) != 2 ||
		!strings.Contains(err.Error(), key.ID) {
		t.Fatalf("a plan in use was removed: %v", err)
	}
	if _, err := here.Remove(ctx, "free", anyPlan); err != nil {
		t.Fatal(err)
	}
	eventually(t, "as it was built in", func() bool { return concurrent("free") == 5 })
	if _, err := here.Remove(ctx, "free", anyPlan); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("a built-in plan was removed: %v", err)
	}
}

func TestLastUseOfAKeyIsKnownToEveryGateway(t *testing.T) {
	s := storetest.Server(t)
	open := func() *registry.KeyUses {
		u, err := registry.OpenKeyUses(storetest.Context(t), storetest.Open(t, s), storetest.Log(t))
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	there := open()
	runUntilEnd(t, there.Run)
	here, at := open(), time.Now().UTC()
	here.Used("acme", "key_1", at)
	if got, ok := here.LastUsed("acme", "key_1"); !ok || !got.Equal(at) {
		t.Errorf("where it was used: %s, %t", got, ok)
	}
	if _, ok := there.LastUsed("acme", "key_1"); ok {
		t.Error("known elsewhere before it was stored")
	}
	ctx, cancel := context.WithCancel(storetest.Context(t))
	cancel() // a gateway that stops stores what it knows
	if err := here.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if _, ok := here.LastUsed("other", "key_1"); ok {
		t.Error("known of another organisation's key")
	}
	eventually(t, "known elsewhere", func() bool {
		got, ok := there.LastUsed("acme", "key_1")
		return ok && got.Equal(at)
	})
	if got, ok := open().LastUsed("acme", "key_1"); !ok || !got.Equal(at) {
		t.Errorf("after a start: %s, %t", got, ok)
	}
}

func TestKeysAreChangedAndRotated(t *testing.T) {
	s := storetest.Server(t)
	here, there := keys(t, s), keys(t, s)
	ctx := storetest.Context(t)
	first := proto.NewKeySecret("local")
	if _, err := here.BootstrapOnce(ctx, func() (string, error) { return first, nil }); err != nil {
		t.Fatal(err)
	}
	key, secret, err := here.Create(ctx, proto.Key{
		Name: "n", Org: "acme", Scopes: proto.UserScopes(), AllowedNetworks: []netip.Prefix{
			netip.MustParsePrefix("192.0.2.0/24"),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	works := func(k *registry.Keys, secret string) bool {
		got, ok := k.Authenticate(secret)
		return ok && got.ID == key.ID && slices.Equal(got.AllowedNetworks, key.AllowedNetworks)
	}
	if _, err := here.Change(ctx, key.ID, func(k *proto.Key) error { k.Name = "m"; return nil }); err != nil {
		t.Fatal(err)
	}
	eventually(t, "renamed elsewhere", func() bool { k, ok := there.Key(key.ID); return ok && k.Name == "m" })
	rotated, second, err := here.Rotate(ctx, key.ID, time.Now().Add(time.Hour))
	if err != nil || rotated.Hint == key.Hint {
		t.Fatalf("%+v, %v", rotated, err)
	}
	eventually(t, "both secrets work", func() bool { return works(there, second) && works(there, secret) })
	_, third, err := here.Rotate(ctx, key.ID, time.Now()) // without overlap
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "only the newest works", func() bool {
		return works(there, third) && !works(there, second) && !works(there, secret)
	})
	if works(here, second) || works(here, secret) || !works(here, third) {
		t.Error("an old secret works where the key was rotated")
	}
	if _, err := here.Revoke(ctx, key.ID); err != nil || works(here, third) {
		t.Errorf("revoked: %v", err)
	}
	if _, _, err := here.Rotate(ctx, "key_bootstrap", time.Now()); !errors.As(err, new(*registry.FirstKeyError)) {
		t.Errorf("the first key was rotated: %v", err)
	}
	var last *proto.LastKeyError
	for name, change := range map[string]func(*proto.Key){
		"no admin": func(k *proto.Key) { k.Scopes = proto.UserScopes() }, "not global": func(k *proto.Key) {
			k.Global = false
		},
		"expires": func(k *proto.Key) { k.ExpiresAt = new(time.Now().Add(time.Hour)) },
	} {
		if _, err := here.Change(ctx, "key_bootstrap", func(k *proto.Key) error { change(k); return nil }); !errors.As(
			err, &last) {
			t.Errorf("%s: nobody administers the server any more: %v", name, err)
		}
	}
	if _, err := here.Change(ctx, "key_bootstrap", func(k *proto.Key) error { k.Name = "root"; return nil }); err != nil {
		t.Error(err)
	}
}
