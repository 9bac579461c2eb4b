package nsjail

import (
	"bytes"
	"context"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// probeTimeout is for one runtime to say its version, on a machine that has just
// booted.
const probeTimeout = 30 * time.Second

// Runtime is one language's interpreter as a jail sees it.
type Runtime struct {
	Language  string // python, node or bash
	Command   string // such as python3
	Available bool
	Version   string // such as 3.11.2; empty when not available
	Problem   string // why it is not available
}

// Probe runs every runtime inside a jail and asks for its version. One that is
// missing or broken is reported as not available; an error means that a jail
// could not be made.
func (m *Maker) Probe(ctx context.Context, spec jail.Spec) ([]Runtime, error) {
	runtimes := []Runtime{
		{Language: "python", Command: "python3"},
		{Language: "node", Command: "node"},
		{Language: "bash", Command: "bash"},
	}
	for i := range runtimes {
		if err := m.probe(ctx, spec, &runtimes[i]); err != nil {
			return nil, err
		}
	}
	return runtimes, nil
}

func (m *Maker) probe(ctx context.Context, spec jail.Spec, r *Runtime) error {
	j, err := m.Prepare(ctx, spec)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	o, err := j.Run(ctx, jail.Program{
		Argv:    []string{r.Command, "--version"},
		Env:     []string{"HOME=" + m.cfg.Home, "LANG=C.UTF-8", "PATH=/usr/local/bin:/usr/bin:/bin"},
		Dir:     m.cfg.Home,
		Timeout: probeTimeout,
		Stdout:  &out,
	})
	if err != nil {
		return err
	}
	r.Version = version(out.String())
	switch {
	case o.Kind == jail.StartFailed:
		r.Problem = o.Step + ": " + o.Detail
	case o.Kind != jail.Exited || o.ExitCode != 0 || r.Version == "":
		r.Problem = r.Command + " --version does not work: " + string(o.Kind) + " " + o.Detail
	default:
		r.Available = true
	}
	if !r.Available {
		r.Version = ""
	}
	return nil
}

// version is the first word of the first line that has a digit, without what
// surrounds the number: "Python 3.11.2", "v20.20.2", "GNU bash, version
// 5.2.15(1)-release".
func version(out string) string {
	line, _, _ := strings.Cut(out, "\n")
	for word := range strings.FieldsSeq(line) {
		if i := strings.IndexAny(word, "0123456789"); i >= 0 {
			word, _, _ = strings.Cut(word[i:], "(")
			return strings.TrimRight(word, ",")
		}
	}
	return ""
}
