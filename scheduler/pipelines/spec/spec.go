// Package spec reads the files of pipelines. It checks all that can be known from the file alone:
// unknown fields and names, cycles, and limits. Errors name the line.
package spec

import (
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	defaultTimeout     = time.Hour
	defaultStepTimeout = 10 * time.Minute
	maxNameLen         = 128 // characters, of a pipeline
	maxArtifacts       = 16  // of a step
	maxPaths           = 32  // of an artifact or cache
	maxCacheKeyLen     = 64
	maxCellNameLen     = 200
)

var (
	namePattern     = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,39}$`)
	keyPattern      = regexp.MustCompile(`^[a-z][a-z0-9_]{0,39}$`)
	cacheKeyPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)
	valuePattern    = regexp.MustCompile(`^[A-Za-z0-9._+:@-]{1,64}$`)
)

// Schema is the JSON schema of the files.
//
//go:embed schema.json
var Schema []byte

// Parse reads the file of a pipeline. It sets the fields that follow from the file. Errors are
// [*proto.FieldError] with the line.
func Parse(file string) (*proto.Pipeline, error) {
	if file == "" || len(file) > proto.MaxPipelineFile {
		return nil, proto.FieldErrorf("file", "must be between 1 and %d bytes", proto.MaxPipelineFile)
	}
	if !utf8.ValidString(file) || strings.Contains(file, "\x00") {
		return nil, proto.FieldErrorf("file", "must be UTF-8 without NUL")
	}
	o, err := parse(strings.TrimPrefix(file, "\ufeff"))
	if err != nil {
		return nil, err
	}
	if err := o.known("name", "timeout", "env", "steps"); err != nil {
		return nil, err
	}
	p := new(proto.Pipeline)
	var line int
	if p.Name, line, err = o.text("name"); err != nil {
		return nil, err
	}
	if utf8.RuneCountInString(p.Name) > maxNameLen ||
		strings.ContainsFunc(p.Name, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return nil, lineErrorf(line, "name must be at most %d characters without control characters", maxNameLen)
	}
	timeout, err := o.duration("timeout", defaultTimeout, proto.MaxPipelineTime)
	if err != nil {
		return nil, err
	}
	p.Timeout = proto.Seconds(timeout)
	if p.Env, err = environment(o); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(p.Env)) {
		if strings.Contains(p.Env[name], "${{") {
			f, _ := o.get("env")
			return nil, lineErrorf(f.line, "env: %s has ${{, which only the env of a step may have", name)
		}
	}
	return p, readSteps(o, p)
}

// readSteps reads all steps, and checks them together.
func readSteps(o *object, p *proto.Pipeline) error {
	f, ok := o.get("steps")
	list, err := elements(f)
	if err != nil {
		return err
	}
	if !ok || len(list) == 0 || len(list) > proto.MaxPipelineSteps {
		return lineErrorf(f.line, "steps must be a list of 1 to %d steps", proto.MaxPipelineSteps)
	}
	lines, needLines := map[string]int{}, map[string]int{}
	cells := 0
	for _, node := range list {
		o, err := asObject("a step", node)
		if err != nil {
			return err
		}
		previous := ""
		if len(p.Steps) > 0 {
			previous = p.Steps[len(p.Steps)-1].Name
		}
		step, err := readStep(o, previous)
		if err != nil {
			return err
		}
		if _, twice := lines[step.Name]; twice {
			return lineErrorf(o.line, "there is another step %s in line %d", step.Name, lines[step.Name])
		}
		lines[step.Name] = o.line
		f, _ := o.get("needs")
		needLines[step.Name] = f.line
		if cells += len(step.Cells); cells > proto.MaxPipelineCells {
			return lineErrorf(o.line, "a pipeline has at most %d cells, a step without a matrix being one",
				proto.MaxPipelineCells)
		}
		p.Steps = append(p.Steps, *step)
	}
	for i := range p.Steps {
		for _, need := range p.Steps[i].Needs {
			if _, ok := lines[need]; !ok {
				return lineErrorf(needLines[p.Steps[i].Name], "step %s needs %q, and there is no step of that name",
					p.Steps[i].Name, proto.Shorten(need))
			}
		}
	}
	if cycle := findCycle(p.Steps); cycle != nil {
		return lineErrorf(lines[cycle[0]], "steps need each other in a circle: %s", strings.Join(cycle, " needs "))
	}
	return nil
}

// readStep reads a step. previous is the name of the preceding step, on which it depends by
// default.
func readStep(o *object, previous string) (*proto.PipelineStep, error) {
	err := o.known("name", "run", "language", "code", "needs", "matrix", "profile", "timeout", "kill_grace", "when",
		"workspace", "env", "secrets", "artifacts", "cache")
	if err != nil {
		return nil, err
	}
	step := new(proto.PipelineStep)
	var line int
	if step.Name, line, err = o.text("name"); err != nil {
		return nil, err
	}
	if !namePattern.MatchString(step.Name) {
		return nil, lineErrorf(line,
			"a step must have a name of 1 to 40 characters of a-z, 0-9, _ and -, the first a letter or digit")
	}
	o.what = "step " + step.Name
	if err := readProgram(o, step); err != nil {
		return nil, err
	}
	if step.Needs, line, err = o.list("needs"); err != nil {
		return nil, err
	}
	if step.Needs == nil && previous != "" {
		step.Needs = []string{previous}
	}
	if len(step.Needs) > proto.MaxPipelineSteps {
		return nil, lineErrorf(line, "needs must be at most %d names", proto.MaxPipelineSteps)
	}
	if err := readConditions(o, step); err != nil {
		return nil, err
	}
	if step.Env, err = environment(o); err != nil {
		return nil, err
	}
	if step.Secrets, line, err = o.list("secrets"); err != nil {
		return nil, err
	}
	for _, name := range step.Secrets {
		if err := proto.CheckEnv("secrets", name, ""); err != nil {
			return nil, lineErrorf(line, "%v", err)
		}
	}
	if err := readArtifacts(o, step); err != nil {
		return nil, err
	}
	if err := readMatrix(o, step); err != nil {
		return nil, err
	}
	return step, checkReferences(o, step)
}

// readProgram reads what a step runs.
func readProgram(o *object, step *proto.PipelineStep) error {
	run, line, err := o.text("run")
	if err != nil {
		return err
	}
	code, _, err := o.text("code")
	if err != nil {
		return err
	}
	language, languageLine, err := o.text("language")
	if err != nil {
		return err
	}
	switch {
	case (run == "") == (code == ""):
		return lineErrorf(o.line, "%s must have run, a script for bash, or language and code", o.what)
	case run != "" && language != "":
		return lineErrorf(languageLine, "%s has run, which is for bash; with language, write code", o.what)
	case code != "" && language == "":
		return lineErrorf(o.line, "%s has code, and needs a language", o.what)
	}
	step.Language, step.Code = proto.Language(language), code
	if run != "" {
		// On the same line, so that bash's messages have the line numbers of the script.
		step.Language, step.Code = proto.Bash, "set -eo pipefail; "+run
	}
	if _, ok := step.Language.Runtime(); !ok {
		return lineErrorf(languageLine, "there is no language %q", proto.Shorten(language))
	}
	if len(step.Code) > proto.MaxCodeBytes {
		return lineErrorf(line, "the program of %s must be at most %d bytes", o.what, proto.MaxCodeBytes)
	}
	return nil
}

// readConditions reads when, how long and where a step runs.
func readConditions(o *object, step *proto.PipelineStep) error {
	when, line, err := o.text("when")
	if err != nil {
		return err
	}
	step.When = proto.WhenSuccess
	if when != "" {
		step.When = proto.StepCondition(when)
	}
	if !slices.Contains([]proto.StepCondition{proto.WhenSuccess, proto.WhenFailure, proto.WhenAlways}, step.When) {
		return lineErrorf(line, "when must be success, failure or always")
	}
	workspace, line, err := o.text("workspace")
	if err != nil {
		return err
	}
	if workspace != "" && workspace != "shared" && workspace != "own" {
		return lineErrorf(line, "workspace must be shared or own")
	}
	if _, matrix := o.get("matrix"); matrix && workspace == "shared" {
		return lineErrorf(line, "the cells of a matrix have workspaces of their own")
	}
	step.Own = workspace == "own"
	timeout, err := o.duration("timeout", defaultStepTimeout, proto.MaxPipelineTime)
	if err != nil {
		return err
	}
	step.Timeout = int(timeout / time.Second)
	grace, err := o.duration("kill_grace", 0, proto.MaxKillGrace)
	if grace > 0 {
		step.KillGrace = new(proto.Seconds(grace))
	}
	return err
}

func readArtifacts(o *object, step *proto.PipelineStep) error {
	f, ok := o.get("artifacts")
	if !ok {
		return nil
	}
	list, err := asObject("artifacts", f.value)
	if err != nil {
		return err
	}
	if len(list.fields) > maxArtifacts {
		return lineErrorf(f.line, "%s has more than %d artifacts", o.what, maxArtifacts)
	}
	step.Artifacts = map[string][]string{}
	for _, a := range list.fields {
		if !namePattern.MatchString(a.name) {
			return lineErrorf(a.line, "names of artifacts must be 1 to 40 characters of a-z, 0-9, _ and -; %q is not",
				proto.Shorten(a.name))
		}
		if step.Artifacts[a.name], err = readPaths("artifact "+a.name, a); err != nil {
			return err
		}
	}
	return nil
}

// readPaths reads a list of paths and patterns in the workspace.
func readPaths(what string, f field) ([]string, error) {
	list, err := texts(what, f.value)
	if err != nil {
		return nil, err
	}
	if len(list) == 0 || len(list) > maxPaths {
		return nil, lineErrorf(f.line, "%s must have 1 to %d paths", what, maxPaths)
	}
	for i, p := range list {
		if list[i], err = proto.CheckPathPattern(p); err != nil {
			return nil, lineErrorf(f.line, "%s: %v", what, err)
		}
	}
	return list, nil
}

// readMatrix makes the cells of a step in the order of the file, the last key changing fastest.
func readMatrix(o *object, step *proto.PipelineStep) error {
	cells := []proto.MatrixCell{{}}
	if f, ok := o.get("matrix"); ok {
		step.Own = true
		matrix, err := asObject("matrix", f.value)
		if err != nil {
			return err
		}
		if len(matrix.fields) == 0 {
			return lineErrorf(f.line, "matrix must have keys with lists of values")
		}
		for _, key := range matrix.fields {
			if !keyPattern.MatchString(key.name) {
				return lineErrorf(key.line,
					"keys of a matrix must be 1 to 40 characters of a-z, 0-9 and _, the first a letter; %q is not",
					proto.Shorten(key.name))
			}
			values, err := texts("matrix."+key.name, key.value)
			if err != nil {
				return err
			}
			if cells, err = multiply(cells, key, values); err != nil {
				return err
			}
		}
	}
	profile, line, err := o.text("profile")
	if err != nil {
		return err
	}
	cacheKey, cacheLine, err := readCache(o, step)
	if err != nil {
		return err
	}
	step.Line, step.ProfileLine = o.line, line
	for i := range cells {
		c := &cells[i]
		if c.Profile, err = fill(line, profile, c.Values); err != nil {
			return err
		}
		if c.CacheKey, err = fill(cacheLine, cacheKey, c.Values); err != nil {
			return err
		}
		if c.CacheKey != "" && (len(c.CacheKey) > maxCacheKeyLen || !cacheKeyPattern.MatchString(c.CacheKey)) {
			return lineErrorf(cacheLine, "the key of a cache must be 1 to %d characters of A-Z, a-z, 0-9, _ and -; %q is not",
				maxCacheKeyLen, proto.Shorten(c.CacheKey))
		}
	}
	step.Cells = cells
	return nil
}

// multiply returns the combinations of cells and the values of a key.
func multiply(cells []proto.MatrixCell, key field, values []string) ([]proto.MatrixCell, error) {
	if len(values) == 0 || len(values)*len(cells) > proto.MaxMatrixCells {
		return nil, lineErrorf(key.line, "a matrix must have 1 to %d cells", proto.MaxMatrixCells)
	}
	var all []proto.MatrixCell
	for _, c := range cells {
		for i, value := range values {
			if !valuePattern.MatchString(value) { // names of cells are names of directories
				return nil, lineErrorf(key.line,
					"values of a matrix must be 1 to 64 characters of A-Z, a-z, 0-9 and . _ + : @ -; %q is not", proto.Shorten(value))
			}
			if slices.Contains(values[:i], value) {
				return nil, lineErrorf(key.line, "matrix.%s has %q twice", key.name, value)
			}
			next := proto.MatrixCell{Name: key.name + "=" + value, Values: maps.Clone(c.Values)}
			if c.Name != "" {
				next.Name = c.Name + "," + next.Name
			}
			if next.Values == nil {
				next.Values = map[string]string{}
			}
			next.Values[key.name] = value
			if len(next.Name) > maxCellNameLen {
				return nil, lineErrorf(key.line, "the keys and values of a cell must be at most %d characters together",
					maxCellNameLen)
			}
			all = append(all, next)
		}
	}
	return all, nil
}

// readCache reads the paths of a step's cache, and returns its key with its line.
func readCache(o *object, step *proto.PipelineStep) (key string, line int, err error) {
	f, ok := o.get("cache")
	if !ok {
		return "", 0, nil
	}
	cache, err := asObject("cache", f.value)
	if err != nil {
		return "", 0, err
	}
	if err := cache.known("key", "paths"); err != nil {
		return "", 0, err
	}
	paths, ok := cache.get("paths")
	if key, line, err = cache.text("key"); err != nil {
		return "", 0, err
	}
	if !ok || key == "" {
		return "", 0, lineErrorf(f.line, "cache must have a key and paths")
	}
	step.Cache, err = readPaths("cache", paths)
	return key, line, err
}

// fill replaces references to the matrix in the value of a field.
func fill(line int, text string, values map[string]string) (string, error) {
	filled, err := proto.ExpandMatrix(text, values, true)
	if err != nil {
		return "", lineErrorf(line, "%v", err)
	}
	return filled, nil
}

// checkReferences refuses references in a step's program and variables to values that its matrix
// lacks.
func checkReferences(o *object, step *proto.PipelineStep) error {
	values := step.Cells[0].Values // all cells have the same keys
	for _, name := range []string{"run", "code"} {
		if f, ok := o.get(name); ok {
			if err := checkReference(f, values, name == "run"); err != nil {
				return err
			}
		}
	}
	f, ok := o.get("env")
	if !ok {
		return nil
	}
	env, err := asObject("env", f.value)
	if err != nil {
		return err
	}
	for _, f := range env.fields {
		if err := checkReference(f, values, true); err != nil {
			return err
		}
	}
	return nil
}

// checkReference checks the references in a field that is a text. Its error names the line of the
// reference.
func checkReference(f field, values map[string]string, strict bool) error {
	value, err := text(f.name, f.value)
	if err != nil {
		return err
	}
	_, err = proto.ExpandMatrix(value, values, strict)
	wrong, ok := errors.AsType[*proto.MatrixError](err)
	if !ok {
		return err
	}
	hint := ""
	if f.name == "run" {
		hint = "; '$''{{' is the text itself in a script"
	}
	return lineErrorf(lineWithin(f.value, value[:wrong.Offset]), "%s: %v%s", f.name, wrong, hint)
}

// environment reads the field env.
func environment(o *object) (map[string]string, error) {
	f, ok := o.get("env")
	if !ok {
		return nil, nil
	}
	list, err := asObject("env", f.value)
	if err != nil {
		return nil, err
	}
	env := map[string]string{}
	for _, v := range list.fields {
		value, err := text(v.name, v.value)
		if err != nil {
			return nil, err
		}
		if err := proto.CheckEnv("env", v.name, value); err != nil {
			return nil, lineErrorf(v.line, "%v", err)
		}
		env[v.name] = value
	}
	if len(env) > proto.MaxEnvVars {
		return nil, lineErrorf(f.line, "env must be at most %d variables", proto.MaxEnvVars)
	}
	return env, nil
}

// findCycle returns the names of steps that need each other, the first one again at the end, or
// nil.
func findCycle(steps []proto.PipelineStep) []string {
	needs := map[string][]string{}
	for i := range steps {
		needs[steps[i].Name] = steps[i].Needs
	}
	done := map[string]bool{}
	var way []string
	var visit func(name string) []string
	visit = func(name string) []string {
		if i := slices.Index(way, name); i >= 0 {
			return append(slices.Clone(way[i:]), name)
		}
		if done[name] {
			return nil
		}
		way = append(way, name)
		for _, need := range needs[name] {
			if cycle := visit(need); cycle != nil {
				return cycle
			}
		}
		way = way[:len(way)-1]
		done[name] = true
		return nil
	}
	for i := range steps {
		if cycle := visit(steps[i].Name); cycle != nil {
			return cycle
		}
	}
	return nil
}

// Label returns the name of a step and its cell, for people.
func Label(step, cell string) string {
	if cell == "" {
		return step
	}
	return fmt.Sprintf("%s (%s)", step, cell)
}
