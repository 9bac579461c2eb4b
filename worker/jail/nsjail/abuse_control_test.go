package nsjail

import (
	"strconv"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

func controlAttacks() []attack {
	return []attack{
		{
			name: "python that closes what could stand around it", language: "python",
			code:   "'''\n\"\"\"\n'''\nprint('one')\nx = '}}); */ \"\"\"'\nprint(__name__, x)",
			stdout: "one\n__main__ }}); */ \"\"\"",
		},
		{
			name: "node that closes what could stand around it", language: "node",
			code: "console.log('one'); /* */ var x = '*/'; console.log(typeof later, x, arguments.length); function " +
				"later() {}",
			stdout: "one\nfunction */ 5",
		},
		{
			name: "node that ends the function it could be in", language: "node", code: "} console.log('out'); {",
			want: jail.Outcome{Kind: jail.Exited, ExitCode: 1},
		},
		{
			name: "bash that closes what could stand around it", language: "bash", code: "echo one\nEOF\n'; echo two; '",
			stdout: "one", want: jail.Outcome{Kind: jail.Exited, ExitCode: 127},
		},
		{
			name: "code without an end of line, with CR, with a byte order mark", language: "python",
			code: "\ufeffprint('one')\r\nprint('two')", stdout: "one\ntwo",
		},
		{name: "variables with line breaks, = and quotes", run: func(t *testing.T, m *Maker) {
			const value = "a=b\nLD_PRELOAD=/tmp/x\n\"'$(id)`id`\\"
			p := program(t, "python",
				"import os; print(os.environ['V'] == os.environ['W'][1:], 'LD_PRELOAD' in os.environ, len(os.environ['V']))")
			p.Env = append(p.Env, "V="+value, "W=x"+value)
			runProgram(t, m, testSpec(), p).want(t, jail.Exited, "True False "+strconv.Itoa(len(value)))
		}},
		{name: "variables that steer the runtime's start", run: func(t *testing.T, m *Maker) {
			// A name without a slash is looked up in the system's directories.
			p := program(t, "bash", "echo $PATH")
			p.Env = []string{"PATH=/tmp:/home/baponi", "BASH_ENV=/nonexistent", "ENV=/nonexistent"}
			runProgram(t, m, testSpec(), p).want(t, jail.Exited, "/tmp:/home/baponi")
		}},
		{name: "what no waiting interpreter can run, many times", run: func(t *testing.T, m *Maker) {
			for range repeats(100) {
				p := program(t, "bash", "echo ran >> n; sort n | uniq -c; echo $#")
				p.Argv = append(p.Argv, "more")
				runProgram(t, m, testSpec(), p).want(t, jail.Exited, "1 ran\n1")
			}
		}},
		{name: "more than a frame holds", run: func(t *testing.T, m *Maker) {
			p := program(t, "bash", "true")
			p.Files = append(p.Files, jail.File{Path: "/tmp/x", Content: make([]byte, 9<<20)})
			if _, err := prepare(t, m, testSpec()).Run(t.Context(), p); err == nil ||
				!strings.Contains(err.Error(), "more than") {
				t.Errorf("got %v", err)
			}
		}, want: jail.Outcome{Kind: jail.StartFailed}},
	}
}
