package nsjail

import (
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// makeImage makes a root file system with bash, its libraries and more files by name. Content that
// begins with "-> " makes a link.
func makeImage(tb testing.TB, more map[string]string) string {
	tb.Helper()
	root := filepath.Join(tempDir(tb, ""), "image")
	for _, name := range []string{"bash", "cat", "ls"} {
		installProgram(tb, root, "/usr/bin/"+name)
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

// installProgram copies a program to /usr/bin of the root file system at root, with the libraries
// that it needs.
func installProgram(tb testing.TB, root, program string) {
	tb.Helper()
	out, err := exec.CommandContext(tb.Context(), "ldd", program).Output()
	if err != nil {
		tb.Fatal(err)
	}
	names := map[string]string{program: "/usr/bin/" + filepath.Base(program)}
	for field := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(field, "/") && !strings.HasSuffix(field, ":") {
			names[field] = field
		}
	}
	for from, to := range names {
		b, err := os.ReadFile(from)
		if err != nil {
			tb.Fatal(err)
		}
		write(tb, root, to, b, 0o755)
	}
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
	t.Parallel()
	m := newMaker(t)
	spec := testSpec()
	spec.Root = makeImage(t, map[string]string{
		"opt/tool/motd": "from the image\n", "etc/motd": "from its /etc\n", "etc/passwd": "root::0:0:::/bin/bash\n",
		"home/other/file": "hidden", "tmp/file": "hidden", "run/file": "hidden",
		"links/up": "-> ../../../../../../etc", "bin": "-> usr/bin", "top.txt": "from its top\n",
	})
	p := program(
		t, "bash", `cat /opt/tool/motd /etc/motd /top.txt; cat /etc/passwd; ls /home /tmp /run; ls -d /links/up/motd
echo x 2>/dev/null >/opt/tool/new || echo read-only; [ -e /usr/bin/env ] || echo the host is not here`)
	got := runProgram(t, m, spec, p)
	if got.Kind != jail.Exited || got.ExitCode != 0 {
		t.Fatalf("%+v", got)
	}
	for _, want := range []string{
		"from the image\n", "from its /etc\n", "from its top\n", "baponi:x:1000:1000:", "/links/up/motd\n", "read-only\n",
		"the host is not here\n",
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

// TestImageSlow blocks reading of an image's /etc, as a slow disk or network may. Jails without the
// image must still start.
func TestImageSlow(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	spec := testSpec()
	spec.Root = makeImage(t, map[string]string{"etc/slow": "x"})
	f, err := os.OpenFile(filepath.Join(spec.Root, "etc/slow"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	lease := func(how int) {
		t.Helper()
		if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, how); err != nil {
			t.Fatal(err)
		}
	}
	// The kernel requests the lease when the file is opened and blocks the opener until it is
	// released.
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, unix.SIGIO)
	defer signal.Stop(asked)
	lease(unix.F_WRLCK)
	slow := make(chan error, 1)
	go func() {
		j, err := m.Prepare(t.Context(), spec)
		if err == nil {
			err = j.Close()
		}
		slow <- err
	}()
	<-asked
	runCode(t, m, "bash", "echo other").want(t, jail.Exited, "other\n")
	select {
	case err := <-slow:
		t.Errorf("the jail with the image was prepared first: %v", err)
	default:
	}
	lease(unix.F_UNLCK)
	if err := <-slow; err != nil {
		t.Error(err)
	}
}

// TestImageGone checks that the copy of an image's /etc is removed once the image is gone.
func TestImageGone(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	spec := testSpec()
	var roots []string
	for range 2 {
		spec.Root = makeImage(t, map[string]string{"etc/large": strings.Repeat("x", 1<<20)})
		roots = append(roots, spec.Root)
		runProgram(t, m, spec, program(t, "bash", "cat /etc/large | { read -N 3 x; echo $x; }")).want(t, jail.Exited, "xxx\n")
	}
	if err := os.RemoveAll(roots[0]); err != nil {
		t.Fatal(err)
	}
	spec.Root = makeImage(t, nil)
	runProgram(t, m, spec, program(t, "bash", "[ -e /etc/large ] || echo another")).want(t, jail.Exited, "another\n")
	copies, err := filepath.Glob(filepath.Join(m.dir, "root", "*", "etc", "large"))
	if err != nil || len(copies) != 1 {
		t.Errorf("copies of /etc: %q, %v; want that of the image that is there", copies, err)
	}
}

// The worker copies an image's /etc. No link in it may make the copy read files outside the image.
func TestImageLinksAreNotFollowed(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	outside := filepath.Join(tempDir(t, ""), "secret")
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
			if got.Kind != jail.Exited || !strings.Contains(got.stdout, "baponi:x:") ||
				strings.Contains(got.stdout, "of the host") {
				t.Errorf("%+v", got)
			}
			if b, err := os.ReadFile(outside); err != nil || string(b) != "of the host" {
				t.Errorf("the host's file is now %q, %v", b, err)
			}
		})
	}
}

func TestImageMissing(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	spec := testSpec()
	spec.Root = filepath.Join(tempDir(t, ""), "none")
	if _, err := m.Prepare(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "image") {
		t.Errorf("%v", err)
	}
	if got := runProgram(t, m, testSpec(), program(t, "bash", "echo ok")); got.stdout != "ok\n" {
		t.Errorf("afterwards: %+v", got)
	}
}
