// Package filestore opens the files that a request addresses: the home of a thread, or an API key's
// part of a storage connection. It checks what the key may change, limits transfers, and words
// storage errors for clients. It does not depend on routes.
package filestore
