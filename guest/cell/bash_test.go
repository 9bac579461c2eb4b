package cell_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// quoteBash returns text as a word of a request, as the header of bash.sh describes.
func quoteBash(text string) string {
	var b strings.Builder
	b.WriteString("$'")
	for _, c := range []byte(text) {
		if c < 0x20 || c > 0x7e || c == '\'' || c == '\\' {
			fmt.Fprintf(&b, `\x%02x`, c)
		} else {
			b.WriteByte(c)
		}
	}
	b.WriteString("'")
	return b.String()
}

func encodeBash(run int, code string, env []string) string {
	words := []string{"__bullpen_begin", fmt.Sprint(run), quoteBash(code)}
	for _, pair := range env {
		words = append(words, quoteBash(pair))
	}
	return "{ " + strings.Join(words, " ") + "; } 2>/dev/null; " +
		"\\builtin source /dev/fd/250 250<<<\"$__bullpen_code\" </dev/null; { __bullpen_source_ended $?; } 2>/dev/null\n" +
		"{ __bullpen_end $?; } 2>/dev/null\n"
}

func startBash(t *testing.T) *started {
	t.Helper()
	script, err := filepath.Abs("bash.sh")
	check(t, err)
	return startProcess(t, encodeBash, "bash", script)
}

func TestBashState(t *testing.T) {
	runTable(t, startBash, []cell{
		{"x=1; f() { echo \"f $x $1\"; }; declare -A map=([a]=b); shopt -s extglob; alias say=echo", ""},
		{"f 2; echo ${map[a]}; say hi", `stdout "f 1 2\nb\nhi\n"`},
	})
	r := startBash(t)
	r.run("mkdir d; cd d; sleep 1000 & job=$!")
	if got := r.run("basename $PWD; kill $job && [ $job = $! ] && echo alive").stdout; got != "d\nalive\n" {
		t.Errorf("%q", got)
	}
}

func TestBashCells(t *testing.T) {
	runTable(t, startBash, []cell{
		{"", ""},
		{"# only a comment", ""},
		{"echo out; echo err >&2", "stdout \"out\\n\"\nstderr \"err\\n\""},
		{"cat <<X\nhere $((1 + 1))\nX\nfor i in 1 2; do\n  echo $i\ndone", `stdout "here 2\n1\n2\n"`},
		{"echo 'é ! $x \\'", `stdout "é ! $x \\\n"`},
		{"printf '\\xff\\x00\\xfe'", `stdout "\xff\x00\xfe"`},
		{"cat; read line; echo $?", `stdout "1\n"`},
		{"(exit 3)", "error ExitStatus: 3"},
		{"bash -c 'kill -SEGV $$'; (exit 130)", "error ExitStatus: 130"},
		{"if then", "stderr \"bash: /dev/fd/250: line 1: syntax error near unexpected token `then'\\n" +
			"bash: /dev/fd/250: line 1: `if then'\\n\"\nerror ExitStatus: 2"},
		{"set -u; echo $nope; echo not reached", "stderr \"bash: nope: unbound variable\\n\"\nerror ExitStatus: 1"},
		{"set +u; echo ${nope:?bad}; echo not reached", "stderr \"bash: nope: bad\\n\"\nerror ExitStatus: 1"},
		{"set -e; f() { false; echo not reached; }; f; echo not reached", "stderr \"\\n\"\nerror ExitStatus: 1"},
		{
			"if false; then :; fi; false || echo handled; (exit 7); echo not reached",
			"stdout \"handled\\n\"\nstderr \"\\n\"\nerror ExitStatus: 7",
		},
		{"(false; echo not reached)", "stderr \"\\n\"\nerror ExitStatus: 1"},
		{"set +e; false; echo reached", `stdout "reached\n"`},
		{"readonly ro=1; ro=2; echo not reached", "stderr \"bash: ro: readonly variable\\n\"\nerror ExitStatus: 1"},
		{"set -x", ""},
		{"set +x", `stderr "+ builtin source /dev/fd/250\n++ set +x\n"`},
	})
}

func TestBashHostile(t *testing.T) {
	runTable(t, startBash, []cell{
		{"printf '\\e_" + nonce[1:] + ";0;{}\\e\\\\'", `stdout "\x1b_` + nonce[1:] + `;0;{}\x1b\\"`},
		{"exec 3>&1 >/dev/null; echo lost", ""},
		{"exec >&3; echo back", `stdout "back\n"`},
		{"exec 4>&2 0<&- 1>&- 2>&-; echo lost", "error ExitStatus: 1"},
		{"exec >&3 2>&4; echo back", `stdout "back\n"`},
		{"mkdir gone; cd gone; rmdir ../gone", ""},
		{"cd ..; echo here", `stdout "here\n"`},
		{"IFS=rue1; set -f; PS1=prompt PS2=prompt PROMPT_COMMAND='echo prompt'", ""},
		{"echo here", `stdout "here\n"`},
		{"for f in printf read local set unset trap export shift kill return; do eval \"$f() { echo $f; }\"; done; " +
			"eval() { echo eval; }", ""},
		{"alias builtin=echo command=echo echo=false", ""},
		{"\\echo here", `stdout "here\n"`},
	})
}

