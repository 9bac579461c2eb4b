package e2e

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// mirrorName is a name of the private network, where a package mirror listens at mirrorPort.
const (
	mirrorName = "mirror.corp.internal"
	mirrorPort = "3141"
)

// testMirror installs packages with pip and npm from a mirror in the private network, in executions and
// in live sandboxes whose profile lists the mirror and nothing else.
func testMirror(t *testing.T, p *programs) {
	with := *p
	with.machine = newMachine(t)
	startMirror(t, with.machine)
	sys := newSystem(t, &with, topology{}, 2, "--sandboxes", "2")
	b := sys.sandboxed("inside", insideProfile("bandwidth", "4MiB", "connection_rate", 50))
	rec := b.ended(b.submit(bash(installPackages)))
	rec.succeeded(t, installedPackages)
	if n := rec.Network; n == nil || n.BytesIn < 1000 || n.BytesOut < 200 || len(n.Blocked) != 0 {
		t.Errorf("network of the execution: %+v", n)
	}

	// The profile opens nothing else: no other port of the mirror, no other address and no other name.
	rec = b.ended(b.submit(python(reachCode + fmt.Sprintf(
		"connect(('%s', 80), ('%s', 8080), ('10.77.0.2', 80), ('%s', 80), ('%s', 80), ('www.example.com', 80), "+
			"('%s', %s))", mirrorName, privateAddr, metadataAddr, webAddr, machineAddr, mirrorPort)).withOverrides()))
	rec.succeeded(t, fmt.Sprintf("%s 80 ECONNREFUSED\n%s 8080 ECONNREFUSED\n10.77.0.2 80 ECONNREFUSED\n"+
		"%s 80 ECONNREFUSED\n%s 80 ECONNREFUSED\nwww.example.com unknown\n%s %s ECONNREFUSED\n",
		mirrorName, privateAddr, metadataAddr, webAddr, machineAddr, mirrorPort))

	live := b.newSandbox(request{})
	live.check(installPackages, installedPackages)
	if out, exit, err := live.run("user", "exec 3<>/dev/tcp/"+privateAddr+"/80"); exit == 0 || err != nil {
		t.Errorf("another port of the mirror from a live sandbox: %q, %d, %v", out, exit, err)
	}
	live.change(http.MethodDelete, "")
	eventually(t, "the usage of the execution and the live sandbox", func() (bool, any) {
		var usage struct{ Rows []proto.Traffic }
		r := b.do(http.MethodGet, "/v1/usage?group_by=", nil)
		r.into(t, &usage)
		// The live sandbox has received as much as the execution.
		return len(usage.Rows) == 1 && usage.Rows[0].BytesIn >= 2000 && usage.Rows[0].BytesOut >= 400, r
	})
}

// startMirror starts a package mirror in the private network of a machine, which has a repository of git, too.
func startMirror(t *testing.T, m *machine) {
	t.Helper()
	files, err := mirrorFiles()
	if err != nil {
		t.Fatal(err)
	}
	repository := t.TempDir()
	create := exec.CommandContext(t.Context(), "sh", "-c", `set -e
git init -q work
cd work
echo 'hello from the repository' >README.md
git add README.md
git -c user.name=a -c user.email=a@example.com commit -qm first
git clone -q --bare . ../repository.git
git -C ../repository.git update-server-info`)
	create.Dir = repository
	if out, err := create.CombinedOutput(); err != nil {
		t.Fatalf("create a repository: %v\n%s", err, out)
	}
	repositories := http.FileServer(http.Dir(repository))
	err = within(m.internet, func() error {
		ln, err := net.Listen("tcp", privateAddr+":"+mirrorPort)
		if err != nil {
			return err
		}
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			content, ok := files[r.URL.Path]
			if !ok {
				repositories.ServeHTTP(w, r)
				return
			}
			if strings.HasPrefix(r.URL.Path, "/simple/") {
				w.Header().Set("Content-Type", "text/html")
			}
			_, _ = w.Write(content)
		})}
		go func() { _ = server.Serve(ln) }()
		t.Cleanup(func() { _ = server.Close() })
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

