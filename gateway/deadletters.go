package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	deadLettersPath = "/v1/admin/dead-letters"
	requeueRoute    = "POST " + deadLettersPath + "/{id}/requeue"
	// shownBytes is how much is shown of a malformed message.
	shownBytes = 4 << 10
)

// deadLetterView is the JSON form of a dead letter.
type deadLetterView struct {
	ID         string           `json:"id"`
	Reason     proto.DeadReason `json:"reason"`
	Message    string           `json:"message"`
	SetAsideAt string           `json:"set_aside_at"`
	Org        *string          `json:"org"` // null, as the next, for what is no job
	KeyID      *string          `json:"key_id"`
	Attempt    *int             `json:"attempt"`
	Workers    []string         `json:"workers"`
	RequeuedAs *string          `json:"requeued_as"`
	RequeuedAt *string          `json:"requeued_at"`
}

// wholeDeadLetterView also tells what the dead letter is about, without what is a tenant's own: program and variables.
type wholeDeadLetterView struct {
	deadLetterView
	Execution *deadExecutionView `json:"execution"` // null for what is no job
	Malformed *deadMessageView   `json:"malformed"` // null for a job
}

type deadExecutionView struct {
	Language    proto.Language    `json:"language"`
	Timeout     int               `json:"timeout"`
	Mode        proto.Mode        `json:"delivery_mode"`
	MaxAttempts int               `json:"max_attempts"`
	ThreadID    *string           `json:"thread_id"`
	Metadata    map[string]string `json:"metadata"`
	WebhookURL  *string           `json:"webhook_url"`
	Sandbox     string            `json:"sandbox"`
	RequestID   *string           `json:"request_id"`
	CreatedAt   string            `json:"created_at"`
	CodeBytes   int               `json:"code_bytes"`
}

type deadMessageView struct {
	Subject string              `json:"subject"`
	Headers map[string][]string `json:"headers"`
	Data    string              `json:"data"` // its beginning, with U+FFFD for what is not UTF-8
	Bytes   int                 `json:"bytes"`
}

func viewDeadLetter(l *proto.DeadLetter) deadLetterView {
	v := deadLetterView{
		ID: l.ID, Reason: l.Reason, Message: l.Message, SetAsideAt: l.At.UTC().Format(timeLayout), Workers: append([]string{}, l.Workers...),
		RequeuedAs: optional(string(l.Requeued)),
	}
	if l.RequeuedAt != nil {
		v.RequeuedAt = optionalTime(*l.RequeuedAt)
	}
	if l.Meta != nil {
		v.Org, v.KeyID, v.Attempt = &l.Meta.Org, &l.Meta.Key, &l.Attempt
	}
	return v
}

func viewWholeDeadLetter(l *proto.DeadLetter, content *proto.DeadContent) wholeDeadLetterView {
	v := wholeDeadLetterView{deadLetterView: viewDeadLetter(l)}
	if job := content.Job; job != nil {
		v.Execution = &deadExecutionView{
			Language: job.Language, Timeout: job.Timeout, Mode: job.Mode, MaxAttempts: job.MaxAttempts, ThreadID: optional(job.ThreadID),
			Metadata: job.Metadata, WebhookURL: optional(job.WebhookURL), Sandbox: job.Profile, RequestID: optional(job.RequestID),
			CreatedAt: job.CreatedAt.UTC().Format(timeLayout), CodeBytes: len(job.Code),
		}
		if job.Metadata == nil {
			v.Execution.Metadata = map[string]string{}
		}
	}
	if m := content.Message; m != nil {
		v.Malformed = &deadMessageView{
			Subject: m.Subject, Headers: m.Header, Bytes: len(m.Data),
			Data: strings.ToValidUTF8(string(m.Data[:min(len(m.Data), shownBytes)]), "\uFFFD"),
		}
		if m.Header == nil {
			v.Malformed.Headers = map[string][]string{}
		}
	}
	return v
}

func (s *Server) listDeadLetters(w http.ResponseWriter, r *http.Request) error {
	limit, err := pageSize(r)
	if err != nil {
		return err
	}
	after, err := deadLetterCursor(r.URL.Query().Get("cursor"))
	if err != nil {
		return err
	}
	list, err := s.DeadLetters.List(r.Context(), after, limit+1, func(err error) {
		s.Log.ErrorContext(r.Context(), "a dead letter cannot be read", "error", err)
	})
	if err != nil {
		return err
	}
	more := len(list) > limit
	list = list[:min(len(list), limit)]
	answer := struct {
		DeadLetters []deadLetterView `json:"dead_letters"`
		NextCursor  *string          `json:"next_cursor"`
	}{DeadLetters: make([]deadLetterView, len(list))}
	for i := range list {
		answer.DeadLetters[i] = viewDeadLetter(&list[i])
	}
	if more {
		last := list[len(list)-1]
		answer.NextCursor = optional(strconv.FormatInt(last.At.UnixNano(), 10) + "." + last.ID)
	}
	return writeValue(w, http.StatusOK, answer)
}

