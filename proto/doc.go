// Package proto holds the words of bullpen: what a job, a result, an event, an execution, a key and a plan are, their JSON
// forms, their limits and how they are validated. Every room speaks through it and it speaks to none of them: it depends on
// the standard library only and does no I/O.
//
// A user program's failure is a [Result]; an error is ours. Codes and statuses are closed lists that may only grow, because
// they are stored and travel.
package proto
