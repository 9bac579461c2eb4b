package web

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
)

// Pages is a list that is read in pages.
type Pages[T any] interface {
	// Page returns up to limit values of an organisation, or of all if org is empty, in order:
	// those after a place for which keep, if not nil, returns true. next is the place after the
	// page, empty after the last one.
	Page(org, after string, limit int, keep func(*T) bool) (page []T, next string)
}

// Listed is a short list in memory, sorted by unique places. It implements [Pages].
type Listed[T any] struct {
	Values []T
	Place  func(*T) string
}

// Page implements [Pages]. The list is of one organisation, or of none.
func (l Listed[T]) Page(_, after string, limit int, keep func(*T) bool) (page []T, next string) {
	for i := range l.Values {
		v := &l.Values[i]
		if after != "" && strings.Compare(l.Place(v), after) <= 0 || keep != nil && !keep(v) {
			continue
		}
		if len(page) == limit {
			return page, l.Place(&page[limit-1])
		}
		page = append(page, *v)
	}
	return page, ""
}

// NamedAfter returns a list of built-in values in their order, followed by others by name.
func NamedAfter[T any](builtIn, others []T, name func(*T) string) Listed[T] {
	place := func(v *T) string {
		i := slices.IndexFunc(builtIn, func(b T) bool { return name(&b) == name(v) })
		if i < 0 {
			i = len(builtIn)
		}
		return string(rune('0'+i)) + name(v)
	}
	all := slices.Concat(builtIn, others)
	slices.SortFunc(all, func(a, b T) int { return strings.Compare(place(&a), place(&b)) })
	return Listed[T]{all, place}
}

// Resource implements the common routes of a kind of objects. T is an object as stored, and F its
// form in answers.
type Resource[T, F any] struct {
	*Core
	Kind string // such as "plan", for the log
	Path string // of the list; an object is at Path/ID
	// Param is the name of the parameter of the path with the id.
	Param string
	// Name returns the organisation of an object, empty for none, and its id.
	Name func(*T) (org, id string)
	Form func(*T) F
	// Live, if not nil, is Form plus volatile fields, on which ETags do not depend.
	Live func(*T) F
	// Audited, if not nil, returns the form for the audit log. It is Form otherwise.
	Audited func(*T) any
	// Answer returns the form of a page. next is nil after the last one.
	Answer func(page []F, next *string) any
	// Valid, if not nil, reports whether an object can have an id.
	Valid func(id string) bool
	// NotFound, if not nil, returns the client's error for an unknown id.
	NotFound func(id string) error
}

// ID returns the id in the path of a request. An id that no object can have is not found.
func (x *Resource[T, F]) ID(r *Request) (string, error) {
	id := chi.URLParam(r.Request, x.Param)
	if x.Valid != nil && !x.Valid(id) {
		return "", x.Error(id, proto.ErrNotFound)
	}
	return id, nil
}

// Error returns the client's error about the object with an id, nil if err is nil.
func (x *Resource[T, F]) Error(id string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, proto.ErrNotFound) && x.NotFound != nil:
		return x.NotFound(id)
	default:
		return fmt.Errorf("%s %s: %w", x.Kind, proto.Shorten(id), err)
	}
}

// Before gives the audit log the object that a request is about to change, and returns an error if
// the request's If-Match does not match the object.
func (x *Resource[T, F]) Before(r *Request, v *T) error {
	org, id := x.Name(v)
	AuditBefore(r, org, id, x.audited(v))
	return CheckMatch(r, x.Form(v))
}

// After hands the audit log the object that a request has changed.
func (x *Resource[T, F]) After(r *Request, v *T) {
	org, id := x.Name(v)
	AuditAfter(r, org, id, x.audited(v))
}

func (x *Resource[T, F]) audited(v *T) any {
	if x.Audited != nil {
		return x.Audited(v)
	}
	return x.Form(v)
}

// Location sets the header of an answer that names a new object.
func (x *Resource[T, F]) Location(w http.ResponseWriter, v *T) {
	_, id := x.Name(v)
	w.Header().Set("Location", x.Path+"/"+id)
}

// Write answers with an object and its ETag.
func (x *Resource[T, F]) Write(w http.ResponseWriter, status int, v *T) error {
	if x.Live == nil {
		return WriteTagged(w, status, x.Form(v))
	}
	tag, err := EntityTag(x.Form(v))
	if err != nil {
		return err
	}
	w.Header().Set("ETag", tag)
	return WriteValue(w, status, x.Live(v))
}