// deadLetterCursor reads where a list goes on, nil for its beginning.
func deadLetterCursor(text string) (*proto.DeadLetter, error) {
	if text == "" {
		return nil, nil
	}
	at, id, _ := strings.Cut(text, ".")
	nanoseconds, err := strconv.ParseInt(at, 10, 64)
	if err != nil || !proto.ValidDeadLetterID(id) {
		return nil, &proto.FieldError{Field: "cursor", Message: "cursor must be what next_cursor had in the answer before"}
	}
	return &proto.DeadLetter{ID: id, At: time.Unix(0, nanoseconds)}, nil
}

// deadLetterID gives the dead letter that the path names. What cannot be one does not exist.
func deadLetterID(r *http.Request) (string, error) {
	id := chi.URLParam(r, "id")
	if !proto.ValidDeadLetterID(id) {
		return "", errNoDeadLetter
	}
	return id, nil
}

func (s *Server) deadLetter(ctx context.Context, id string) (*proto.DeadLetter, *proto.DeadContent, error) {
	letter, content, err := s.DeadLetters.Get(ctx, id)
	if errors.Is(err, proto.ErrNotFound) {
		return nil, nil, errNoDeadLetter
	}
	return letter, content, err
}

func (s *Server) getDeadLetter(w http.ResponseWriter, r *http.Request) error {
	id, err := deadLetterID(r)
	if err != nil {
		return err
	}
	letter, content, err := s.deadLetter(r.Context(), id)
	if err != nil {
		return err
	}
	return writeValue(w, http.StatusOK, viewWholeDeadLetter(letter, content))
}

func (s *Server) deleteDeadLetter(w http.ResponseWriter, r *http.Request) error {
	id, err := deadLetterID(r)
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	err = s.DeadLetters.Remove(ctx, id)
	if errors.Is(err, proto.ErrNotFound) {
		return errNoDeadLetter
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// requeueDeadLetter makes a new execution of the job of a dead letter: the old one has ended, and stays as it did.
func (s *Server) requeueDeadLetter(w http.ResponseWriter, r *http.Request) (err error) {
	id := proto.NewTraceID()
	ctx, span := s.Tracer.Start(proto.ContextWithTraceID(r.Context(), id), requeueRoute, spanOptions(r)...)
	defer func() {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}()
	letterID, err := deadLetterID(r)
	if err != nil {
		return err
	}
	letter, err := s.Submissions.Requeue(ctx, letterID, id, func(dead *proto.Job) (*proto.Job, error) { return s.again(ctx, dead, id) })
	switch {
	case errors.Is(err, proto.ErrNotFound):
		return errNoDeadLetter
	case errors.Is(err, proto.ErrNoJob):
		return errNoJob
	case err != nil:
		return s.submitError(ctx, id, err)
	}
	infoOf(ctx).trace = letter.Requeued
	span.SetAttributes(attribute.String("bullpen.trace_id", string(letter.Requeued)))
	w.Header().Set("X-Trace-Id", string(letter.Requeued))
	w.Header().Set("Location", "/v1/executions/"+string(letter.Requeued))
	return writeValue(w, http.StatusAccepted, viewDeadLetter(letter))
}

// again makes a new execution of a job: what was asked for, the sandbox and the webhook stay, and the plan is that which its key has now.
// Nobody waits for it on a connection, so it may be queued as long as an asynchronous one whatever its mode is.
func (s *Server) again(ctx context.Context, old *proto.Job, id proto.TraceID) (*proto.Job, error) {
	key, ok := s.Keys.Key(old.Key)
	if !ok || key.RevokedAt != nil {
		return nil, errKeyRevoked
	}
	plan, ok := proto.PlanByName(key.Plan)
	if !ok {
		return nil, fmt.Errorf("key %s has the plan %q, which there is not", key.ID, key.Plan)
	}
	i := infoOf(ctx)
	i.plan = plan // of which refusals speak
	if err := checkPlan(plan, old.Mode, old.Timeout, s.UpgradeURL); err != nil {
		return nil, err
	}
	now := time.Now().UTC()
	job := *old
	job.TraceID, job.RequestID, job.Prefer = id, i.requestID, ""
	job.CreatedAt, job.QueueDeadline = now, now.Add(s.QueueExpiry)
	job.Concurrent, job.MaxQueued, job.Weight, job.KeyConcurrent = plan.Concurrent, plan.MaxQueued, plan.Weight, key.Concurrent
	return &job, nil
}
