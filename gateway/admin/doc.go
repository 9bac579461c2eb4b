// Package admin has the routes of the administration: what organisations have and may do, and what the
// operator of a server looks after. Each kind of objects is a struct with the stores that it needs.
package admin