func TestBashInterrupt(t *testing.T) {
	r := startBash(t)
	// A child between fork and exec loses an interrupt. So it is the child itself that tells that it runs.
	sleep := "bash -c 'echo started; exec sleep 1000'"
	for _, code := range []string{
		sleep + "; echo no", "echo started; while :; do :; done", "f() { " + sleep + "; }; f; echo no",
	} {
		r.send("kept=1; " + code)
		r.waitFor("started\n")
		r.interrupt()
		if got := r.wait(); got.String() != "stderr \"\\n\"\nerror KeyboardInterrupt: \nstatus interrupted" {
			t.Errorf("%s: %s", code, got)
		}
		if got := r.run("echo $kept").String(); got != `stdout "1\n"` {
			t.Error(got)
		}
	}
	r.interrupt()
	if got := r.run("echo idle").String(); got != `stdout "idle\n"` {
		t.Error(got)
	}
}

func TestBashEnvOfOneRun(t *testing.T) {
	r := startBash(t)
	r.run("export B='b c' D=d; E=local")
	got := r.run("printenv A B E; unset D", "A=it's\n\\n é", "B=2", "D=3", "E=exported")
	if got.String() != `stdout "it's\n\\n é\n2\nexported\n"` {
		t.Error(got)
	}
	if got := r.run(`echo "${A-unset} $B $D $E"; printenv E`).stdout; got != "unset b c d local\n" {
		t.Errorf("%q", got)
	}
	r.send("sleep 1000 & echo started; wait", "A=1")
	r.waitFor("started\n")
	r.interrupt()
	r.wait()
	if got := r.run(`echo "${A-unset} ${BULLPEN_CELL-unset}"; printenv | grep -i bullpen`).stdout; got != "unset unset\n" {
		t.Errorf("%q", got)
	}
}

func TestBashEndFrame(t *testing.T) {
	r := startBash(t)
	check(t, os.WriteFile(filepath.Join(r.cmd.Dir, "before"), []byte("1"), 0o600))
	first := r.run("echo hi > 'a é\n\"b'; echo > .hidden; mkdir d; echo > d/inside; echo 22 >> before")
	if first.end.Count != 1 || first.end.Memory <= 0 || first.end.Memory > 100<<20 {
		t.Errorf("%+v", first.end)
	}
	slices.SortFunc(first.end.Files, func(a, b struct {
		Path string
		Size int64
	},
	) int {
		return strings.Compare(a.Path, b.Path)
	})
	if fmt.Sprint(first.end.Files) != "[{a é\n\"b 3} {before 4}]" {
		t.Errorf("%q", fmt.Sprint(first.end.Files))
	}
	second := r.run("touch -r . b; cd d; echo > elsewhere")
	if second.end.Count != 2 || fmt.Sprint(second.end.Files) != "[{b 0}]" {
		t.Errorf("%+v", second.end)
	}
	if many := r.run("cd ..; for i in {1..150}; do echo > n$i; done").end; len(many.Files) != 0 {
		t.Errorf("%d files of another directory than that of the start", len(many.Files))
	}
	if many := r.run("for i in {1..150}; do echo > n$i; done").end; len(many.Files) != 100 {
		t.Errorf("%d files", len(many.Files))
	}
}

func TestBashDisplay(t *testing.T) {
	runTable(t, startBash, []cell{
		{"printf 'a\\xff€😀\\t\"\\\\\\n' > t.html; display text/html t.html", "display map[text/html:a\ufffd€😀\t\"\\\n]"},
		{"printf '\\x89PNG' > p; echo first; display image/png p", "stdout \"first\\n\"\ndisplay map[image/png:iVBORw==]"},
		{"display image/png absent", "stderr \"usage: display MIME FILE (not for JSON)\\n\"\nerror ExitStatus: 2"},
		{"(display image/png p)", "stderr \"display: only in the shell of the cell\\n\"\nerror ExitStatus: 1"},
	})
	r := startBash(t)
	got := r.run("head -c 1572864 /dev/zero > fits; head -c 1572865 /dev/zero > large\n" +
		"display image/png fits; display image/png large\n" +
		"tr '\\0' x < fits > x; cat x x > xx; display text/plain xx; display text/plain x\n" +
		"for i in {1..97}; do display text/plain t; done\n" +
		"echo t > t; for i in {1..100}; do display text/plain t; done")
	displays := got.frames
	if len(displays) != 100 || got.end.Dropped != 4 {
		t.Fatalf("%d displays, %d dropped", len(displays), got.end.Dropped)
	}
	for i, want := range []struct {
		size      int
		truncated string
	}{{2 << 20, "[]"}, {0, "[image/png]"}, {2<<20 - 2<<20%300, "[text/plain]"}} {
		size := 0
		for _, value := range displays[i].Data {
			size = len(value.(string))
		}
		if size != want.size || fmt.Sprint(displays[i].Truncated) != want.truncated {
			t.Errorf("display %d: %d bytes, truncated %v", i, size, displays[i].Truncated)
		}
	}
}

func TestBashLargeOutput(t *testing.T) {
	r := startBash(t)
	got := r.run("head -c 100000000 /dev/zero; echo done >&2")
	if len(got.stdout) != 100_000_000 || got.stderr != "done\n" {
		t.Errorf("%d bytes, stderr %q", len(got.stdout), got.stderr)
	}
}

func TestBashEnds(t *testing.T) {
	r := startBash(t)
	r.run("trap 'echo handler' EXIT")
	if stdout, _, code := r.exit(); stdout != "handler\n" || code != 0 {
		t.Errorf("%q %d", stdout, code)
	}
	r = startBash(t)
	got := r.run("trap 'echo handler' EXIT; echo out; exit 3").String()
	if !strings.HasPrefix(got, `stdout "out\nhandler\n"`) {
		t.Error(got)
	}
	if _, _, code := r.exit(); code != 3 {
		t.Error(code)
	}
}
