package agent

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Host does a run's work with the rights and limits of one request's API key. Its errors are
// [*api.Error], worded for clients, unless a method documents others.
type Host interface {
	// Execute runs a program as execution id, and returns its record. It does not run it again if
	// the execution exists. If ctx is done first, the execution is cancelled, unless the run
	// continues in another process. A timeout of 0 is the longest that the plan allows, up to
	// [MaxTimeout].
	Execute(ctx context.Context, id proto.TraceID, req *api.ExecuteRequest) (*proto.Record, error)
	// Place returns where the programs of a thread run while its live sandbox runs. With cells it returns the Python
	// interpreter there, and starts both if necessary. It returns nil if there is no such sandbox, or if none can be
	// started now: calls are executions then.
	Place(ctx context.Context, thread string, cells bool) (*proto.Place, error)
	// ExecuteAt is Execute at a place of the thread in req. There is no record to find later. The code of its error is
	// [api.CodeContextLost] if the place is gone.
	ExecuteAt(ctx context.Context, at *proto.Place, id proto.TraceID, req *api.ExecuteRequest) (*proto.Record, error)
	// RunCell runs a cell at a place of a thread, and returns its result. It does not run it again if a cell with that
	// id was run there. The code of its error is [api.CodeContextLost] if the place is gone.
	RunCell(ctx context.Context, thread string, at *proto.Place, id proto.TraceID, code string) (*api.CellResult, error)
	// Reserve reserves memory for n bytes of text until the request ends.
	Reserve(n int64) error
	// Thread returns a thread. The code of its error is [api.CodeNotFound] if there is none.
	Thread(ctx context.Context, id string) (*proto.Thread, error)
	// ListFiles calls each for the entries of a directory of a thread's home. An unknown thread has
	// none.
	ListFiles(ctx context.Context, thread, dir string, each func(proto.File) error) error
	// OpenFile opens a file in a thread's home. The code of its error is [api.CodeNotFound] if there
	// is none.
	OpenFile(ctx context.Context, thread, path string) (*proto.FileContent, error)
	// PutFile stores a file in a thread's home, and creates the thread if it does not exist.
	PutFile(ctx context.Context, thread, path string, size int64, body io.Reader) error
	// ReplaceFile is PutFile if the file still has the tag returned by OpenFile, or does not exist
	// for an empty tag. Otherwise the error is a [*proto.FileChangedError].
	ReplaceFile(ctx context.Context, thread, path, tag string, size int64, body io.Reader) error
	// CleanPath returns a path relative to the home, where programs' relative paths begin. The
	// error for a path outside the home is for the model.
	CleanPath(path string) (string, error)

	// Caller returns the organisation and the id of the API key.
	Caller() (org, key string)
	// KeepFiles makes the files of a container expire at a time, if they would much earlier.
	KeepFiles(ctx context.Context, container string, until time.Time) error
	// SaveFile stores a file of the organisation with its content, replacing one with its id.
	SaveFile(ctx context.Context, f *proto.AgentFile, body io.Reader) error
	// File returns a file of the organisation. The code of its error is [api.CodeNotFound] if it
	// does not exist or has expired.
	File(ctx context.Context, id string) (*proto.AgentFile, error)
}

// MaxTimeout is the longest run time of a tool call, in seconds.
const MaxTimeout = 300

// Metadata of executions that are tool calls.
const (
	MetadataRun  = "agent_run"  // the id of the run
	MetadataCall = "agent_call" // the id of the call
)

// outputDir is the directory in the home for files that a Bash call passes to the client. It is
// empty when a call starts.
const outputDir = ".outputs"

// maxOutputFiles is the number of files that a call leaves.
const maxOutputFiles = 100

// Container is where the tool calls of a run are carried out: a thread, which is created by the
// first call.
type Container struct {
	Host Host
	ID   string // of the thread
	Run  string // the id of the run
	Used bool   // a call was carried out or a file stored
	// Expires returns when the container, and the files that its programs pass to the client,
	// expire after a use at a time. It is set unless InPlace is.
	Expires func(used time.Time) time.Time
	// InPlace leaves the files of programs where they are: Output has their paths, and no copies.
	InPlace bool

	executions map[string]int // by call
	place      *proto.Place   // of the call that is carried out; nil if it is an execution
	errPlace   error          // why it has no place
}

