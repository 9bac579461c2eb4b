// Package processpb is the protocol of processes in a sandbox, generated from process.proto by make
// proto.
package processpb
