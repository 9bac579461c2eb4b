package spec

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"github.com/bullpen-run/bullpen/proto"
)

// The parser's time grows with the square of a mapping's keys and of the depth, so both are limited
// before it is called.
const (
	maxTokens = 8000
	maxDepth  = 16
)

// lineErrorf returns the error for a line of the file.
func lineErrorf(line int, format string, args ...any) error {
	return proto.FieldErrorf("file", "line %d: %s", line, fmt.Sprintf(format, args...))
}

// parse returns the mapping that is the whole document.
func parse(file string) (*object, error) {
	tokens := lexer.Tokenize(file)
	if len(tokens) > maxTokens {
		return nil, proto.FieldErrorf("file", "must have at most %d words and marks outside of texts; it has %d", maxTokens,
			len(tokens))
	}
	if err := checkTokens(tokens); err != nil {
		return nil, err
	}
	parsed, err := parser.Parse(tokens, 0)
	if err != nil {
		return nil, syntaxError(err)
	}
	if len(parsed.Docs) != 1 || parsed.Docs[0].Body == nil {
		return nil, proto.FieldErrorf("file", "must be one YAML document with the steps of a pipeline")
	}
	return asObject("the file", parsed.Docs[0].Body)
}

// syntaxError returns the parser's error with the line of the fault.
func syntaxError(err error) error {
	at, ok := errors.AsType[yaml.Error](err)
	if !ok || at.GetToken() == nil || at.GetToken().Position == nil {
		text, _, _ := strings.Cut(err.Error(), "\n")
		return proto.FieldErrorf("file", "must be YAML: %s", proto.Shorten(text))
	}
	t := at.GetToken()
	// A line that is indented too much continues the text above it, where its token begins. Its
	// colon is the fault.
	if colon := t.Next; colon != nil && colon.Type == token.MappingValueType && colon.Position.Line > t.Position.Line {
		return lineErrorf(colon.Position.Line,
			"continues the text of line %d, which can have no colon; indent it as the fields beside it", t.Position.Line)
	}
	return lineErrorf(t.Position.Line, "%s", proto.Shorten(at.GetMessage()))
}

// checkTokens refuses YAML that pipelines do not need and parsers may stumble over.
func checkTokens(tokens token.Tokens) error {
	var columns []int // of the lines that enclose the present one
	line, flow, entries := 0, 0, 0
	for _, t := range tokens {
		if t.Position.Line != line {
			line, entries = t.Position.Line, 0
			for len(columns) > 0 && columns[len(columns)-1] >= t.Position.Column {
				columns = columns[:len(columns)-1]
			}
			columns = append(columns, t.Position.Column)
		}
		switch t.Type {
		case token.AnchorType, token.AliasType, token.MergeKeyType:
			return lineErrorf(line, "anchors and aliases are not supported; repeat the text")
		case token.TagType, token.DirectiveType, token.MappingKeyType:
			return lineErrorf(line, "%s is not supported here; put a text in quotes", proto.Shorten(t.Value))
		case token.SequenceStartType, token.MappingStartType:
			flow++
		case token.SequenceEndType, token.MappingEndType:
			flow--
		case token.SequenceEntryType:
			entries++
		}
		if len(columns)+flow+entries > maxDepth {
			return lineErrorf(line, "is nested too deeply")
		}
	}
	return nil
}

// object is a mapping of the file.
type object struct {
	what   string // for messages
	line   int
	fields []field
}

// field is a key of a mapping with its value.
type field struct {
	name  string
	line  int
	value ast.Node
}

func asObject(what string, node ast.Node) (*object, error) {
	o := &object{what: what, line: lineOf(node)}
	var values []*ast.MappingValueNode
	switch n := node.(type) {
	case *ast.MappingNode:
		values = n.Values
	case *ast.MappingValueNode:
		values = []*ast.MappingValueNode{n}
	default:
		return nil, lineErrorf(o.line, "%s must be a mapping of names to values", what)
	}
	for _, v := range values {
		name, err := text("a name", v.Key)
		if err != nil {
			return nil, err
		}
		line := lineOf(v.Key)
		if slices.ContainsFunc(o.fields, func(f field) bool { return f.name == name }) {
			return nil, lineErrorf(line, "%s is given twice", proto.Shorten(name))
		}
		o.fields = append(o.fields, field{name, line, v.Value})
	}
	return o, nil
}

