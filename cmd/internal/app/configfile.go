package app

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// ParseConfig parses args, the flags of `bullpen serve`, and adds settings from the environment,
// the file and the defaults.
func ParseConfig(args []string) (*Config, error) {
	c := new(Config)
	parser, err := kong.New(c, kong.Name("serve"), kong.NoDefaultHelp(), Durations())
	if err != nil {
		return nil, fmt.Errorf("settings: %w", err)
	}
	if _, err := parser.Parse(args); err != nil {
		return nil, fmt.Errorf("settings: %w", err)
	}
	return c, nil
}

// Variables returns the environment variables of all settings.
func Variables() (names []string) {
	for _, field := range reflect.VisibleFields(reflect.TypeFor[Config]()) {
		if name := field.Tag.Get("env"); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// AfterApply rejects a bootstrap key on the command line.
func (c *Config) AfterApply(ctx *kong.Context) error {
	for _, p := range ctx.Path {
		if p.Flag != nil && p.Flag.Name == "bootstrap-key" && !p.Resolved {
			return errors.New("--bootstrap-key is not a flag, because other users of the machine could read it: set " +
				"BULLPEN_BOOTSTRAP_KEY, or bootstrap-key in the file")
		}
	}
	return nil
}

// configFile is the path of a YAML file whose values replace defaults of flags.
type configFile string

// BeforeResolve reads the file. kong calls it after it has read flags and environment.
func (f configFile) BeforeResolve(ctx *kong.Context, trace *kong.Path) error {
	path := string(f)
	if trace.Flag != nil {
		path = string(ctx.FlagValue(trace.Flag).(configFile))
	}
	if path == "" {
		return nil
	}
	values, err := readConfigFile(path)
	if err != nil {
		return err
	}
	if err := checkValues(path, values, ctx.Flags()); err != nil {
		return err
	}
	ctx.AddResolver(kong.ResolverFunc(func(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
		for _, name := range flag.Envs {
			if _, ok := os.LookupEnv(name); ok {
				return nil, nil // the environment overrides the file
			}
		}
		if v, ok := values[flag.Name]; ok {
			return v.text, nil
		}
		return nil, nil
	}))
	return nil
}

// fileValue is a setting of the file in the form of a flag value.
type fileValue struct {
	text string
	line int
}

// readConfigFile reads the settings of a file. Its errors have the file and the line, but no
// values, which may be secrets.
func readConfigFile(path string) (map[string]fileValue, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read settings: %w", err)
	}
	file, err := parser.ParseBytes(text, 0)
	if err != nil {
		return nil, yamlError(path, err)
	}
	if len(file.Docs) > 1 {
		return nil, fmt.Errorf("%s must have one YAML document, not %d", path, len(file.Docs))
	}
	var raw map[string]any
	if err := yaml.Unmarshal(text, &raw); err != nil {
		return nil, yamlError(path, err)
	}
	lines := KeyLines(file)
	values := map[string]fileValue{}
	for key, v := range raw {
		if err := flatten(values, lines, key, v); err != nil {
			return nil, fmt.Errorf("%s:%w", path, err)
		}
	}
	return values, nil
}

// KeyLines returns the line numbers of the keys of a YAML file. Nested keys are joined with dots.
func KeyLines(file *ast.File) map[string]int {
	lines := map[string]int{}
	for _, doc := range file.Docs {
		keyLines(lines, "", doc.Body)
	}
	return lines
}

// keyLines adds the line numbers of the keys of a mapping.
func keyLines(lines map[string]int, prefix string, node ast.Node) {
	m, ok := node.(*ast.MappingNode)
	if !ok {
		return
	}
	for _, v := range m.Values {
		key := prefix + v.Key.GetToken().Value
		lines[key] = v.Key.GetToken().Position.Line
		keyLines(lines, key+".", v.Value)
	}
}

// flatten adds the setting at a key, or the settings nested in it, by the names of their flags:
// a.b_c, and b_c nested in a, are a-b-c.
func flatten(values map[string]fileValue, lines map[string]int, key string, v any) error {
	if below, ok := v.(map[string]any); ok && len(below) > 0 {
		for name, v := range below {
			if err := flatten(values, lines, key+"."+name, v); err != nil {
				return err
			}
		}
		return nil
	}
	form, err := flagForm(v)
	if err != nil {
		return fmt.Errorf("%d: %s: %w", lines[key], key, err)
	}
	name := strings.NewReplacer(".", "-", "_", "-").Replace(key)
	if other, twice := values[name]; twice {
		return fmt.Errorf("%d: %s is already set on line %d", max(other.line, lines[key]), name, min(other.line, lines[key]))
	}
	values[name] = fileValue{form, lines[key]}
	return nil
}

func yamlError(path string, err error) error {
	const want = "must be YAML with one `setting: value` a line"
	var at yaml.Error
	if errors.As(err, &at) && at.GetToken() != nil {
		return fmt.Errorf("%s:%d: %s: %s", path, at.GetToken().Position.Line, want, at.GetMessage())
	}
	return fmt.Errorf("%s: %s", path, want)
}

func flagForm(v any) (string, error) {
	switch v := v.(type) {
	case []any:
		items := make([]string, len(v))
		for i, item := range v {
			var err error
			if items[i], err = flagForm(item); err != nil {
				return "", err
			}
		}
		return strings.Join(items, ","), nil
	case map[string]any:
		return "", errors.New("must be a value or a list of values")
	case nil:
		return "", errors.New("has no value: give one, or remove the line")
	default:
		return fmt.Sprint(v), nil
	}
}

// checkValues checks that the settings are flags and that their values parse.
func checkValues(path string, values map[string]fileValue, flags []*kong.Flag) error {
	known := map[string]*kong.Flag{}
	for _, f := range flags {
		if !slices.Contains([]string{"help", "version", "config", "json"}, f.Name) {
			known[f.Name] = f
		}
	}
	var unknown []string
	for _, key := range slices.Sorted(maps.Keys(values)) {
		flag, v := known[key], values[key]
		if flag == nil {
			unknown = append(unknown, fmt.Sprintf("%s (line %d)", key, v.line))
			continue
		}
		scratch := reflect.New(flag.Target.Type()).Elem()
		scan := kong.ScanFromTokens(kong.Token{Type: kong.FlagValueToken, Value: v.text})
		if err := flag.Mapper.Decode(&kong.DecodeContext{Value: flag.Value, Scan: scan}, scratch); err != nil {
			return fmt.Errorf("%s:%d: %s: %w", path, v.line, key, err)
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	return fmt.Errorf("%s: unknown settings: %s. Known settings: %s", path, strings.Join(unknown, ", "),
		strings.Join(slices.Sorted(maps.Keys(known)), ", "))
}
