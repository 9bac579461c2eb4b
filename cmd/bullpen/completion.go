package main

import (
	"embed"
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// The scripts ask __complete, so they complete what the installed program knows.
//
//go:embed completion
var completionScripts embed.FS

type completionCommand struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

func (*completionCommand) Help() string {
	return `Packages of bullpen install the scripts. Otherwise call it in ~/.bashrc, in ~/.zshrc after compinit, or once for
fish.

The scripts complete commands, flags and values. With BULLPEN_API_KEY they ask the server for names and ids, at most
the first 100.

Examples:

  source <(bullpen completion bash)
  source <(bullpen completion zsh)
  bullpen completion fish >~/.config/fish/completions/bullpen.fish`
}

func (c *completionCommand) Run(s streams) error {
	script, err := completionScripts.ReadFile("completion/bullpen." + c.Shell)
	if err != nil {
		return err
	}
	_, err = s.out.Write(script)
	return err
}

// completeCommand prints the completions of the last word, one per line with a tab and its help. It
// prints nothing where any word is valid, such as a file name.
type completeCommand struct {
	Words []string `arg:"" optional:""`
}

func (c *completeCommand) Run(s streams, k *kong.Context) error {
	for _, w := range completions(k.Model.Node, c.Words) {
		if _, err := fmt.Fprintf(s.out, "%s\t%s\n", w.text, w.help); err != nil {
			return err
		}
	}
	return nil
}

// completion is a word of a command line, with help in one line.
type completion struct{ text, help string }

// completions returns the completions of the last of words, which follow the program's name. An =
// between a flag and its value may be a separate word.
func completions(node *kong.Node, words []string) []completion {
	if len(words) == 0 {
		return nil
	}
	last := words[len(words)-1]
	var flag *kong.Flag // whose value comes next
	position := 0       // of the next argument
	for _, word := range words[:len(words)-1] {
		switch {
		case word == "=":
		case flag != nil:
			flag = nil
		case word == "--":
			return nil
		case strings.HasPrefix(word, "-") && len(word) > 1:
			if f := findFlag(node, word); f != nil && !f.IsBool() && !f.IsCounter() {
				flag = f
			}
		default:
			if child := findChild(node, word); child != nil {
				node, position = child, 0
			} else {
				position++
			}
		}
	}
	switch name, value, assigned := strings.Cut(last, "="); {
	case flag != nil:
		return enum(flag.Value, "", strings.TrimPrefix(last, "="))
	case assigned && strings.HasPrefix(name, "--"):
		if flag = findFlag(node, name); flag == nil {
			return nil
		}
		return enum(flag.Value, name+"=", value)
	case strings.HasPrefix(last, "-"):
		return flags(node, last)
	case len(node.Children) > 0:
		return children(node, last)
	case len(node.Positional) > 0:
		return enum(node.Positional[min(position, len(node.Positional)-1)], "", last)
	}
	return nil
}

func findChild(node *kong.Node, name string) *kong.Node {
	for _, child := range node.Children {
		if child.Name == name || slices.Contains(child.Aliases, name) {
			return child
		}
	}
	return nil
}

// findFlag returns the flag of a node or of its parents, or nil if it is unknown or the word
// already includes its value.
func findFlag(node *kong.Node, word string) *kong.Flag {
	for _, group := range node.AllFlags(false) {
		for _, f := range group {
			if word == "--"+f.Name || f.Short != 0 && word == "-"+string(f.Short) {
				return f
			}
		}
	}
	return nil
}

func children(node *kong.Node, prefix string) (out []completion) {
	for _, child := range node.Children {
		if !child.Hidden && strings.HasPrefix(child.Name, prefix) {
			out = append(out, completion{child.Name, child.Help})
		}
	}
	return out
}

func flags(node *kong.Node, prefix string) (out []completion) {
	for _, group := range node.AllFlags(true) {
		for _, f := range group {
			if name := "--" + f.Name; strings.HasPrefix(name, prefix) {
				out = append(out, completion{name, f.Help})
			}
		}
	}
	return out
}

// enum returns the values listed in the definition of a flag or argument, each with assignment in
// front.
func enum(v *kong.Value, assignment, prefix string) (out []completion) {
	if v.Enum == "" {
		return nil
	}
	for _, value := range v.EnumSlice() {
		if value != "" && strings.HasPrefix(value, prefix) {
			out = append(out, completion{assignment + value, ""})
		}
	}
	return out
}
