// Package gateway is the HTTP server. It joins the routes defined by package proto/api with the
// groups of routes that implement them. Each group is a package below this one, and all share
// package web. They reach the queue, the registry and the stores only through small interfaces
// declared by the group that uses them.
//
// Surfaces are routes of other APIs with other conventions: their own error bodies, limits and path
// prefixes.
package gateway
