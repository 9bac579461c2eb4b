// Package script is a model server whose scripted replies come from a file. It replaces a model in
// tests, and for users who try this server without one.
package script

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/goccy/go-yaml"
)

// Script is a list of rules. The first one that matches the last message of a request replies.
type Script struct {
	Rules []*Rule `yaml:"rules"`
}

// Rule is a reply, and what it is a reply to.
type Rule struct {
	// Match is a regular expression to find in the text of the last message; empty matches all.
	// ${1} and the like in Text and Arguments refer to its groups.
	Match string `yaml:"match"`
	// Role limits the rule to last messages of the user, or to results of tools: user or tool; empty
	// for both.
	Role string `yaml:"role"`
	// Tool limits the rule to requests with a tool of this name.
	Tool string `yaml:"tool"`

	// Thinking is what the model thinks before it replies.
	Thinking string `yaml:"thinking"`
	Text     string `yaml:"text"`
	Calls    []Call `yaml:"calls"`
	// Finish is why the reply ends: empty for its usual end, length, refused.
	Finish string `yaml:"finish"`
	// Chunk is the size of the parts of texts and arguments in bytes; 0 for one part.
	Chunk int `yaml:"chunk"`
	// Delay is the time before each part.
	Delay time.Duration `yaml:"delay"`
	// Status, if not 0, is the status of an error response, with Text as its message.
	Status     int `yaml:"status"`
	RetryAfter int `yaml:"retry_after"` // seconds, with Status
	// Fault ends the reply: drop breaks it off after its parts, hang sends nothing more.
	Fault string `yaml:"fault"`
	// Times, if not 0, is how often the rule may reply.
	Times int `yaml:"times"`

	match *regexp.Regexp
}

// Call is a call of a tool in a reply.
type Call struct {
	Name      string         `yaml:"name"`
	Arguments map[string]any `yaml:"arguments"`
	// Raw, if not empty, is sent instead of the JSON of Arguments.
	Raw string `yaml:"raw"`
	// NoID leaves the id of the call out.
	NoID bool `yaml:"no_id"`
}

// Parse reads a script, as YAML or JSON.
func Parse(text []byte) (*Script, error) {
	var s Script
	if err := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(&s); err != nil {
		return nil, fmt.Errorf("read the script: %w", err)
	}
	if len(s.Rules) == 0 {
		return nil, errors.New("the script has no rules: write them as a list below rules")
	}
	for i, r := range s.Rules {
		if r == nil {
			return nil, fmt.Errorf("rule %d is empty", i+1)
		}
		var err error
		if r.match, err = regexp.Compile("(?s)" + r.Match); err != nil {
			return nil, fmt.Errorf("rule %d: match: %w", i+1, err)
		}
		if err := oneOf(r.Role, "", roleUser, roleTool); err != nil {
			return nil, fmt.Errorf("rule %d: role %w", i+1, err)
		}
		if err := oneOf(r.Finish, "", "length", "refused"); err != nil {
			return nil, fmt.Errorf("rule %d: finish %w", i+1, err)
		}
		if err := oneOf(r.Fault, "", "drop", "hang"); err != nil {
			return nil, fmt.Errorf("rule %d: fault %w", i+1, err)
		}
	}
	return &s, nil
}

func oneOf(value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	return fmt.Errorf("is %q; it must be one of %q", value, allowed)
}
