package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/storage/s3"
	"github.com/bullpen-run/bullpen/storage/storagetest"
	"github.com/bullpen-run/bullpen/worker/mount"
)

const (
	connections = "/v1/admin/connections"
	// bucket is a connection. Its credential is a secret that secretStore has credentials for.
	bucket = `{"slug":"data","kind":"s3","endpoint":"https://s3.example.com","region":"us-east-1","bucket":"acme-data",` +
		`"path_style":true,"credential":"KEYS","prefix":"base"}`
)

// connectionStore replaces the registry of connections.
type connectionStore struct {
	stub *stub
	mu   sync.Mutex
	all  []proto.Connection
}

func (s *connectionStore) at(org, slug string) int {
	return slices.IndexFunc(s.all, func(c proto.Connection) bool { return c.Org == org && c.Slug == slug })
}

func (s *connectionStore) Connection(_ context.Context, org, slug string) (proto.Connection, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.at(org, slug)
	if i < 0 {
		return proto.Connection{}, proto.ErrNotFound
	}
	return s.all[i], nil
}

func (s *connectionStore) Page(
	org, after string, limit int, keep func(*proto.Connection) bool,
) ([]proto.Connection, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	place := func(c *proto.Connection) string { return c.Org + "." + c.Slug }
	return pageOf(slices.Values(s.all), func(c *proto.Connection) string { return c.Org }, place, org, after, limit, keep)
}

func (s *connectionStore) Create(_ context.Context, c proto.Connection) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at(c.Org, c.Slug) >= 0 {
		return proto.ErrExists
	}
	s.all = append(s.all, c)
	return nil
}

func (s *connectionStore) Change(
	_ context.Context, org, slug string, change func(*proto.Connection) error,
) (proto.Connection, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.at(org, slug)
	if i < 0 {
		return proto.Connection{}, proto.ErrNotFound
	}
	c := s.all[i]
	if err := change(&c); err != nil {
		return c, err
	}
	s.all[i] = c
	return c, nil
}

func (s *connectionStore) Remove(
	_ context.Context, org, slug string, check, empty func(proto.Connection) error,
) (proto.Connection, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.at(org, slug)
	if i < 0 {
		return proto.Connection{}, proto.ErrNotFound
	}
	c := s.all[i]
	if err := check(c); err != nil {
		return c, err
	}
	for _, k := range s.stub.keys {
		if k.Org == org && k.RevokedAt == nil &&
			slices.ContainsFunc(k.Mounts, func(m proto.KeyMount) bool { return m.Connection == slug }) {
			return c, &proto.BoundConnectionError{Connection: slug, Keys: []string{k.ID}}
		}
	}
	if c.Kind == proto.MountVolume {
		s.all[i].Removing = true
		if err := empty(c); err != nil {
			return c, err
		}
	}
	s.all = slices.Delete(s.all, i, i+1)
	return c, nil
}

// storageStub replaces the buckets of connections. It knows that names with "private" lead to private
// addresses.
type storageStub struct {
	mu       sync.Mutex
	failure  error           // of tests and looks
	prefixes map[string]bool // that have objects
	tested   []proto.Mount
	looked   []proto.Mount
}

func (s *storageStub) CheckEndpoint(_ context.Context, field, url string) error {
	if strings.Contains(url, "private") || strings.HasPrefix(url, "http:") {
		return proto.FieldErrorf(field, "leads to an address that is not open to storage connections")
	}
	return nil
}

func (s *storageStub) Test(_ context.Context, m proto.Mount, keys proto.S3Credentials) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if keys.SecretAccessKey != "canary-key" {
		return errors.New("other credentials")
	}
	s.tested = append(s.tested, m)
	return s.failure
}

func (s *storageStub) HasObjects(_ context.Context, m proto.Mount, _ proto.S3Credentials) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looked = append(s.looked, m)
	return s.prefixes[m.Prefix], s.failure
}

// Bucket opens a bucket of a real server, for which there is no guard here.
func (s *storageStub) Bucket(m proto.Mount, _ proto.S3Credentials) (filestore.BucketFiles, error) {
	id, secret := storagetest.Credentials()
	b, err := s3.OpenBucket(s3.BucketConfig{
		S3Mount: *m.S3, Credentials: proto.S3Credentials{AccessKeyID: id, SecretAccessKey: secret}, Prefix: m.Prefix,
	})
	return &s3.Files{Bucket: b}, err
}

