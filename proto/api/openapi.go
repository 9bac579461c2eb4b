package api

import (
	"cmp"
	"encoding/json"
	"maps"
	"net/http"
	"net/netip"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// object is a JSON object.
type object = map[string]any

// OpenAPI returns the OpenAPI document of a server of that version, which also has the routes of vendors.
func OpenAPI(version string, vendors ...Route) ([]byte, error) {
	g := &generator{schemas: object{}}
	paths := object{}
	for _, r := range append(Routes(), vendors...) {
		path := strings.ReplaceAll(r.Path, "*", "{name}") // which may have slashes
		if paths[path] == nil {
			paths[path] = object{}
		}
		paths[path].(object)[strings.ToLower(r.Method)] = g.operation(&r, path)
	}
	g.schemaOf(BatchResult{}, false) // of a line in an answer that is not JSON as a whole
	g.schemaOf(ChangesEvent{}, false)
	var events []object
	mapping := object{}
	for _, event := range []any{StatusEvent{}, OutputEvent{}, DisplayEvent{}, KeepaliveEvent{}, ResultEvent{}} {
		schema := g.schemaOf(event, false)
		kind, _ := reflect.TypeOf(event).FieldByName("Type")
		events, mapping[kind.Tag.Get("enum")] = append(events, schema), schema["$ref"]
	}
	g.schemas["Event"] = object{
		"description": "One line of a stream.", "oneOf": events,
		"discriminator": object{"propertyName": "type", "mapping": mapping},
	}
	responses := object{}
	for _, c := range Codes() {
		headers := object{"X-Request-Id": ref("headers", "RequestId")}
		maps.Copy(headers, c.headers)
		responses[c.Title] = object{
			"description": c.Doc, "headers": headers,
			"content": content(typeJSON, g.schemaOf(Error{}, false), Error{Code: c.Code, Message: c.Example}),
		}
	}
	return json.MarshalIndent(object{
		"openapi": "3.1.0",
		"info": object{
			"title": "bullpen", "version": version, "license": object{"name": "Apache-2.0", "identifier": "Apache-2.0"},
			"description": "Runs untrusted code in sandboxes. Every answer has an X-Request-Id; every answer about an " +
				"execution has an X-Trace-Id. " +
				"A schema cannot say which fields exclude each other, or what depends on the time and on what is stored: the " +
				"descriptions of fields do. A request that breaks such a rule gets 400 with the code validation_error and a " +
				"message that begins with the field. " +
				"HEAD is answered like GET, without the body. Other paths are answered with 404, other methods with 405 and " +
				"Allow, in the same envelope. Requests that break the rules of HTTP " +
				"itself, or have headers of more than 64 KiB, are answered in plain text and without an X-Request-Id.",
		},
		"servers":  []object{{"url": "/"}},
		"security": []object{{"key": []string{}}},
		"tags":     tags(),
		"paths":    paths,
		"components": object{
			"securitySchemes": object{
				"key": object{
					"type": "http", "scheme": "bearer",
					"description": "An API key: `sk-REGION-TOKEN`. Each operation names the scope that the key needs. x-global: " +
						"the key must be a global administrator's.",
				},
				"session": object{
					"type": "apiKey", "in": "cookie", "name": "__Host-bullpen_session",
					"description": "The session of a browser; over plain HTTP the name has no __Host- prefix. A request that " +
						"changes something names the organisation of the session in the header X-Bullpen-Org. Requests of pages of " +
						"other origins are refused.",
				},
			},
			"headers": object{
				"RequestId": object{
					"description": "The client's X-Request-Id, or one that the server chose.", "required": true,
					"schema": object{"type": "string", "minLength": 1, "maxLength": 128},
				},
				"TraceId": object{
					"description": "The execution's trace id.", "required": true,
					"schema": g.schema(reflect.TypeFor[string](), `format:"trace-id"`, false),
				},
			},
			"parameters": object{"RequestId": object{
				"name": "X-Request-Id", "in": "header", "schema": object{"type": "string"},
				"description": "Kept in the record and sent back: 1 to 128 printable ASCII characters.",
			}},
			"responses": responses,
			"schemas":   g.schemas,
		},
	}, "", "  ")
}

func ref(kind, name string) object { return object{"$ref": "#/components/" + kind + "/" + name} }

// content returns the content of one type, with an example unless it is nil.
func content(mediaType string, schema object, example any) object {
	media := object{"schema": schema}
	if example != nil {
		media["example"] = example
	}
	return object{mediaType: media}
}

// generator collects the schemas of named types.
type generator struct{ schemas object }

// operation returns the description of a route.
func (g *generator) operation(r *Route, path string) object {
	op := object{"operationId": r.ID, "tags": []string{cmp.Or(r.Tag, tagAgents)}, "summary": r.Summary}
	if r.Doc != "" {
		op["description"] = r.Doc
	}
	switch {
	case r.Public:
		op["security"] = []object{}
	case r.Scope != "":
		op["security"] = []object{{"key": []proto.Scope{r.Scope}}, {"session": []proto.Scope{r.Scope}}}
		if r.OrAdmin {
			op["security"] = append(op["security"].([]object), object{"key": []proto.Scope{proto.ScopeAdmin}},
				object{"session": []proto.Scope{proto.ScopeAdmin}})
		}
	}
	if r.Global {
		op["x-global"] = true
	}
	var parameters []object
	for _, part := range strings.Split(path, "{")[1:] {
		name, _, _ := strings.Cut(part, "}")
		parameters = append(parameters,
			object{"name": name, "in": "path", "required": true, "description": r.PathDoc, "schema": object{"type": "string"}})
	}
	for _, p := range r.params() {
		parameters = append(parameters,
			object{"name": p.Name, "in": p.In, "required": p.Required, "description": p.Doc, "schema": p.schema})
	}
	if r.Tag != tagServer {
		parameters = append(parameters, ref("parameters", "RequestId"))
		op["parameters"] = parameters
	}
	if r.Request != nil {
		op["requestBody"] = object{
			"required": !r.OptionalBody, "content": content(typeJSON, g.schemaOf(r.Request, true), r.Request),
		}
	}
	if r.Upload != "" {
		forms := content(r.Upload, object{}, nil)
		if r.Request != nil {
			maps.Copy(forms, content(typeJSON, g.schemaOf(r.Request, true), r.Request))
		}
		op["requestBody"] = object{"required": true, "description": r.UploadDoc, "content": forms}
	}
	if r.Vendor != "" {
		op["responses"] = object{
			"default": object{
				"description": "As " + r.Vendor + " documents it.",
				"headers":     object{"X-Request-Id": ref("headers", "RequestId")},
			},
		}
		if r.Method == http.MethodPost {
			op["requestBody"] = object{"description": "As " + r.Vendor + " documents it.", "content": object{"*/*": object{}}}
		}
		return op
	}
	responses := object{}
	for i := range r.Responses {
		responses[strconv.Itoa(r.Responses[i].Status)] = g.response(r, &r.Responses[i])
	}
	for _, c := range Codes() { // the first code of a status stands for all
		status := strconv.Itoa(c.Status)
		if responses[status] == nil && slices.Contains(r.errors(), c.Status) {
			responses[status] = ref("responses", c.Title)
		}
	}
	op["responses"] = responses
	return op
}

// params returns the parameters of a route: its own, and those that follow from its kind.
func (r *Route) params() []Param {
	if !r.conditional() {
		return r.Params
	}
	return append(slices.Clip(r.Params),
		header("If-Match", "The ETag that the object must have, so that no other change is lost.", text()))
}

// conditional reports whether a request may have an If-Match.
func (r *Route) conditional() bool {
	return r.Tagged && (r.Method == http.MethodPut || r.Method == http.MethodPatch || r.Method == http.MethodDelete)
}

// errors returns the statuses of the errors of a route: of the errors of the route itself, and of
// those that follow from its kind.
func (r *Route) errors() []int {
	statuses := r.Errors
	if r.Tag == tagServer {
		return statuses
	}
	statuses = append(statuses, http.StatusInternalServerError, http.StatusServiceUnavailable)
	if !r.Public {
		statuses = append(statuses, http.StatusUnauthorized, http.StatusForbidden, http.StatusTooManyRequests)
	}
	if r.Request != nil || r.Upload != "" {
		statuses = append(statuses, http.StatusBadRequest, http.StatusRequestTimeout, http.StatusRequestEntityTooLarge,
			http.StatusUnsupportedMediaType)
	}
	if r.conditional() {
		statuses = append(statuses, http.StatusPreconditionFailed)
	}
	if slices.ContainsFunc(r.Params, func(p Param) bool { return p.In == "query" }) {
		statuses = append(statuses, http.StatusBadRequest)
	}
	return statuses
}

func (g *generator) response(r *Route, a *Response) object {
	headers := object{"X-Request-Id": ref("headers", "RequestId")}
	if r.Traced {
		headers["X-Trace-Id"] = ref("headers", "TraceId")
	}
	if r.Tagged && a.Body != nil && r.Method != http.MethodDelete {
		headers["ETag"] = object{"description": "Changes with the object.", "schema": object{"type": "string"}}
	}
	for name, doc := range a.Headers {
		headers[name] = object{"description": doc, "schema": object{"type": "string"}}
	}
	response := object{"description": a.Doc, "headers": headers}
	all := object{}
	if a.Body != nil {
		all = content(typeJSON, g.schemaOf(a.Body, false), a.Body)
	}
	for mediaType, example := range a.Text {
		schema := object{}
		if example != "" {
			if !strings.HasSuffix(mediaType, "+json") {
				schema["type"] = "string"
			}
			all[mediaType] = object{"schema": schema, "example": example}
		} else {
			all[mediaType] = object{"schema": schema}
		}
	}
	if len(all) > 0 {
		response["content"] = all
	}
	return response
}

// schemaOf returns the schema of the type of v, which is the type of a request or of an answer.
func (g *generator) schemaOf(v any, request bool) object {
	return g.schema(reflect.TypeOf(v), "", request)
}

// schema returns the schema of a type. Structs become named schemas, but those inside requests do
// not: their fields are optional there.
func (g *generator) schema(t reflect.Type, tag reflect.StructTag, request bool) object {
	var schema object
	switch reflect.Zero(t).Interface().(type) {
	case Time:
		schema = object{"type": "string", "format": "date-time", "examples": []string{exampleTime().Format(proto.TimeLayout)}}
	case netip.Prefix:
		schema = object{"type": "string", "examples": []string{"192.0.2.0/24"}}
	case proto.Bytes:
		schema = g.bytes(request)
	case map[string]json.RawMessage:
		schema = object{"type": "object", "additionalProperties": object{}}
	case json.RawMessage:
		schema = object{"type": []string{"object", "null"}}
	case proto.Seconds:
		schema = numberSchema("number", tag)
	case Waits:
		item := numberSchema("number", tag)
		schema = object{"oneOf": []object{
			{"type": "array", "minItems": 1, "maxItems": proto.MaxWebhookAttempts - 1, "items": item},
			{"const": durable},
			{"type": "null"},
		}}
	default:
		schema = g.kindSchema(t, tag, request)
	}
	if text, ok := tag.Lookup("default"); ok && request && t.Kind() != reflect.Pointer {
		schema["default"] = defaultValue(t, text)
	}
	if doc := tag.Get("doc"); doc != "" {
		schema["description"] = doc
	}
	return schema
}

func (g *generator) kindSchema(t reflect.Type, tag reflect.StructTag, request bool) object {
	switch t.Kind() {
	case reflect.Pointer:
		return g.schema(t.Elem(), tag, request)
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Int, reflect.Int64:
		return numberSchema("integer", tag)
	case reflect.Float64:
		return numberSchema("number", tag)
	case reflect.String:
		return stringSchema(t, tag)
	case reflect.Map:
		schema := object{"type": "object", "additionalProperties": g.schema(t.Elem(), valueTag(tag), request)}
		copyTags(schema, tag, "maxProperties")
		if pattern := tag.Get("keyPattern"); pattern != "" {
			schema["propertyNames"] = object{"pattern": pattern, "maxLength": json.RawMessage(tag.Get("keyMaxLength"))}
		}
		return schema
	case reflect.Slice:
		schema := object{"type": "array", "items": g.schema(t.Elem(), valueTag(tag), request)}
		copyTags(schema, tag, "maxItems", "uniqueItems")
		return schema
	default:
		if request && path.Base(t.PkgPath()) != "api" {
			return g.structSchema(t, request)
		}
		name := cmp.Or(map[string]string{"Profile": "Sandbox"}[t.Name()], t.Name())
		if g.schemas[name] == nil {
			g.schemas[name] = object{} // for types that refer to themselves
			g.schemas[name] = g.structSchema(t, request)
		}
		return ref("schemas", name)
	}
}

// structSchema returns the schema of an object. Fields of requests that are not required may be
// null.
func (g *generator) structSchema(t reflect.Type, request bool) object {
	properties, required := object{}, []string{}
	partial := request && path.Base(t.PkgPath()) != "api" || objectTag(t).Get("partial") == "true"
	for _, f := range jsonFields(t) {
		schema := g.schema(f.Type, f.Tag, request)
		needed := !f.omitEmpty && !partial
		if needed {
			required = append(required, f.name)
		}
		if request && !needed || !request && needed && f.Type.Kind() == reflect.Pointer {
			schema = nullable(schema)
		}
		properties[f.name] = schema
	}
	schema := object{"type": "object", "properties": properties}
	if len(required) > 0 {
		schema["required"] = required
	}
	if objectTag(t).Get("additionalProperties") != "true" {
		schema["unevaluatedProperties"] = false
	}
	if doc := objectTag(t).Get("doc"); doc != "" {
		schema["description"] = doc
	}
	return schema
}

// nullable returns a schema that allows null, too.
func nullable(schema object) object {
	switch kind := schema["type"].(type) {
	case string:
		schema["type"] = []string{kind, "null"}
		if values, ok := schema["enum"].([]string); ok {
			var all []any
			for _, v := range values {
				all = append(all, v)
			}
			schema["enum"] = append(all, nil)
		}
	case nil:
		if schema["$ref"] != nil {
			return object{"anyOf": []object{schema, {"type": "null"}}}
		}
	}
	return schema
}

func (g *generator) bytes(request bool) object {
	name := "Bytes"
	schema := object{
		"type": "string", "pattern": "^[0-9]+(KiB|MiB|GiB)?$", "examples": []string{"512MiB"},
		"description": "An amount of data, in the largest unit that divides it.",
	}
	if request {
		name = "BytesRequest"
		schema = object{
			"type": []string{"string", "integer"}, "pattern": "^[0-9]+ ?(KiB|MiB|GiB)?$", "minimum": 0,
			"examples": []any{"512MiB", 536870912}, "description": "A number of bytes, or a string with a unit.",
		}
	}
	g.schemas[name] = schema
	return ref("schemas", name)
}

func numberSchema(kind string, tag reflect.StructTag) object {
	schema := object{"type": kind}
	copyTags(schema, tag, "minimum", "maximum")
	return schema
}

func stringSchema(t reflect.Type, tag reflect.StructTag) object {
	schema := object{"type": "string"}
	switch values := enumOf(t, tag); len(values) {
	case 0:
	case 1:
		schema["const"] = values[0]
	default:
		schema["enum"] = values
	}
	copyTags(schema, tag, "minLength", "maxLength")
	if pattern := tag.Get("pattern"); pattern != "" {
		schema["pattern"] = pattern
	}
	_, format := formatOf(tag.Get("format"))
	maps.Copy(schema, format)
	return schema
}

// copyTags copies tags with JSON values into a schema.
func copyTags(schema object, tag reflect.StructTag, names ...string) {
	for _, name := range names {
		if value := tag.Get(name); value != "" {
			schema[name] = json.RawMessage(value)
		}
	}
}

// valueTag returns the tags of the entries of a list or map.
func valueTag(tag reflect.StructTag) reflect.StructTag {
	var tags []string
	if pattern := tag.Get("valuePattern"); pattern != "" {
		tags = append(tags, "pattern:"+strconv.Quote(pattern))
	}
	if length := tag.Get("valueMaxLength"); length != "" {
		tags = append(tags, "maxLength:"+strconv.Quote(length))
	}
	return reflect.StructTag(strings.Join(tags, " "))
}

// defaultValue returns the JSON form of a default.
func defaultValue(t reflect.Type, text string) any {
	if t.Kind() == reflect.String {
		return text
	}
	return json.RawMessage(text)
}
