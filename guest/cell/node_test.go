package cell_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func encodeJSON(run int, code string, env []string) string {
	request := map[string]any{"run": run, "code": code}
	if len(env) > 0 {
		variables := map[string]string{}
		for _, pair := range env {
			name, value, _ := strings.Cut(pair, "=")
			variables[name] = value
		}
		request["env"] = variables
	}
	line, err := json.Marshal(request)
	if err != nil {
		panic(err)
	}
	return string(line) + "\n"
}

// nodeCommand returns the command of the runner. The shell passes the descriptors that Node cannot duplicate.
func nodeCommand(t *testing.T, args ...string) []string {
	t.Helper()
	script, err := filepath.Abs("node.mjs")
	check(t, err)
	return append([]string{"sh", "-c", `exec "$0" "$@" 3<&0 4>&1 5>&2 </dev/null`, "node", script}, args...)
}

func startNode(t *testing.T) *started {
	t.Helper()
	return startProcess(t, encodeJSON, nodeCommand(t)...)
}

func TestNodeCells(t *testing.T) {
	runTable(t, startNode, []cell{
		{"", ""},
		{"// only a comment", ""},
		{"console.log('out é'); console.error('err')", "stdout \"out é\\n\"\nstderr \"err\\n\""},
		{"process.stdout.write(Buffer.from([0xff, 0, 0xfe]))", "stdout \"\\xff\\x00\\xfe\"\nresult true"},
		{"1 + 1", "result 2"},
		{"'text'", "result 'text'"},
		{"undefined", ""},
		{
			"[] instanceof Array && new Error() instanceof Error && require('vm').runInThisContext('[]') instanceof Array",
			"result true",
		},
		{"await Promise.resolve(5)", "result 5"},
		{"const a = await 1, b = 2; a + b", "result 3"},
		{"a + b", "result 3"},
		{"async function main() { await null; return 'done' }\nmain()", "result 'done'"},
		{"main().then(() => 7)", "result 7"},
		{"import fs, { readFileSync as read } from 'node:fs'; import * as path from 'path'; import 'os'\n" +
			"fs.readFileSync === read && path.sep", "result '/'"},
		{"read === fs.readFileSync && (await import('fs')).readFileSync === read", "result true"},
		{
			"fs.writeFileSync('m.mjs', 'export default 3; export const named = 4')\n" +
				"fs.writeFileSync('c.cjs', 'module.exports = 5')",
			"",
		},
		{"import three, { named } from './m.mjs'\nthree + named + require('./c.cjs')", "result 12"},
		{"import('./m.mjs').then((m) => m.default)", "result 3"},
		{"throw new RangeError('far')", "error RangeError: far"},
		{"await null; throw new RangeError('far')", "error RangeError: far"},
		{"throw 5", "error Number: 5"},
		{"throw null", "error Error: null"},
		{"nope", "error ReferenceError: nope is not defined"},
		{"console.log('not reached')\nconst = 5", "error SyntaxError: Unexpected token '='"},
		{"await 1; console.log('not reached'); const = 5", "error SyntaxError: Unexpected token '='"},
		{"let twice; let twice", ""},
		{"globalThis.settled = 0; setTimeout(() => { settled = 1 }, 1); settled", "result 0"},
		{"while (!settled) await new Promise((r) => setTimeout(r, 1)); settled", "result 1"},
		{"require.main === module && __dirname === process.cwd()", "result true"},
	})
}