func (s *storageStub) Directory(m proto.Mount) (filestore.MountFiles, error) {
	return mount.OpenDirectory(nil, m)
}

func (h *harness) storage() *storageStub { return h.server.Storage.(*storageStub) }

// with returns bucket with other members.
func with(members string) string {
	return strings.TrimSuffix(bucket, "}") + members + "}"
}

func replaced(old, by string) string { return strings.Replace(bucket, old, by, 1) }

// newConnectionHarness starts a server with the secrets KEYS of acme and other, and the connection
// data of acme.
func newConnectionHarness(t *testing.T) *harness {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	h.stub.orgs["other"] = proto.Org{Name: "other", Plan: proto.UnlimitedPlan}
	for _, secret := range []string{"KEYS", "KEYS?org=other", "PLAIN"} {
		h.do("PUT", "/v1/admin/secrets/"+secret, `{"value":"canary"}`).want(200, "")
	}
	h.do("POST", connections, bucket).want(201, "")
	return h
}

// orgAdmin returns the same client with the key of an administrator of an organisation.
func (h *harness) orgAdmin(org string) *harness {
	return h.as(h.stub.addKey(org, "enterprise", proto.Key{Scopes: proto.Scopes()}))
}

// newKey returns the id of a new key with mounts, and the same client with it.
func (h *harness) newKey(org, mounts string) (string, *harness) {
	h.t.Helper()
	made := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"`+org+`","mounts":`+mounts+`}`).want(201, "").json()
	return made["id"].(string), h.as(made["key"].(string))
}

func TestConnectionFields(t *testing.T) {
	h := newConnectionHarness(t)
	h.do("DELETE", connections+"/data", "").want(200, "")
	long := strings.Repeat("a", 300)
	for name, test := range map[string]struct {
		body, word string // no word: it is accepted
	}{
		"as it is": {bucket, ""}, "Amazon's": {replaced(`"endpoint":"https://s3.example.com",`, ""), ""},
		"no slug": {replaced(`"slug":"data",`, ""), "slug"}, "capital": {replaced(`"data"`, `"Data"`), "slug"},
		"dots":  {replaced(`"data"`, `".."`), "slug"},
		"slash": {replaced(`"data"`, `"a/b"`), "slug"}, "dot": {replaced(`"data"`, `"a.b"`), "slug"},
		"long slug": {replaced(`"data"`, `"`+long+`"`), "slug"},
		"kind":      {replaced(`"s3"`, `"nfs"`), "kind"}, "no kind": {replaced(`"kind":"s3",`, ""), "kind"},
		"user":             {replaced("https://s3", "https://u:p@s3"), "endpoint"},
		"path":             {replaced("example.com", "example.com/x"), "endpoint"},
		"query":            {replaced("example.com", "example.com?x"), "endpoint"},
		"scheme":           {replaced("https://", "file://"), "endpoint"},
		"plain":            {replaced("https://", "http://"), "endpoint"},
		"address":          {replaced("s3.example", "private.example"), "endpoint"},
		"no region":        {replaced(`"region":"us-east-1",`, ""), "region"},
		"host as region":   {replaced("us-east-1", "x.evil.com/"), "region"},
		"no bucket":        {replaced(`"bucket":"acme-data",`, ""), "bucket"},
		"path in bucket":   {replaced("acme-data", "a/../b"), "bucket"},
		"host in bucket":   {replaced("acme-data", "evil.com#"), "bucket"},
		"short bucket":     {replaced("acme-data", "ab"), "bucket"},
		"no credential":    {replaced(`"credential":"KEYS",`, ""), "credential"},
		"missing secret":   {replaced("KEYS", "KEYS2"), "credential"},
		"no credentials":   {replaced("KEYS", "PLAIN"), "credential"},
		"path of a secret": {replaced("KEYS", "../KEYS"), "credential"},
		"prefix of dots":   {replaced("base", "a/../b"), "prefix"}, "absolute prefix": {replaced("base", "/base"), "prefix"},
		"slash at the end": {replaced("base", "base/"), "prefix"}, "empty component": {replaced("base", "a//b"), "prefix"},
		"control": {replaced("base", `a\u0001b`), "prefix"}, "NUL": {replaced("base", `a\u0000b`), "prefix"},
		"long prefix":     {replaced("base", "a/"+long), "prefix"},
		"directory of s3": {with(`,"directory":"/srv"`), "directory"}, "unknown": {with(`,"secret":"x"`), "secret"},
		"description":             {with(`,"description":"` + long + `"`), "description"},
		"directory":               {`{"slug":"d","kind":"directory","directory":"/srv/data"}`, ""},
		"root":                    {`{"slug":"d","kind":"directory","directory":"/"}`, "directory"},
		"relative":                {`{"slug":"d","kind":"directory","directory":"srv"}`, "directory"},
		"unclean":                 {`{"slug":"d","kind":"directory","directory":"/srv/../etc"}`, "directory"},
		"no directory":            {`{"slug":"d","kind":"directory"}`, "directory"},
		"directory with a bucket": {`{"slug":"d","kind":"directory","directory":"/srv","bucket":"abc"}`, "kind"},
		"volume":                  {`{"slug":"v","kind":"volume","bytes":"1GiB","prefix":"a"}`, ""},
		"number of bytes":         {`{"slug":"v","kind":"volume","bytes":1048576}`, ""},
		"no quota":                {`{"slug":"v","kind":"volume"}`, "bytes"},
		"small":                   {`{"slug":"v","kind":"volume","bytes":"1023KiB"}`, "bytes"},
		"large":                   {`{"slug":"v","kind":"volume","bytes":"1001GiB"}`, "bytes"},
		"quota of a bucket":       {with(`,"bytes":"1GiB"`), "bytes"},
		"quota of a directory":    {`{"slug":"d","kind":"directory","directory":"/srv/data","bytes":"1GiB"}`, "bytes"},
		"volume with a bucket":    {`{"slug":"v","kind":"volume","bytes":"1GiB","bucket":"abc"}`, "kind"},
		"volume with a directory": {`{"slug":"v","kind":"volume","bytes":"1GiB","directory":"/srv"}`, "directory"},
	} {
		t.Run(name, func(t *testing.T) {
			h := h.in(t)
			a := h.do("POST", connections+"?test=false", test.body)
			if test.word != "" {
				a.want(400, "validation_error", test.word)
				return
			}
			a.want(201, "")
			h.do("DELETE", connections+"/"+a.json()["slug"].(string), "").want(200, "")
		})
	}
	h.do("POST", connections+"?test=maybe", bucket).want(400, "validation_error", "test")
}

func TestConnectionLife(t *testing.T) {
	h := newConnectionHarness(t)
	h.do("POST", connections, bucket).want(409, "conflict")
	got := h.do("GET", connections+"/data", "").want(200, "")
	if c := got.json(); c["tested_at"] == nil || c["bucket"] != "acme-data" || c["prefix"] != "base" ||
		c["org"] != "acme" {
		t.Errorf("%s", got.body)
	}
	if m := h.storage().tested; len(m) == 0 || m[0].Prefix != "base" || m[0].ReadOnly || m[0].S3.Bucket != "acme-data" {
		t.Errorf("tested %+v", m)
	}
	// A description is no part of what was tested.
	got = h.do("PUT", connections+"/data?test=false", with(`,"description":"d"`)).want(200, "")
	if c := got.json(); c["tested_at"] == nil || c["description"] != "d" {
		t.Errorf("%s", got.body)
	}
	tag := got.header.Get("ETag")
	changed := h.do("PUT", connections+"/data?test=false", with(`,"read_only":true`), "If-Match", tag).want(200, "")
	if c := changed.json(); c["tested_at"] != nil || c["read_only"] != true {
		t.Errorf("%s", changed.body)
	}
	h.do("PUT", connections+"/data", bucket, "If-Match", tag).want(412, "precondition_failed")
	h.do("DELETE", connections+"/data", "", "If-Match", tag).want(412, "precondition_failed")
	h.do("PUT", connections+"/data", replaced(`"data"`, `"other"`)).want(400, "validation_error", "slug")
	h.do("PUT", connections+"/none", replaced(`"data"`, `"none"`)).want(404, "not_found")
	h.do("GET", connections+"/..%2fdata", "").want(404, "not_found")
	if c := h.do("POST", connections+"/data/test", "").want(200, "").json(); c["tested_at"] == nil {
		t.Errorf("%v", c)
	}
	id, _ := h.newKey("acme", `[{"connection":"data"}]`)
	h.do("DELETE", connections+"/data", "").want(409, "conflict", id)
	h.do("DELETE", "/v1/admin/keys/"+id, "").want(200, "")
	h.do("DELETE", connections+"/data", "").want(200, "")
	h.do("GET", connections+"/data", "").want(404, "not_found")
	wanted := map[string][2]bool{ // whether the record has the connection before and after
		"connection.create": {false, true}, "connection.replace": {true, true}, "connection.remove": {true, false},
		"connection.test": {true, true},
	}
	for _, r := range h.audit.all() {
		want, ok := wanted[r.Action]
		if !ok || r.Stage != api.AuditOutcome || r.Error != nil {
			continue
		}
		delete(wanted, r.Action)
		if r.Object.Kind != "connection" || r.Object.Name != "data" || *r.Object.Org != "acme" ||
			(r.Before != nil) != want[0] || (r.After != nil) != want[1] {
			t.Errorf("%s: %+v, before %s, after %s", r.Action, r.Object, r.Before, r.After)
		}
	}
	if len(wanted) > 0 {
		t.Errorf("not recorded: %v", wanted)
	}
}

func TestConnectionThatFailsItsTest(t *testing.T) {
	h := newConnectionHarness(t)
	h.storage().failure = &proto.StorageTestError{Step: "write an object", Why: `status 403 "AccessDenied"`}
	h.do("POST", connections, replaced(`"data"`, `"new"`)).want(409, "conflict", "write an object", "AccessDenied")
	h.do("GET", connections+"/new", "").want(404, "not_found")
	h.do("PUT", connections+"/data", bucket).want(409, "conflict", "write an object")
	h.do("POST", connections+"/data/test", "").want(409, "conflict", "write an object")
	if c := h.do("POST", connections+"?test=false", replaced(`"data"`, `"new"`)).want(
		201, "").json(); c["tested_at"] != nil {
		t.Errorf("%v", c)
	}
	h.do("POST", connections, `{"slug":"d","kind":"directory","directory":"/srv/data"}`).want(201, "")
	h.do("POST", connections+"/d/test", "").want(409, "conflict", "workers")
}

func TestConnectionsOfOtherOrganisations(t *testing.T) {
	h := newConnectionHarness(t)
	other := h.orgAdmin("other")
	for _, path := range []string{"/data", "/data?org=acme"} {
		other.do("GET", connections+path, "").want(404, "not_found")
		other.do("PUT", connections+path, bucket).want(404, "not_found")
		other.do("DELETE", connections+path, "").want(404, "not_found")
		other.do("POST", connections+strings.Replace(path, "/data", "/data/test", 1), "").want(404, "not_found")
	}
	other.do("POST", connections+"?org=acme", bucket).want(404, "not_found")
	other.do("POST", connections, with(`,"org":"acme"`)).want(404, "not_found")
	other.do("GET", connections+"?org=acme", "").want(404, "not_found")
	if list := other.do("GET", connections, "").want(200, "").json()["connections"].([]any); len(list) != 0 {
		t.Errorf("%v", list)
	}
	other.do("POST", "/v1/admin/keys", `{"name":"n","org":"other","mounts":[{"connection":"data"}]}`).want(
		400, "validation_error", "mounts", "other")
	// It has a connection of the same slug, which a key of acme does not see.
	other.do("POST", connections, replaced("acme-data", "other-data")).want(201, "")
	_, user := h.newKey("acme", `[{"connection":"data"}]`)
	if job := h.jobOf(user.execute(hello).want(200, "")); job.Mounts[0].S3.Bucket != "acme-data" {
		t.Errorf("%+v", job.Mounts)
	}
	if list := h.do("GET", connections, "").want(200, "").json()["connections"].([]any); len(list) != 2 {
		t.Errorf("a global administrator sees %v", list)
	}
	h.do("POST", connections+"?org=none", bucket).want(404, "not_found")
}

func TestDirectoriesAreForGlobalAdministrators(t *testing.T) {
	h := newConnectionHarness(t)
	const dir = `{"slug":"dir","kind":"directory","directory":"/srv/data"}`
	h.do("POST", connections, dir).want(201, "")
	admin := h.orgAdmin("acme")
	admin.do("POST", connections, strings.Replace(dir, `"dir"`, `"mine"`, 1)).want(403, "forbidden", "global")
	admin.do("PUT", connections+"/data", strings.Replace(dir, `"dir"`, `"data"`, 1)).want(403, "forbidden", "global")
	admin.do("PUT", connections+"/dir", replaced(`"data"`, `"dir"`)).want(403, "forbidden", "global")
	admin.do("DELETE", connections+"/dir", "").want(403, "forbidden", "global")
	admin.do("GET", connections+"/dir", "").want(200, "")
	admin.do("PUT", connections+"/data", bucket).want(200, "")
	_, user := h.newKey("acme", `[{"connection":"dir","prefix":"a"}]`)
	if m := h.jobOf(user.execute(hello).want(200, "")).Mounts; len(m) != 1 || m[0].Directory != "/srv/data" ||
		m[0].Prefix != "a" || m[0].At != "a" || m[0].S3 != nil {
		t.Errorf("%+v", m)
	}
}

func TestVolumeConnections(t *testing.T) {
	h := newConnectionHarness(t)
	const volume = `{"slug":"work","kind":"volume","bytes":"2MiB"}`
	admin := h.orgAdmin("acme")
	admin.do("POST", connections, volume).want(201, "")
	if c := admin.do("PUT", connections+"/work", strings.Replace(volume, "2MiB", "3MiB", 1)).want(
		200, "").json(); c["bytes"] != "3MiB" || c["kind"] != "volume" {
		t.Errorf("%v", c)
	}
	admin.do("PUT", connections+"/work", replaced(`"data"`, `"work"`)).want(400, "validation_error", "kind", "volume")
	admin.do("PUT", connections+"/data", strings.Replace(volume, "work", "data", 1)).want(400, "validation_error",
		"kind", "s3")
	admin.do("POST", connections+"/work/test", "").want(409, "conflict", "volume")
	_, user := h.newKey("acme", `[{"connection":"work","prefix":"a"}]`)
	if m := h.jobOf(user.execute(hello).want(200, "")).Mounts; len(m) != 1 || m[0].Kind != proto.MountVolume ||
		m[0].Bytes != 3<<20 || m[0].Prefix != "a" || m[0].At != "a" {
		t.Errorf("%+v", m)
	}
}

func TestKeyMounts(t *testing.T) {
	h := newConnectionHarness(t)
	eleven := strings.TrimSuffix(strings.Repeat(`{"connection":"data"},`, 11), ",")
	for mounts, word := range map[string]string{
		`[{"connection":"none"}]`: "none", `[{"connection":"data"},{"connection":"data","prefix":"a"}]`: "only once",
		`[` + eleven + `]`: "10 entries",
		`[{"prefix":"a"}]`: "connection", `[{"connection":"data","prefix":"../a"}]`: "prefix",
		`[{"connection":"data","prefix":"/a"}]`: "prefix",
		`[{"connection":"data","prefix":"a/"}]`: "prefix", `[{"connection":"../data"}]`: "connection", `["data"]`: "objects",
		`"data"`:                               "objects",
		`[{"connection":"data","write":true}]`: "write", `[{"connection":"data","read_only":1}]`: "read_only",
		`[null]`: "objects",
	} {
		h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","mounts":`+mounts+`}`).want(400, "validation_error", word)
	}
	id, user := h.newKey("acme", `[{"connection":"data","prefix":"tenants/acme","read_only":true}]`)
	job := h.jobOf(user.execute(hello).want(200, ""))
	s3 := proto.S3Mount{
		Endpoint: "https://s3.example.com", Region: "us-east-1", Bucket: "acme-data", PathStyle: true,
		Credential: "KEYS",
	}
	if len(job.Mounts) != 1 || *job.Mounts[0].S3 != s3 {
		t.Fatalf("%+v", job.Mounts)
	}
	if m := job.Mounts[0]; m.Slug != "data" || m.Kind != proto.MountS3 || !m.ReadOnly || m.Prefix != "base/tenants/acme" ||
		m.At != "tenants/acme" {
		t.Errorf("%+v", m)
	}
	if !job.HasMounts || !job.HasSecrets || len(job.Bound) != 0 ||
		string(job.Sealed) != "sealed for "+string(job.TraceID) || len(job.Env) != 0 {
		t.Errorf("%+v", job)
	}
	rotated := h.do("POST", "/v1/admin/keys/"+id+"/rotate", "").want(200, "").json()
	if m := rotated["mounts"].([]any); len(m) != 1 {
		t.Errorf("%v", rotated)
	}
	h.do("PUT", "/v1/admin/keys/"+id, `{"name":"n","mounts":[{"connection":"none"}]}`).want(
		400, "validation_error", "none")
	h.do("PUT", "/v1/admin/keys/"+id, `{"name":"n","mounts":[]}`).want(200, "")
	if job := h.jobOf(user.execute(hello).want(200, "")); job.HasMounts || job.Mounts != nil || job.Sealed != nil {
		t.Errorf("%+v", job)
	}
}

