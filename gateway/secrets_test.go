package gateway

import (
	"context"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// secretStore has values by organisation and name.
type secretStore map[string]string

func (s secretStore) Put(_ context.Context, org, name, value string) (proto.Secret, error) {
	s[org+"/"+name] = value
	return s.Get(context.Background(), org, name)
}

func (s secretStore) Get(_ context.Context, org, name string) (proto.Secret, error) {
	value, ok := s[org+"/"+name]
	if !ok {
		return proto.Secret{}, proto.ErrNotFound
	}
	variable, err := proto.CheckSecretValue(value)
	return proto.Secret{Org: org, Name: name, Bytes: len(value), Variable: variable}, err
}

func (s secretStore) List(org string) (list []proto.Secret) {
	for key := range s {
		if of, name, _ := strings.Cut(key, "/"); of == org {
			list = append(list, proto.Secret{Org: org, Name: name})
		}
	}
	return list
}

func (s secretStore) Remove(_ context.Context, org, name string) error {
	_, err := s.Get(context.Background(), org, name)
	delete(s, org+"/"+name)
	return err
}

func (s secretStore) Bind(
	ctx context.Context, org string, id proto.TraceID, bound []proto.SecretBinding,
) (map[string]proto.Secret, []byte, error) {
	secrets := map[string]proto.Secret{}
	for _, b := range bound {
		secret, err := s.Get(ctx, org, b.Secret)
		if err != nil {
			return nil, nil, &proto.MissingSecretError{Secret: b.Secret}
		}
		secrets[b.Secret] = secret
	}
	return secrets, []byte("sealed for " + id), nil
}

func TestSecretsOfAKeyAndItsSandbox(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	for path, value := range map[string]string{"A": "canary", "B": "canary-b", "A?org=other": "canary-o", "LONG": strings.Repeat("x", 5000)} {
		if a := h.do("PUT", "/v1/admin/secrets/"+path, `{"value":"`+value+`"}`).want(200, ""); strings.Contains(string(a.body), value) {
			t.Errorf("the answer has the value: %s", string(a.body))
		}
	}
	h.do("POST", sandboxPath, `{"name":"web","secrets":["A=V","B"]}`).want(201, "")
	key := func(secrets string) *harness {
		with := *h
		with.key = h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"pro","sandbox":"web","secrets":`+secrets+`}`).want(201, "").json()["key"].(string)
		return &with
	}
	user := key(`["B=V!"]`) // instead of the sandbox's V
	a := user.execute(hello).want(200, "")
	job := h.jobOf(a)
	if len(job.Bound) != 2 || job.Bound[0].Secret != "B" || !job.Bound[0].Mask || job.Bound[1].Secret != "B" || job.Bound[1].Env != "" ||
		!job.HasSecrets || string(job.Sealed) != "sealed for "+string(job.TraceID) {
		t.Errorf("%+v", job)
	}
	user.execute(body("env_vars", map[string]string{"V": "mine"})).want(400, "validation_error", "env_vars", "V")
	key(`["LONG=L"]`).execute(hello).want(400, "validation_error", "LONG", "file")
	key(`["LONG"]`).execute(hello).want(200, "")
	key(`["C"]`).execute(hello).want(500, "internal", `"C"`)
	for _, bad := range []string{`["a.b"]`, `["A=PATH"]`, `["A="]`, `["A=X","B=X"]`, `["A","A!"]`} {
		h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"pro","secrets":`+bad+`}`).want(400, "validation_error", "secrets")
		h.do("POST", sandboxPath, `{"name":"bad","secrets":`+bad+`}`).want(400, "validation_error", "secrets")
	}
	for _, value := range []string{"abc", strings.Repeat("x", proto.MaxSecretBytes+1)} {
		h.do("PUT", "/v1/admin/secrets/A", `{"value":"`+value+`"}`).want(400, "validation_error", "value")
	}
	h.do("PUT", "/v1/admin/secrets/a.b", `{"value":"abcd"}`).want(400, "validation_error", "name")
	user.do("GET", "/v1/admin/secrets", "").want(403, "forbidden")
	h.do("DELETE", "/v1/admin/secrets/A", "").want(204, "")
	h.do("GET", "/v1/admin/secrets/A", "").want(404, "not_found")
	h.do("GET", "/v1/admin/secrets/A?org=other", "").want(200, "")
	if strings.Contains(h.log.String(), "canary") {
		t.Error("a value was logged")
	}
}

func TestRotateSecretsKey(t *testing.T) {
	h := newHarness(t)
	if a := h.do("POST", "/v1/admin/secrets/rotate-key", "").want(200, ""); a.json()["wrapped_for"] != "age1new" {
		t.Error(a.json())
	}
	if !strings.Contains(h.log.String(), "key of secrets rotated") {
		t.Error("the rotation was not logged")
	}
	h.stub.noSecretsKey = true
	h.do("POST", "/v1/admin/secrets/rotate-key", "").want(409, "conflict", "--secrets-key")
}
