package gateway

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// secretStore has secrets by organisation and name.
type secretStore map[string]proto.Secret

// Value returns credentials of buckets for secrets whose names begin with KEYS.
func (s secretStore) Value(_ context.Context, org, name string) ([]byte, error) {
	_, ok := s[org+"/"+name]
	switch {
	case !ok:
		return nil, proto.ErrNotFound
	case strings.HasPrefix(name, "KEYS"):
		return []byte(`{"access_key_id":"id","secret_access_key":"canary-key"}`), nil
	default:
		return []byte("canary"), nil
	}
}

func (s secretStore) Put(_ context.Context, org, name, value string, injection *proto.Injection) (proto.Secret, error) {
	variable, err := proto.CheckSecretValue(value)
	s[org+"/"+name] = proto.Secret{Org: org, Name: name, Bytes: len(value), Variable: variable, Injection: injection}
	return s[org+"/"+name], err
}

func (s secretStore) Get(_ context.Context, org, name string) (proto.Secret, error) {
	secret, ok := s[org+"/"+name]
	if !ok {
		return proto.Secret{}, proto.ErrNotFound
	}
	return secret, nil
}

func (s secretStore) Page(org, after string, limit int, keep func(*proto.Secret) bool) ([]proto.Secret, string) {
	return pageOf(maps.Values(s), func(x *proto.Secret) string { return x.Org }, func(x *proto.Secret) string {
		return x.Name
	}, org, after, limit, keep)
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
	for i, b := range bound {
		secret, err := s.Get(ctx, org, b.Secret)
		if err != nil {
			return nil, nil, &proto.MissingSecretError{Secret: b.Secret}
		}
		secrets[b.Secret] = secret
		bound[i].Injection = secret.Injection
	}
	return secrets, []byte("sealed for " + id), nil
}

func TestSecretsOfAKeyAndItsSandbox(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	for path, value := range map[string]string{
		"A": "canary", "B": "canary-b", "A?org=other": "canary-o", "LONG": strings.Repeat("x", 5000),
	} {
		if a := h.do("PUT", "/v1/admin/secrets/"+path, `{"value":"`+value+`"}`).want(200, ""); strings.Contains(
			string(a.body), value) {
			t.Errorf("the answer has the value: %s", string(a.body))
		}
	}
	h.do("POST", profilesPath, `{"name":"web","secrets":["A=V","B"]}`).want(201, "")
	key := func(secrets string) *harness {
		with := *h
		with.key = h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"pro","profile":"web","secrets":`+secrets+
			`}`).want(201, "").json()["key"].(string)
		return &with
	}
	user := key(`["B=V!"]`) // instead of the sandbox's V
	a := user.execute(hello).want(200, "")
	job := h.jobOf(a)
	if len(job.Bound) != 2 || job.Bound[0].Secret != "B" || !job.Bound[0].Mask || job.Bound[1].Secret != "B" ||
		job.Bound[1].Env != "" ||
		!job.HasSecrets || string(job.Sealed) != "sealed for "+string(job.TraceID) {
		t.Errorf("%+v", job)
	}
	user.execute(body("env_vars", map[string]string{"V": "mine"})).want(400, "validation_error", "env_vars", "V")
	key(`["LONG=L"]`).execute(hello).want(400, "validation_error", "LONG", "file")
	key(`["LONG"]`).execute(hello).want(200, "")
	key(`["C"]`).execute(hello).want(409, "conflict", `"C"`)
	for _, bad := range []string{`["a.b"]`, `["A=PATH"]`, `["A="]`, `["A=X","B=X"]`, `["A","A!"]`} {
		h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"pro","secrets":`+bad+`}`).want(
			400, "validation_error", "secrets")
		h.do("POST", profilesPath, `{"name":"bad","secrets":`+bad+`}`).want(400, "validation_error", "secrets")
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

