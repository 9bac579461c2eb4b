// Package sandboxes creates live sandboxes, stops and resumes them, and passes requests on to their
// guests. [Service] does so for every surface, and [Routes] are those of bullpen's own API.
package sandboxes