// NewContainerID returns the id of a new container with a prefix.
func NewContainerID(prefix string) string { return prefix + strings.ToLower(rand.Text()) }

// Output is the outcome of a program.
type Output struct {
	Record *proto.Record
	Files  []*proto.AgentFile // that it left for the client
	Paths  []string           // of these files, if they are left in place
	Note   string             // why some of these are missing, empty if none are
	// Pictures are what a cell has shown, for models that can see them.
	Pictures []Image
}

// Shortened returns the beginning of an output that is too long for a model, with a note.
func Shortened(text string, truncated bool) string {
	switch {
	case len(text) > api.MaxToolOutput:
		return text[:proto.CutUTF8(text[:api.MaxToolOutput])] + "\n[The rest of the output was cut off.]"
	case truncated:
		return text + "\n[The rest of the output was cut off.]"
	default:
		return text
	}
}

// Python runs a Python program. Files created or changed directly in its home are passed to the
// client.
func (c *Container) Python(ctx context.Context, call, code string) (*Output, error) {
	record, err := c.execute(
		ctx, call, &api.ExecuteRequest{Language: proto.Python, Code: code, Env: map[string]string{"OUTPUT_DIR": "."}})
	if err != nil || record.StartedAt == nil {
		return &Output{Record: record}, err
	}
	// The worker's clock has stamped both the record and the files.
	return c.output(ctx, record, "", *record.StartedAt)
}

// Bash runs a Bash command, with a timeout in seconds; 0 is the longest. The files that it leaves in
// $OUTPUT_DIR are left for the client; with InPlace, those that it changes directly in its home.
func (c *Container) Bash(ctx context.Context, call, command string, timeout int) (*Output, error) {
	// On the first line, so that the line numbers in messages are those of the command.
	const emptyOutputs = `export OUTPUT_DIR="$HOME/` + outputDir + `"; rm -rf -- "$OUTPUT_DIR"; mkdir -- "$OUTPUT_DIR"; `
	if !c.InPlace {
		command = emptyOutputs + command
	}
	record, err := c.execute(ctx, call, &api.ExecuteRequest{Language: proto.Bash, Code: command, Timeout: timeout})
	if err != nil || record.StartedAt == nil {
		return &Output{Record: record}, err
	}
	if c.InPlace {
		return c.output(ctx, record, "", *record.StartedAt)
	}
	return c.output(ctx, record, outputDir, time.Time{})
}

func (c *Container) execute(ctx context.Context, call string, req *api.ExecuteRequest) (*proto.Record, error) {
	c.Used = true
	req.ThreadID, req.MaxAttempts = c.ID, 1
	req.Metadata = map[string]string{MetadataRun: c.Run, MetadataCall: call}
	if err := errors.Join(req.Validate(), c.errPlace); err != nil {
		return nil, err
	}
	id := c.executionID(call)
	if c.place == nil {
		return c.Host.Execute(ctx, id, req)
	}
	record, err := c.Host.ExecuteAt(ctx, c.place, id, req)
	gone, err := lost(err)
	if gone != nil {
		record = gone.Record
	}
	return record, err
}

// executionID returns the id of the next execution of a call. A run that is continued finds those of its calls.
func (c *Container) executionID(call string) proto.TraceID {
	if c.executions == nil {
		c.executions = map[string]int{}
	}
	c.executions[call]++
	return proto.DerivedTraceID(fmt.Sprintf("agent %s %s %d", c.Run, call, c.executions[call]))
}

// output returns the outcome of a program, with the files in a directory changed since a time,
// without links and directories. The program has run, so an error here becomes a note.
func (c *Container) output(ctx context.Context, record *proto.Record, dir string, since time.Time) (*Output, error) {
	out := &Output{Record: record}
	var paths []string
	err := c.Host.ListFiles(ctx, c.ID, dir, func(f proto.File) error {
		if f.Type() != proto.FileRegular || f.Modified.Before(since) {
			return nil
		}
		if len(paths) == maxOutputFiles {
			return &EditError{Message: fmt.Sprintf("there are more than %d", maxOutputFiles)}
		}
		paths = append(paths, f.Path)
		return nil
	})
	return out, c.leaveAll(ctx, out, paths, err)
}

