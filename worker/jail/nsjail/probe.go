package nsjail

import (
	"bytes"
	"context"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// probeTimeout limits how long one runtime may take to print its version, on a machine that has
// just booted.
const probeTimeout = 30 * time.Second

// Runtime is a language's interpreter as found in a jail.
type Runtime struct {
	proto.Runtime
	Available bool
	Found     string // its version, such as 3.11.2; empty if not available
	Problem   string // the reason if it is not available
}

// Probe runs the interpreter of every language in a jail and reads its version. A missing or broken
// interpreter is reported as not available. An error means that a jail could not be created.
func (m *Maker) Probe(ctx context.Context, spec jail.Spec) (all []Runtime, err error) {
	for _, r := range proto.Runtimes() {
		found, err := m.probe(ctx, spec, r)
		if err != nil {
			return nil, err
		}
		all = append(all, found)
	}
	return all, nil
}

func (m *Maker) probe(ctx context.Context, spec jail.Spec, runtime proto.Runtime) (Runtime, error) {
	r := Runtime{Runtime: runtime}
	j, err := m.Prepare(ctx, spec)
	if err != nil {
		return r, err
	}
	command := r.Interpreters[0]
	var out bytes.Buffer
	o, err := j.Run(ctx, jail.Program{
		Argv:    []string{command, r.Version},
		Env:     []string{"HOME=" + m.cfg.Home, "LANG=C.UTF-8", "PATH=/usr/local/bin:/usr/bin:/bin"},
		Dir:     m.cfg.Home,
		Timeout: probeTimeout,
		Stdout:  &out,
	})
	if err != nil {
		return r, err
	}
	found := version(out.String())
	switch {
	case o.Kind == jail.StartFailed:
		r.Problem = o.Step + ": " + o.Detail
	case o.Kind != jail.Exited || o.ExitCode != 0 || found == "":
		r.Problem = command + " " + r.Version + " does not work: " + string(o.Kind) + " " + o.Detail
	default:
		r.Available, r.Found = true, found
	}
	return r, nil
}

// version returns the first word with a digit of the first line that has one, without the
// characters around the number: "Python 3.11.2", "v20.20.2", "GNU bash, version 5.2.15(1)-release".
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
