// Command bench measures bullpen against the bare interpreters, on one machine, in one run. It is a benchmark, not a test: no
// figure makes it fail, only --soak does where executions leave something behind. --profile measures nothing: it shows what the
// server is busy with.
//
// What is compared runs in alternating blocks (bare, bullpen, bare, bullpen, …), so that a machine that gets slower or faster
// meanwhile does so for both. The bare side is the interpreter that jails run, started by this process with a clean
// environment, the program in a file and its output in pipes; the bullpen side is an inline request over a connection that is
// kept open. Each run's output is checked; a run that fails counts as an error, is shown, and enters no percentile. Percentiles
// are taken from the raw samples: the smallest sample that at least that share of all samples does not exceed.
//
// At half load requests come at times that were fixed before, and what one took counts from its time: a server that stalls is not
// asked less often for that, and its stall is in all figures that it delays.
//
// The overhead is the time of a request as the client sees it, less what the worker's log says that it spent in preparing the
// jail and in running the program there. The rest holds everything else that the caller waited for, the client's own work and
// its half of the connection included. What the worker clears away after the answer is not in it, because nobody waits for it.
package main
