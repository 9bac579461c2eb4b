package app

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"filippo.io/age"

	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// s3Server starts an S3 server with this process' credentials.
func s3Server(t *testing.T) *storagetest.Server {
	t.Helper()
	for _, v := range storagetest.Env() {
		name, value, _ := strings.Cut(v, "=")
		t.Setenv(name, value)
	}
	s, err := storagetest.Start("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// storeKey creates a key file.
func storeKey(t *testing.T) string {
	t.Helper()
	key, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(name, []byte(key.String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestDoctorChecksS3(t *testing.T) {
	server := s3Server(t)
	endpoint, err := server.Endpoint()
	if err != nil {
		t.Fatal(err)
	}
	good := storagetest.StoreURL(endpoint, "p")
	faults := &storagetest.Injector{}
	proxy := server.Proxy(faults)
	t.Cleanup(proxy.Close)
	nothing := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(nothing.Close)
	gone := httptest.NewServer(nil)
	gone.Close()
	for name, test := range map[string]struct {
		url, key      string
		env           [2]string
		fault         storagetest.Fault
		of            string
		found, remedy string
		ok            bool
	}{
		"good":        {url: good, found: "written, read, listed and removed", ok: true},
		"encrypted":   {url: good, key: storeKey(t), found: ", encrypted", ok: true},
		"no key file": {url: good, key: "/nonexistent/key", found: "/nonexistent/key", remedy: "--store-key"},
		"bucket": {
			url: strings.Replace(good, "//blobs/", "//others/", 1), found: "NoSuchBucket",
			remedy: "make the bucket others",
		},
		"region": {
			url: strings.Replace(good, "us-east-1", "eu-west-1", 1), found: "eu-west-1",
			remedy: "another region",
		},
		"no region": {
			url: strings.Replace(good, "region=us-east-1&", "", 1), found: "add region=",
			remedy: "correct --store",
		},
		"other server": {url: storagetest.StoreURL(nothing.URL, "p"), found: "404", remedy: "endpoint"},
		"no server": {
			url: storagetest.StoreURL(gone.URL, "p"), found: "refused",
			remedy: "start the server at " + gone.URL,
		},
		"TLS": {url: strings.Replace(good, "http:", "https:", 1), found: "http", remedy: "http:// in endpoint"},
		"access key": {
			url: good, env: [2]string{"AWS_ACCESS_KEY_ID", "nobody"}, found: "access key",
			remedy: "AWS_ACCESS_KEY_ID",
		},
		"secret": {
			url: good, env: [2]string{"AWS_SECRET_ACCESS_KEY", "hunter2"}, found: "SignatureDoesNotMatch",
			remedy: "AWS_SECRET_ACCESS_KEY",
		},
		"put fails": {
			url: proxy.StoreURL("q"), fault: storagetest.Broken, of: "put", found: "put blob",
			remedy: "try again",
		},
		"get fails": {
			url: proxy.StoreURL("q"), fault: storagetest.Throttled, of: "get", found: "get blob",
			remedy: "try again",
		},
		"gets other": {
			url: proxy.StoreURL("q"), fault: storagetest.Wrong, of: "get", found: "corrupt",
			remedy: "reading it again",
		},
		"list fails": {
			url: proxy.StoreURL("q"), fault: storagetest.Broken, of: "list", found: "list blob",
			remedy: "try again",
		},
		"delete fails": {
			url: proxy.StoreURL("q"), fault: storagetest.Reset, of: "delete", found: "delete blob",
			remedy: "try again",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if test.env[0] != "" {
				t.Setenv(test.env[0], test.env[1])
			}
			args := []string{"--store", test.url}
			if test.key != "" {
				args = append(args, "--store-key", test.key)
			}
			faults.Set(test.fault, -1, test.of, 0)
			check := checkStore(t.Context(), config(t, args...))
			faults.Clear()
			if check.OK != test.ok || !strings.Contains(check.Found, test.found) ||
				!test.ok && !strings.Contains(check.Remedy, test.remedy) ||
				strings.Contains(check.Found, "\n") || strings.Contains(check.Found+check.Remedy, "hunter2") {
				t.Errorf("%+v", check)
			}
		})
	}
	for _, prefix := range []string{"p", "q"} {
		left, err := filepath.Glob(server.Path(prefix + "/doctor/*"))
		if err != nil || len(left) > 1 || len(left) > 0 && prefix == "p" { // objects that could not be removed remain
			t.Errorf("left over: %v, %v", left, err)
		}
	}
}

func TestDoctorChecksDirectories(t *testing.T) {
	c := config(t)
	if check := checkStore(t.Context(), c); !check.OK || !strings.Contains(check.Found, filepath.Join(c.Data, "blobs")) {
		t.Errorf("%+v", check)
	}
	if left, err := os.ReadDir(filepath.Dir(c.Data)); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
	there := filepath.Join(t.TempDir(), "a", "b")
	for range 2 { // also a store that is in use
		store, err := openStore(t.Context(), config(t, "--store", "file://"+there))
		if err != nil {
			t.Fatal(err)
		}
		if check := checkStore(t.Context(), config(t, "--store", "file://"+there+"/")); !check.OK ||
			!strings.Contains(check.Found, there) {
			t.Errorf("%+v", check)
		}
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(there); err != nil || len(left) != 1 || left[0].Name() != ".writing" {
		t.Errorf("left over: %v, %v", left, err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{file, file + "/below"} {
		if check := checkStore(t.Context(), config(t, "--store", "file://"+bad)); check.OK ||
			!strings.Contains(check.Found, file) || check.Remedy == "" {
			t.Errorf("%s: %+v", bad, check)
		}
	}
}
