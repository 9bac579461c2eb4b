package spec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/bullpen-run/bullpen/proto"
)

const whole = `
name: build and test
timeout: 30m
env: {LEVEL: 3, EMPTY: ""}
steps:
  - name: build
    run: |
      # a comment
      make
    cache: {key: deps, paths: [.cache]}
  - name: test
    language: python
    code: print(1)
    matrix:
      python: ["3.10", 3.11]
      os: [a, b]
    profile: py-${{ matrix.python }}
    timeout: 90
    kill_grace: 10s
    env:
      DEBUG: true
    secrets: [TOKEN]
    artifacts:
      report: [out/*.xml, "dist/"]
  - name: report
    needs: [test, build]
    when: always
    workspace: own
    run: echo done
`

func TestParse(t *testing.T) {
	p, err := Parse(whole)
	if err != nil {
		t.Fatal(err)
	}
	cell := func(python, os string) proto.MatrixCell {
		return proto.MatrixCell{
			Name: "python=" + python + ",os=" + os, Values: map[string]string{"python": python, "os": os},
			Profile: "py-" + python,
		}
	}
	want := &proto.Pipeline{
		Name: "build and test", Timeout: proto.Seconds(30 * time.Minute), Env: map[string]string{"LEVEL": "3", "EMPTY": ""},
		Steps: []proto.PipelineStep{
			{
				Name: "build", Language: proto.Bash, Code: "set -eo pipefail; # a comment\nmake\n", When: proto.WhenSuccess,
				Timeout: 600,
				Cache:   []string{".cache"}, Cells: []proto.MatrixCell{{CacheKey: "deps"}}, Line: 6, ProfileLine: 6,
			},
			{
				Name: "test", Language: proto.Python, Code: "print(1)", Needs: []string{"build"}, When: proto.WhenSuccess,
				Timeout: 90, Own: true,
				KillGrace: new(proto.Seconds(10 * time.Second)),
				Env:       map[string]string{"DEBUG": "true"}, Secrets: []string{"TOKEN"}, Artifacts: map[string][]string{
					"report": {"out/*.xml", "dist"},
				},
				Cells: []proto.MatrixCell{cell("3.10", "a"), cell("3.10", "b"), cell("3.11", "a"), cell("3.11", "b")},
				Line:  11, ProfileLine: 17,
			},
			{
				Name: "report", Language: proto.Bash, Code: "set -eo pipefail; echo done", Needs: []string{"test", "build"},
				When: proto.WhenAlways, Timeout: 600,
				Own: true, Cells: []proto.MatrixCell{{}}, Line: 25, ProfileLine: 25,
			},
		},
	}
	if diff := cmp.Diff(want, p); diff != "" {
		t.Errorf("want - got:\n%s", diff)
	}
}

// One byte order mark at the beginning is left out.
func TestByteOrderMark(t *testing.T) {
	want, err := Parse(whole)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse("\ufeff" + whole)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v, want - got:\n%s", err, diff)
	}
	if _, err := Parse("\ufeff\ufeff" + whole); err == nil {
		t.Error("two marks are accepted")
	}
}

// A program and its variables have the values of the matrix.
func TestMatrixReferences(t *testing.T) {
	p, err := Parse(`
steps:
  - name: a
    matrix: {v: ["3.11", "3.12"], os: [x]}
    run: echo ${{ matrix.v }} ${{matrix.os}} ${v} $((1)) {{ x }}
    env: {A: "v-${{ matrix.v }}", B: plain}
  - name: b
    matrix: {v: [1]}
    language: node
    code: |
      console.log(` + "`${{a: 1}.a} ${{ matrix.v }}`" + `)
`)
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range []string{"3.11", "3.12"} {
		code, errCode := p.Steps[0].CellCode(i)
		env, errEnv := p.Steps[0].CellEnv(i)
		if code != "set -eo pipefail; echo "+v+" x ${v} $((1)) {{ x }}" || env["A"] != "v-"+v || env["B"] != "plain" ||
			errCode != nil || errEnv != nil {
			t.Errorf("%q, %v, %v, %v", code, env, errCode, errEnv)
		}
	}
	if code, err := p.Steps[1].CellCode(0); code != "console.log(`${{a: 1}.a} 1`)\n" || err != nil {
		t.Errorf("%q, %v", code, err)
	}
}

