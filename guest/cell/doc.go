// Package cell is the protocol between a runner and whoever starts it. A runner is a program that runs cells, pieces of
// code, in an interpreter that keeps its state between them: python.py, node.mjs and bash.sh, which this package
// contains. The guest of a live sandbox starts runners for contexts, and the worker starts one for an execution with
// rich results.
//
// A runner reads requests from its standard input, one on a line, see [Language.Encode]. It answers with frames between
// what the cell prints to standard output. A frame is a JSON object of ASCII characters, in one or more chunks:
//
//	ESC _ NONCE ; M ; PART ESC \
//
// NONCE is the value of the variable [NonceEnv]. M is 1 if more chunks of the frame follow, else 0. A PART has at most
// 4,000 bytes, so that a chunk is written to a pipe in one piece, whatever else is written there.
//
// All frames have a type and a number, sync. Before a runner writes a frame to standard output, it flushes both outputs
// of the program, and writes a frame of that number, without a type, to standard error. A [Reader] passes a frame on
// when it has seen the number there, and holds what follows the number until then. The order of outputs and frames is
// therefore the program's, and a frame that a program has forged can only harm the program itself.
//
//	ready    version, name                    Once, when the runner accepts requests.
//	display  data, metadata, result, chart,   Something to look at, see Display.
//	         columns, truncated
//	error    name, value, traceback           Why the cell failed, see Failure.
//	end      status, count, memory, files,    The cell has ended, see End. The runner
//	         dropped                          reads the next request.
//
// All but ready have run, the number of the request. SIGINT to the process group of a runner interrupts the cell.
//
// With the argument --cell and the path of a file, a runner of Python runs that file as one cell, reads no requests and
// exits. With --serve it forks contexts, see [Fork].
package cell
