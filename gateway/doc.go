// Package gateway is the HTTP server. It joins the routes that package proto/api defines with the groups of
// routes that carry them out. Each group is a package below this one, and all share package web. They reach
// the queue, the registry and the stores only through small interfaces, which the group that uses them
// declares.
//
// Surfaces are routes of other APIs with other conventions: their own error bodies, limits and path prefixes.
package gateway
