package sessions

import (
	"context"

	"github.com/bullpen-run/bullpen/proto"
)

// Programs runs the programs of agents. A program runs where the files of its session are.
type Programs interface {
	// Start starts a program for a session.
	Start(ctx context.Context, x *proto.AgentSession, p *Program) (Process, error)
}

// Program is the command line and the environment of an agent's program.
type Program struct {
	Args []string
	Env  map[string]string
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