// Each row is a cell of its own, and its value.
func TestNodeRewriting(t *testing.T) {
	cells := []cell{
		{"const x = 1; x", "1"},
		{"const x = 2; x", "2"},
		{"let x = 3\nx", "3"},
		{"function x() { return 4 }\nx()", "4"},
		{"class x { static y = 5 }\nx.y", "5"},
		{"var x = 6; x", "6"},
		{"const { x, ...rest } = { x: 7, y: 8 }; x + rest.y", "15"},
		{"const [p, [q = 2]] = [1, []]\np + q", "3"},
		{"class x {}\n[1].length", "1"},
		{"class x extends Array { m() { return {} } }\n(new x()).length", "0"},
		{"let x\nx", "undefined"},
		{"let v1 = 1, v2, v3; [v1, v2, v3]", "[ 1, undefined, undefined ]"},
		{"let n = 0; for (const i of [1, 2]) n += i; for (let i = 0; i < 2; i++) { const k = i; n += k }\nn", "4"},
		{"var let_ = 1; var of = 2; of / let_ / 1", "2"},
		{"let re = /const x = [/\"'`]\\//g; re.source.length", "18"},
		{"let d = 4, g = 2; d / 2 / g", "1"},
		{"if (true) /a/.test('a')", "true"},
		{"(1 + 3) / 2 /1", "2"},
		{"const t = `const ${`let ${ { a: 1 }.a } }`} ${'}'} \\``; t", "'const let 1 } } `'"},
		{"/* const y = ` */ const c = 1 // let `\nc", "1"},
		{
			"const o = { const: 1, let: 2, class: 3, import: 4, await: 5 }; o.const + o.let + o.class + o.import + o.await",
			"15",
		},
		{"const s = 'const a = \\'1\\''; s.length", "13"},
		{"const arrow = (a) => { const b = a; return b }\narrow(3)", "3"},
		{"label: for (;;) { break label }\n1", "1"},
		{"const f = function () { return 1 }\nconst h = class Named {}\nf() + h.name", "'1Named'"},
		{"const multi = [1,\n2]\n  .map((v) => v * 2)\n  .join()\nmulti", "'2,4'"},
		{"const one = 1\n;[one].length", "1"},
		{"let i = 1\ni\n++i\ni", "2"},
		{"'use strict'; const strict = 1; strict", "1"},
		// The same in async cells.
		{"const w = await 1\nconst { z } = await { z: 2 }\nw + z", "3"},
		{"w + z", "3"},
		{"let w; await 0\nw", "undefined"},
		{"await 0; let w1 = 1, w2; [w1, w2]", "[ 1, undefined ]"},
		{"class K { m() { return 1 } }\nawait 0\nnew K().m()", "1"},
		{"new K().m()", "1"},
		{"fn2(); async function fn1() { return await 8 }\nfunction fn2() {}\nawait fn1()", "8"},
		{"typeof fn2", "'function'"},
		{"await 0\nconst chain = [3, 1]\n  .sort()\n  .join('-')\nchain", "'1-3'"},
		{"const r1 = await 4 / 2 / 1; r1", "2"},
		{"if (await true) { 1 } else { 2 }\n3", "3"},
		{"const fnx = async () => { const inner = await 5; return inner }\nawait fnx()", "5"},
		{"await [1][0] // end", "1"},
		{"const obj = await 1 ? { a: 1 } : {}\nobj.a", "1"},
		{"for await (const e of [1, 2]) { globalThis.last = e }\nlast", "2"},
		{"const after = 1; await 0; { const inner = 2 }\nafter", "1"},
		{"await 0; ({ a: 1 }).a", "1"},
		{"import\n  os,\n  { EOL as eol }\nfrom 'os';\nos.EOL === eol", "true"},
		{"import os2 from 'os'\nimport fs2 from 'fs'\ntypeof os2.cpus + typeof fs2.stat", "'functionfunction'"},
	}
	r := startNode(t)
	for _, c := range cells {
		want := "result " + c.want
		if c.want == "undefined" {
			want = ""
		}
		if got := r.run(c.code).String(); got != want {
			t.Errorf("%s\ngot:\n%s\nwant:\n%s", c.code, got, want)
		}
	}
}

func TestNodeTraceback(t *testing.T) {
	r := startNode(t)
	for code, want := range map[string]string{
		"\n  const = 5":       "cell-N:2|  const = 5|        ^||SyntaxError: Unexpected token '='",
		"await 1\n const = 5": "cell-N:2| const = 5|       ^||SyntaxError: Unexpected token '='",
		"const q1 = 1\nfunction f() { q2 }\nf()": "ReferenceError: q2 is not defined|    at f (cell-N:2:16)" +
			"|    at cell-N:3:1",
		"await 0; q2": "ReferenceError: q2 is not defined|    at cell-N:1:10",
	} {
		got := r.run(code)
		if len(got.frames) != 1 {
			t.Fatalf("%s: %s", code, got)
		}
		trace := strings.ReplaceAll(strings.Join(got.frames[0].Traceback, "|"), fmt.Sprintf("cell-%d", r.runs), "cell-N")
		if trace != want {
			t.Errorf("%q\ngot:  %s\nwant: %s", code, trace, want)
		}
	}
}

