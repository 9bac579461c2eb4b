package api

import (
	"net/http"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// Resource is a kind of object that administrators manage. Routes and client methods are derived from it,
// and commands if it has columns. T is an object, N a new one, and S the settings that can be changed.
type Resource[T, N, S any] struct {
	Name     string // what people call an object, such as API key
	Singular string // such as key: in ids of routes and actions of the audit log
	Plural   string // such as keys: in paths, and the field of the list in an answer
	Param    string // what the path of an object ends with, such as id or name
	OfOrg    bool   // objects belong to organisations
	Settings func(*T) S
	Columns  []Column[T] // of a table for people

	CreateDoc, ReplaceDoc, RemoveDoc string // what the documents add about these routes and commands
	Example                          string // of the command that creates an object
}

// Column is a column of a table of objects.
type Column[T any] struct {
	Head string
	Cell func(*T) any
}

// Path returns the path of the list. An object is at Path/id.
func (r *Resource[T, N, S]) Path() string { return "/v1/admin/" + r.Plural }

// WithArticle returns the name with its article.
func (r *Resource[T, N, S]) WithArticle() string {
	if strings.ContainsRune("aeioAEIO", rune(r.Name[0])) {
		return "an " + r.Name
	}
	return "a " + r.Name
}

// PluralName returns the name of several objects.
func (r *Resource[T, N, S]) PluralName() string { return r.Name + "s" }

// registered has the routes of resources, in the order of the files that declare them.
var registered []Route

// register adds the routes of a resource to those of the API. They are declared with the resource, so that
// one file has all of it.
func register[T, N, S any](r Resource[T, N, S], routes func(*Resource[T, N, S]) []Route) *Resource[T, N, S] {
	registered = append(registered, routes(&r)...)
	return &r
}

// The routes of a resource, in their order.
const (
	routeCreate = iota
	routeList
	routeGet
	routeReplace
	routeRemove
)

// routes returns the five routes of a resource: to create, list, get, replace and remove objects.
// example is an object, wanted a new one, settings what replaces those of an object, and page the answer
// with a list, whose order listed describes.
func (r *Resource[T, N, S]) routes(example T, wanted, settings, page any, listed string) []Route {
	params := paging()
	mayLack, conflicts := []int{http.StatusNotFound}, []int{http.StatusNotFound, http.StatusConflict}
	named, namedConflicts := mayLack, conflicts
	if r.Param == "name" {
		named = append([]int{http.StatusBadRequest}, mayLack...)
		namedConflicts = append([]int{http.StatusBadRequest}, conflicts...)
	}
	onCreate, onList := []int{http.StatusConflict}, []int(nil)
	if r.OfOrg {
		onCreate, onList, params = conflicts, mayLack, pagesOfOrgs()
	}
	list, object := r.Path(), r.Path()+"/{"+r.Param+"}"
	routes := []Route{
		{
			Method: http.MethodPost, Path: list, ID: "create" + title(r.Singular), Summary: "Create " + r.WithArticle(),
			Audit: r.Singular + ".create", Doc: r.CreateDoc, Request: wanted,
			Responses: created("The "+r.Name+".", example), Errors: onCreate, Tagged: true,
		},
		{
			Method: http.MethodGet, Path: list, ID: "list" + title(r.Plural), Summary: "List " + r.PluralName(), Params: params,
			Responses: ok(listed, page), Errors: onList,
		},
		{
			Method: http.MethodGet, Path: object, ID: "get" + title(r.Singular), Summary: "Look at " + r.WithArticle(),
			Responses: ok("The "+r.Name+".", example), Errors: named, Tagged: true,
		},
		{
			Method: http.MethodPut, Path: object, ID: "replace" + title(r.Singular), Summary: "Change " + r.WithArticle(),
			Audit: r.Singular + ".replace", Doc: "As a whole: absent fields get their defaults. " + r.ReplaceDoc,
			Request:   settings,
			Responses: ok("The "+r.Name+" as it is now.", example), Errors: conflicts, Tagged: true,
		},
		{
			Method: http.MethodDelete, Path: object, ID: "remove" + title(r.Singular), Summary: "Remove " + r.WithArticle(),
			Audit: r.Singular + ".remove", Doc: r.RemoveDoc,
			Responses: ok("The "+r.Name+" as it was.", example), Errors: namedConflicts, Tagged: true,
		},
	}
	for i := range routes {
		routes[i].Tag, routes[i].Scope = tagAdmin, proto.ScopeAdmin
		if strings.HasSuffix(routes[i].Path, "}") {
			routes[i].PathDoc = "The " + r.Name + "'s " + r.Param + "."
		}
	}
	return routes
}

// same is the settings of an object all of which can be changed.
func same[T any](object *T) T { return *object }

// title returns a word with a capital letter.
func title(word string) string { return strings.ToUpper(word[:1]) + word[1:] }

// changedByGlobal makes only global administrators create, change and remove what routes are about.
func changedByGlobal(routes []Route) []Route {
	for _, i := range []int{routeCreate, routeReplace, routeRemove} {
		routes[i].Global = true
	}
	return routes
}
