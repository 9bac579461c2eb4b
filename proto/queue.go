package proto

import "time"

// MaxQueuePlaces limits the executions whose queue positions one request may ask for.
const MaxQueuePlaces = 20

// MaxQueueOrgs limits the organisations in one view of the queue, which must fit into a message.
const MaxQueueOrgs = 1000

// QueueRequest asks for the queue of an API key, or of organisations.
type QueueRequest struct {
	Org    string    `json:"org"`
	Key    string    `json:"key"`              // the API key's id
	Traces []TraceID `json:"traces,omitempty"` // whose places are wanted
	// Orgs asks for the queues of the organisations whose names come after After, and for nothing
	// else.
	Orgs  bool   `json:"orgs,omitempty"`
	After string `json:"after,omitempty"`
}

// OrgQueue is the queue of an organisation.
type OrgQueue struct {
	Org string `json:"org"`
	QueueCounts
}

// QueueView is the queue of an API key, or of organisations.
type QueueView struct {
	Key    QueueCounts  `json:"key"`
	Org    QueueCounts  `json:"org"`
	Oldest *QueuePlace  `json:"oldest,omitempty"` // the key's execution that is queued for the longest time
	Places []QueuePlace `json:"places,omitempty"` // of the request's executions that are queued
	// Orgs are the first MaxQueueOrgs of the requested organisations, by name. Those that have
	// nothing queued or running are left out.
	Orgs []OrgQueue `json:"orgs,omitempty"`
}

// QueueCounts counts executions.
type QueueCounts struct {
	Queued  ClassCounts `json:"queued"`
	Running ClassCounts `json:"running"`
}

// ClassCounts counts executions by their class.
type ClassCounts struct {
	Interactive int `json:"interactive" minimum:"0" doc:"Inline and streaming ones."`
	Background  int `json:"background" minimum:"0" doc:"Async ones, including those of batches."`
}

// QueuePlace is the place of an execution in the queue.
type QueuePlace struct {
	TraceID   TraceID   `json:"trace_id"`
	Class     Class     `json:"class"`
	CreatedAt time.Time `json:"created_at"`
	Position  int       `json:"position"`       // executions that will start before it, estimated
	Wait      *float64  `json:"wait,omitempty"` // until it starts, in seconds, estimated; nil if unknown
	// WaitingFor is what no live worker offers, nil if one can run the execution.
	WaitingFor *Missing `json:"waiting_for,omitempty"`
}
