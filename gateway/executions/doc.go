// Package executions has the routes of executions and of the queue, and the [Runner] with which all requests
// run programs and wait for their end.
package executions
