package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto/api"
)

// Resource has the methods for one kind of managed objects: see [ResourceOf]. T is the stored form,
// N the form of a new object, and S its changeable settings.
type Resource[T, N, S any] struct {
	client   *Client
	path     string     // of the list; an object is at path/ID
	field    string     // of the list in an answer
	query    url.Values // of every request
	settings func(*T) S
}

// ResourceOf returns the methods for a kind of objects, such as [api.MemberResource].
func ResourceOf[T, N, S any](a *Admin, r *api.Resource[T, N, S]) Resource[T, N, S] {
	return Resource[T, N, S]{client: a.client, path: r.Path(), field: r.Plural, settings: r.Settings}
}

func (r Resource[T, N, S]) at(id string) string {
	return withQuery(r.path+"/"+url.PathEscape(id), r.query)
}

// List returns the objects of an organisation. If org is empty, it returns all that the key in use
// may see. Objects without an organisation, such as plans, are listed with an empty org.
func (r Resource[T, N, S]) List(ctx context.Context, org string) iter.Seq2[T, error] {
	return pages[T](ctx, r.client, r.path, r.field, largestPagesOf(org))
}

// Get returns an object. The id is the name of what has a name.
func (r Resource[T, N, S]) Get(ctx context.Context, id string) (*T, error) {
	return read[T](ctx, r.client, r.at(id))
}

// Create creates an object. It is not resent when the connection breaks, because that could create
// two: see [ErrUnknownOutcome].
func (r Resource[T, N, S]) Create(ctx context.Context, object *N) (*T, error) {
	return get[T](ctx, r.client, call{method: http.MethodPost, path: withQuery(r.path, r.query), body: object})
}

// Edit reads an object, calls change with its settings, and stores them. If the object was changed
// meanwhile, the error is an [*Error] of status 412, and nothing is stored.
func (r Resource[T, N, S]) Edit(ctx context.Context, id string, change func(*S)) (*T, error) {
	object := new(T)
	header, err := r.client.decode(ctx, call{method: http.MethodGet, path: r.at(id), resend: true}, object)
	if err != nil {
		return nil, err
	}
	settings := r.settings(object)
	change(&settings)
	tag := map[string]string{"If-Match": header.Get("ETag")}
	return get[T](ctx, r.client, call{method: http.MethodPut, path: r.at(id), body: settings, header: tag})
}

// Remove removes an object and returns it.
func (r Resource[T, N, S]) Remove(ctx context.Context, id string) (*T, error) {
	return get[T](ctx, r.client, call{method: http.MethodDelete, path: r.at(id)})
}