// leaveAll leaves files for the client. err is why some are missing.
func (c *Container) leaveAll(ctx context.Context, out *Output, paths []string, err error) error {
	for _, path := range paths {
		f, errSave := c.leave(ctx, path)
		switch {
		case isNotFound(errSave): // removed by another execution
		case errSave != nil:
			err = errors.Join(err, fmt.Errorf("%q: %w", proto.Shorten(path), errSave))
		case f == nil:
			out.Paths = append(out.Paths, path)
		default:
			out.Files = append(out.Files, f)
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		out.Note = "Files that the program left for the user are missing: " + err.Error()
	}
	return nil
}

// leave leaves a file for the client. The file that it returns is nil if that stays in place.
func (c *Container) leave(ctx context.Context, path string) (*proto.AgentFile, error) {
	content, err := c.Host.OpenFile(ctx, c.ID, path)
	if err != nil || c.InPlace {
		return nil, err
	}
	body, err := content.Read(ctx, 0, content.Size)
	if err != nil {
		return nil, fmt.Errorf("read %q: %w", proto.Shorten(path), err)
	}
	defer func() { _ = body.Close() }() // it was only read
	org, _ := c.Host.Caller()
	f := proto.NewContainerFile(org, c.ID, path, content.Size)
	f.ExpiresAt = new(c.Expires(f.CreatedAt).UTC())
	return f, c.Host.SaveFile(ctx, f, body)
}

func isNotFound(err error) bool {
	known, ok := errors.AsType[*api.Error](err)
	return ok && known.Code == api.CodeNotFound
}

// Names are the names of files in a container.
type Names map[string]string // the ids of the files by their names

// Of returns the name of a file: its own, or one with a number if that is taken.
func (n Names) Of(f *proto.AgentFile) string {
	name, extension := f.Name, path.Ext(f.Name)
	for i := 2; n[name] != "" && n[name] != f.ID; i++ {
		number := fmt.Sprintf("_%d%s", i, extension)
		stem := strings.TrimSuffix(f.Name, extension)
		name = stem[:proto.CutUTF8(stem[:min(len(stem), proto.MaxFileNameBytes-len(number))])] + number
	}
	n[name] = f.ID
	return name
}

// Upload copies a file of the organisation into the home, under a name.
func (c *Container) Upload(ctx context.Context, f *proto.AgentFile, name string) error {
	content, err := c.Host.OpenFile(ctx, f.Thread(), proto.AgentFileContent)
	if err != nil {
		return err
	}
	body, err := content.Read(ctx, 0, content.Size)
	if err != nil {
		return fmt.Errorf("read file %s: %w", f.ID, err)
	}
	defer func() { _ = body.Close() }() // it was only read
	c.Used = true
	return c.Host.PutFile(ctx, c.ID, name, content.Size, body)
}

// MaxEditBytes is the size of a file that the text editor opens or creates.
const MaxEditBytes = 1 << 20

// EditError is an error of the text editor, for the model.
type EditError struct {
	NotFound bool
	Message  string
}

func (e *EditError) Error() string { return e.Message }

// clean returns a path relative to the home, which is also at [proto.ContainerData] and has /tmp. In live sandboxes it
// is at [proto.SandboxHome], too.
func (c *Container) clean(name string) (string, error) {
	name = path.Clean(name)
	for at, dir := range map[string]string{"/tmp": proto.ContainerTmp, proto.ContainerData: ".", proto.SandboxHome: "."} {
		if rest, ok := strings.CutPrefix(name, at); ok && (rest == "" || rest[0] == '/') {
			name = dir + rest
		}
	}
	return c.Host.CleanPath(name)
}

// TextFile is a file in the home, as the text editor finds it.
type TextFile struct {
	// State identifies the content; it is empty if there is no file.
	State string
	Text  []byte
	Err   *EditError // why there is no Text, nil if there is

	path string // clean
	tag  string // of the stored content, empty if there is no file
}

// OpenText opens a file in the home.
func (c *Container) OpenText(ctx context.Context, path string) (*TextFile, error) {
	clean, err := c.clean(path)
	if err != nil {
		return nil, &EditError{Message: err.Error()}
	}
	f := &TextFile{path: clean}
	content, err := c.Host.OpenFile(ctx, c.ID, clean)
	if isNotFound(err) {
		f.Err = &EditError{NotFound: true, Message: fmt.Sprintf("there is no file %s", proto.Shorten(path))}
		return f, nil
	}
	if err != nil {
		return nil, err
	}
	f.tag = content.Tag
	if content.Size > MaxEditBytes {
		f.State = "tag " + content.Tag // no edit makes such a file
		f.Err = &EditError{Message: fmt.Sprintf("the file has %d bytes, more than %d; read a part of it with a command",
			content.Size, MaxEditBytes)}
		return f, nil
	}
	body, err := content.Read(ctx, 0, content.Size)
	if err != nil {
		return nil, fmt.Errorf("read %q: %w", proto.Shorten(path), err)
	}
	f.Text, err = io.ReadAll(body)
	f.State = stateOf(f.Text)
	return f, errors.Join(err, body.Close())
}

// stateOf returns the state of a file with a text. It is the same however the file is stored.
func stateOf(text []byte) string {
	sum := sha256.Sum256(text)
	return "sha256 " + hex.EncodeToString(sum[:])
}

// Plan returns the change of the file to a text.
func (f *TextFile) Plan(text []byte) (*Change, error) {
	if f.path == "" {
		return nil, &EditError{Message: "the path must name a file"}
	}
	if len(text) > MaxEditBytes {
		return nil, &EditError{Message: fmt.Sprintf("the text has %d bytes, more than %d; write the file with a program",
			len(text), MaxEditBytes)}
	}
	return &Change{Before: f.State, After: stateOf(text)}, nil
}

// maxApplyAttempts limits how often a change is tried because the file was replaced meanwhile.
const maxApplyAttempts = 10

var errChangedByOther = &EditError{
	Message: "the file was changed by somebody else during this call; view it before you try again",
}

// ApplyChange applies a change to the file at a path, unless it is already applied. edit returns
// the changed text, and may be called more than once. ApplyChange returns an [*EditError] if the
// file has changed in another way.
func (c *Container) ApplyChange(
	ctx context.Context, path string, change *Change, edit func(*TextFile) ([]byte, error),
) error {
	for range maxApplyAttempts {
		f, err := c.OpenText(ctx, path)
		if err != nil {
			return err
		}
		switch f.State {
		case change.Before:
		case change.After:
			return nil
		default:
			return errChangedByOther
		}
		text, err := edit(f)
		if err != nil {
			return err
		}
		c.Used = true
		err = c.Host.ReplaceFile(ctx, c.ID, f.path, f.tag, int64(len(text)), bytes.NewReader(text))
		// The same text has another tag after it was stored anew, for example by a compaction.
		if _, changed := errors.AsType[*proto.FileChangedError](err); !changed {
			return err
		}
	}
	return errChangedByOther
}

// ListDirectory returns the names in a directory of the home; names of directories end with a
// slash.
func (c *Container) ListDirectory(ctx context.Context, path string) (names []string, err error) {
	clean, err := c.clean(path)
	if err != nil {
		return nil, &EditError{Message: err.Error()}
	}
	err = c.Host.ListFiles(ctx, c.ID, clean, func(f proto.File) error {
		if len(names) == api.MaxToolFiles {
			return &EditError{Message: fmt.Sprintf("the directory has more than %d entries; list it with a command",
				api.MaxToolFiles)}
		}
		name := f.Path[strings.LastIndex(f.Path, "/")+1:]
		if f.IsDirectory {
			name += "/"
		}
		names = append(names, name)
		return nil
	})
	return names, err
}
