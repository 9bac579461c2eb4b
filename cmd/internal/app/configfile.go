package app

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sort"
	"strings"

	"github.com/alecthomas/kong"
	"github.com/goccy/go-yaml"
)

// ParseConfig gives the settings of args, the flags of `bullpen serve`, with the environment, the file and the defaults under
// them.
func ParseConfig(args []string) (*Config, error) {
	c := new(Config)
	parser, err := kong.New(c, kong.Name("serve"), kong.NoDefaultHelp())
	if err != nil {
		return nil, fmt.Errorf("settings: %w", err)
	}
	if _, err := parser.Parse(args); err != nil {
		return nil, fmt.Errorf("settings: %w", err)
	}
	return c, nil
}

// AfterApply refuses secrets that nobody should put on a command line, where every process of the host can read them.
func (c *Config) AfterApply(ctx *kong.Context) error {
	for _, p := range ctx.Path {
		if p.Flag != nil && p.Flag.Name == "bootstrap-key" && !p.Resolved {
			return errors.New("--bootstrap-key is not a flag, because other users of the host could read it: set BULLPEN_BOOTSTRAP_KEY, or bootstrap-key in the file")
		}
	}
	return nil
}

// configFile is the path of a YAML file; when it is set, the file's values stand in for flags that are not.
type configFile string

// BeforeResolve reads the file. kong calls it when flags and environment are known.
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
	if err := checkKeys(path, values, ctx.Flags()); err != nil {
		return err
	}
	ctx.AddResolver(kong.ResolverFunc(func(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
		for _, name := range flag.Envs {
			if _, ok := os.LookupEnv(name); ok {
				return nil, nil // no value of the file's, and no error: the environment wins
			}
		}
		if v, ok := values[flag.Name]; ok {
			return v, nil
		}
		return nil, nil
	}))
	return nil
}

// readConfigFile reads the settings of the file as they would be written in flags.
func readConfigFile(path string) (map[string]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read settings: %w", err)
	}
	var raw map[string]any
	if err := yaml.Unmarshal(text, &raw); err != nil {
		return nil, fmt.Errorf("%s must be YAML with one `setting: value` a line: %w", path, err)
	}
	values := make(map[string]string, len(raw))
	for key, v := range raw {
		if values[key], err = flagForm(v); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", path, key, err)
		}
	}
	return values, nil
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
		return "", errors.New("write a value or a list of values, not settings below settings")
	case nil:
		return "", errors.New("has no value: give one or remove the line")
	default:
		return fmt.Sprint(v), nil
	}
}

func checkKeys(path string, values map[string]string, flags []*kong.Flag) error {
	var known, unknown []string
	for _, f := range flags {
		if !slices.Contains([]string{"help", "config", "json"}, f.Name) {
			known = append(known, f.Name)
		}
	}
	for key := range values {
		if !slices.Contains(known, key) {
			unknown = append(unknown, key)
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	sort.Strings(known)
	sort.Strings(unknown)
	return fmt.Errorf("%s: unknown settings: %s. There are: %s", path, strings.Join(unknown, ", "), strings.Join(known, ", "))
}
