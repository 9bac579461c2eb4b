// Package work has the routes of batches, schedules and pipelines: work that starts executions
// without a request for each.
package work
