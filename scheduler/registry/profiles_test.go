package registry_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// profiles opens the list like a gateway.
func profiles(t *testing.T, s nats.InProcessConnProvider) *registry.Profiles {
	t.Helper()
	l, err := registry.OpenProfiles(storetest.Context(t), storetest.Open(t, s), storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	runUntilEnd(t, l.Run)
	return l
}

// profile returns a profile that differs from the default in everything but isolation: strict
// isolation excludes preloaded modules.
func profile(name string) proto.Profile {
	return proto.Profile{
		Name: name, Image: "py", CPU: 2, Memory: 2 * proto.GiB, Pids: 50,
		Disk:    proto.Disk{Home: proto.GiB, Tmp: proto.MiB, Inodes: 1000},
		Network: proto.Network{Policy: proto.NetworkAllowlist, Allow: []string{"pypi.org"}}, Env: map[string]string{"A": "1"},
		Output:  1000,
		Preload: []string{"numpy"},
	}
}

func TestProfileIsKnownToEveryGatewayUntilItIsRemoved(t *testing.T) {
	s := storetest.Server(t)
	here, there := profiles(t, s), profiles(t, s)
	ctx := storetest.Context(t)
	want := profile("web.1-a_b")
	if err := here.Create(ctx, want); err != nil {
		t.Fatal(err)
	}
	same := func(where string, l *registry.Profiles) {
		t.Helper()
		got, err := l.Profile(ctx, want.Name)
		if err != nil {
			t.Fatalf("%s: %v", where, err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("%s: %s", where, d)
		}
		// by a caller that merges into it
		got.Env["A"], got.Network.Allow[0], got.Preload[0] = "changed", "changed", "changed"
	}
	for range 2 {
		same("where it was made", here)
		same("elsewhere, at once", there)
		same("in a gateway that starts later", profiles(t, s))
	}
	if err := there.Create(ctx, profile(want.Name)); !errors.Is(err, proto.ErrExists) {
		t.Errorf("created twice: %v", err)
	}

	want.CPU = 3
	if err := there.Replace(ctx, want, anyProfile); err != nil {
		t.Fatal(err)
	}
	same("where it was replaced", there)
	eventually(t, "replaced elsewhere", func() bool {
		p, err := here.Profile(ctx, want.Name)
		return err == nil && p.CPU == 3
	})
	if err := here.Replace(ctx, profile("other"), anyProfile); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("an unknown one was replaced: %v", err)
	}

	removed, err := here.Remove(ctx, want.Name, anyProfile)
	if d := cmp.Diff(want, removed); err != nil || d != "" {
		t.Fatalf("%v, %s", err, d)
	}
	unknown := func(l *registry.Profiles) bool {
		_, err := l.Profile(ctx, want.Name)
		return errors.Is(err, proto.ErrNotFound)
	}
	if !unknown(here) {
		t.Error("known where it was removed")
	}
	eventually(t, "removed elsewhere", func() bool { return unknown(there) })
	if _, err := here.Remove(ctx, want.Name, anyProfile); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("removed twice: %v", err)
	}
	if err := there.Create(ctx, want); err != nil {
		t.Errorf("created again: %v", err)
	}
	eventually(t, "created again", func() bool { return !unknown(here) })
}

func TestProfilesAreFollowedAfterTheServerWasRestarted(t *testing.T) {
	s := storetest.NewRestartable(t)
	here, there := profiles(t, s), profiles(t, s)
	ctx := storetest.Context(t)
	if err := here.Create(ctx, profile("web")); err != nil {
		t.Fatal(err)
	}
	cpu := func() float64 { return must(there.Profile(ctx, "web")).CPU }
	eventually(t, "known elsewhere", func() bool { return cpu() == profile("web").CPU })
	s.Restart()
	changed := profile("web")
	changed.CPU, changed.Isolation, changed.Preload = 3, proto.IsolationStrict, nil
	eventually(t, "replaced", func() bool {
		once, cancel := context.WithTimeout(ctx, time.Second) // requests sent to the old server are never answered
		defer cancel()
		return here.Replace(once, changed, anyProfile) == nil
	})
	eventually(t, "replaced elsewhere", func() bool { return cpu() == 3 })
	if d := cmp.Diff(changed, must(there.Profile(ctx, "web"))); d != "" {
		t.Error(d)
	}
}

