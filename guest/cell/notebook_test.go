package cell_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// notebookCells is how many cells testdata/notebook.py has.
const notebookCells = 60

// notebookPackages are what the notebook is run with on both sides.
var notebookPackages = []string{
	"nbconvert==7.17.2", "ipykernel==6.31.0", "ipython==8.37.0", "matplotlib==3.11.2", "numpy==2.4.6", "pandas==3.1.1",
}

// notebookCell is a cell, and the reason why it does something else here than in Jupyter, if it does.
type notebookCell struct {
	code, differs string
}

// notebookDisplay is something to look at: a value or a display.
type notebookDisplay struct {
	Result bool
	Data   map[string]any
}

// notebookOutput is what a cell does.
type notebookOutput struct {
	Stdout, Stderr string
	Displays       []notebookDisplay
	Errors         []string // name, value and traceback
}

// TestNotebook executes a notebook with nbconvert and in a context, with the same interpreter. Each cell does the
// same, except for those that are marked with a reason.
func TestNotebook(t *testing.T) {
	if testing.Short() {
		t.Skip("it installs packages")
	}
	venv := filepath.Join(t.TempDir(), "venv")
	command(t, "", "python3", "-m", "venv", venv)
	interpreter := filepath.Join(venv, "bin", "python")
	command(t, "", interpreter, append([]string{"-m", "pip", "install", "--quiet"}, notebookPackages...)...)
	cells := readNotebook(t)
	want := jupyterOutputs(t, interpreter, cells)

	r := startRunner(t, []string{interpreter})
	for i, c := range cells {
		got := outputOf(r.run(c.code))
		equal := reflect.DeepEqual(got, want[i])
		switch {
		case equal && c.differs != "":
			t.Errorf("cell %d does the same as in Jupyter, and is marked: %s\n%s", i+1, c.differs, c.code)
		case !equal && c.differs == "":
			t.Errorf("cell %d:\n%s\ngot  %.4000s\nwant %.4000s", i+1, c.code, dump(got), dump(want[i]))
		case !equal:
			t.Logf("cell %d differs: %s", i+1, c.differs)
		}
	}
}

func dump(o notebookOutput) []byte {
	text, _ := json.Marshal(o) // strings and values of JSON
	return text
}

func command(t *testing.T, dir, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}

// readNotebook returns the cells of the notebook. Each begins with a line "# %%", with the reason after "differs:".
func readNotebook(t *testing.T) []notebookCell {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "notebook.py"))
	if err != nil {
		t.Fatal(err)
	}
	var cells []notebookCell
	for part := range strings.SplitSeq("\n"+string(text), "\n# %%") {
		title, code, ok := strings.Cut(part, "\n")
		if ok && part != "" {
			cells = append(cells, notebookCell{strings.TrimSuffix(code, "\n"), strings.TrimPrefix(title, " differs: ")})
		}
	}
	if len(cells) != notebookCells {
		t.Fatalf("the notebook has %d cells", len(cells))
	}
	return cells
}

// jupyterOutputs returns what cells do in Jupyter.
func jupyterOutputs(t *testing.T, interpreter string, cells []notebookCell) []notebookOutput {
	t.Helper()
	type output struct {
		Kind      string         `json:"output_type"`
		Stream    string         `json:"name"`
		Text      lines          `json:"text"`
		Data      map[string]any `json:"data"`
		Name      string         `json:"ename"`
		Value     string         `json:"evalue"`
		Traceback []string       `json:"traceback"`
	}
	type cell struct {
		Kind     string         `json:"cell_type"`
		Source   string         `json:"source"`
		Metadata map[string]any `json:"metadata"`
		Outputs  []output       `json:"outputs"`
		Count    *int           `json:"execution_count"`
	}
	var notebook struct {
		Format   int            `json:"nbformat"`
		Minor    int            `json:"nbformat_minor"`
		Metadata map[string]any `json:"metadata"`
		Cells    []cell         `json:"cells"`
	}
	notebook.Format, notebook.Metadata = 4, map[string]any{}
	for _, c := range cells {
		notebook.Cells = append(notebook.Cells, cell{
			Kind: "code", Source: c.code, Metadata: map[string]any{}, Outputs: []output{},
		})
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "notebook.ipynb")
	text, err := json.Marshal(notebook)
	if err == nil {
		err = os.WriteFile(file, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	command(t, dir, interpreter, "-m", "nbconvert", "--to", "notebook", "--execute", "--allow-errors", "--inplace", file)
	var executed struct {
		Cells []struct {
			Outputs []output `json:"outputs"`
		} `json:"cells"`
	}
	if text, err = os.ReadFile(file); err == nil {
		err = json.Unmarshal(text, &executed)
	}
	if err != nil {
		t.Fatal(err)
	}
	var all []notebookOutput
	for _, c := range executed.Cells {
		var o notebookOutput
		for _, out := range c.Outputs {
			switch {
			case out.Kind == "stream" && out.Stream == "stdout":
				o.Stdout += string(out.Text)
			case out.Kind == "stream":
				o.Stderr += string(out.Text)
			case out.Kind == "error":
				o.Errors = append(o.Errors, stable(out.Name), stable(out.Value),
					stable(strings.Join(out.Traceback, "\n")))
			default:
				o.Displays = append(o.Displays, notebookDisplay{out.Kind == "execute_result", stableData(out.Data)})
			}
		}
		o.Stdout, o.Stderr = stable(o.Stdout), stable(o.Stderr)
		all = append(all, o)
	}
	return all
}

// lines is a text that is stored as lines.
type lines string

func (l *lines) UnmarshalJSON(data []byte) error {
	var parts []string
	if err := json.Unmarshal(data, &parts); err != nil {
		return err
	}
	*l = lines(strings.Join(parts, ""))
	return nil
}

// outputOf returns what a cell did in a context.
func outputOf(o outcome) notebookOutput {
	out := notebookOutput{Stdout: stable(o.stdout), Stderr: stable(o.stderr)}
	for _, f := range o.frames {
		switch f.Type {
		case "display":
			out.Displays = append(out.Displays, notebookDisplay{f.Result, stableData(f.Data)})
		case "error":
			out.Errors = append(out.Errors, f.Name, stable(f.Value), stable(strings.Join(f.Traceback, "\n")))
		}
	}
	return out
}

var (
	colours = regexp.MustCompile("\x1b\\[[0-9;]*m")
	// varying is what differs from run to run: addresses, times and the names of cells.
	varying = regexp.MustCompile(`0x[0-9a-f]+|[0-9][0-9.e+]* [nµμm]?s\b|` +
		`<ipython-input[^>]*>|(/tmp/ipykernel_\d+/)?\d{6,}\.py`)
)

// stable returns a text without what varies.
func stable(text string) string {
	return strings.TrimRight(varying.ReplaceAllString(colours.ReplaceAllString(text, ""), "…"), "\n")
}

// stableData returns data with texts without what varies, and pictures as their types alone.
func stableData(data map[string]any) map[string]any {
	for kind, value := range data {
		if parts, ok := value.([]any); ok && !strings.HasSuffix(kind, "json") { // a text that is stored as lines
			text := ""
			for _, p := range parts {
				part, _ := p.(string)
				text += part
			}
			value = text
		}
		text, isText := value.(string)
		switch {
		case strings.HasPrefix(kind, "image/"):
			data[kind] = "a picture"
		case isText:
			data[kind] = stable(text)
		}
	}
	return data
}
