package app

import (
	"context"
	"errors"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/gateway/agentsandboxes"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// sessionSandboxes adapts the sandboxes of agent sessions to the interface of their package.
type sessionSandboxes struct{ *agentsandboxes.Sandboxes }

// Open implements [sessions.Sandboxes].
func (s sessionSandboxes) Open(ctx context.Context, x *proto.AgentSession) (sessions.Sandbox, error) {
	b, err := s.Sandboxes.Open(ctx, x)
	if err != nil {
		return nil, sessionError(err)
	}
	return sessionSandbox{b}, nil
}

// sessionError gives an error the text for users of the session, if there is one.
func sessionError(err error) error {
	if err == nil {
		return nil
	}
	if known := api.NewError(err); known.Code != api.CodeInternal {
		return errors.Join(&sessions.Error{Message: known.Message}, err)
	}
	return err
}

// sessionSandbox adapts a sandbox.
type sessionSandbox struct{ *agentsandboxes.Sandbox }

// Models implements [sessions.Sandbox].
func (b sessionSandbox) Models() sessions.Models {
	return sessions.Models{URL: b.ModelsURL(), Token: b.ModelsToken()}
}

// Start implements [sessions.Sandbox].
func (b sessionSandbox) Start(ctx context.Context, p *sessions.Program) (sessions.Process, error) {
	return sessionProcess{b.Sandbox.Start(ctx, p.Args, p.Env)}, nil
}

// Save implements [sessions.Sandbox].
func (b sessionSandbox) Save(ctx context.Context) ([]sessions.FileChange, bool, error) {
	changes, more, err := b.Sandbox.Save(ctx, sessions.StateDir)
	list := make([]sessions.FileChange, len(changes))
	for i := range changes {
		list[i] = sessions.FileChange(changes[i])
	}
	return list, more, sessionError(err)
}

// sessionProcess adapts a process.
type sessionProcess struct{ *agentsandboxes.Process }

// Exit implements [sessions.Process].
func (p sessionProcess) Exit() sessions.Exit {
	exit := p.Process.Exit()
	stderr := sessions.Stderr{Head: exit.Head, Truncated: exit.Truncated, TotalLines: &exit.Lines}
	if exit.Truncated {
		stderr.Tail = exit.Tail
	}
	return sessions.Exit{Code: exit.Code, Stderr: stderr}
}