// known refuses fields of other names.
func (o *object) known(names ...string) error {
	for _, f := range o.fields {
		if !slices.Contains(names, f.name) {
			return lineErrorf(f.line, "%s has no field %q; it may have %s", o.what, proto.Shorten(f.name),
				strings.Join(names, ", "))
		}
	}
	return nil
}

// get returns a field. ok is false if it is absent or null.
func (o *object) get(name string) (f field, ok bool) {
	for _, f := range o.fields {
		if _, null := f.value.(*ast.NullNode); f.name == name && f.value != nil && !null {
			return f, true
		}
	}
	return field{line: o.line}, false
}

// text returns a text field, empty if it is absent.
func (o *object) text(name string) (string, int, error) {
	f, ok := o.get(name)
	if !ok {
		return "", o.line, nil
	}
	value, err := text(name, f.value)
	return value, f.line, err
}

// list returns the elements of a field, which may be a single text.
func (o *object) list(name string) (list []string, line int, err error) {
	f, ok := o.get(name)
	if !ok {
		return nil, o.line, nil
	}
	list, err = texts(name, f.value)
	return list, f.line, err
}

// duration returns a field that is a number of seconds or a duration such as 90s or 10m.
func (o *object) duration(name string, otherwise, most time.Duration) (time.Duration, error) {
	value, line, err := o.text(name)
	if err != nil || value == "" {
		return otherwise, err
	}
	d, err := time.ParseDuration(value)
	if n, errInt := strconv.Atoi(value); errInt == nil {
		d, err = time.Duration(min(n, 1<<30))*time.Second, nil
	}
	if err != nil || d < time.Second || d > most || d%time.Second != 0 {
		return 0, lineErrorf(line, "%s must be a whole number of seconds, such as 90 or 10m, up to %s", name, most)
	}
	return d, nil
}

// text returns a scalar as it is written.
func text(what string, node ast.Node) (string, error) {
	switch n := node.(type) {
	case *ast.StringNode:
		return n.Value, nil
	case *ast.LiteralNode:
		return n.Value.Value, nil
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		return n.GetToken().Value, nil
	default:
		return "", lineErrorf(lineOf(node), "%s must be a text", what)
	}
}

// texts returns the elements of a sequence of scalars, or the only one.
func texts(what string, node ast.Node) ([]string, error) {
	sequence, ok := node.(*ast.SequenceNode)
	if !ok {
		single, err := text(what, node)
		if err != nil {
			return nil, lineErrorf(lineOf(node), "%s must be a list of texts", what)
		}
		return []string{single}, nil
	}
	list := []string{}
	for _, element := range sequence.Values {
		value, err := text("an element of "+what, element)
		if err != nil {
			return nil, err
		}
		list = append(list, value)
	}
	return list, nil
}

// lineWithin returns the line in the text of a node at which the text after before starts.
func lineWithin(node ast.Node, before string) int {
	if literal, ok := node.(*ast.LiteralNode); ok && strings.HasPrefix(literal.Start.Value, "|") {
		return lineOf(node) + 1 + strings.Count(before, "\n")
	}
	return lineOf(node)
}

func lineOf(node ast.Node) int {
	if node == nil {
		return 1
	}
	if t := node.GetToken(); t != nil && t.Position != nil {
		return t.Position.Line
	}
	return 1
}

// elements returns the elements of a sequence.
func elements(f field) ([]ast.Node, error) {
	if f.value == nil {
		return nil, nil
	}
	sequence, ok := f.value.(*ast.SequenceNode)
	if !ok {
		return nil, lineErrorf(f.line, "%s must be a list", f.name)
	}
	return sequence.Values, nil
}
