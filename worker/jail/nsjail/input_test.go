package nsjail

import (
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// echoInput prints the program's arguments, then its standard input: the first 6 bytes as a child reads them, the rest as the
// program does, and a mark at the end.
var echoInput = map[string]string{ // read only
	"python": `
import subprocess, sys
print(*map('<{}>'.format, sys.argv[1:]))
subprocess.run(['dd', 'bs=6', 'count=1', 'status=none'])
print(sys.stdin.read() + 'end')`,
	"node": `
console.log(process.argv.slice(2).map(a => '<' + a + '>').join(' '));
require('child_process').execFileSync('dd', ['bs=6', 'count=1', 'status=none'], {stdio: 'inherit'});
process.stdin.on('data', d => process.stdout.write(d)).on('end', () => console.log('end'));`,
	"bash": `
args=(); for a; do args+=("<$a>"); done; echo "${args[*]}"
dd bs=6 count=1 status=none
while IFS= read -r line; do echo "$line"; done; echo "${line}end"`,
}

func TestArgumentsAndStdin(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			m := newMaker(t)
			startBy(m, mode)
			for _, language := range languages {
				for name, c := range map[string]struct {
					args        []string
					stdin, want string
				}{
					"neither":   {nil, "", "\nend\n"},
					"arguments": {[]string{"-c", "", "--x=y z", "é\n*"}, "", "<-c> <> <--x=y z> <é\n*>\nend\n"},
					"stdin":     {nil, "first\nsecond\nthird", "\nfirst\nsecond\nthirdend\n"},
					"both":      {[]string{"a"}, "first\n", "<a>\nfirst\nend\n"},
				} {
					t.Run(language+" "+name, func(t *testing.T) {
						t.Parallel()
						p, err := jail.Source{
							Language: language, Code: echoInput[language], Args: c.args, Stdin: c.stdin, TraceID: "trc_test", Home: DefaultHome,
						}.Program()
						if err != nil {
							t.Fatal(err)
						}
						p.Timeout = patience
						r := runProgram(t, m, testSpec(), p)
						if r.stdout != c.want || r.stderr != "" || r.Kind != jail.Exited || r.ExitCode != 0 {
							t.Errorf("got %+v\nwant stdout %q", r, c.want)
						}
					})
				}
			}
		})
	}
}
