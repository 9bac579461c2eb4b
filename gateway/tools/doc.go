// Package tools has the route of the Model Context Protocol, and implements its tools: programs
// become executions that the client waits for, and files get signed URLs. Package mcp implements
// the protocol.
package tools
