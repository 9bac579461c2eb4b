// Package web is what all groups of routes share: it finds out who a request is from, checks what its API
// key may do and use, reads bodies, writes answers and errors, and records requests in the log and in the
// audit log. It knows no route: a [Row] is the description of one with its handler, and [Core.Guard] puts
// the checks before it that follow from the description.
package web
