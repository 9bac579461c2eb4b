package api

import (
	"net/http"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// Resource is a kind of object that administrators manage. Its routes, the methods of clients and the
// commands of the command line follow from it. T is an object, N a new one, and S the settings of one that
// can be changed.
type Resource[T, N, S any] struct {
	Name     string // what people call an object, such as API key
	Singular string // such as key: in ids of routes and actions of the audit log
	Plural   string // such as keys: in paths, and the field of the list in an answer
	Param    string // what the path of an object ends with: id or name
	OfOrg    bool   // objects belong to organisations
	Settings func(*T) S
	Columns  []Column[T] // of a table for people

	CreateDoc, ReplaceDoc, RemoveDoc string // what happens when one is created, its settings are replaced, and so on
}

// Column is a column of a table of objects.
type Column[T any] struct {
	Head string
	Cell func(*T) any
}

// Path returns the path of the list. An object is at Path/id.
func (r *Resource[T, N, S]) Path() string { return "/v1/admin/" + r.Plural }

// One returns the name with its article.
func (r *Resource[T, N, S]) One() string {
	if strings.ContainsRune("aeioAEIO", rune(r.Name[0])) {
		return "an " + r.Name
	}
	return "a " + r.Name
}

// Many returns the name of several objects.
func (r *Resource[T, N, S]) Many() string { return r.Name + "s" }

// registered has the routes of resources, in the order of the files that declare them.
var registered []Route

// register adds the routes of a resource, which are declared beside it, to those of the API.
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
	title, params := strings.ToUpper(r.Singular[:1])+r.Singular[1:], paging()
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
			Method: http.MethodPost, Path: list, ID: "create" + title, Summary: "Create " + r.One(),
			Audit: r.Singular + ".create", Doc: r.CreateDoc, Request: wanted,
			Responses: created("The "+r.Name+".", example), Errors: onCreate, Tagged: true,
		},
		{
			Method: http.MethodGet, Path: list, ID: "list" + title + "s", Summary: "List " + r.Many(), Params: params,
			Responses: ok(listed, page), Errors: onList,
		},
		{
			Method: http.MethodGet, Path: object, ID: "get" + title, Summary: "Look at " + r.One(),
			Responses: ok("The "+r.Name+".", example), Errors: named, Tagged: true,
		},
		{
			Method: http.MethodPut, Path: object, ID: "replace" + title, Summary: "Change " + r.One(),
			Audit: r.Singular + ".replace", Doc: "As a whole: absent fields get their defaults. " + r.ReplaceDoc,
			Request:   settings,
			Responses: ok("The "+r.Name+" as it is now.", example), Errors: conflicts, Tagged: true,
		},
		{
			Method: http.MethodDelete, Path: object, ID: "remove" + title, Summary: "Remove " + r.One(),
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

// changedByGlobal makes only global administrators create, change and remove what routes are about.
func changedByGlobal(routes []Route) []Route {
	for _, i := range []int{routeCreate, routeReplace, routeRemove} {
		routes[i].Global = true
	}
	return slices.Clip(routes)
}
