// Package acp serves sessions of coding agents through the Agent Client Protocol over HTTP, for
// clients of the Sandbox Agent API 0.4.
//
// A client chooses the id of a server and posts JSON-RPC messages to it. The server sends
// responses, notifications and requests over a stream of server-sent events. A response that is
// ready early is also the HTTP response of the POST. A server is a log of messages to the client,
// and each entry contains the state after it, see [state]. So any gateway can serve any server, and
// a client that reconnects continues after the last message it has seen.
//
// The sessions of a server have logs of their own, see package sessions. While a client is
// connected, its gateway translates new events of the sessions with prompts in progress, see
// [projector]. Appends are compare-and-set on the last entry, so each message exists once even if
// several gateways translate.
package acp
