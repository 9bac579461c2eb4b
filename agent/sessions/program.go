package sessions

import (
	"context"
	"net/http"

	"github.com/bullpen-run/bullpen/proto"
)

// Sandboxes opens the sandboxes in which agents' programs run.
type Sandboxes interface {
	// Open starts or resumes the sandbox of a session. Nothing of an earlier Open runs in it then. The
	// error is an [*Error] if the client can do something about it.
	Open(ctx context.Context, x *proto.AgentSession) (Sandbox, error)
}

// Sandbox is the sandbox of a session. Its home has the files of the session. It is safe for concurrent
// use.
type Sandbox interface {
	// Home returns the absolute path of the home directory.
	Home() string
	// Dir returns the absolute path of the session's directory, in which its agent works. It exists.
	Dir() string
	// Models returns where programs in the sandbox reach this server's model APIs.
	Models() Models
	// Start starts a program in the directory of the session. The program ends when the sandbox is closed.
	Start(ctx context.Context, p *Program) (Process, error)
	// Transport returns the transport to a port of the sandbox's loopback interface, whatever the host of
	// a request.
	Transport(port int) http.RoundTripper
	// WriteFile creates or replaces a file. It creates the parent directories.
	WriteFile(ctx context.Context, path string, content []byte) error
	// Save stores the files as they are, and returns what has changed since the last save, without [StateDir]. more
	// reports that the list is not complete.
	Save(ctx context.Context) (changes []FileChange, more bool, err error)
	// Lost returns the reason, in words for users, why the sandbox has ended by itself; empty if it has not.
	Lost(ctx context.Context) string
	// Close ends all programs, stores the files and stops the sandbox.
	Close()
}

// FileChange is what has happened to a file in a sandbox.
type FileChange struct {
	Path   string // absolute
	Action string // write for a new file, and patch for one that was changed or removed
	Diff   string // the unified diff; empty if the content is no text or too large
}

// Models is where programs in a sandbox reach this server's model APIs.
type Models struct {
	// URL has no slash at its end. Anthropic's API is at /anthropic below it, and OpenAI's at /openai/v1.
	URL string
	// Token is the API key to use. It is valid for this sandbox only, and only for the model APIs.
	Token string
}

// Program is the command line and the environment of an agent's program.
type Program struct {
	Args []string
	Env  map[string]string // in addition to that of the sandbox
}

// Process is a running program that communicates in lines.
type Process interface {
	// ReadLine returns the next line of standard output, and the cursor after it. It returns
	// [io.EOF] when the program has ended.
	ReadLine() (line []byte, cursor string, err error)
	// WriteLine writes a line to standard input. It does not wait for the program to read it.
	WriteLine(line []byte) error
	// Exit returns how the program ended. It must be called only after ReadLine has returned
	// [io.EOF].
	Exit() Exit
	// Close kills the program and its children. It returns when all of them have ended.
	Close()
}

// Exit is how a program ended.
type Exit struct {
	Code   int
	Stderr Stderr
}

// Installation is an agent's program as the workers have it.
type Installation struct {
	Version string // the default of sessions; empty if unknown
	// Versions are all that sessions can have, the default first. It is empty for an agent without a
	// program.
	Versions []string
	// Dir is the absolute path of the program's files in sandboxes. It is set even if no worker has the
	// program at the moment, since a worker may join while a sandbox waits for one.
	Dir string
	// Missing is the reason why no worker has it; empty if one has.
	Missing string
}
