// Package filestore opens the files that a request addresses: the home of a thread, or the part of a
// storage connection that an API key has. It checks what the key may change, limits transfers, and words
// the errors of storage for clients. It knows no route.
package filestore
