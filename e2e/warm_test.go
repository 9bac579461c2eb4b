package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// prewarmed makes a worker prewarm jails as it does by default.
var prewarmed = []string{"--warm-memory", "0"} // read only

// forkedCount returns how many programs of a language had forked jails.
func (sys *system) forkedCount(language string) (n int) {
	at := *sys.api
	at.base, at.key = sys.health, ""
	for line := range strings.Lines(string(at.get("/metrics").body)) {
		if _, err := fmt.Sscanf(line, `bullpen_worker_jails_total{language="`+language+`",start="forked"} %d`,
			&n); err == nil {
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
		"import os, sys; print(os.listdir('.') + os.listdir('/tmp'), os.environ['COLOUR'], sys.argv); open('left', 'w'); " +
			"open('/tmp/left', 'w')",
		"['main.py'] %s ['/home/baponi/main.py']\n",
		"import os; n = 1 + (int(open('n').read()) if os.path.exists('n') else 0); open('n', 'w').write(str(n)); print(n)",
	},
	"node": {
		"const fs = require('fs'); console.log([...fs.readdirSync('.'), ...fs.readdirSync('/tmp')].join(), " +
			"process.env.COLOUR, process.argv[1]);" +
			"fs.writeFileSync('left', ''); fs.writeFileSync('/tmp/left', '')",
		"main.js %s /home/baponi/main.js\n",
		"const fs = require('fs'), n = 1 + (fs.existsSync('n') ? Number(fs.readFileSync('n')) : 0); fs.writeFileSync('n', " +
			"`${n}`); console.log(n)",
	},
}

// testWarm runs programs in prewarmed jails: alone, with their own variables, and in a thread. They
// must find what programs in newly made jails find, and nothing from earlier ones. As many run at
// once as a worker must be asked for within a few seconds before it forks jails. On a busy machine,
// fewer would end too late for the next ones to count.
func testWarm(t *testing.T, p *programs, in topology) {
	const slots = 16
	sys := newSystem(t, p, in, slots, prewarmed...)
	for language, program := range warmPrograms {
		n, before := 0, sys.forkedCount(language)
		eventually(t, language+" in jails that were forked", func() (bool, any) {
			var started [slots]*pending
			for i := range started {
				env := map[string]string{"COLOUR": fmt.Sprintf("shade-%d", n+i)}
				started[i] = sys.start(request{"language": language, "code": program.look}.and("env_vars", env))
			}
			for i, p := range started {
				if r := p.answer(t).result(t); r.Stdout != fmt.Sprintf(program.finds, fmt.Sprintf("shade-%d", n+i)) {
					t.Errorf("got %+v, %s", r, deref(r.ErrorMessage))
				}
			}
			n += slots
			return sys.forkedCount(language) >= before+3, n
		})
		n, before = 0, sys.forkedCount(language)
		eventually(t, language+" in threads, in jails that were forked", func() (bool, any) {
			n++
			var started [slots]*pending
			for i := range started {
				started[i] = sys.start(request{"language": language, "code": program.count}.of(
					fmt.Sprintf("warm-%s-%d", language, i)))
			}
			for i, p := range started {
				if r := p.answer(t).result(t); r.Stdout != fmt.Sprintf("%d\n", n) {
					t.Errorf("call %d of thread %d: %+v", n, i, r)
				}
			}
			return sys.forkedCount(language) >= before+3, n
		})
	}
	// A profile can prevent this: with strict isolation nothing is forked, however often it is
	// requested.
	strict, before := sys.sandboxed("strict", request{"isolation": "strict"}), sys.forkedCount("python")
	for i := range 30 {
		if r := strict.inline(python(fmt.Sprintf("print(%d)", i))); r.Stdout != fmt.Sprintf("%d\n", i) {
			t.Errorf("in strict isolation: %+v", r)
		}
	}
	if n := sys.forkedCount("python") - before; n != 0 {
		t.Errorf("%d executions in strict isolation were forked", n)
	}
	// Modules that a profile preloads are present when its programs start.
	preloading := sys.sandboxed("preloading", request{"preload": []string{"decimal", "xml.dom"}})
	eventually(t, "modules that were imported before", func() (bool, any) {
		r := preloading.inline(python(
			"import sys; print('decimal' in sys.modules, 'xml.dom' in sys.modules, 'ctypes' in sys.modules)"))
		return r.Stdout == "True True False\n", r
	})
	// A module that keeps a thread cannot be preloaded. The log reports it, and programs import it in
	// jails that are not forked.
	threaded := sys.sandboxed("threaded", request{"image": sys.hostImageWith(t, "keeps_a_thread", `
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
`), "preload": []string{"keeps_a_thread"}})
	before = sys.forkedCount("python")
	eventually(t, "why nothing is forked", func() (bool, any) {
		r := threaded.inline(python(
			"import sys, threading; print('keeps_a_thread' in sys.modules); import keeps_a_thread; " +
				"print(threading.active_count())"))
		if r.Stdout != "False\n2\n" {
			t.Errorf("with a module that cannot be imported before: %+v", r)
		}
		failures := sys.worker.logged(t, "zygote creation failed") // one of another profile, too, on a busy machine
		return slices.ContainsFunc(failures, func(l logLine) bool {
			return strings.Contains(l.Error,
				"what is preloaded has threads: leave out the module that starts them, of keeps_a_thread")
		}), failures
	})
	if n := sys.forkedCount("python") - before; n != 0 {
		t.Errorf("%d executions were forked from what has a thread", n)
	}
	for name, failed := range map[string]bool{"threaded": true, "preloading": false} {
		eventually(t, "whether modules of "+name+" are preloaded", func() (bool, any) {
			r := sys.get(profilesPath + "/" + name + "/preload")
			return strings.Contains(string(r.body), "keeps_a_thread") == failed &&
				strings.Contains(string(r.body), `"error":null`) != failed, r
		})
	}
}

// hostImageWith makes an image from the host's /usr plus one Python module.
func (sys *system) hostImageWith(t *testing.T, module, code string) string {
	t.Helper()
	site := strings.TrimSpace(sys.inline(python("import site; print(site.getsitepackages()[0])")).Stdout)
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
	if err := unix.Mount("overlay", usr, "overlay", unix.MS_RDONLY,
		"lowerdir="+filepath.Join(dir, "more")+":/usr"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(usr, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return image
}
