package proto

import (
	"fmt"
	"maps"
	"regexp"
	"strings"
)

const matrixReference = "${{"

var matrixPattern = regexp.MustCompile(`\$\{\{\s*matrix\.([^}\s]*)\s*\}\}`)

// MatrixError is an error in a reference to a value of a matrix.
type MatrixError struct {
	Offset int // of the reference in the text, in bytes
	Reason string
}

func (e *MatrixError) Error() string { return e.Reason }

// ExpandMatrix replaces ${{ matrix.KEY }} in a text by the values of a cell. If strict, the text
// must contain no other ${{. Its error is a [*MatrixError].
func ExpandMatrix(text string, values map[string]string, strict bool) (string, error) {
	var out strings.Builder
	end := 0
	check := func(until int) error {
		at := strings.Index(text[end:until], matrixReference)
		if !strict || at < 0 {
			return nil
		}
		return &MatrixError{end + at, matrixReference + " must be of the form ${{ matrix.KEY }}"}
	}
	for _, found := range matrixPattern.FindAllStringSubmatchIndex(text, -1) {
		if err := check(found[0]); err != nil {
			return "", err
		}
		key := text[found[2]:found[3]]
		value, ok := values[key]
		if !ok {
			return "", &MatrixError{found[0], fmt.Sprintf("the matrix of this step has no key %q", Shorten(key))}
		}
		out.WriteString(text[end:found[0]] + value)
		end = found[1]
	}
	if err := check(len(text)); err != nil {
		return "", err
	}
	out.WriteString(text[end:])
	return out.String(), nil
}

// CellCode returns the program of a cell. Matrix values contain no character that is special to a
// shell, to another language or inside a quoted string.
func (s *PipelineStep) CellCode(cell int) (string, error) {
	return ExpandMatrix(s.Code, s.Cells[cell].Values, s.Language == Bash)
}

// CellEnv returns the variables of a cell that the step sets itself.
func (s *PipelineStep) CellEnv(cell int) (map[string]string, error) {
	env := maps.Clone(s.Env)
	for name, value := range env {
		var err error
		if env[name], err = ExpandMatrix(value, s.Cells[cell].Values, true); err != nil {
			return nil, err
		}
	}
	return env, nil
}
