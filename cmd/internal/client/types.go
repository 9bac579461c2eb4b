package client

import "github.com/bullpen-run/bullpen/proto/api"

// The types of requests and answers are those of the API, so that commands need only this package.
type (
	Request  = api.ExecuteRequest
	Accepted = api.Accepted
)