// A connection, a key and a request narrow what a program sees, and none widens it.
func TestNarrowing(t *testing.T) {
	h := newConnectionHarness(t)
	h.do("PUT", connections+"/data", replaced(`,"prefix":"base"`, "")).want(200, "")
	h.do("POST", connections, strings.NewReplacer(`"data"`, `"based"`, `"prefix":"base"`, `"prefix":"x/base"`).Replace(
		bucket)).want(201, "")
	for _, test := range []struct {
		slug, key, sub string
		prefix, at     string // of the mount; 403 if at is "-"
	}{
		{"data", "", "", "", ""},
		{"data", "", "a", "a", "a"},
		{"data", "", "a/b/", "a/b", "a/b"},
		{"based", "", "", "x/base", ""},
		{"based", "", "a", "x/base/a", "a"},
		{"based", "tenants/acme", "", "x/base/tenants/acme", "tenants/acme"},
		{"based", "tenants/acme", "tenants/acme", "x/base/tenants/acme", "tenants/acme"},
		{"based", "tenants/acme", "tenants/acme/", "x/base/tenants/acme", "tenants/acme"},
		{"based", "tenants/acme", "tenants/acme/jobs/7", "x/base/tenants/acme/jobs/7", "tenants/acme/jobs/7"},
		{"based", "tenants/acme", "tenants/acme-corp", "", "-"},
		{"based", "tenants/acme", "tenants/acme-corp/x", "", "-"},
		{"based", "tenants/acme", "tenants/acmecorp", "", "-"},
		{"based", "tenants/acme", "tenants", "", "-"},
		{"based", "tenants/acme", "tenants/other", "", "-"},
		{"based", "tenants/acme", "jobs/7", "", "-"},
		{"based", "tenants/acme", "acme", "", "-"},
		{"based", "tenants/acme", "x/base/tenants/acme", "", "-"},
		{"based", "tenants/acme", "Tenants/acme", "", "-"},
		{"based", "tenants/acme", "tenants/acme\u200b", "", "-"},
	} {
		_, user := h.newKey("acme", `[{"connection":"`+test.slug+`","prefix":"`+test.key+`"}]`)
		req := hello
		if test.sub != "" {
			req = body("sub_paths", []string{"/data/" + test.slug + "/" + test.sub})
		}
		if test.at == "-" {
			user.execute(req).want(403, "forbidden",
				"sub_paths must be in the parts of storage connections that the API key has")
			continue
		}
		m := h.jobOf(user.execute(req).want(200, "")).Mounts
		if len(m) != 1 || m[0].Prefix != test.prefix || m[0].At != test.at || proto.CheckMounts(m) != nil {
			t.Errorf("%+v: %+v", test, m)
		}
	}
	for _, sub := range []string{
		"tenants/acme/../other", "tenants//acme", "tenants/acme/.", "./tenants/acme",
		"tenants/acme/%2e%2e/x", `tenants\acme`,
	} {
		_, user := h.newKey("acme", `[{"connection":"data"}]`)
		user.execute(body("sub_paths", []string{"/data/data/" + sub})).want(400, "validation_error", "sub_paths")
	}
	// Connections without a sub path stay; those that the key does not have, and such that do not
	// exist, are refused alike.
	_, user := h.newKey("acme", `[{"connection":"data","prefix":"p"},{"connection":"based","read_only":true}]`)
	h.storage().prefixes = map[string]bool{"x/base/q": true}
	m := h.jobOf(user.execute(body("sub_paths", []string{"/data/based/q"})).want(200, "")).Mounts
	if len(m) != 2 || m[0].Prefix != "p" || m[0].ReadOnly || m[1].Prefix != "x/base/q" || !m[1].ReadOnly {
		t.Errorf("%+v", m)
	}
	_, user = h.newKey("acme", `[{"connection":"data","prefix":"p"}]`)
	texts := map[string]bool{}
	for _, slug := range []string{"based", "nowhere", "data"} {
		a := user.execute(body("sub_paths", []string{"/data/" + slug + "/q"})).want(403, "forbidden")
		texts[strings.Replace(a.json()["message"].(string), "/data/"+slug, "/data/SLUG", 1)] = true
	}
	if len(texts) != 1 {
		t.Errorf("the answers tell what exists: %v", texts)
	}
	long := strings.Repeat("€/", 250) + "x"
	deep := strings.Repeat("d/", 127) + "d"
	h.do("PUT", connections+"/data", replaced("base", deep)).want(200, "")
	_, user = h.newKey("acme", `[{"connection":"data"}]`)
	user.execute(body("sub_paths", []string{"/data/data/" + long})).want(400, "validation_error", "shorter")
}

