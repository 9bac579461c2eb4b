package acp

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// The ids of the config options of sessions.
const (
	optionMode       = "mode"
	optionModel      = "model"
	optionPermission = "permission_mode"
	optionVariant    = "thought_level"
)

// ConfigOption is a setting of a session, with its allowed values.
type ConfigOption struct {
	ID       string        `json:"id"`
	Name     string        `json:"name"`
	Category string        `json:"category,omitempty"`
	Type     string        `json:"type"` // select
	Value    string        `json:"currentValue"`
	Options  []ConfigValue `json:"options"`
}

// ConfigValue is an allowed value of a setting.
type ConfigValue struct {
	Value       string `json:"value"`
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
}

// ConfigOptions returns the settings of a session, or of a new session if x is nil.
func ConfigOptions(info *sessions.Info, x *proto.AgentSession) []ConfigOption {
	if x == nil {
		x = &proto.AgentSession{
			AgentMode: sessions.DefaultMode, PermissionMode: sessions.PermissionDefault, Model: info.DefaultModel,
		}
	}
	list := []ConfigOption{}
	add := func(id, name, category, value string, values []ConfigValue) {
		if len(values) > 0 {
			list = append(list, ConfigOption{id, name, category, "select", value, values})
		}
	}
	var models, variants, modes, permissions []ConfigValue
	for _, m := range info.Models {
		name := m.Name
		if name == "" {
			name = m.ID
		}
		models = append(models, ConfigValue{Value: m.ID, Name: name})
		if m.ID == x.Model {
			for _, v := range m.Variants {
				variants = append(variants, ConfigValue{Value: v, Name: v})
			}
		}
	}
	for _, m := range info.Modes {
		modes = append(modes, ConfigValue{m.ID, m.Name, m.Description})
	}
	for _, m := range info.PermissionModes {
		permissions = append(permissions, ConfigValue{Value: m, Name: m})
	}
	add(optionModel, "Model", optionModel, x.Model, models)
	add(optionMode, "Mode", optionMode, x.AgentMode, modes)
	add(optionPermission, "Permissions", "", x.PermissionMode, permissions)
	add(optionVariant, "Thought level", optionVariant, x.Variant, variants)
	return list
}

// checkOption returns an error if a setting does not allow a value. It accepts models that are not
// listed.
func checkOption(info *sessions.Info, option, value string) error {
	if value == "" {
		return invalidf("invalid request: the value must not be empty")
	}
	switch option {
	case optionMode, optionModel, optionVariant:
		return nil
	case optionPermission:
		if slices.Contains(info.PermissionModes, value) {
			return nil
		}
		return invalidf("invalid request: invalid permission mode: %s", proto.Shorten(value))
	default:
		return invalidf("invalid request: unknown config option: %s", proto.Shorten(option))
	}
}

func setOption(x *proto.AgentSession, option, value string) {
	switch option {
	case optionMode:
		x.AgentMode = value
	case optionModel:
		x.Model = value
	case optionPermission:
		x.PermissionMode = value
	case optionVariant:
		x.Variant = value
	}
}

// configKind describes the routes of one kind of configuration. article is the kind with its
// article, for summaries of routes.
type configKind struct {
	kind        proto.AgentConfigKind
	name        string
	article     string
	nameInQuery string
}

var configKinds = []configKind{
	{proto.AgentConfigMCP, "MCP", "an MCP server", "mcpName"},
	{proto.AgentConfigSkills, "Skills", "skills", "skillName"},
}

// parse returns the directory and the name in the query of a request. ok is false if the query is
// invalid and parse has written the response.
func (k *configKind) parse(w http.ResponseWriter, r *http.Request) (directory, name string, ok bool, err error) {
	q := r.URL.Query()
	directory, name = q.Get("directory"), q.Get(k.nameInQuery)
	for _, p := range []struct{ name, value string }{{"directory", directory}, {k.nameInQuery, name}} {
		if p.value == "" || len(p.value) > proto.MaxAgentConfigName {
			return "", "", false, invalid(w, http.StatusBadRequest, "the query parameter '"+p.name+"' is missing or too long")
		}
	}
	return directory, name, true, nil
}

func (s *Server) putConfig(k *configKind) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		directory, name, ok, err := k.parse(w, r)
		if !ok {
			return err
		}
		host := s.Host(r)
		if err := host.AllowStored(r.Context(), false); err != nil {
			return err
		}
		c := &proto.AgentConfig{Kind: k.kind, Directory: directory, Name: name}
		c.Org, _ = host.Caller()
		err = host.ReadBody(w, func(body []byte) error {
			var object map[string]json.RawMessage
			if json.Unmarshal(body, &object) != nil || object == nil {
				return api.Errorf(api.CodeValidation, "invalid request: the body must be an object")
			}
			if len(body) > proto.MaxAgentConfig {
				return api.Errorf(api.CodeValidation, "invalid request: the body must not be longer than %d bytes",
					proto.MaxAgentConfig)
			}
			c.Value = slices.Clone(body)
			return nil
		})
		if err != nil {
			return err
		}
		if err := s.Configs.PutConfig(r.Context(), c); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
}

func (s *Server) getConfig(k *configKind) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		directory, name, ok, err := k.parse(w, r)
		if !ok {
			return err
		}
		org, _ := s.Host(r).Caller()
		c, err := s.Configs.Config(r.Context(), org, k.kind, directory, name)
		if errors.Is(err, proto.ErrNotFound) {
			return writeProblem(w, http.StatusNotFound, "not_found", "there is no such configuration")
		}
		if err != nil {
			return err
		}
		writeResponse(w, c.Value)
		return nil
	}
}

func (s *Server) deleteConfig(k *configKind) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		directory, name, ok, err := k.parse(w, r)
		if !ok {
			return err
		}
		org, _ := s.Host(r).Caller()
		if err := s.Configs.RemoveConfig(r.Context(), org, k.kind, directory, name); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
}