func TestProfilesAreListedByName(t *testing.T) {
	s := storetest.Server(t)
	l := profiles(t, s)
	ctx := storetest.Context(t)
	for _, name := range []string{"b", "a.b", "gone", "a"} {
		if err := l.Create(ctx, profile(name)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.Remove(ctx, "gone", anyProfile); err != nil {
		t.Fatal(err)
	}
	for _, one := range []*registry.Profiles{l, profiles(t, s)} {
		list := one.List("")
		var names []string
		for _, p := range list {
			names = append(names, p.Name)
		}
		if !slices.Equal(names, []string{"a", "a.b", "b"}) {
			t.Errorf("%s", names)
		}
	}
}

func TestProfileWithKeysIsNotRemoved(t *testing.T) {
	s := storetest.Server(t)
	k, l := keys(t, s), profiles(t, s)
	ctx := storetest.Context(t)
	wanted := proto.Key{Name: "ci", Org: "acme", Plan: "pro", Scopes: proto.UserScopes(), Profile: "web"}
	if _, _, err := k.Create(ctx, wanted); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("bound to a missing profile: %v", err)
	}
	if list := k.List(""); len(list) != 0 {
		t.Fatalf("%+v", list)
	}
	for _, name := range []string{"web", "other"} {
		if err := l.Create(ctx, profile(name)); err != nil {
			t.Fatal(err)
		}
	}
	key, secret, err := k.Create(ctx, wanted)
	if err != nil || key.Profile != "web" {
		t.Fatalf("%+v, %v", key, err)
	}
	if got, ok := k.Authenticate(secret); !ok || got.Profile != "web" {
		t.Errorf("%+v, %v", got, ok)
	}
	_, err = l.Remove(ctx, "web", anyProfile)
	if bound := new(proto.BoundError); !errors.As(err, &bound) || bound.Profile != "web" ||
		!slices.Equal(bound.Keys, []string{key.ID}) {
		t.Fatalf("removed: %v", err)
	}
	if d := cmp.Diff(profile("web"), must(l.Profile(ctx, "web"))); d != "" {
		t.Errorf("binding a key changed it: %s", d)
	}
	if _, err := l.Remove(ctx, "other", anyProfile); err != nil {
		t.Errorf("one without keys: %v", err)
	}
	if _, err := k.Revoke(ctx, key.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Remove(ctx, "web", anyProfile); err != nil {
		t.Errorf("its only key is revoked: %v", err)
	}
}

// The further profiles of a key stay as its own does. A change that names one which does not exist
// leaves the key as it was.
func TestProfileOfRequestsIsNotRemoved(t *testing.T) {
	s := storetest.Server(t)
	k, l := keys(t, s), profiles(t, s)
	ctx := storetest.Context(t)
	for _, name := range []string{"web", "gpu"} {
		if err := l.Create(ctx, profile(name)); err != nil {
			t.Fatal(err)
		}
	}
	wanted := proto.Key{Name: "ci", Org: "acme", Scopes: proto.UserScopes(), Profiles: []string{"agents", "web"}}
	key, _, err := k.Create(ctx, wanted)
	if err != nil {
		t.Fatal(err)
	}
	wanted.Profiles = []string{"web", "nowhere"}
	if _, _, err := k.Create(ctx, wanted); !errors.Is(err, proto.ErrNotFound) || len(k.List("")) != 1 {
		t.Errorf("created with a missing profile: %v", err)
	}
	refused := func(name string) {
		t.Helper()
		_, err := l.Remove(ctx, name, anyProfile)
		if bound := new(proto.BoundError); !errors.As(err, &bound) || !slices.Equal(bound.Keys, []string{key.ID}) {
			t.Errorf("%s is removed: %v", name, err)
		}
	}
	change := func(names ...string) error {
		_, err := k.Change(ctx, key.ID, func(k *proto.Key) error { k.Profiles = names; return nil })
		return err
	}
	refused("web")
	if err := change("gpu", "nowhere", "web"); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("changed to a missing profile: %v", err)
	}
	if got := must(k.Get(ctx, key.ID)).Profiles; !slices.Equal(got, []string{"agents", "web"}) {
		t.Errorf("the key has %v after that", got)
	}
	if err := change("gpu"); err != nil {
		t.Fatal(err)
	}
	refused("gpu")
	if _, err := l.Remove(ctx, "web", anyProfile); err != nil {
		t.Errorf("no key allows it any more: %v", err)
	}
	if err := change(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Remove(ctx, "gpu", anyProfile); err != nil {
		t.Errorf("no key allows it any more: %v", err)
	}
}

// No key allows a profile that is gone, in whatever order keys are changed and profiles removed.
func TestProfileIsRemovedWhileAKeyIsChanged(t *testing.T) {
	s := storetest.Server(t)
	k, l := keys(t, s), profiles(t, s)
	ctx := storetest.Context(t)
	key, _, err := k.Create(ctx, proto.Key{Name: "ci", Org: "acme", Scopes: proto.UserScopes()})
	if err != nil {
		t.Fatal(err)
	}
	change := func(names ...string) error {
		_, err := k.Change(ctx, key.ID, func(k *proto.Key) error { k.Profiles = names; return nil })
		return err
	}
	for range 20 {
		if err := l.Create(ctx, profile("web")); err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		var changeErr error
		group.Go(func() { changeErr = change("web") })
		_, removeErr := l.Remove(ctx, "web", anyProfile)
		group.Wait()
		if changeErr != nil && !errors.Is(changeErr, proto.ErrNotFound) {
			t.Fatal(changeErr)
		}
		allows := len(must(k.Get(ctx, key.ID)).Profiles) > 0
		switch bound := new(proto.BoundError); {
		case allows != (changeErr == nil):
			t.Fatalf("the key allows the profile: %v, after %v", allows, changeErr)
		case removeErr == nil && allows:
			t.Fatal("the profile is gone, and the key allows it")
		case removeErr != nil && !errors.As(removeErr, &bound):
			t.Fatal(removeErr)
		case removeErr == nil:
			continue
		}
		if err := change(); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Remove(ctx, "web", anyProfile); err != nil {
			t.Fatal(err)
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// No valid key is left without its profile, in whatever order keys are created and profiles
// removed.
func TestProfileIsRemovedWhileKeysAreMade(t *testing.T) {
	s := storetest.Server(t)
	k, other, l := keys(t, s), keys(t, s), profiles(t, s)
	ctx := storetest.Context(t)
	wanted := proto.Key{Name: "ci", Org: "acme", Plan: "pro", Scopes: proto.UserScopes(), Profile: "web"}
	for range 20 {
		if err := l.Create(ctx, profile("web")); err != nil {
			t.Fatal(err)
		}
		var made []string
		var mu sync.Mutex
		var group sync.WaitGroup
		for _, gateway := range []*registry.Keys{k, other} {
			group.Go(func() {
				key, _, err := gateway.Create(ctx, wanted)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					made = append(made, key.ID)
				} else if !errors.Is(err, proto.ErrNotFound) {
					t.Errorf("make a key: %v", err)
				}
			})
		}
		_, removeErr := l.Remove(ctx, "web", anyProfile)
		group.Wait()
		switch bound := new(proto.BoundError); {
		case removeErr == nil && len(made) > 0:
			t.Fatalf("the profile is gone and %s were made", made)
		case removeErr != nil && !errors.As(removeErr, &bound):
			t.Fatal(removeErr)
		case removeErr == nil:
			continue
		}
		for _, id := range made {
			if _, err := k.Revoke(ctx, id); err != nil && !errors.Is(err, proto.ErrNotFound) {
				t.Fatal(err)
			}
			if _, err := other.Revoke(ctx, id); err != nil && !errors.Is(err, proto.ErrNotFound) {
				t.Fatal(err)
			}
		}
		if _, err := l.Remove(ctx, "web", anyProfile); err != nil {
			t.Fatal(err)
		}
	}
}

// A malformed profile does not exist: its keys are rejected, and it can be replaced.
func TestMalformedProfileIsNone(t *testing.T) {
	s := storetest.Server(t)
	l := profiles(t, s)
	st := storetest.Open(t, s)
	ctx := storetest.Context(t)
	if err := l.Create(ctx, profile("web")); err != nil {
		t.Fatal(err)
	}
	for _, body := range []string{`{`, `{"name":"other"}`, `{"name":"web","cpu":1000}`} {
		if _, err := st.Profiles.Put(ctx, "web", []byte(body)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "refused", func() bool { _, err := l.Profile(ctx, "web"); return err != nil })
		if list := l.List(""); len(list) != 0 {
			t.Errorf("%s is listed: %v", body, list)
		}
		if err := l.Replace(ctx, profile("web"), anyProfile); err != nil {
			t.Errorf("%s cannot be replaced: %v", body, err)
		}
		if _, err := l.Profile(ctx, "web"); err != nil {
			t.Errorf("replaced: %v", err)
		}
	}
}

// anyProfile lets any profile be replaced or removed.
func anyProfile(proto.Profile) error { return nil }