// A path that the program may only read must exist, if a gateway can tell.
func TestSubPathsThatDoNotExist(t *testing.T) {
	h := newConnectionHarness(t)
	h.storage().prefixes = map[string]bool{"base/there": true}
	_, user := h.newKey("acme", `[{"connection":"data","read_only":true}]`)
	sub := func(path string) string { return body("sub_paths", []string{"/data/data/" + path}) }
	user.execute(sub("there")).want(200, "")
	user.execute(sub("missing")).want(400, "validation_error", "sub_paths", "/data/data/missing")
	user.execute(hello).want(200, "")
	h.storage().failure = errors.New("list an object: no response")
	user.execute(sub("there")).want(503, "service_unavailable", "data")
	h.storage().failure = fmt.Errorf("list an object: %w", fs.ErrPermission)
	user.execute(sub("there")).want(409, "conflict", "data", "credentials")
	h.storage().failure = &proto.StorageTestError{Step: "connect to the server", Why: "it is not public"}
	user.execute(sub("there")).want(409, "conflict", "not public")
	_, writer := h.newKey("acme", `[{"connection":"data"}]`)
	looked := len(h.storage().looked)
	writer.execute(sub("missing")).want(200, "")
	h.storage().failure = nil
	h.do("PUT", connections+"/data?test=false", strings.Replace(bucket, "base", "other", 1)).want(200, "")
	user.execute(sub("missing")).want(200, "") // no gateway has reached the bucket
	if len(h.storage().looked) != looked {
		t.Error("the bucket was asked in vain")
	}
}

