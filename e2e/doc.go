// Package e2e holds the tests of the built program: with real jails, over real HTTP, on each topology.
package e2e
