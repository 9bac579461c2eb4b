// Command bench measures bullpen against the bare interpreters, on one machine, in one run. It is a
// benchmark, not a test: no figure makes it fail. Only --soak and --soak-for fail, if executions
// leave something behind, are lost or make something grow. --profile measures nothing; it shows what
// the server spends its time on.
//
// The two sides run in alternating blocks (bare, bullpen, bare, bullpen, …), so that a change in
// the machine's speed affects both. The bare side is the interpreter that jails run. This process
// starts it with a clean environment, the program in a file and its output in pipes. The bullpen
// side is an inline request over a connection that is kept open. Each run's output is checked. A
// run that fails counts as an error, is shown, and enters no percentile. Percentiles are computed
// from the raw samples. A percentile is the smallest sample that is not exceeded by at least that
// share of all samples.
//
// At half load, requests are sent at times that were fixed in advance, and each latency counts from
// that time. A stalled server therefore does not receive fewer requests, and the stall appears in
// all latencies that it affects.
//
// The overhead is the time of a request as the client sees it, less the time that the worker's log
// reports for preparing the jail and running the program. It includes everything else that the
// caller waited for, such as the client's own work and its half of the connection. It excludes the
// worker's cleanup after the response, because nobody waits for it.
package main
