package cell

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	_ "embed"

	"github.com/bullpen-run/bullpen/guest/mask"
)

// NonceEnv is the environment variable with the nonce of a runner's frames. The runner removes it.
const NonceEnv = "BULLPEN_CELL"

// PreloadEnv is the environment variable with the modules, separated by commas, that a runner with --serve imports
// before it forks contexts.
const PreloadEnv = "BULLPEN_PRELOAD"

// Dir is the directory of the runners in a sandbox.
const Dir = "/run/bullpen/cells"

// PythonRunner is the path of the runner of Python.
const PythonRunner = Dir + "/python.py"

// The runners.
var (
	//go:embed python.py
	pythonRunner []byte
	//go:embed node.mjs
	nodeRunner []byte
	//go:embed bash.sh
	bashRunner []byte
)

// Files returns the runners by their names in [Dir].
func Files() map[string][]byte {
	return map[string][]byte{"python.py": pythonRunner, "node.mjs": nodeRunner, "bash.sh": bashRunner}
}

// Language is a language of contexts.
type Language struct {
	Name    string
	Aliases []string
	// Runtime is the name of the interpreter among a sandbox's languages, and Commands its names in PATH.
	Runtime  string
	Commands []string
	// Runner is the name of the runner in [Dir], and Args are its arguments.
	Runner string
	Args   []string
	// Forks means that one process of the runner, with --serve, forks all contexts.
	Forks bool
	// Insist means that the interpreter may miss a SIGINT, which is therefore soon sent again, until the
	// cell has ended.
	Insist bool
	// Private means that the runner reads requests from descriptor 3, and that 4 and 5 are duplicates of its standard
	// output and error.
	Private bool
	// Shell means that requests are lines of shell instead of JSON, see bash.sh.
	Shell bool
}

// Languages returns all languages of contexts.
func Languages() []Language {
	return []Language{
		{Name: "python", Runtime: "python", Commands: []string{"python3", "python"}, Runner: "python.py", Forks: true},
		{
			Name: "javascript", Aliases: []string{"js"}, Runtime: "node", Commands: []string{"node"}, Runner: "node.mjs",
			Private: true, Insist: true,
		},
		{
			Name: "typescript", Aliases: []string{"ts"}, Runtime: "node", Commands: []string{"node"}, Runner: "node.mjs",
			Args: []string{"--typescript"}, Private: true, Insist: true,
		},
		{Name: "bash", Runtime: "bash", Commands: []string{"bash"}, Runner: "bash.sh", Shell: true, Insist: true},
	}
}

// LanguageOf returns the language with a name or an alias.
func LanguageOf(name string) (Language, bool) {
	all := Languages()
	i := slices.IndexFunc(all, func(l Language) bool { return l.Name == name || slices.Contains(l.Aliases, name) })
	if i < 0 {
		return Language{}, false
	}
	return all[i], true
}

// Request is a request to run a cell.
type Request struct {
	Run  int64             `json:"run"` // its number
	Code string            `json:"code"`
	Env  map[string]string `json:"env,omitempty"` // for this cell only
}

// Encode returns the text of a request.
func (l *Language) Encode(r *Request) []byte {
	if l.Shell {
		return encodeShell(r)
	}
	line, err := json.Marshal(r)
	if err != nil {
		panic(err) // strings and numbers can be encoded
	}
	return append(line, '\n')
}

// encodeShell returns the lines of a request to bash.sh, which describes them.
func encodeShell(r *Request) []byte {
	text := fmt.Appendf(nil, "{ __bullpen_begin %d ", r.Run)
	text = quote(text, r.Code)
	for _, name := range slices.Sorted(maps.Keys(r.Env)) {
		text = quote(append(text, ' '), name+"="+r.Env[name])
	}
	return append(text, "; } 2>/dev/null; \\builtin source /dev/fd/250 250<<<\"$__bullpen_code\" </dev/null; "+
		"{ __bullpen_source_ended $?; } 2>/dev/null\n{ __bullpen_end $?; } 2>/dev/null\n"...)
}

// quote appends a text as a word of bash.
func quote(to []byte, text string) []byte {
	to = append(to, "$'"...)
	for _, c := range []byte(text) {
		if c < ' ' || c > '~' || c == '\'' || c == '\\' {
			to = fmt.Appendf(to, `\x%02x`, c)
		} else {
			to = append(to, c)
		}
	}
	return append(to, '\'')
}

