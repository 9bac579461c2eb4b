package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

type manCommand struct{}

func (*manCommand) Help() string {
	return `Example:

  bullpen man | man -l -`
}

func (*manCommand) Run(s streams, k *kong.Context) error {
	_, err := s.out.Write(manPage(k.Model, app.BuildInfo()))
	return err
}

// manPage returns the manual page of all commands, in the macros of man.
func manPage(model *kong.Application, build app.Build) []byte {
	m := new(manual)
	day, _, _ := strings.Cut(build.Date, "T")
	if day == "" {
		day = time.Unix(0, 0).UTC().Format(time.DateOnly) // the same build has the same page
	}
	m.macro("TH", "BULLPEN", "1", day, "bullpen "+build.Version, "User Commands")
	m.macro("SH", "NAME")
	m.text("bullpen - run untrusted code in jails")
	m.macro("SH", "SYNOPSIS")
	m.text("bullpen COMMAND [FLAG...] [ARGUMENT...]")
	m.macro("SH", "DESCRIPTION")
	m.text(model.Help)
	m.macro("SH", "COMMANDS")
	var settings []*kong.Flag
	for _, command := range model.Leaves(true) {
		m.macro("SS", "bullpen "+command.Summary())
		m.text(command.Help)
		m.text(command.Detail)
		for _, argument := range command.Positional {
			m.item("<"+argument.Name+">", flagHelp(argument))
		}
		listed := false // whether the flags are settings of a server
		for _, f := range command.Flags {
			switch {
			case f.Hidden || f.Name == "help":
			case f.Group != nil:
				listed = true
				if !slices.ContainsFunc(settings, func(other *kong.Flag) bool { return other.Name == f.Name }) {
					settings = append(settings, f)
				}
			default:
				m.item(flagName(f), flagHelp(f.Value))
			}
		}
		if listed {
			m.macro("PP")
			m.text("The other flags are listed in SETTINGS.")
		}
	}
	m.macro("SH", "SETTINGS")
	m.text("Flags of the server. Each is also an environment variable and a key of the file that --config names.")
	for _, f := range settings {
		m.item(flagName(f), flagHelp(f.Value))
	}
	m.macro("SH", "EXIT STATUS")
	for _, status := range [][2]string{
		{"0", "Success. For bullpen run, logs --follow and wait: the program's own exit code."},
		{"1", "Failure."},
		{"2", "Wrong usage."},
		{"124", "The program exceeded its timeout."},
		{"125", "The program could not run, or its outcome is unknown."},
		{"128+N", "Signal N ended the program."},
		{"130", "The program was cancelled, or the command was interrupted."},
		{"137", "The program exceeded its memory limit."},
		{"159", "The program made a forbidden system call."},
	} {
		m.item(status[0], status[1])
	}
	m.macro("SH", "EXAMPLES")
	m.text(`Start a server, and run a program on it from another terminal:

  bullpen serve --data /var/lib/bullpen
  export BULLPEN_API_KEY=$(cat /var/lib/bullpen/bootstrap.key)
  echo 'print(6 * 7)' | bullpen run -

Keep files between programs:

  echo 'date >>log' | bullpen run --thread notes -l bash -
  bullpen files cp thread:notes/log .`)
	m.macro("SH", "FILES")
	m.item("/etc/bullpen/*.env", "Settings of the services of packages.")
	m.item("/var/lib/bullpen", "Data of the services of packages.")
	m.macro("SH", "SEE ALSO")
	m.text("nsjail(1), systemd.resource-control(5), age-keygen(1)")
	return m.Bytes()
}

func flagName(f *kong.Flag) string {
	name := "--" + f.Name
	if f.Tag.Negatable != "" {
		name = "--[no-]" + f.Name
	}
	if f.Short != 0 {
		name = "-" + string(f.Short) + ", " + name
	}
	if f.IsBool() || f.IsCounter() {
		return name
	}
	return name + "=" + f.FormatPlaceHolder()
}

// manual writes the macros of man.
type manual struct{ bytes.Buffer }

var roffEscapes = strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, "^", `\(ha`, "~",
	`\(ti`, "…", "...")

func (m *manual) macro(name string, args ...string) {
	m.WriteString("." + name)
	for _, arg := range args {
		_, _ = fmt.Fprintf(m, ` "%s"`, strings.ReplaceAll(roffEscapes.Replace(arg), `"`, `\(dq`))
	}
	m.WriteByte('\n')
}

// line writes a line of text, which may begin with a dot.
func (m *manual) line(text string) {
	if strings.HasPrefix(text, ".") {
		m.WriteString(`\&`)
	}
	m.WriteString(roffEscapes.Replace(text) + "\n")
}

// text writes paragraphs. Lines that begin with a space are not filled.
func (m *manual) text(text string) {
	filled := true
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if fill := !strings.HasPrefix(line, " "); line != "" && fill != filled {
			m.macro(map[bool]string{true: "fi", false: "nf"}[fill])
			filled = fill
		}
		if line == "" {
			m.macro("PP")
		} else {
			m.line(line)
		}
	}
	if !filled {
		m.macro("fi")
	}
}

// item writes a term and its explanation.
func (m *manual) item(term, explanation string) {
	m.macro("TP")
	m.WriteString(`\fB` + roffEscapes.Replace(term) + "\\fR\n")
	m.line(explanation)
}
