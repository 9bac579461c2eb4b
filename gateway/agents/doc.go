// Package agents serves the agents of surfaces with the rights and limits of an API key: programs
// in containers, files of containers and of organisations, and batches of requests.
package agents
