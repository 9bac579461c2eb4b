// Package streamjson translates stream-json, a format of JSON lines in which Claude Code reports what it
// does. Amp writes the same format. It does not know how each of these programs is started and answered:
// packages claude and amp do.
package streamjson
