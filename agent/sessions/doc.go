// Package sessions runs sessions of coding agents. It is independent of client APIs and of agent
// protocols. Packages rest and acp translate requests into calls of a [Service], and events into
// responses. An [Agent] translates the output of an agent's program into events.
//
// A session's log contains everything that happens in it, see [Entry]: messages of users, their
// answers to questions and permissions, and events. Appends are compare-and-set on the last entry.
// Each entry contains the state after it, so any process can continue from the last entry. The
// session's record only describes the session and marks it as active while it has work.
//
// A [Runner] drives the sessions with work. Only one process does so at a time. The runner sends
// one message after another to the agent, and stores the agent's reports as events of that
// message's turn. A runner that takes over from a dead one ends the turn in progress with an error
// event, unless the agent can continue it.
package sessions
