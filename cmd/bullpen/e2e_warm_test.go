package main

import (
	"fmt"
	"strings"
	"testing"
)

// madeAhead has a worker make jails before they are asked for, as it does where nothing is set.
var madeAhead = []string{"--warm-memory", "0"} // read only

// warmStarts is how many programs of a language have found a jail ready.
func (w *world) warmStarts(language string) (n int) {
	at := *w.api
	at.base, at.key = w.health, ""
	for line := range strings.Lines(string(at.get("/metrics").body)) {
		if _, err := fmt.Sscanf(line, `bullpen_worker_jails_total{language="`+language+`",start="warm"} %d`, &n); err == nil {
			return n
		}
	}
	return 0
}

// warmPrograms tell what they find in the home and in /tmp, a variable of the request and their arguments, and leave something in both; and
// count how often they have run in a thread.
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

// testWarm runs programs in jails that were ready, alone with variables of their own and in a thread. They find what those find whose jails
// are made for them, and nothing of those before.
func testWarm(t *testing.T, p *programs, in topology) {
	w := newWorld(t, p, in, 2, madeAhead...)
	for language, program := range warmPrograms {
		n, before := 0, w.warmStarts(language)
		eventually(t, language+" in jails that were ready", func() (bool, any) {
			n++
			colour := fmt.Sprintf("shade-%d", n)
			r := w.inline(request{"language": language, "code": program.look}.and("env_vars", map[string]string{"COLOUR": colour}))
			if r.Stdout != fmt.Sprintf(program.finds, colour) {
				t.Errorf("got %+v", r)
			}
			return w.warmStarts(language) >= before+3, n
		})
		n, before = 0, w.warmStarts(language)
		eventually(t, language+" in a thread, in jails that were ready", func() (bool, any) {
			n++
			r := w.inline(request{"language": language, "code": program.count}.of("warm-" + language))
			if r.Stdout != fmt.Sprintf("%d\n", n) {
				t.Errorf("call %d of a thread: %+v", n, r)
			}
			return w.warmStarts(language) >= before+3, n
		})
	}
}
