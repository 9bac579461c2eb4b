package nsjail

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// makeImage makes a root file system of bash and what it needs, and more files
// by name; one whose content begins with "-> " is a link.
func makeImage(tb testing.TB, more map[string]string) string {
	tb.Helper()
	root := filepath.Join(runDir(tb), "image")
	files := []string{"/usr/bin/bash", "/usr/bin/cat", "/usr/bin/ls"}
	out, err := exec.CommandContext(tb.Context(), "ldd", files...).Output()
	if err != nil {
		tb.Fatal(err)
	}
	for field := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(field, "/") && !strings.HasSuffix(field, ":") {
			files = append(files, field)
		}
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			tb.Fatal(err)
		}
		write(tb, root, f, b, 0o755)
	}
	for name, content := range more {
		if target, link := strings.CutPrefix(content, "-> "); link {
			if err := makeDirs(root, filepath.Dir(name)); err != nil {
				tb.Fatal(err)
			}
			if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
				tb.Fatal(err)
			}
			continue
		}
		write(tb, root, name, []byte(content), 0o644)
	}
	return root
}

func write(tb testing.TB, root, name string, content []byte, mode fs.FileMode) {
	tb.Helper()
	if err := makeDirs(root, filepath.Dir(name)); err != nil {
		tb.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, name), content, mode); err != nil {
		tb.Fatal(err)
	}
}

func TestImage(t *testing.T) {
	m := newMaker(t)
	spec := testSpec()
	spec.Root = makeImage(t, map[string]string{
		"opt/tool/motd": "from the image\n", "etc/motd": "from its /etc\n", "etc/passwd": "root::0:0:::/bin/bash\n",
		"home/other/file": "hidden", "tmp/file": "hidden", "run/file": "hidden",
		"links/up": "-> ../../../../../../etc", "bin": "-> usr/bin",
	})
	p := program(t, "bash", `cat /opt/tool/motd /etc/motd; cat /etc/passwd; ls /home /tmp /run; ls -d /links/up/motd
echo x 2>/dev/null >/opt/tool/new || echo read-only; [ -e /usr/bin/env ] || echo the host is not here`)
	got := runProgram(t, m, spec, p)
	if got.Kind != jail.Exited || got.ExitCode != 0 {
		t.Fatalf("%+v", got)
	}
	for _, want := range []string{
		"from the image\n", "from its /etc\n", "baponi:x:1000:1000:", "/links/up/motd\n", "read-only\n", "the host is not here\n",
	} {
		if !strings.Contains(got.stdout, want) {
			t.Errorf("no %q in %q", want, got.stdout)
		}
	}
	for _, no := range []string{"hidden", "other", "file", "root::0"} {
		if strings.Contains(got.stdout, no) {
			t.Errorf("%q in %q", no, got.stdout)
		}
	}
	missing := runProgram(t, m, spec, program(t, "python", "print(1)"))
	if missing.Kind != jail.StartFailed || missing.Step != "exec python3" {
		t.Errorf("python in an image without it: %+v", missing)
	}
	host := runProgram(t, m, testSpec(), program(t, "bash", "ls /opt/tool"))
	if host.ExitCode == 0 {
		t.Error("an image shows in a jail that does not have it")
	}
}

// The worker copies an image's /etc; nothing in it may lead the copy out.
func TestImageLinksAreNotFollowed(t *testing.T) {
	m := newMaker(t)
	outside := filepath.Join(runDir(t), "secret")
	if err := os.WriteFile(outside, []byte("of the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, etc := range map[string]map[string]string{
		"files": {"etc/passwd": "-> " + outside, "etc/resolv.conf": "-> " + outside, "etc/motd": "-> " + outside},
		"etc":   {"etc": "-> " + filepath.Dir(outside)},
		"home":  {"home": "-> " + filepath.Dir(outside), "dev": "-> /dev", "proc": "-> /"},
	} {
		t.Run(name, func(t *testing.T) {
			spec := testSpec()
			spec.Root = makeImage(t, etc)
			got := runProgram(t, m, spec, program(t, "bash", "cat /etc/motd /etc/secret; cat /etc/passwd; pwd; ls /home"))
			if got.Kind != jail.Exited || !strings.Contains(got.stdout, "baponi:x:") || strings.Contains(got.stdout, "of the host") {
				t.Errorf("%+v", got)
			}
			if b, err := os.ReadFile(outside); err != nil || string(b) != "of the host" {
				t.Errorf("the host's file is now %q, %v", b, err)
			}
		})
	}
}

func TestImageMissing(t *testing.T) {
	m := newMaker(t)
	spec := testSpec()
	spec.Root = filepath.Join(runDir(t), "none")
	if _, err := m.Prepare(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "image") {
		t.Errorf("%v", err)
	}
	if got := runProgram(t, m, testSpec(), program(t, "bash", "echo ok")); got.stdout != "ok\n" {
		t.Errorf("afterwards: %+v", got)
	}
}
