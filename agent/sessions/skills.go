package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// skillSource is where skills come from.
type skillSource struct {
	Type    string   `json:"type"` // local, git or github
	Source  string   `json:"source"`
	Skills  []string `json:"skills"` // names; empty for all
	Ref     string   `json:"ref"`
	Subpath string   `json:"subpath"`
}

// copySkills copies the skills of a source into a directory. A skill is a directory with a file SKILL.md.
const copySkills = `set -eu
to=$1 kind=$2 from=$3 ref=$4 below=$5
shift 5
mkdir -p -- "$to"
if [ "$kind" = git ]; then
  clone=$(mktemp -d)
  trap 'rm -rf -- "$clone"' EXIT
  git clone --quiet -- "$from" "$clone/$(basename -- "$from" .git)"
  from=$clone/$(basename -- "$from" .git)
  [ -z "$ref" ] || git -C "$from" checkout --quiet "$ref" --
fi
root=$from${below:+/$below}
found=
for skill in "$root" "$root"/*/ "$root"/skills/*/; do
  name=$(basename -- "$skill")
  [ -f "$skill/SKILL.md" ] || continue
  if [ $# -gt 0 ]; then
    wanted=
    for one; do [ "$one" = "$name" ] && wanted=1; done
    [ -n "$wanted" ] || continue
  fi
  rm -rf -- "$to/$name"
  cp -R -- "$skill" "$to/$name"
  found=1
done
[ -n "$found" ] || { echo "there is no such skill" >&2; exit 1; }
`

// placeSkills copies the skills of a session to where its agent looks for them: a directory relative to the home.
func placeSkills(ctx context.Context, b Sandbox, x *proto.AgentSession, dir string) error {
	if len(x.Skills) == 0 {
		return nil
	}
	if dir == "" {
		return &Error{Message: "the agent knows no skills; create the session without them"}
	}
	var skills struct {
		Sources []skillSource `json:"sources"`
	}
	if err := json.Unmarshal(x.Skills, &skills); err != nil {
		return fmt.Errorf("decode the skills of session %s: %w", x.ID, err)
	}
	for _, s := range skills.Sources {
		kind, from := "local", s.Source
		switch s.Type {
		case "github":
			kind, from = "git", "https://github.com/"+s.Source
		case "git":
			kind = "git"
		default:
			if !path.IsAbs(from) {
				from = path.Join(b.Dir(), from)
			}
		}
		args := []string{"/bin/sh", "-c", copySkills, "sh", path.Join(b.Home(), dir), kind, from, s.Ref, s.Subpath}
		if err := runProgram(ctx, b, &Program{Args: append(args, s.Skills...)}); err != nil {
			return &Error{Message: fmt.Sprintf("the skills of %s could not be loaded: %v", proto.Shorten(s.Source), err)}
		}
	}
	return nil
}

// runProgram runs a program to its end. The error of a program that fails is what it has written.
func runProgram(ctx context.Context, b Sandbox, program *Program) error {
	p, err := b.Start(ctx, program)
	if err != nil {
		return err
	}
	defer p.Close()
	stop := context.AfterFunc(ctx, p.Close)
	defer stop()
	for err == nil {
		_, _, err = p.ReadLine()
	}
	if !errors.Is(err, io.EOF) {
		return err
	}
	if exit := p.Exit(); exit.Code != 0 {
		return errors.New(proto.Shorten(strings.TrimSpace(exit.Stderr.Head)))
	}
	return ctx.Err()
}
