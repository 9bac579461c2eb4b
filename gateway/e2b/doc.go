// Package e2b serves E2B's clients: the routes with which they create and stop sandboxes, and the requests
// that they send to a sandbox.
//
// The routes are a [web.Surface] over the same sandboxes as bullpen's own API. A template is a sandbox
// profile that the API key allows, by its name. Whatever a request asks for and a sandbox cannot have is
// refused with an error that names it; nothing is ignored.
//
// Requests to a sandbox are recognised before any route is looked up, by both routing headers, or by the
// host PORT-ID.DOMAIN. See [DataPlane].
package e2b