// Executions are refused while what their key names is missing.
func TestMissingConnectionOrSecret(t *testing.T) {
	h := newConnectionHarness(t)
	id, user := h.newKey("acme", `[{"connection":"data"}]`)
	h.do("DELETE", "/v1/admin/secrets/KEYS", "").want(204, "")
	user.execute(hello).want(409, "conflict", "KEYS", "does not exist")
	h.do("PUT", "/v1/admin/secrets/KEYS", `{"value":"canary"}`).want(200, "")
	user.execute(hello).want(200, "")
	h.server.Connections.(*connectionStore).all = nil
	user.execute(hello).want(409, "conflict", "data", "does not exist")
	schedule := &proto.Schedule{ID: "s", Org: "acme", Key: id, Request: []byte(hello)}
	if _, refused, err := h.admission.StartScheduled(t.Context(), schedule, time.Now()); err != nil ||
		!strings.Contains(refused, `"data"`) {
		t.Errorf("the history of a schedule has %q, %v", refused, err)
	}
}

// A connection that is being removed ends work that starts later: it is never there again.
func TestRemovingConnectionIsFinal(t *testing.T) {
	h := newConnectionHarness(t)
	key, user := h.newKey("acme", `[{"connection":"data"}]`)
	store := h.server.Connections.(*connectionStore)
	store.all[store.at("acme", "data")].Removing = true
	user.execute(hello).want(409, "conflict", "is being removed")
	step := proto.PipelineStep{Name: "s", Code: "1", Language: proto.Python, Timeout: 1, Cells: []proto.MatrixCell{{}}}
	run := &proto.Pipeline{ID: "p", Org: "acme", Key: key, Steps: []proto.PipelineStep{step}}
	_, refused, err := h.admission.StartStep(t.Context(), run, 0, 0, "")
	if err != nil || !strings.Contains(refused, "is being removed") {
		t.Errorf("a step: %q, %v", refused, err)
	}
	schedule := &proto.Schedule{ID: "s", Org: "acme", Key: key, Request: []byte(hello)}
	if _, refused, err = h.admission.StartScheduled(t.Context(), schedule, time.Now()); err != nil ||
		!strings.Contains(refused, "is being removed") {
		t.Errorf("a tick: %q, %v", refused, err)
	}
}

