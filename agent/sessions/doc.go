// Package sessions runs sessions of coding agents. It knows neither the APIs of clients nor the
// protocols of agents: packages rest and acp translate requests to calls of a [Service] and events to
// answers, and an [Agent] translates between an agent's program and events.
//
// All that happens in a session is in its log, see [Entry]: messages of users, their answers to
// questions and permissions, and events. An entry is appended only if the one before it is known, and
// has the state after it, so any process can go on from the last entry. The session's record is only a
// description, and says whether the session has work.
//
// A [Runner] drives the sessions with work, in one process at a time. It hands one message after
// another to the agent, and stores what the agent reports as events of the message's turn. A runner
// that takes over from one that has died ends an interrupted turn with an error event, unless the
// agent can continue it.
package sessions