func TestNodeDisplay(t *testing.T) {
	runTable(t, startNode, []cell{
		{"display.html('<b>é</b>')", "display map[text/html:<b>é</b>]"},
		{"display({ a: 1 })\n", "display map[text/plain:{ a: 1 }]"},
		{"display({ a: [1] }, 'application/json')", "display map[application/json:map[a:[1]]]"},
		{
			"display({ toMimeBundle: () => ({ 'text/plain': 'p', 'image/png': Buffer.from('png') }) })",
			"display map[image/png:cG5n text/plain:p]",
		},
		{
			"await display({ async [Symbol.for('Jupyter.display')]() { return { 'text/html': 'h' } } })",
			"display map[text/html:h]",
		},
		{"Buffer.from('\\x89PNG\\r\\n\\x1a\\n', 'latin1')", "result <nil>"},
		{
			"({ get a() { throw 1 }, [require('util').inspect.custom]() { throw new Error('inspect') } })",
			"error Error: inspect",
		},
	})
	r := startNode(t)
	got := r.run("display.png(Buffer.alloc(1572864)); display.png(Buffer.alloc(1572865))\n" +
		"display.html('é'.repeat(1 << 20) + 'x')\n" +
		"for (let i = 0; i < 101; i++) display(i)")
	if len(got.frames) != 100 || got.end.Dropped != 4 {
		t.Fatalf("%d displays, %d dropped", len(got.frames), got.end.Dropped)
	}
	for i, want := range []string{"2097152 []", "0 [image/png]", "2097152 [text/html]", "0 [text/plain]"} {
		size := 0
		for _, value := range got.frames[i].Data {
			size = len(value.(string))
		}
		if got := fmt.Sprint(size, got.frames[i].Truncated); got != want {
			t.Errorf("display %d: %s instead of %s", i, got, want)
		}
	}
}

func TestNodeUncaught(t *testing.T) {
	r := startNode(t)
	got := r.run("setTimeout(() => { throw new Error('late') }, 0); Promise.reject(new Error('rejected'))\n" +
		"await new Promise((r) => setTimeout(r, 20)); 1")
	if got.String() != "stderr "+fmt.Sprintf("%q", got.stderr)+"\nresult 1" ||
		!strings.Contains(got.stderr, "Uncaught Error: late") ||
		!strings.Contains(got.stderr, "Uncaught Error: rejected") || strings.Contains(got.stderr, "node.mjs") {
		t.Error(got)
	}
}

func TestNodeHostile(t *testing.T) {
	runTable(t, startNode, []cell{
		{
			"process.stdout.write('\\x1b_" + nonce[1:] + ";0;{}\\x1b\\\\'); 0",
			`stdout "\x1b_` + nonce[1:] + `;0;{}\x1b\\"` + "\nresult 0",
		},
		{"console.log = console.error = () => {}; JSON.stringify = JSON.parse = () => 'x'; 1", "result 1"},
		{"process = Buffer = undefined; Promise.prototype.then = () => {}; 1", "result 1"},
		{"var fs = require('fs'); fs.writeSync = () => { throw 1 }; 1", "result 1"},
		{"fs.mkdirSync('gone'); require('process').chdir('gone'); fs.rmdirSync('../gone')", ""},
		{"1", "result 1"},
		{"for (const fd of [0, 1, 2]) fs.closeSync(fd)", ""},
		{"2", "result 2"},
	})
	r := startNode(t)
	got := r.run("for (let i = 0; i < 100; i++) process.stdout.write('x'.repeat(1e6)); console.error('done')")
	if len(got.stdout) != 100_000_000 || got.stderr != "done\n" {
		t.Errorf("%d bytes, stderr %q", len(got.stdout), got.stderr)
	}
}

