// Package acp serves sessions of coding agents by the Agent Client Protocol over HTTP, for the clients of
// the Sandbox Agent API 0.4.
//
// A client names a server, with any text, and posts messages of JSON-RPC to it. Responses, notifications and
// requests of the server come by a stream of server-sent events, and a response by the answer of its request,
// too, if it is early. A server is a log of messages to the client, with a state after each entry, see [state].
// So any gateway serves any server, and a client that was cut off goes on at the message that it has seen last.
//
// What happens in the sessions of a server is in their own logs, see package sessions. While a client is
// connected, its gateway translates new events of the sessions with prompts in progress, see [projector].
// Entries are appended only after the last one known, so each message exists once even if several gateways
// translate.
package acp
