// Package process starts processes in a sandbox, keeps the last of their output, and connects clients
// to them. It is the service process.Process of E2B's daemon.
package process
