// Package executions has the routes of executions and of the queue, and the [Runner] that runs
// programs for requests and waits for their results.
package executions
