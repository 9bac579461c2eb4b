package nsjail

import (
	"path/filepath"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// echoInput programs print their arguments, then their standard input, then a mark. A child reads
// the first 6 bytes of the input and the program reads the rest.
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
	"ruby": `
puts ARGV.map { |a| "<#{a}>" }.join(" ")
$stdout.flush
system("dd", "bs=6", "count=1", "status=none")
puts $stdin.read + "end"`,
	"deno": `
console.log(Deno.args.map((a: string) => "<" + a + ">").join(" "));
await new Deno.Command("dd", {args: ["bs=6", "count=1", "status=none"], stdin: "inherit", stdout: "inherit"}).spawn().status;
await Deno.stdin.readable.pipeTo(Deno.stdout.writable, {preventClose: true});
console.log("end");`,
}

// specFor returns the spec of jails that have a language's interpreter: the host's, or the one that
// deploy/fetch.sh deno fetches.
func specFor(t *testing.T, language string) jail.Spec {
	t.Helper()
	spec := testSpec()
	if language == "deno" {
		spec.Root = filepath.Join(tempDir(t, ""), "image")
		installProgram(t, spec.Root, "/usr/bin/dd")
		installProgram(t, spec.Root, filepath.Join(filepath.Dir(nsjailPath(t)), "../../../deno/deno"))
	}
	return spec
}

func TestArgumentsAndStdin(t *testing.T) {
	for _, r := range proto.Runtimes() {
		language := string(r.Language)
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			m := newMaker(t)
			spec := specFor(t, language)
			var zygote jail.Zygote
			if spec.Root == "" {
				zygote = zygoteOf(t, m, spec)
			} else { // no python in this image
				zygote = bareZygote(t, m, spec)
			}
			for _, mode := range modes {
				for name, c := range map[string]struct {
					args        []string
					stdin, want string
				}{
					"neither":   {nil, "", "\nend\n"},
					"arguments": {[]string{"-c", "", "--x=y z", "é\n*"}, "", "<-c> <> <--x=y z> <é\n*>\nend\n"},
					"stdin":     {nil, "first\nsecond\nthird", "\nfirst\nsecond\nthirdend\n"},
					"both":      {[]string{"a"}, "first\n", "<a>\nfirst\nend\n"},
				} {
					t.Run(mode+" "+name, func(t *testing.T) {
						p, err := jail.Source{
							Language: language, Code: echoInput[language], Args: c.args, Stdin: c.stdin, TraceID: "trc_test",
							Home: DefaultHome,
						}.Program()
						if err != nil {
							t.Fatal(err)
						}
						p.Timeout = patience
						r := runIn(t, prepareMode(t, m, zygote, mode, spec, language), p)
						if r.stdout != c.want || r.stderr != "" || r.Kind != jail.Exited || r.ExitCode != 0 {
							t.Errorf("got %+v\nwant stdout %q", r, c.want)
						}
					})
				}
			}
		})
	}
}
