package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// searchPath is the path in which jails look for interpreters.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// program is a program and this machine's interpreter for it.
type program struct {
	language    proto.Language
	code        string
	output      string
	interpreter string // path
	dir, file   string // location of the code for the bare interpreter
}

// languages lists the compared languages, each with its interpreter, its file name and its smallest
// program.
var languages = []struct {
	name              proto.Language
	interpreter, file string
	code              string
}{
	{proto.Python, "python3", "main.py", "print(1)"},
	{proto.Node, "node", "main.js", "console.log(1)"},
	{proto.Bash, "bash", "main.sh", "echo 1"},
}

const leastOutput = "1\n"

// leastPrograms writes each language's smallest program below dir. It returns a reason for each
// language without an interpreter.
func leastPrograms(dir string) ([]program, map[proto.Language]string, error) {
	var found []program
	missing := map[proto.Language]string{}
	for _, l := range languages {
		p, err := newProgram(filepath.Join(dir, string(l.name)), l.name, l.code)
		if errors.Is(err, exec.ErrNotFound) {
			missing[l.name] = fmt.Sprintf("there is no %s in %s", l.interpreter, searchPath)
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		p.output = leastOutput
		found = append(found, p)
	}
	return found, missing, nil
}

// newProgram creates dir and writes code to a file in it.
func newProgram(dir string, language proto.Language, code string) (program, error) {
	for _, l := range languages {
		if l.name != language {
			continue
		}
		path, err := lookPath(l.interpreter)
		if err != nil {
			return program{}, err
		}
		p := program{language: language, code: code, interpreter: path, dir: dir, file: filepath.Join(dir, l.file)}
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return p, fmt.Errorf("make a directory for programs: %w", err)
		}
		if err := os.WriteFile(p.file, []byte(code), 0o600); err != nil {
			return p, fmt.Errorf("write a program: %w", err)
		}
		return p, nil
	}
	return program{}, fmt.Errorf("there is no language %q", language)
}

// lookPath finds the interpreter that a jail would find. The PATH of this process may lead to
// another one.
func lookPath(name string) (string, error) {
	for dir := range strings.SplitSeq(searchPath, ":") {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("find %s: %w", name, exec.ErrNotFound)
}

// environment returns an environment as clean as a jail's. Variables of this process, such as
// NODE_EXTRA_CA_CERTS, can make an interpreter start much more slowly.
func (p *program) environment() []string {
	return []string{"HOME=" + p.dir, "USER=baponi", "LANG=C.UTF-8", "TMPDIR=/tmp", "PATH=" + searchPath}
}

// command returns the command that runs the program with the bare interpreter.
func (p *program) command(ctx context.Context) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.interpreter, p.file)
	cmd.Env, cmd.Dir = p.environment(), p.dir
	return cmd
}

// bare runs the program with the bare interpreter.
func (p *program) bare(ctx context.Context) (sample, error) {
	stdout, err := p.outputOf(ctx, nil)
	if err != nil {
		return sample{}, err
	}
	return sample{}, p.check(stdout)
}

// outputOf runs the program with the bare interpreter, with additional variables, and returns its
// output.
func (p *program) outputOf(ctx context.Context, env map[string]string) (string, error) {
	cmd := p.command(ctx)
	for name, value := range env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("run the bare %s: %w: %s", p.language, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.String(), nil
}

// inline returns a runner for the program in a jail.
func (p *program) inline(a *api) runner {
	return func(ctx context.Context) (sample, error) {
		result, id, err := a.execute(ctx, p.language, p.code, programTimeout)
		switch {
		case err != nil:
			return sample{}, err
		case result.ErrorMessage != nil:
			return sample{}, fmt.Errorf("execution %s: %s", id, *result.ErrorMessage)
		case result.ExitCode != 0:
			return sample{}, fmt.Errorf("execution %s: exit code %d: %s", id, result.ExitCode, strings.TrimSpace(result.Stderr))
		}
		return sample{id: id}, p.check(result.Stdout)
	}
}

func (p *program) check(stdout string) error {
	if stdout != p.output {
		return fmt.Errorf("the %s program printed %.40q and should have printed %.40q", p.language, stdout, p.output)
	}
	return nil
}
