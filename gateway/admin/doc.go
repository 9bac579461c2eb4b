// Package admin has the administrative routes: the objects and rights of organisations, and the
// operator's view of a server. Each kind of objects is a struct with the stores that it needs.
package admin
