package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto/api"
)

// document is the part of an OpenAPI document from which types are generated.
type document struct {
	Paths      map[string]map[string]*operation `json:"paths"`
	Components struct {
		Schemas map[string]*schema `json:"schemas"`
	} `json:"components"`
}

type operation struct {
	ID         string `json:"operationId"`
	Parameters []struct {
		Name     string  `json:"name"`
		In       string  `json:"in"`
		Required bool    `json:"required"`
		Schema   *schema `json:"schema"`
	} `json:"parameters"`
	RequestBody *body           `json:"requestBody"`
	Responses   map[string]body `json:"responses"`
}

type body struct {
	Content map[string]struct {
		Schema *schema `json:"schema"`
	} `json:"content"`
}

type schema struct {
	Ref                  string             `json:"$ref"`
	Type                 any                `json:"type"` // a string or a list of them
	Enum                 []any              `json:"enum"`
	Properties           map[string]*schema `json:"properties"`
	Required             []string           `json:"required"`
	AdditionalProperties json.RawMessage    `json:"additionalProperties"`
	Items                *schema            `json:"items"`
	AnyOf                []*schema          `json:"anyOf"`
	OneOf                []*schema          `json:"oneOf"`
	AllOf                []*schema          `json:"allOf"`
}

// writeSchema writes TypeScript types of all schemas and operations of the HTTP API.
func writeSchema(file string) error {
	text, err := api.OpenAPI("")
	if err != nil {
		return fmt.Errorf("describe the API: %w", err)
	}
	var d document
	if err := json.Unmarshal(text, &d); err != nil {
		return fmt.Errorf("decode the description of the API: %w", err)
	}
	var b strings.Builder
	b.WriteString("// Written by console/build from the OpenAPI document. Not committed.\n\n")
	for _, name := range slices.Sorted(maps.Keys(d.Components.Schemas)) {
		fmt.Fprintf(&b, "export type %s = %s;\n", name, typeOf(d.Components.Schemas[name]))
	}
	calls, routes := strings.Builder{}, strings.Builder{}
	for _, path := range slices.Sorted(maps.Keys(d.Paths)) {
		for _, method := range slices.Sorted(maps.Keys(d.Paths[path])) {
			o := d.Paths[path][method]
			if o == nil || o.ID == "" || !strings.HasPrefix(path, "/v1/") && path != "/login" {
				continue
			}
			fmt.Fprintf(&calls, "  %s: { args: %s; answer: %s };\n", o.ID, argsOf(o), answerOf(o))
			fmt.Fprintf(&routes, "  %s: [%q, %q],\n", o.ID, strings.ToUpper(method), strings.TrimPrefix(path, "/"))
		}
	}
	fmt.Fprintf(&b, "\nexport interface Calls {\n%s}\n\n", calls.String())
	fmt.Fprintf(&b, "export const routes: Record<keyof Calls, [method: string, path: string]> = {\n%s};\n",
		routes.String())
	if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil { //nolint:gosec // public
		return fmt.Errorf("write the types of the API: %w", err)
	}
	return nil
}

// argsOf returns the type of an operation's arguments: parameters of path and query by their names,
// and body.
func argsOf(o *operation) string {
	var fields []string
	for _, p := range o.Parameters {
		name, optional := p.Name, "?"
		if p.Required {
			optional = ""
		}
		switch {
		case p.In != "path" && p.In != "query":
		case strings.Contains(name, "<"): // such as metadata.<key>
			fields = append(fields, "[name: `"+name[:strings.Index(name, "<")]+"${string}`]: string | undefined")
		default:
			fields = append(fields, fmt.Sprintf("%s%s: %s", name, optional, typeOf(p.Schema)))
		}
	}
	if o.RequestBody != nil {
		t := "BodyInit"
		if s, ok := o.RequestBody.Content["application/json"]; ok {
			t = typeOf(s.Schema)
		}
		fields = append(fields, "body?: "+t)
	}
	return "{ " + strings.Join(append(fields, "headers?: Record<string, string>"), "; ") + " }"
}

func answerOf(o *operation) string {
	for _, status := range slices.Sorted(maps.Keys(o.Responses)) {
		if s, ok := o.Responses[status].Content["application/json"]; ok && status < "300" {
			return typeOf(s.Schema)
		}
	}
	return "unknown"
}

// typeOf returns the TypeScript type of a schema.
func typeOf(s *schema) string {
	switch {
	case s == nil:
		return "unknown"
	case s.Ref != "":
		return s.Ref[strings.LastIndex(s.Ref, "/")+1:]
	case len(s.Enum) > 0:
		return union(s.Enum, func(v any) string {
			text, _ := json.Marshal(v) // of values that were JSON
			return string(text)
		})
	case len(s.AnyOf) > 0:
		return union(s.AnyOf, typeOf)
	case len(s.OneOf) > 0:
		return union(s.OneOf, typeOf)
	case len(s.AllOf) == 1:
		return typeOf(s.AllOf[0])
	}
	types, ok := s.Type.([]any)
	if !ok {
		types = []any{s.Type}
	}
	return union(types, func(t any) string {
		switch t {
		case "string", "boolean", "null":
			return fmt.Sprint(t)
		case "integer", "number":
			return "number"
		case "array":
			return "Array<" + typeOf(s.Items) + ">"
		case "object":
			return objectType(s)
		default:
			return "unknown"
		}
	})
}

func objectType(s *schema) string {
	if len(s.Properties) == 0 {
		var values schema
		if json.Unmarshal(s.AdditionalProperties, &values) == nil && len(s.AdditionalProperties) > 0 {
			return "Record<string, " + typeOf(&values) + ">"
		}
		return "Record<string, unknown>"
	}
	var fields []string
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		optional := "?"
		if slices.Contains(s.Required, name) {
			optional = ""
		}
		fields = append(fields, fmt.Sprintf("%q%s: %s", name, optional, typeOf(s.Properties[name])))
	}
	return "{ " + strings.Join(fields, "; ") + " }"
}

func union[T any](list []T, text func(T) string) string {
	var parts []string
	for _, v := range list {
		parts = append(parts, text(v))
	}
	return strings.Join(parts, " | ")
}
