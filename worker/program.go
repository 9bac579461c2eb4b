package worker

import (
	"cmp"
	"context"
	"crypto/rand"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// programError explains to the tenant why the sandbox cannot run a job's program.
type programError struct{ err error }

func (e *programError) Error() string { return e.err.Error() }
func (e *programError) Unwrap() error { return e.err }

// writeProgram writes the program's file, if it belongs in the home.
func (a *attempt) writeProgram(_ context.Context, b *sandbox) (err error) {
	usual := jail.FileInHome(string(a.job.Language))
	if b.home == nil || usual == "" {
		return nil
	}
	a.file, err = b.home.PutProgram(usual, jail.FileContent(string(a.job.Language), a.job.Code))
	return err
}

// load loads the program into the jail. The error is a [*programError] if the sandbox cannot run it.
func (a *attempt) load(ctx context.Context, b *sandbox) error {
	p, err := a.programFor(b)
	if err != nil {
		return &programError{err}
	}
	a.program = p
	return b.jail.Load(ctx, p)
}

// programFor returns the program that the jail runs. Its error is a sentence for the tenant.
func (a *attempt) programFor(b *sandbox) (jail.Program, error) {
	job := a.job
	if job.Live != nil {
		return a.guestFor(b)
	}
	source, ok := a.keyOf(job).source(b.jail.image)
	if !ok {
		_, err := (&proto.Image{Languages: b.jail.image.Languages}).Interpreter(job.Language)
		return jail.Program{}, err
	}
	source.Code, source.Args, source.Stdin = job.Code, job.Args, job.Stdin
	source.TraceID, source.File = string(job.TraceID), a.file
	if job.Rich {
		a.nonce = rand.Text()
		source.Cell = a.nonce
	}
	source.Env = withSecrets(job, b.secrets)
	if b.injector != nil {
		source.Env = withTrust(source.Env)
	}
	p, err := source.Program()
	if a.file != "" { // it is in the home
		p.Files = nil
	}
	p.Files = append(p.Files, secretFiles(job, b.secrets)...)
	if b.injector != nil {
		p.Interception = b.injector.Interception()
		p.Files = append(p.Files, trustFile(a.Roots, b.injector))
	}
	p.Timeout = time.Duration(job.Timeout) * time.Second
	p.TimeoutGrace, p.CancelGrace = job.TimeoutGrace(), job.CancelGrace()
	p.LowWeight = job.Class() == proto.ClassBackground // nobody waits for it
	return p, err
}

// Spec returns the spec of a sandbox's jail. root is the directory of its root file system, empty
// for the host's runtimes.
func Spec(s proto.Sandbox, root string) jail.Spec {
	return jail.Spec{
		Root: root, Network: s.Network, CPU: s.CPU, Memory: s.Memory, Pids: s.Pids, HomeBytes: s.HomeBytes,
		TmpBytes: s.TmpBytes, Inodes: s.Inodes, OpenFiles: cmp.Or(s.OpenFiles, proto.DefaultOpenFiles),
		SystemCalls: s.SystemCalls, Terminals: s.Terminals,
	}
}
