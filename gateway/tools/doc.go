// Package tools has the route of the Model Context Protocol, and carries out its tools: programs become
// executions that the client waits for, and files get signed URLs. Package mcp has the protocol.
package tools
