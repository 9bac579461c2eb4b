package client

import "github.com/bullpen-run/bullpen/proto/api"

// The types of requests and answers are those of the API, so that commands need only this package.
type (
	Request           = api.ExecuteRequest
	Accepted          = api.Accepted
	Execution         = api.Execution
	BlockedConnection = api.BlockedConnection
	Step              = api.Step
	NewKey            = api.KeyRequest
	Key               = api.Key
	Image             = api.Image
	File              = api.File
	ChangedFile       = api.ChangedFile
	Time              = api.Time
	Thread            = api.Thread
	WholeThread       = api.WholeThread
	ThreadVersion     = api.ThreadVersion
	WebhookSettings   = api.WebhookRequest
	Webhook           = api.Webhook
	Waits             = api.Waits
	Delivery          = api.Delivery
	DeliveryAttempt   = api.DeliveryAttempt
	Replayed          = api.Replayed
	Endpoint          = api.Endpoint
	DeadLetter        = api.DeadLetter
	WholeDeadLetter   = api.WholeDeadLetter
)
