package api

import (
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// shownBytes is the number of bytes of a malformed message that are shown.
const shownBytes = 4 << 10

// DeadLetter is a dead letter in a list.
type DeadLetter struct {
	ID         string           `json:"id" pattern:"^(trc_[A-Za-z0-9_-]{20}|dead_[1-9][0-9]*)$" doc:"The trace id of a job."`
	Reason     proto.DeadReason `json:"reason" doc:"workers_lost: every worker that was assigned the job was lost before it started the program. malformed: a message that is no job."`
	Message    string           `json:"message" doc:"The reason in a sentence."`
	SetAsideAt Time             `json:"set_aside_at"`
	Org        *string          `json:"org" doc:"null, as the next two, for a malformed message."`
	KeyID      *string          `json:"key_id" doc:"The API key that the job was submitted with."`
	Attempt    *int             `json:"attempt" minimum:"1" doc:"The attempt that could not start."`
	Workers    []string         `json:"workers" doc:"The workers that were lost with the job, in this order."`
	RequeuedAs *proto.TraceID   `json:"requeued_as" doc:"The trace id of the execution that was made of it; null while there is none."`
	RequeuedAt *Time            `json:"requeued_at"`
}

// DeadLetters is a page of dead letters.
type DeadLetters struct {
	DeadLetters []DeadLetter `json:"dead_letters"`
	NextCursor  *string      `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// WholeDeadLetter is a dead letter with its content, but without the tenant's program and
// variables.
type WholeDeadLetter struct {
	DeadLetter
	Execution *DeadExecution `json:"execution" doc:"What was asked for; null for a malformed message."`
	Malformed *DeadMessage   `json:"malformed" doc:"The message as it was found; null for a job."`
}

// DeadExecution is the request of a dead-lettered job.
type DeadExecution struct {
	Language    proto.Language    `json:"language"`
	Timeout     int               `json:"timeout" doc:"Seconds."`
	Mode        proto.Mode        `json:"delivery_mode"`
	MaxAttempts int               `json:"max_attempts" minimum:"1"`
	ThreadID    *string           `json:"thread_id"`
	Metadata    map[string]string `json:"metadata"`
	WebhookURL  *string           `json:"webhook_url"`
	Profile     string            `json:"profile" doc:"The name of its profile."`
	RequestID   *string           `json:"request_id" doc:"The X-Request-Id of its submission."`
	CreatedAt   Time              `json:"created_at"`
	CodeBytes   int               `json:"code_bytes" minimum:"0" doc:"The size of the program."`
}

// DeadMessage is a malformed message that was dead-lettered.
type DeadMessage struct {
	Subject string              `json:"subject"`
	Headers map[string][]string `json:"headers"`
	Data    string              `json:"data" doc:"The first 4,096 bytes, with U+FFFD for what is not UTF-8."`
	Bytes   int                 `json:"bytes" minimum:"0" doc:"The size of the message."`
}

// NewDeadLetter returns the form of a dead letter in lists.
func NewDeadLetter(l *proto.DeadLetter) DeadLetter {
	letter := DeadLetter{
		ID: l.ID, Reason: l.Reason, Message: l.Message, SetAsideAt: Time{l.At}, Workers: append([]string{}, l.Workers...),
		RequeuedAs: optional(l.Requeued),
	}
	if l.RequeuedAt != nil {
		letter.RequeuedAt = optionalTime(*l.RequeuedAt)
	}
	if l.Meta != nil {
		letter.Org, letter.KeyID, letter.Attempt = &l.Meta.Org, &l.Meta.Key, &l.Attempt
	}
	return letter
}

// NewWholeDeadLetter returns the form of a dead letter with its content.
func NewWholeDeadLetter(l *proto.DeadLetter, content *proto.DeadContent) *WholeDeadLetter {
	whole := &WholeDeadLetter{DeadLetter: NewDeadLetter(l)}
	if job := content.Job; job != nil {
		whole.Execution = &DeadExecution{
			Language: job.Language, Timeout: job.Timeout, Mode: job.Mode, MaxAttempts: job.MaxAttempts,
			ThreadID: optional(proto.UserThread(job.ThreadID)),
			Metadata: orEmpty(job.Metadata), WebhookURL: optional(job.WebhookURL), Profile: job.Profile,
			RequestID: optional(job.RequestID), CreatedAt: Time{job.CreatedAt}, CodeBytes: len(job.Code),
		}
	}
	if m := content.Message; m != nil {
		whole.Malformed = &DeadMessage{
			Subject: m.Subject, Headers: orEmpty(m.Header), Bytes: len(m.Data),
			Data: strings.ToValidUTF8(string(m.Data[:min(len(m.Data), shownBytes)]), "\uFFFD"),
		}
	}
	return whole
}