// Fork asks a runner with --serve for a context. It is a message on the Unix socket that is the
// runner's standard input, of type SOCK_SEQPACKET, with three descriptors: the context's standard
// input, output and error.
type Fork struct {
	Nonce string            `json:"nonce"`
	Dir   string            `json:"cwd"`
	Env   map[string]string `json:"env"` // the whole environment
}

// Forked is a message of a runner with --serve.
type Forked struct {
	Ready  bool              `json:"ready"`  // once: it can fork contexts
	Failed map[string]string `json:"failed"` // why modules could not be imported before
	PID    int               `json:"pid"`    // answers a Fork
	Error  string            `json:"error"`  // answers a Fork that failed
	// Exited is the process id of a context that has ended, and Status its wait status.
	Exited int `json:"exited"`
	Status int `json:"status"`
}

// Display is something to look at.
type Display struct {
	// Data is the same thing in several forms, by MIME types: strings, which are base64 for binary types, and any JSON
	// for JSON types.
	Data     map[string]json.RawMessage `json:"data"`
	Metadata json.RawMessage            `json:"metadata,omitempty"`
	Result   bool                       `json:"result,omitempty"`  // the value of the cell's last expression
	Chart    json.RawMessage            `json:"chart,omitempty"`   // of a figure: what it shows
	Columns  json.RawMessage            `json:"columns,omitempty"` // of a data frame: lists of values by column
	// Truncated contains what is missing or incomplete because it was too large: MIME types, chart,
	// columns, or display for everything.
	Truncated []string `json:"truncated,omitempty"`
}

// Mask replaces secrets in the texts of a display. They remain in its pictures.
func (d *Display) Mask(masks *mask.Masks) {
	data := make(map[string]json.RawMessage, len(d.Data))
	for kind, value := range d.Data {
		data[masks.String(kind)] = masks.JSON(value)
	}
	d.Data = data
	for _, value := range []*json.RawMessage{&d.Metadata, &d.Chart, &d.Columns} {
		*value = masks.JSON(*value)
	}
	for i, name := range d.Truncated {
		d.Truncated[i] = masks.String(name)
	}
}

// Failure is why a cell failed.
type Failure struct {
	Name      string   `json:"name"` // such as ZeroDivisionError
	Value     string   `json:"value"`
	Traceback []string `json:"traceback"`
}

// Statuses of a cell that has ended.
const (
	OK          = "ok"
	Failed      = "error"
	Interrupted = "interrupted"
)

// End is the end of a cell.
type End struct {
	Status string `json:"status"`
	Count  int64  `json:"count"` // of the cells that the context has run, with this one
	// Memory is what the context has for itself, in bytes; 0 if it is not known.
	Memory  int64  `json:"memory,omitempty"`
	Files   []File `json:"files,omitempty"`   // that the cell has created or changed in its working directory
	Dropped int    `json:"dropped,omitempty"` // displays beyond the limit
}

// File is a regular file.
type File struct {
	// Path is relative to the directory in which the interpreter has started, or absolute outside of it.
	Path string `json:"path"`
	Size int64  `json:"size"`
}

// Types of frames.
const (
	TypeReady   = "ready"
	TypeDisplay = "display"
	TypeError   = "error"
	TypeEnd     = "end"
)

// Frame is a frame of a runner. Of the pointers at most one is set, by its type.
type Frame struct {
	Type    string
	Run     int64
	Display *Display
	Failure *Failure
	End     *End
	// Version is the interpreter's, and Name that of the program that runs cells. Only ready has them.
	Version, Name string
}

// header is what all frames have.
type header struct {
	Type    string `json:"type"`
	Sync    uint64 `json:"sync"`
	Run     int64  `json:"run"`
	Version string `json:"version"`
	Name    string `json:"name"`
}

// parse returns a frame and its sync. It returns false for what no runner writes.
func parse(text []byte) (f Frame, sync uint64, ok bool) {
	var h header
	if json.Unmarshal(text, &h) != nil {
		return f, 0, false
	}
	f.Type, f.Run = h.Type, h.Run
	var into any
	switch h.Type {
	case "":
		return f, h.Sync, true
	case TypeReady:
		f.Version, f.Name = h.Version, h.Name
		return f, h.Sync, true
	case TypeDisplay:
		f.Display = &Display{}
		into = f.Display
	case TypeError:
		f.Failure = &Failure{}
		into = f.Failure
	case TypeEnd:
		f.End = &End{}
		into = f.End
	default:
		return f, 0, false
	}
	return f, h.Sync, json.Unmarshal(text, into) == nil
}