func TestInjectedSecrets(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	put := func(value string, changes ...string) *reply {
		injection := map[string]string{
			"hosts": `["api.example.com","*.example.org:8443,9443","http://plain.example.com"]`, "header": `"Authorization"`,
			"template": `"Bearer {{value}}"`,
		}
		for i := 0; i < len(changes); i += 2 {
			injection[changes[i]] = changes[i+1]
		}
		return h.do("PUT", "/v1/admin/secrets/API",
			fmt.Sprintf(`{"value":%q,"injection":{"hosts":%s,"header":%s,"template":%s}}`,
				value, injection["hosts"], injection["header"], injection["template"]))
	}
	for _, bad := range []struct{ field, value, field2 string }{
		{"hosts", `[]`, "injection.hosts"},
		{"hosts", `["` + strings.Repeat(`a.example.com","`, 16) + `b.example.com"]`, "injection.hosts"},
		{"hosts", `["93.184.216.34"]`, "injection.hosts"},
		{"hosts", `["10.0.0.0/8"]`, "injection.hosts"},
		{"hosts", `["[2001:db8::1]:443"]`, "injection.hosts"},
		{"hosts", `["0x7f.1"]`, "injection.hosts"},
		{"hosts", `["a.*.example.com"]`, "injection.hosts"},
		{"hosts", `["*.com"]`, "injection.hosts"},
		{"hosts", `["localhost"]`, "injection.hosts"},
		{"hosts", `["*"]`, "injection.hosts"},
		{"hosts", `["https://api.example.com"]`, "injection.hosts"},
		{"hosts", `["http://api.example.com/path"]`, "injection.hosts"},
		{"hosts", `["user@api.example.com"]`, "injection.hosts"},
		{"hosts", `["api.example.com:0"]`, "injection.hosts"},
		{"header", `""`, "injection.header"},
		{"header", `"A B"`, "injection.header"},
		{"header", `"X:"`, "injection.header"},
		{"header", `"Ä"`, "injection.header"},
		{"header", `"` + strings.Repeat("x", 65) + `"`, "injection.header"},
		{"header", `"host"`, "injection.header"},
		{"header", `"TRANSFER-encoding"`, "injection.header"},
		{"header", `"Content-Length"`, "injection.header"},
		{"header", `"Proxy-Authorization"`, "injection.header"},
		{"template", `"Bearer"`, "injection.template"},
		{"template", `"{{value}}{{value}}"`, "injection.template"},
		{"template", `"{{value}}\r\nX: y"`, "injection.template"},
		{"template", `"{{value}}` + strings.Repeat("x", 256) + `"`, "injection.template"},
	} {
		put("canary", bad.field, bad.value).want(400, "validation_error", bad.field2)
	}
	if a := put("canary\nX: y").want(400, "validation_error", "value", "header"); strings.Contains(
		string(a.body), "canary") {
		t.Errorf("the answer has the value: %s", string(a.body))
	}
	put("canary").want(200, "")
	got := h.do("GET", "/v1/admin/secrets/API", "").want(200, "").json()["injection"].(map[string]any)
	if got["header"] != "Authorization" || len(got["hosts"].([]any)) != 3 {
		t.Errorf("%v", got)
	}

	key := func(sandbox, secrets string) *harness {
		with := *h
		with.key = h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"pro","profile":"`+sandbox+`","secrets":`+
			secrets+`}`).want(201, "").json()["key"].(string)
		return &with
	}
	h.do("POST", profilesPath, `{"name":"open","network":{"policy":"unrestricted"}}`).want(201, "")
	h.do("POST", profilesPath, `{"name":"closed"}`).want(201, "")
	job := h.jobOf(key("open", `["API"]`).execute(hello).want(200, ""))
	if !job.HasInjections || len(job.Bound) != 1 || job.Bound[0].Injection == nil ||
		job.Bound[0].Injection.Template != "Bearer {{value}}" {
		t.Errorf("%+v", job)
	}
	key("closed", `["API"]`).execute(hello).want(400, "validation_error", "API", "blocked")
	key("open", `["API=VAR"]`).execute(hello).want(400, "validation_error", "VAR", "never")
	h.do("PUT", "/v1/admin/secrets/OTHER", `{"value":"canary"}`).want(200, "")
	if job := h.jobOf(key("open", `["OTHER"]`).execute(hello).want(200, "")); job.HasInjections ||
		job.Bound[0].Injection != nil {
		t.Errorf("%+v", job)
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
