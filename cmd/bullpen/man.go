package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

type manCommand struct {
	Command string `arg:"" optional:"" help:"Command to print the page of, such as run. Default: the page of bullpen itself."`
	Dir     string `placeholder:"DIR" help:"Write the pages of all commands to this directory instead."`
}

func (*manCommand) Help() string {
	return `Examples:

  bullpen man | man -l -
  bullpen man run | man -l -
  bullpen man --dir /usr/local/share/man/man1`
}

func (c *manCommand) Run(s streams, k *kong.Context) error {
	if c.Dir == "" {
		text, ok := manPages(k.Model)["bullpen"+strings.TrimRight("-"+c.Command, "-")]
		if !ok {
			return usagef("there is no command %q; see bullpen --help", c.Command)
		}
		_, err := s.out.Write(text)
		return err
	}
	for name, text := range manPages(k.Model) {
		name = filepath.Join(c.Dir, name+".1")
		if err := os.WriteFile(name, text, 0o644); err != nil { //nolint:gosec // a page for everybody
			return err
		}
	}
	return nil
}

// manPages returns the manual pages by their names, in the macros of man: bullpen, and one of each
// command with its subcommands, such as bullpen-run.
func manPages(model *kong.Application) map[string][]byte {
	pages := map[string][]byte{"bullpen": overviewPage(model)}
	for _, command := range model.Children {
		if !command.Hidden {
			pages["bullpen-"+command.Name] = commandPage(command)
		}
	}
	return pages
}

// newManual begins a page.
func newManual(name, summary string) *manual {
	build := app.BuildInfo()
	day, _, _ := strings.Cut(build.Date, "T")
	if day == "" {
		day = time.Unix(0, 0).UTC().Format(time.DateOnly) // the same build has the same page
	}
	m := new(manual)
	m.macro("TH", strings.ToUpper(name), "1", day, "bullpen "+build.Version, "User Commands")
	m.macro("SH", "NAME")
	m.text(name + " - " + strings.ToLower(summary[:1]) + strings.TrimSuffix(summary[1:], "."))
	m.macro("SH", "SYNOPSIS")
	return m
}

func overviewPage(model *kong.Application) []byte {
	m := newManual("bullpen", "Run untrusted code in jails")
	m.text("bullpen COMMAND [FLAG...] [ARGUMENT...]")
	m.macro("SH", "DESCRIPTION")
	m.text(model.Help)
	m.macro("SH", "COMMANDS")
	for _, command := range model.Children {
		if !command.Hidden {
			m.item("bullpen-"+command.Name+"(1)", command.Help)
		}
	}
	m.macro("SH", "EXIT STATUS")
	m.text(commonExitCodes)
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
	m.item("/usr/share/doc/bullpen", "Tutorials, guides and references, in packages.")
	m.macro("SH", "SEE ALSO")
	m.text("bullpen-serve(1), bullpen-run(1), nsjail(1), systemd.resource-control(5), age-keygen(1)")
	return m.Bytes()
}

const commonExitCodes = `0 success, 1 failure, 2 wrong usage, 130 interrupted.`

// commandPage returns the page of a command with its subcommands.
func commandPage(command *kong.Node) []byte {
	m := newManual("bullpen-"+command.Name, command.Help)
	leaves := command.Leaves(true)
	if len(command.Children) == 0 {
		leaves = []*kong.Node{command}
	}
	for i, leaf := range leaves {
		if i > 0 {
			m.macro("br")
		}
		m.text("bullpen " + leaf.Summary())
	}
	m.macro("SH", "DESCRIPTION")
	m.text(command.Help)
	var exit, examples strings.Builder
	var related strings.Builder // texts that name other commands
	for _, leaf := range leaves {
		text := splitHelp(leaf.Detail)
		if leaf != command {
			m.macro("SS", "bullpen "+leaf.Path())
			m.text(leaf.Help)
		}
		m.macro("PP")
		m.text(text.description)
		related.WriteString(leaf.Detail + m.parameters(leaf, leaf != command))
		if text.exitCodes != "" && leaf != command {
			exit.WriteString("bullpen " + leaf.Path() + ":\n\n")
		}
		for _, part := range []struct {
			to   *strings.Builder
			text string
		}{{&exit, text.exitCodes}, {&examples, text.examples}} {
			if part.text != "" {
				part.to.WriteString(part.text + "\n\n")
			}
		}
	}
	if len(command.Children) > 0 {
		m.macro("SS", "Flags of each of these commands")
		m.flags(leaves[0].Flags, isCommon)
	}
	m.macro("SH", "EXIT STATUS")
	if exit.Len() == 0 || len(command.Children) > 0 {
		m.text(commonExitCodes)
		m.macro("PP")
	}
	m.text(strings.TrimRight(exit.String(), "\n"))
	m.macro("SH", "EXAMPLES")
	m.text(strings.TrimRight(examples.String(), "\n"))
	m.macro("SH", "SEE ALSO")
	also := []string{"bullpen(1)"}
	for _, other := range command.Parent.Children {
		if other != command && regexp.MustCompile(`\bbullpen `+other.Name+`\b`).MatchString(related.String()) {
			also = append(also, "bullpen-"+other.Name+"(1)")
		}
	}
	m.text(strings.Join(also, ", "))
	return m.Bytes()
}

// help is the help of a command in the parts of a manual page.
type help struct{ description, exitCodes, examples string }

// splitHelp splits the help of a command. Its parts begin with a line such as "Exit codes:", and end
// before the next paragraph that is not indented.
func splitHelp(text string) help {
	var h help
	part := &h.description
	for paragraph := range strings.SplitSeq(text, "\n\n") {
		if !strings.HasPrefix(paragraph, " ") {
			part = &h.description
		}
		for title, of := range map[string]*string{
			"Exit codes:": &h.exitCodes, "Example:": &h.examples, "Examples:": &h.examples,
		} {
			if rest, ok := strings.CutPrefix(paragraph, title); ok {
				part, paragraph = of, strings.TrimLeft(rest, " ")
			}
		}
		if paragraph = strings.Trim(paragraph, "\n"); paragraph != "" {
			*part += strings.TrimRight("\n\n"[:min(len(*part), 2)]+paragraph, "\n")
		}
	}
	return h
}

// parameters lists the arguments and flags of a command, and returns the help of the flags.
// Subcommands have no common flags.
func (m *manual) parameters(command *kong.Node, sub bool) string {
	for _, argument := range command.Positional {
		m.item("<"+argument.Name+">", flagHelp(argument))
	}
	return m.flags(command.Flags, func(f *kong.Flag) bool { return !sub || !isCommon(f) })
}

// isCommon reports whether every command of a server has a flag.
func isCommon(f *kong.Flag) bool { return f.Name == "url" || f.Name == "key" || f.Name == "json" }

// flags lists flags, and returns their help. Those of a server are in groups.
func (m *manual) flags(flags []*kong.Flag, listed func(*kong.Flag) bool) (help string) {
	group := ""
	for _, f := range flags {
		if f.Hidden || f.Name == "help" || !listed(f) {
			continue
		}
		if f.Group != nil && f.Group.Key != group {
			group = f.Group.Key
			m.macro("SS", group)
		}
		m.item(flagName(f), flagHelp(f.Value))
		help += f.Help + "\n"
	}
	return help
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
