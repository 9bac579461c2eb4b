// Package gateway is the HTTP server: it authenticates, validates and admits requests, and writes
// all answers. It reaches the queue, the registry and the stores only through the small interfaces
// that it declares.
//
// Package proto/api defines the routes and types. Authentication, error bodies, the limit of bodies
// and the path prefix belong to the route group of the execute API, so that other APIs with other
// conventions can be added beside it.
package gateway
