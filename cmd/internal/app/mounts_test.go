package app

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
	"github.com/bullpen-run/bullpen/webhook/guard"
)

// bucketsFor returns buckets that may be at the port of an endpoint, in some ranges.
func bucketsFor(t *testing.T, endpoint string, cidrs ...string) buckets {
	t.Helper()
	u, err := url.Parse(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		t.Fatal(err)
	}
	cfg := &Config{MountAllowHTTP: true, MountAllowPorts: []guard.PortRange{{First: port, Last: port}}}
	for _, cidr := range cidrs {
		cfg.MountAllowCIDRs = append(cfg.MountAllowCIDRs, netip.MustParsePrefix(cidr))
	}
	b, err := openBuckets(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func bucketMount(endpoint, prefix string) proto.Mount {
	return proto.Mount{Slug: "data", Kind: proto.MountS3, Prefix: prefix, S3: &proto.S3Mount{
		Endpoint: endpoint, Region: storagetest.Region, Bucket: storagetest.Bucket, PathStyle: true, Credential: "KEYS",
	}}
}

func bucketKeys() proto.S3Credentials {
	id, secret := storagetest.Credentials()
	return proto.S3Credentials{AccessKeyID: id, SecretAccessKey: secret}
}

func TestBucketsAreTestedStepByStep(t *testing.T) {
	server := s3Server(t)
	proxy := server.Proxy(&storagetest.Injector{})
	t.Cleanup(proxy.Close)
	b, m := bucketsFor(t, proxy.Endpoint, "127.0.0.0/8"), bucketMount(proxy.Endpoint, "team")
	if err := b.Test(t.Context(), m, bucketKeys()); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(server.Path("team")); err == nil && len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
	for op, step := range map[string]string{
		"list": "list the objects", "put": "write an object", "get": "read the object",
		"delete": "delete the object",
	} {
		proxy.Set(storagetest.Broken, -1, op, 0)
		var failed *proto.StorageTestError
		if err := b.Test(t.Context(), m, bucketKeys()); !errors.As(err, &failed) || !strings.Contains(failed.Step, step) ||
			!strings.Contains(failed.Why, "500") {
			t.Errorf("%s: %v", op, err)
		}
		readOnly := m
		readOnly.ReadOnly = true
		if err := b.Test(t.Context(), readOnly, bucketKeys()); (err != nil) != (op == "list") {
			t.Errorf("%s, read-only: %v", op, err)
		}
		proxy.Clear()
	}
	wrong := bucketKeys()
	wrong.SecretAccessKey = "another-canary"
	if err := b.Test(t.Context(), m, wrong); err == nil || !strings.Contains(err.Error(), "SignatureDoesNotMatch") ||
		strings.Contains(err.Error(), "canary") {
		t.Errorf("wrong credentials: %v", err)
	}
	if err := os.MkdirAll(server.Path("team/dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(server.Path("team/dir/file"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for prefix, want := range map[string]bool{
		"": true, "team": true, "team/dir": true, "team/di": false, "team/dir/file": false, "none": false,
	} {
		has, err := b.HasObjects(t.Context(), bucketMount(proxy.Endpoint, prefix), bucketKeys())
		if has != want || err != nil {
			t.Errorf("%q has objects: %v, %v", prefix, has, err)
		}
	}
}

// A bucket does not lead to the networks of this machine.
func TestBucketsAreGuarded(t *testing.T) {
	var requests atomic.Int32
	inside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		requests.Add(1)
		w.WriteHeader(http.StatusOK)
	}))
	t.Cleanup(inside.Close)
	local := strings.Replace(inside.URL, "127.0.0.1", "localhost", 1)
	b := bucketsFor(t, inside.URL)
	for _, endpoint := range []string{
		inside.URL, strings.Replace(inside.URL, "127.0.0.1", "2130706433", 1),
		strings.Replace(inside.URL, "127.0.0.1", "[::ffff:127.0.0.1]", 1),
	} {
		if _, err := openBucket(b.guard, b.guard.Dial, requestConns, bucketMount(endpoint, ""), bucketKeys()); err == nil {
			t.Errorf("%s was opened", endpoint)
		}
	}
	if err := b.CheckEndpoint(t.Context(), "endpoint", local); err == nil ||
		!strings.Contains(err.Error(), "storage connections") {
		t.Errorf("%v", err)
	}
	var failed *proto.StorageTestError
	if err := b.Test(t.Context(), bucketMount(local, ""), bucketKeys()); !errors.As(err, &failed) ||
		!strings.Contains(failed.Why, "not public") {
		t.Errorf("%v", err)
	}
	files, err := b.Bucket(bucketMount(local, ""), bucketKeys())
	if err != nil {
		t.Fatal(err)
	}
	_, err = files.Open(t.Context(), "x")
	for what, err := range map[string]error{
		"list": files.List(t.Context(), "", true, nil), "open": err, "put": files.CheckPut(t.Context(), "x", 1),
	} {
		if !errors.As(err, &failed) || !strings.Contains(failed.Why, "not public") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := files.Close(); err != nil {
		t.Error(err)
	}
	if _, err := b.Bucket(bucketMount(inside.URL, ""), bucketKeys()); err == nil {
		t.Error("the address was accepted")
	}
	// As the process that serves mounts opens it.
	bucket, err := openBucket(b.guard, b.guard.Dial, requestConns, bucketMount(local, ""), bucketKeys())
	if err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := bucket.List(t.Context(), "", "", 1); err == nil {
		t.Error("a private address was reached")
	}
	redirecting := httptest.NewServer(http.RedirectHandler(inside.URL, http.StatusTemporaryRedirect))
	t.Cleanup(redirecting.Close)
	if err := bucketsFor(t, redirecting.URL, "127.0.0.0/8").Test(t.Context(), bucketMount(redirecting.URL, ""),
		bucketKeys()); err == nil {
		t.Error("a redirection was followed")
	}
	if n := requests.Load(); n > 0 {
		t.Errorf("the server got %d requests", n)
	}
	strict, err := openBuckets(new(Config))
	if err != nil {
		t.Fatal(err)
	}
	for _, endpoint := range []string{
		"http://s3.example.com", "https://s3.example.com:9000", "https://10.0.0.1",
		"https://s3.example.com:22",
	} {
		if err := strict.CheckEndpoint(t.Context(), "endpoint", endpoint); err == nil {
			t.Errorf("%s is allowed", endpoint)
		}
	}
}

// A server that never ends its list takes neither memory nor time.
func TestBucketsReadLittle(t *testing.T) {
	endless := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, `<?xml version="1.0"?><ListBucketResult>`)
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, "<Contents><Key>k</Key></Contents>"); err != nil {
				return
			}
		}
	}))
	t.Cleanup(endless.Close)
	if err := bucketsFor(t, endless.URL, "127.0.0.0/8").Test(t.Context(), bucketMount(endless.URL, ""),
		bucketKeys()); err == nil {
		t.Error("the list was read")
	}
}
