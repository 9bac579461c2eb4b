package registry_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/keyring"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// reversed is the operator's key of the tests.
type reversed struct{}

func (reversed) Wrap(_ context.Context, key []byte) ([]byte, string, error) {
	wrapped := bytes.Clone(key)
	slices.Reverse(wrapped)
	return wrapped, "reversed", nil
}

func (r reversed) Unwrap(ctx context.Context, wrapped []byte) ([]byte, error) {
	key, _, err := r.Wrap(ctx, wrapped)
	return key, err
}

func TestInjectionsStay(t *testing.T) {
	ctx, st := storetest.Context(t), storetest.Open(t, storetest.Server(t))
	ring, err := keyring.Open(ctx, st, reversed{}, true, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	secrets, err := registry.OpenSecrets(ctx, st, ring, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	put := func(value string, injection *proto.Injection) proto.Secret {
		t.Helper()
		secret, err := secrets.Put(ctx, "acme", "API", value, injection)
		if err != nil {
			t.Fatal(err)
		}
		return secret
	}
	template := func(i *proto.Injection) string {
		if i == nil {
			return "none"
		}
		return i.Template
	}
	bearer := &proto.Injection{Hosts: []string{"api.example.com"}, Header: "Authorization", Template: "Bearer {{value}}"}
	if got := put("value one", nil); got.Injection != nil {
		t.Errorf("%+v", got)
	}
	put("value two", bearer)
	if got := put("value three", nil); template(got.Injection) != bearer.Template || got.Bytes != len("value three") {
		t.Errorf("a secret whose value alone was replaced: %+v", got)
	}
	bad, err := secrets.Put(ctx, "acme", "API", "two\nlines", nil)
	if refused, ok := errors.AsType[*proto.FieldError](err); !ok || refused.Field != "value" ||
		strings.Contains(err.Error(), "lines\"") {
		t.Errorf("a value that cannot be in a header: %+v, %v", bad, err)
	}
	bound := []proto.SecretBinding{{Secret: "API"}}
	found, sealed, err := secrets.Bind(ctx, "acme", proto.NewTraceID(), bound)
	if err != nil || template(bound[0].Injection) != bearer.Template ||
		template(found["API"].Injection) != bearer.Template || len(sealed) == 0 {
		t.Errorf("bound %+v of %+v, %v", bound, found, err)
	}
	stored, err := st.Secrets.Get(ctx, "secret.acme.API")
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range [][2]string{{"api.example.com", "evil.example.com"}, {`"injection"`, `"unknown"`}} {
		if _, err := st.Secrets.Put(ctx, "secret.acme.API",
			bytes.Replace(stored.Value(), []byte(change[0]), []byte(change[1]), 1)); err != nil {
			t.Fatal(err)
		}
		other, err := registry.OpenSecrets(ctx, st, ring, storetest.Log(t))
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := other.Bind(ctx, "acme", proto.NewTraceID(), bound); err == nil ||
			!strings.Contains(err.Error(), "decrypt") {
			t.Errorf("a secret whose %s was changed in the store: %v", change[0], err)
		}
	}
	if got := put("value four", &proto.Injection{Hosts: bearer.Hosts, Header: "X-Key", Template: "{{value}}"}); template(
		got.Injection) != "{{value}}" {
		t.Errorf("%+v", got)
	}
	if err := secrets.Remove(ctx, "acme", "API"); err != nil {
		t.Fatal(err)
	}
	put("value five", nil)
	if _, _, err = secrets.Bind(ctx, "acme", proto.NewTraceID(), bound); err != nil || bound[0].Injection != nil {
		t.Errorf("after the secret was removed and made again: %+v, %v", bound, err)
	}
}

// A secret stays while something of its organisation names it.
func TestSecretInUseIsNotRemoved(t *testing.T) {
	ctx, s := storetest.Context(t), storetest.Server(t)
	st, log := storetest.Open(t, s), storetest.Log(t)
	ring, err := keyring.Open(ctx, st, reversed{}, true, log)
	if err != nil {
		t.Fatal(err)
	}
	secrets, err := registry.OpenSecrets(ctx, st, ring, log)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := registry.OpenKeys(ctx, st, ring, "local", log)
	if err != nil {
		t.Fatal(err)
	}
	profiles, err := registry.OpenProfiles(ctx, st, log)
	if err != nil {
		t.Fatal(err)
	}
	links := connections(t, s)
	for _, org := range []string{"acme", "other"} {
		for _, name := range []string{"KEY", "PROFILE", "LINK", "FURTHER"} {
			if _, err := secrets.Put(ctx, org, name, "a value", nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	p := proto.DefaultProfile()
	p.Name, p.Secrets = "p", []string{"PROFILE=VARIABLE"}
	if err := profiles.Create(ctx, p); err != nil {
		t.Fatal(err)
	}
	create := func(k proto.Key) string {
		k.Name, k.Org, k.Scopes = "k", "acme", proto.UserScopes()
		made, _, err := keys.Create(ctx, k)
		if err != nil {
			t.Fatal(err)
		}
		return made.ID
	}
	own, bound := create(proto.Key{Secrets: []string{"KEY=VARIABLE!"}}), create(proto.Key{Profile: "p"})
	p.Name, p.Secrets = "further", []string{"FURTHER"}
	if err := profiles.Create(ctx, p); err != nil {
		t.Fatal(err)
	}
	may := create(proto.Key{Profiles: []string{"further"}})
	c := connection("acme", "data")
	c.Kind, c.S3 = proto.MountS3, &proto.S3Mount{Credential: "LINK"}
	if err := links.Create(ctx, c); err != nil {
		t.Fatal(err)
	}
	for name, holder := range map[string]string{"KEY": own, "PROFILE": bound, "LINK": "data", "FURTHER": may} {
		if used := new(proto.SecretInUseError); !errors.As(secrets.Remove(ctx, "acme", name), &used) ||
			!strings.Contains(used.Error(), holder) {
			t.Errorf("%s: %v", name, used)
		}
		if err := secrets.Remove(ctx, "other", name); err != nil {
			t.Errorf("%s of another organisation: %v", name, err)
		}
	}
	for _, id := range []string{own, bound, may} {
		if _, err := keys.Revoke(ctx, id); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := links.Remove(ctx, "acme", "data", allow, allow); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"KEY", "PROFILE", "LINK", "FURTHER"} {
		if err := secrets.Remove(ctx, "acme", name); err != nil {
			t.Errorf("%s is not used: %v", name, err)
		}
	}
}
