package gateway

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Null is accepted for members that may be absent, and for no others. Their schemas say the same.
func TestNullsAreAsDescribed(t *testing.T) {
	text, err := api.OpenAPI("1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	compiler.UseRegexpEngine(func(text string) (jsonschema.Regexp, error) { // which are of JavaScript
		return regexp.Compile(regexp.MustCompile(`\\u([0-9a-fA-F]{4})`).ReplaceAllString(text, `\x{$1}`))
	})
	if err := compiler.AddResource("https://bullpen.invalid/openapi.json", doc); err != nil {
		t.Fatal(err)
	}
	contract, err := contract()
	if err != nil {
		t.Fatal(err)
	}
	escape := strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D")
	n := 0
	for _, route := range api.Routes() {
		body := contract.Paths.Find(route.Path).GetOperation(route.Method).RequestBody
		if body == nil || body.Value.Content[web.TypeJSON] == nil {
			continue
		}
		members := body.Value.Content[web.TypeJSON].Schema.Value
		at := "https://bullpen.invalid/openapi.json#/paths/" + escape.Replace(route.Path) + "/" +
			strings.ToLower(route.Method) + "/requestBody/content/application~1json/schema"
		if ref := body.Value.Content[web.TypeJSON].Schema.Ref; ref != "" {
			at = "https://bullpen.invalid/openapi.json" + ref
		}
		for name := range members.Properties {
			schema, err := compiler.Compile(at + "/properties/" + escape.Replace(name))
			if err != nil {
				t.Fatal(err)
			}
			n++
			err = schema.Validate(nil)
			if optional := !slices.Contains(members.Required, name); optional != (err == nil) {
				t.Errorf("%s: null for %s: %v", route.ID, name, err)
			}
		}
	}
	if n < 100 {
		t.Errorf("%d members were checked", n)
	}
}