func TestInvalid(t *testing.T) {
	step := func(fields string) string { return "steps:\n  - name: a\n    run: x\n" + fields }
	many := func(n int) string {
		text := "steps:\n"
		for i := range n {
			text += fmt.Sprintf("  - {name: s%d, run: x}\n", i)
		}
		return text
	}
	for file, want := range map[string]string{
		"":                              "between 1 and",
		"steps: []":                     "line 1: steps must be a list of 1 to 64",
		"steps: {a: b}":                 "line 1: steps must be a list",
		"- a":                           "line 1: the file must be a mapping",
		"a: b: c":                       "line 1: ",
		"name: x\nstep: []":             `line 2: the file has no field "step"`,
		"name: x\nname: y\nsteps: []":   "line 2: ",
		"steps:\n  - {name: A, run: x}": "line 2: a step must have a name",
		"steps:\n  - {run: x}":          "line 2: a step must have a name",
		"steps:\n  - {name: a}":         "step a must have run",
		"steps:\n  - {name: a, run: x, language: bash}":        "has run, which is for bash",
		"steps:\n  - {name: a, code: x}":                       "needs a language",
		"steps:\n  - {name: a, code: x, language: cobol}":      `there is no language "cobol"`,
		"steps:\n  - {name: a, run: x}\n  - {name: a, run: x}": "line 3: there is another step a in line 2",
		step("    image: x\n"):                                 `line 4: a step has no field "image"`,
		step("    when: always\n    needs: [b]\n"):             `line 5: step a needs "b", and there is no step of that name`,
		step("    needs: [a]\n"):                               "circle: a needs a",
		step("    needs: c\n  - {name: b, run: x, needs: []}\n  - {name: c, run: x, needs: [b, a]}"): "line 2: steps need " +
			"each other in a circle: a needs c needs a",
		step("    when: never\n"):   "line 4: when must be",
		step("    timeout: 0\n"):    "line 4: timeout must be",
		step("    timeout: 1.5s\n"): "line 4: timeout must be",
		step("    kill_grace: 31\n"): "line 4: kill_grace must be a whole number " +
			"of seconds, such as 90 or 10m, up to 30s",
		step("    kill_grace: 0\n"):                                          "line 4: kill_grace must be",
		step("    timeout: 7h\n"):                                            "line 4: timeout must be",
		step("    workspace: mine\n"):                                        "line 4: workspace must be",
		step("    env: {path: x}\n"):                                         "line 4: env names must be",
		step("    env: {PATH: x}\n"):                                         "line 4: env must not set a reserved name",
		step("    env: {A: [1]}\n"):                                          "line 4: A must be a text",
		step("    secrets: [a]\n"):                                           "line 4: secrets names must be",
		step("    matrix: {}\n"):                                             "line 4: matrix must have keys",
		step("    matrix: {A: [1]}\n"):                                       "line 4: keys of a matrix",
		step("    matrix: {a: [1, 1]}\n"):                                    `matrix.a has "1" twice`,
		step("    matrix: {a: [../x]}\n"):                                    "values of a matrix",
		step("    matrix: {a: [1,2,3,4,5,6,7,8,9], b: [1,2,3,4,5,6,7,8]}\n"): "1 to 64 cells",
		step("    matrix: {a: [1]}\n    profile: ${{ matrix.b }}\n"): `line 5: the matrix of this step has ` +
			`no key "b"`,
		step("    env: {A: '${{ matrix.b }}'}\n"): `line 4: A: the matrix of this step has ` +
			`no key "b"`,
		step("    env:\n      A: x\n      B: ${{ secrets.T }}\n"): "line 6: " +
			"B: ${{ must be of the form",
		"steps:\n  - name: a\n    run: |\n      x\n\n      echo ${{ matrix.b }}\n    matrix: {a: [1]}\n": `line 6: ` +
			`run: the matrix of this step has no key "b"`,
		"steps:\n  - name: a\n    run: echo ${{ github.sha }}\n": "line 3: " +
			"run: ${{ must be of the form",
		"steps:\n  - name: a\n    language: python\n    code: |\n      ${{ matrix.b }}\n": `line 5: ` +
			`code: the matrix of this step has no key "b"`,
		"name: x\nenv: {A: '${{ matrix.a }}'}\nsteps: []": "line 2: env: A " +
			"has ${{, which only the env of a step",
		step("     needs: b\n"):                      "line 4: continues the text of line 3",
		"name: x\n  y: z\nsteps: []":                 "line 2: continues the text of line 1",
		step("    env:\n      A: b\n     C: d\n"):    "line 6: ",
		step("    artifacts: {r: ['a**']}\n"):        "** must be a whole component",
		step("    profile: ${{ env.X }}\n"):          "must be of the form",
		step("    artifacts: {r: [../x]}\n"):         "must be a path below the workspace",
		step("    artifacts: {r: [/etc]}\n"):         "must be a path below the workspace",
		step("    artifacts: {r: ['[']}\n"):          "not a valid pattern",
		step("    cache: {key: x}\n"):                "cache must have a key and paths",
		step("    cache: {key: a/b, paths: x}\n"):    "the key of a cache",
		step("    env: &a {B: c}\n"):                 "line 4: anchors and aliases",
		step("    env: !!map {B: c}\n"):              "line 4: ",
		"steps: " + strings.Repeat("[", 1000):        "line 1: is nested too deeply",
		strings.Repeat("- ", 1000):                   "line 1: is nested too deeply",
		many(65):                                     "1 to 64 steps",
		strings.Repeat("a: 1\n", 3000):               "must have at most 8000",
		"name: \xff":                                 "must be UTF-8",
		strings.Repeat("#", proto.MaxPipelineFile+1): "must be between 1 and",
	} {
		_, err := Parse(file)
		field, ok := errors.AsType[*proto.FieldError](err)
		if !ok || field.Field != "file" || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %v; want %q", file, err, want)
		}
	}
	if _, err := Parse(many(64)); err != nil {
		t.Error(err)
	}
}

