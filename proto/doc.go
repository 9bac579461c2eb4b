// Package proto holds the domain types of bullpen: jobs, results, events, executions, threads, keys
// and plans, their JSON forms, their limits and their validation. All other packages use it. It
// depends only on the standard library and does no I/O. Package proto/api has the types of the HTTP
// API.
//
// A user program's failure is a [Result]; an error is a failure of bullpen. Codes and statuses are
// closed lists that may only grow, because they are stored and sent to clients.
package proto
