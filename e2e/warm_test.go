package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// madeAhead makes a worker prewarm jails as it does by default.
var madeAhead = []string{"--warm-memory", "0"} // read only

// forked returns how many programs of a language had forked jails.
func (w *world) forked(language string) (n int) {
	at := *w.api
	at.base, at.key = w.health, ""
	for line := range strings.Lines(string(at.get("/metrics").body)) {
		if _, err := fmt.Sscanf(line, `bullpen_worker_jails_total{language="`+language+`",start="forked"} %d`, &n); err == nil {
			return n
		}
	}
	return 0
}

// warmPrograms print what they find in the home and in /tmp, a variable of the request and their
// arguments, and leave files in both directories. They also count how often they have run in a
// thread.
var warmPrograms = map[string]struct{ look, finds, count string }{ // read only
	"bash": {
		"ls -A ~ /tmp; touch ~/left /tmp/left; echo $COLOUR $0 $#", "/home/baponi:\n\n/tmp:\n%s /run/bullpen/job/main.sh 0\n",
		"n=$(($(cat n 2> /dev/null || echo 0) + 1)); echo $n | tee n",
	},
	"python": {
		"import os, sys; print(os.listdir('.') + os.listdir('/tmp'), os.environ['COLOUR'], sys.argv); open('left', 'w'); open('/tmp/left', 'w')",
		"['main.py'] %s ['/home/baponi/main.py']\n",
		"import os; n = 1 + (int(open('n').read()) if os.path.exists('n') else 0); open('n', 'w').write(str(n)); print(n)",
	},
	"node": {
		"const fs = require('fs'); console.log([...fs.readdirSync('.'), ...fs.readdirSync('/tmp')].join(), process.env.COLOUR, process.argv[1]);" +
			"fs.writeFileSync('left', ''); fs.writeFileSync('/tmp/left', '')",
		"main.js %s /home/baponi/main.js\n",
		"const fs = require('fs'), n = 1 + (fs.existsSync('n') ? Number(fs.readFileSync('n')) : 0); fs.writeFileSync('n', `${n}`); console.log(n)",
	},
}

// testWarm runs programs in prewarmed jails: alone, with their own variables, and in a thread. They
// must find what programs in newly made jails find, and nothing from earlier ones. The programs run
// without pauses, so that some jails are forked.
func testWarm(t *testing.T, p *programs, in topology) {
	w := newWorld(t, p, in, 2, madeAhead...)
	for language, program := range warmPrograms {
		n, before := 0, w.forked(language)
		eventually(t, language+" in jails that were forked", func() (bool, any) {
			n++
			colour := fmt.Sprintf("shade-%d", n)
			r := w.inline(request{"language": language, "code": program.look}.and("env_vars", map[string]string{"COLOUR": colour}))
			if r.Stdout != fmt.Sprintf(program.finds, colour) {
				t.Errorf("got %+v", r)
			}
			return w.forked(language) >= before+3, n
		})
		n, before = 0, w.forked(language)
		eventually(t, language+" in a thread, in jails that were forked", func() (bool, any) {
			n++
			r := w.inline(request{"language": language, "code": program.count}.of("warm-" + language))
			if r.Stdout != fmt.Sprintf("%d\n", n) {
				t.Errorf("call %d of a thread: %+v", n, r)
			}
			return w.forked(language) >= before+3, n
		})
	}
	// A profile can prevent this: with strict isolation nothing is forked, however often it is
	// requested.
	strict, before := w.sandboxed("strict", request{"isolation": "strict"}), w.forked("python")
	for i := range 30 {
		if r := strict.inline(python(fmt.Sprintf("print(%d)", i))); r.Stdout != fmt.Sprintf("%d\n", i) {
			t.Errorf("in strict isolation: %+v", r)
		}
	}
	if n := w.forked("python") - before; n != 0 {
		t.Errorf("%d executions in strict isolation were forked", n)
	}
	// Modules that a profile preloads are present when its programs start.
	preloading := w.sandboxed("preloading", request{"preload": []string{"decimal", "xml.dom"}})
	eventually(t, "modules that were imported before", func() (bool, any) {
		r := preloading.inline(python("import sys; print('decimal' in sys.modules, 'xml.dom' in sys.modules, 'ctypes' in sys.modules)"))
		return r.Stdout == "True True False\n", r
	})
	// A module that keeps a thread cannot be preloaded. The log says so, and programs import it in
	// jails that are not forked.
	threaded := w.sandboxed("threaded", request{"image": w.hostWith(t, "keeps_a_thread", `
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
`), "preload": []string{"keeps_a_thread"}})
	before = w.forked("python")
	eventually(t, "why nothing is forked", func() (bool, any) {
		r := threaded.inline(python("import sys, threading; print('keeps_a_thread' in sys.modules); import keeps_a_thread; print(threading.active_count())"))
		if r.Stdout != "False\n2\n" {
			t.Errorf("with a module that cannot be imported before: %+v", r)
		}
		line, ok := w.worker.said(t, "zygote creation failed")
		return ok && strings.Contains(line.Error, "what is preloaded has threads: leave out the module that starts them, of keeps_a_thread"), line
	})
	if n := w.forked("python") - before; n != 0 {
		t.Errorf("%d executions were forked from what has a thread", n)
	}
}

// hostWith makes an image from the host's /usr plus one Python module.
func (w *world) hostWith(t *testing.T, module, code string) string {
	t.Helper()
	site := strings.TrimSpace(w.inline(python("import site; print(site.getsitepackages()[0])")).Stdout)
	dir := passable(t)
	image, usr := filepath.Join(dir, "image"), filepath.Join(dir, "image", "usr")
	more := filepath.Join(dir, "more", strings.TrimPrefix(site, "/usr/"))
	for _, d := range []string{usr, more} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(more, module+".py"), []byte(code), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"bin", "lib", "lib64"} {
		if target, err := os.Readlink("/" + name); err == nil {
			if err := os.Symlink(target, filepath.Join(image, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := unix.Mount("overlay", usr, "overlay", unix.MS_RDONLY, "lowerdir="+filepath.Join(dir, "more")+":/usr"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(usr, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return image
}