// The schema names the fields that the parser knows.
func TestSchema(t *testing.T) {
	type object struct {
		Properties map[string]json.RawMessage
	}
	var schema struct {
		object
		Defs struct{ Step object } `json:"$defs"`
	}
	if err := json.Unmarshal(Schema, &schema); err != nil {
		t.Fatal(err)
	}
	for file, have := range map[string]object{"x: 1": schema.object, "steps: [{x: 1}]": schema.Defs.Step} {
		_, err := Parse(file)
		_, names, _ := strings.Cut(fmt.Sprint(err), "it may have ")
		want := strings.Split(names, ", ")
		slices.Sort(want)
		if got := slices.Sorted(maps.Keys(have.Properties)); !slices.Equal(got, want) {
			t.Errorf("the schema has %q, the parser %q", got, want)
		}
	}
}

// The schema accepts the files that the parser accepts, and finds plain mistakes.
func TestSchemaValidates(t *testing.T) {
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("pipeline.json", document); err != nil {
		t.Fatal(err)
	}
	schema, err := c.Compile("pipeline.json")
	if err != nil {
		t.Fatal(err)
	}
	validate := func(file string) error {
		t.Helper()
		var value any
		if err := yaml.Unmarshal([]byte(file), &value); err != nil {
			t.Fatal(err)
		}
		return schema.Validate(value)
	}
	valid := map[string]string{"whole": whole}
	for _, name := range []string{"python", "matrix"} {
		text, err := os.ReadFile("../../../examples/" + name + "/ci.yaml")
		if err != nil {
			t.Fatal(err)
		}
		valid[name] = string(text)
	}
	for name, file := range valid {
		if _, err := Parse(file); err != nil {
			t.Errorf("%s: parser: %v", name, err)
		}
		if err := validate(file); err != nil {
			t.Errorf("%s: schema: %v", name, err)
		}
	}
	for _, file := range []string{
		"steps: []", "steps: {a: b}", "name: x", "steps:\n  - {name: A, run: x}", "steps:\n  - {name: a}",
		"steps:\n  - {name: a, code: x}",
		"steps:\n  - {name: a, run: x, when: never}", "steps:\n  - {name: a, run: x, timeout: soon}",
		"steps:\n  - {name: a, run: x, env: {path: x}}",
		"steps:\n  - {name: a, run: x, matrix: {}}", "steps:\n  - {name: a, run: x, cache: {key: x}}",
	} {
		if _, err := Parse(file); err == nil {
			t.Errorf("%s: the parser accepts it", file)
		}
		if err := validate(file); err == nil {
			t.Errorf("%s: the schema accepts it", file)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(whole)
	f.Add("steps: [{name: a, run: x, matrix: {a: [1, 2]}}]")
	f.Fuzz(func(t *testing.T, file string) {
		p, err := Parse(file)
		if _, ok := errors.AsType[*proto.FieldError](err); err != nil && !ok {
			t.Error(err)
		}
		if err == nil && (len(p.Steps) == 0 || len(p.Steps[0].Cells) == 0) {
			t.Errorf("%+v", p)
		}
	})
}
