// Package contexts keeps interpreters in a sandbox that run cells, one after another, and keep their
// state between them.
//
// A context is a process of a runner, see package cell. Contexts of a language that forks are forked
// from one process, which has imported what takes long. The runs of a context take turns. The events
// of a run are numbered and kept for a while, so that a client that was cut off can read on.
//
// A context ends with its process. It stays listed as lost, with the reason, until it is restarted or
// deleted.
package contexts
