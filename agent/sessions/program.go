package sessions

import (
	"context"

	"github.com/bullpen-run/bullpen/proto"
)

// Programs runs the programs of agents where the files of their sessions are.
type Programs interface {
	// Start starts a program for a session.
	Start(ctx context.Context, x *proto.AgentSession, p *Program) (Process, error)
}

// Program is an agent's program with what it gets.
type Program struct {
	Args []string
	Env  map[string]string
}

// Process is a running program that reads and writes lines.
type Process interface {
	// ReadLine returns the next line of the standard output, and a cursor for the place after it. It
	// returns [io.EOF] when the program has ended.
	ReadLine() (line []byte, cursor string, err error)
	// WriteLine writes a line to the standard input. It does not wait for the program to read it.
	WriteLine(line []byte) error
	// Exit returns how the program ended. It is called after ReadLine has returned [io.EOF].
	Exit() Exit
	// Close ends the program. No process of it is left when it returns.
	Close()
}

// Exit is how a program ended.
type Exit struct {
	Code   int
	Stderr Stderr
}