// List answers with a page of the objects of the organisation that scope returns.
func (x *Resource[T, F]) List(scope func(*Request) (string, error), pages Pages[T]) Handle {
	return func(w http.ResponseWriter, r *Request) error {
		org, err := scope(r)
		if err != nil {
			return err
		}
		return x.WritePage(w, r, pages, org, nil)
	}
}

// WritePage answers with the page of a list that a request asks for.
func (x *Resource[T, F]) WritePage(
	w http.ResponseWriter, r *Request, pages Pages[T], org string, keep func(*T) bool,
) error {
	limit, err := PageSize(r)
	if err != nil {
		return err
	}
	place, cursor := "", r.URL.Query().Get("cursor")
	if cursor != "" {
		if place, err = x.OpenPlace(r.URL.Path, org, cursor); err != nil {
			return err
		}
	}
	found, place := pages.Page(org, place, limit, keep)
	form := x.Form
	if x.Live != nil {
		form = x.Live
	}
	forms := make([]F, len(found))
	for i := range found {
		forms[i] = form(&found[i])
	}
	var next *string
	if place != "" {
		if cursor, err = x.SealPlace(r.URL.Path, org, place); err != nil {
			return err
		}
		next = &cursor
	}
	return WriteValue(w, http.StatusOK, x.Answer(forms, next))
}

// Get answers with the object that find returns.
func (x *Resource[T, F]) Get(find func(context.Context, *Request) (T, error)) Handle {
	return func(w http.ResponseWriter, r *Request) error {
		v, err := find(r.Context(), r)
		if err != nil {
			return x.Error(chi.URLParam(r.Request, x.Param), err)
		}
		return x.Write(w, http.StatusOK, &v)
	}
}

// Create answers with the object that create makes from the request body, which read decodes.
func (x *Resource[T, F]) Create(
	read func(http.ResponseWriter, *Request) (T, error), create func(context.Context, T) (T, error),
) Handle {
	return func(w http.ResponseWriter, r *Request) error {
		v, err := read(w, r)
		if err != nil {
			return err
		}
		ctx, cancel := Detached(r.Context())
		defer cancel()
		_, id := x.Name(&v)
		if v, err = create(ctx, v); err != nil {
			return x.Error(cmp.Or(id, "(new)"), err)
		}
		x.After(r, &v)
		x.Location(w, &v)
		return x.Write(w, http.StatusCreated, &v)
	}
}

// Put answers with the result of change, called with an object and the request body decoded by
// read. For the stored object, change must return errors of [Resource.Before] unchanged.
func (x *Resource[T, F]) Put(
	read func(http.ResponseWriter, *Request) (T, error),
	change func(ctx context.Context, r *Request, id string, wanted T) (T, error),
) Handle {
	return func(w http.ResponseWriter, r *Request) error {
		id, err := x.ID(r)
		if err != nil {
			return err
		}
		wanted, err := read(w, r)
		if err != nil {
			return x.Error(id, err)
		}
		ctx, cancel := Detached(r.Context())
		defer cancel()
		v, err := change(ctx, r, id, wanted)
		if err != nil {
			return x.Error(id, err)
		}
		x.After(r, &v)
		return x.Write(w, http.StatusOK, &v)
	}
}

// Remove answers with the object removed by remove, or with an empty body if that is nil. For the
// stored object, remove must return errors of [Resource.Before] unchanged.
func (x *Resource[T, F]) Remove(remove func(ctx context.Context, r *Request, id string) (*T, error)) Handle {
	return func(w http.ResponseWriter, r *Request) error {
		id, err := x.ID(r)
		if err != nil {
			return err
		}
		ctx, cancel := Detached(r.Context())
		defer cancel()
		v, err := remove(ctx, r, id)
		if err != nil {
			return x.Error(id, err)
		}
		if v == nil {
			w.WriteHeader(http.StatusNoContent)
			return nil
		}
		return WriteValue(w, http.StatusOK, x.Form(v))
	}
}

// OwnOrg returns the organisation of the API key of a request.
func OwnOrg(r *Request) (string, error) { return r.Key.Org, nil }

// NoOrg is the scope of objects without an organisation.
func NoOrg(*Request) (string, error) { return "", nil }

// NamedOrg returns the organisation in the query of an administrator's request, by default the API
// key's.
func NamedOrg(r *Request) (string, error) { return AdminOrg(r, r.URL.Query().Get("org")) }

// Same is the form of objects that the API shows unchanged.
func Same[T any](v *T) T { return *v }
