// Package filesystempb is the protocol of files in a sandbox, generated from filesystem.proto by make
// proto.
package filesystempb