// Work that starts later has the mounts that its key has then.
func TestMountsOfEachWayToStart(t *testing.T) {
	h := newConnectionHarness(t)
	key, user := h.newKey("acme", `[{"connection":"data","prefix":"p"}]`)
	hasMount := func(what string, job *proto.Job) {
		t.Helper()
		if len(job.Mounts) != 1 || job.Mounts[0].Prefix != "base/p" || !job.HasMounts ||
			string(job.Sealed) != "sealed for "+string(job.TraceID) {
			t.Errorf("%s: %+v", what, job)
		}
	}
	hasMount("inline", h.jobOf(user.execute(hello).want(200, "")))
	hasMount("async", h.jobOf(user.execute(hello, "Prefer", "respond-async").want(202, "")))
	hasMount("streaming", h.jobOf(user.execute(hello, "Accept", "application/x-ndjson").want(200, "")))
	result, _ := callTool(t, h.modelClient(user.key, "", nil), "sandbox_execute", map[string]any{"code": "1"})
	ran := proto.TraceID(result["trace_id"].(string))
	hasMount("a tool", h.stub.runs[ran].job)
	started := func(id proto.TraceID, refused string, err error) *proto.Job {
		t.Helper()
		if err != nil || refused != "" {
			t.Fatal(refused, err)
		}
		return h.stub.runs[id].job
	}
	schedule := &proto.Schedule{ID: "s", Org: "acme", Key: key, Request: []byte(hello)}
	hasMount("schedule", started(h.admission.StartScheduled(t.Context(), schedule, time.Unix(1e9, 0))))
	item, itemID := []byte(`{"code":"1","sub_paths":["/data/data/p/q"]}`), proto.NewTraceID()
	submit, err := h.admission.OpenBatch(&proto.Batch{Org: "acme", Key: key}, nil)
	if err != nil {
		t.Fatal(err)
	}
	refused, err := submit(t.Context(), item, 0, itemID)
	if job := started(itemID, refused, err); job.Mounts[0].Prefix != "base/p/q" {
		t.Errorf("batch: %+v", job)
	}
	step := proto.PipelineStep{Name: "s", Code: "1", Language: proto.Python, Timeout: 1, Cells: []proto.MatrixCell{{}}}
	run := &proto.Pipeline{ID: "p", Org: "acme", Key: key, Steps: []proto.PipelineStep{step}}
	hasMount("pipeline", started(h.admission.StartStep(t.Context(), run, 0, 0, "")))

	// A dead letter has no more than its key has now.
	dead := lostJob("acme", key)
	dead.Mounts = []proto.Mount{{Slug: "data", Kind: proto.MountS3, Prefix: "base", At: ""}}
	for _, test := range []struct{ at, mounts, prefix string }{
		{"", `[{"connection":"data","prefix":"p"}]`, "base/p"},
		{"p", `[{"connection":"data"}]`, "base/p"},
		{"p/q", `[{"connection":"data","prefix":"p"}]`, "base/p/q"},
		{"p", `[{"connection":"data","prefix":"p/q"}]`, "base/p/q"},
		{"p", `[{"connection":"data","prefix":"pq"}]`, ""},
		{"p", `[]`, ""},
	} {
		h.do("PUT", "/v1/admin/keys/"+key, `{"name":"n","mounts":`+test.mounts+`}`).want(200, "")
		dead.TraceID, dead.Mounts[0].At = proto.NewTraceID(), test.at
		a := h.do("POST", "/v1/admin/dead-letters/"+h.letters.add(dead)+"/requeue", "")
		if test.prefix == "" {
			a.want(http.StatusConflict, "conflict", "data")
			continue
		}
		if m := h.jobOf(a.want(202, "")).Mounts; len(m) != 1 || m[0].Prefix != test.prefix || m[0].S3.Credential != "KEYS" {
			t.Errorf("%+v: %+v", test, m)
		}
	}
}

// No answer and no record has the credentials.
func TestCredentialsStayInside(t *testing.T) {
	h := newConnectionHarness(t)
	_, user := h.newKey("acme", `[{"connection":"data"}]`)
	a := user.execute(hello).want(200, "")
	for _, text := range []string{
		string(a.body), h.log.String(), fmt.Sprintf("%+v", h.audit.records),
		string(h.do("GET", connections, "").body),
	} {
		if strings.Contains(text, "canary-key") {
			t.Errorf("the credentials are in %s", cmp.Or(text, "nothing"))
		}
	}
}