const mirrorURL = "http://" + mirrorName + ":" + mirrorPort

// insideProfile is a profile whose programs reach the mirror and nothing else.
func insideProfile(network ...any) request {
	return request{
		"network": request{"policy": "allowlist", "private": []string{mirrorName + ":" + mirrorPort}}.and(network...),
		"env": request{
			"PIP_INDEX_URL": mirrorURL + "/simple", "PIP_TRUSTED_HOST": mirrorName, "NPM_CONFIG_REGISTRY": mirrorURL + "/npm/",
		},
	}
}

// installPackages is a program that installs the mirror's packages, and prints installedPackages.
const (
	installPackages = `set -e
/usr/bin/python3 -m pip install -q --no-cache-dir --disable-pip-version-check --target packages tinything >&2
PYTHONPATH=packages /usr/bin/python3 -c 'import tinything; print(tinything.greeting)'
npm install --silent --no-audit --no-fund --no-update-notifier tiny-thing >&2
node -e 'console.log(require("tiny-thing"))'
`
	installedPackages = "hello from the wheel\nhello from the tarball\n"
)

// mirrorFiles returns the files of a mirror by path: an index of PyPI with a wheel, and a registry of
// npm with a tarball.
func mirrorFiles() (map[string][]byte, error) {
	var wheel bytes.Buffer
	archive := zip.NewWriter(&wheel)
	const info = "tinything-1.0.dist-info/"
	for _, file := range []struct{ name, content string }{
		{"tinything/__init__.py", "greeting = 'hello from the wheel'\n"},
		{info + "METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n"},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{info + "RECORD", "tinything/__init__.py,,\n" + info + "METADATA,,\n" + info + "WHEEL,,\n" + info + "RECORD,,\n"},
	} {
		w, err := archive.Create(file.name)
		if err != nil {
			return nil, err
		}
		if _, err := w.Write([]byte(file.content)); err != nil {
			return nil, err
		}
	}
	if err := archive.Close(); err != nil {
		return nil, err
	}
	var tarball bytes.Buffer
	compressed := gzip.NewWriter(&tarball)
	files := tar.NewWriter(compressed)
	for _, file := range []struct{ name, content string }{
		{"package/package.json", `{"name":"tiny-thing","version":"1.0.0","main":"index.js"}`},
		{"package/index.js", "module.exports = 'hello from the tarball'\n"},
	} {
		if err := files.WriteHeader(&tar.Header{Name: file.name, Mode: 0o644, Size: int64(len(file.content))}); err != nil {
			return nil, err
		}
		if _, err := files.Write([]byte(file.content)); err != nil {
			return nil, err
		}
	}
	if err := files.Close(); err != nil {
		return nil, err
	}
	if err := compressed.Close(); err != nil {
		return nil, err
	}
	digest := sha512.Sum512(tarball.Bytes())
	const wheelPath, tarballPath = "/files/tinything-1.0-py3-none-any.whl", "/npm/tiny-thing/-/tiny-thing-1.0.0.tgz"
	return map[string][]byte{
		"/simple/tinything/": []byte(`<a href="` + wheelPath + `">tinything-1.0-py3-none-any.whl</a>`),
		wheelPath:            wheel.Bytes(),
		"/npm/tiny-thing": fmt.Appendf(nil, `{"name":"tiny-thing","dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":`+
			`{"name":"tiny-thing","version":"1.0.0","dist":{"tarball":"http://%s:%s%s","integrity":"sha512-%s"}}}}`,
			mirrorName, mirrorPort, tarballPath, base64.StdEncoding.EncodeToString(digest[:])),
		tarballPath: tarball.Bytes(),
	}, nil
}
