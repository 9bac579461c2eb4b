// Package work has the routes of what starts executions without a request for each: batches, schedules and
// pipelines.
package work