func TestNodeInterrupt(t *testing.T) {
	r := startNode(t)
	r.run("var ticks = 0; setInterval(() => ticks++, 1)")
	// Node loses a signal that arrives while a script returns. So cells that wait report from a timer.
	later := "setTimeout(() => console.log('started'), 1); "
	for _, code := range []string{
		"console.log('started'); while (true) {}", later + "await new Promise(() => {})",
		later + "new Promise(() => {})",
	} {
		r.send("const kept = 1; " + code)
		r.waitFor("started\n")
		r.interrupt()
		if got := r.wait().String(); got != "error Interrupted: \nstatus interrupted" {
			t.Errorf("%s: %s", code, got)
		}
		if got := r.run("ticks = 0; while (ticks === 0) await new Promise(setImmediate); kept").String(); got != "result 1" {
			t.Error(got)
		}
	}
	r.interrupt()
	if got := r.run("'idle'").String(); got != "result 'idle'" {
		t.Error(got)
	}
}

func TestNodeEnvOfOneRun(t *testing.T) {
	r := startNode(t)
	r.run("process.env.B = 'before'")
	if got := r.run("`${process.env.A} ${process.env.B}`", "A=1 é", "B=2").String(); got != "result '1 é 2'" {
		t.Error(got)
	}
	got := r.run("`${process.env.A} ${process.env.B} ${process.env.BULLPEN_CELL}`").String()
	if got != "result 'undefined before undefined'" {
		t.Error(got)
	}
}

func TestNodeEndFrame(t *testing.T) {
	r := startNode(t)
	check(t, os.WriteFile(filepath.Join(r.cmd.Dir, "before"), []byte("1"), 0o600))
	end := r.run("const fs = require('fs'); fs.writeFileSync('a é\\n', '123')\n" +
		"fs.writeFileSync('.hidden', ''); fs.mkdirSync('d')\n" +
		"fs.appendFileSync('before', '2')").end
	if fmt.Sprint(end.Files) != "[{a é\n 3} {before 2}]" || end.Count != 1 || end.Memory <= 0 || end.Memory > 1<<30 {
		t.Errorf("%+v", end)
	}
	end = r.run("for (let i = 0; i < 150; i++) fs.writeFileSync('n' + i, '')").end
	if len(end.Files) != 100 || end.Count != 2 {
		t.Errorf("%+v", end)
	}
	if end := r.run("1").end; len(end.Files) != 0 || end.Count != 3 {
		t.Errorf("%+v", end)
	}
}

func TestNodeEnds(t *testing.T) {
	r := startNode(t)
	r.run("process.on('exit', () => console.log('handler')); setInterval(() => {}, 1000)")
	if stdout, _, code := r.exit(); stdout != "handler\n" || code != 0 {
		t.Errorf("%q %d", stdout, code)
	}
	r = startNode(t)
	if got := r.run("console.log('out'); process.exit(3)").String(); got != "stdout \"out\\n\"\nended" {
		t.Error(got)
	}
	if _, _, code := r.exit(); code != 3 {
		t.Error(code)
	}
}

// TypeScript runs where Node can strip types, and is refused elsewhere.
func TestTypeScript(t *testing.T) {
	command := nodeCommand(t, "--typescript")
	version, err := exec.Command("node", "-p",
		"[process.versions.node, typeof require('module').stripTypeScriptTypes]").Output()
	check(t, err)
	if !strings.Contains(string(version), "function") {
		cmd := exec.Command(command[0], command[1:]...)
		out, _ := cmd.CombinedOutput()
		running, err := exec.Command("node", "-p", "process.versions.node").Output()
		check(t, err)
		want := "TypeScript needs Node 22.13 or newer; this is " + string(running)
		if string(out) != want || cmd.ProcessState.ExitCode() != 64 {
			t.Errorf("%d %q", cmd.ProcessState.ExitCode(), out)
		}
		return
	}
	start := func(t *testing.T) *started { return startProcess(t, encodeJSON, command...) }
	runTable(t, start, []cell{
		{"interface P { x: number }\nconst p: P = { x: 1 } satisfies P\np.x as number", "result 1"},
		{"const p: string = 'again'\np!", "result 'again'"},
		{"type T = string; const f = async <A,>(a: A): Promise<A> => a\nawait f<number>(3)", "result 3"},
		{"import { type Stats, statSync } from 'node:fs'\ntypeof statSync", "result 'function'"},
		{"enum Color { Red = 3 }\nColor.Red", "result 3"},
		{"class C { private y = 2; get(): number { return this.y } }\nnew C().get()", "result 2"},
	})
	r := start(t)
	if got := r.run("const x: number = ;"); len(got.frames) != 1 || got.frames[0].Name != "SyntaxError" {
		t.Error(got)
	}
}
