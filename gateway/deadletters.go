package gateway

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const requeueRoute = "POST /v1/admin/dead-letters/{id}/requeue"

func (s *Server) listDeadLetters(w http.ResponseWriter, r *http.Request) error {
	limit, err := pageSize(r)
	if err != nil {
		return err
	}
	after, err := parseDeadLetterCursor(r.URL.Query().Get("cursor"))
	if err != nil {
		return err
	}
	list, err := s.DeadLetters.List(r.Context(), after, limit+1, func(err error) {
		s.Log.ErrorContext(r.Context(), "dead letter unreadable", "error", err)
	})
	if err != nil {
		return err
	}
	answer := api.DeadLetters{DeadLetters: []api.DeadLetter{}}
	for i := range list[:min(len(list), limit)] {
		answer.DeadLetters = append(answer.DeadLetters, api.NewDeadLetter(&list[i]))
	}
	if len(list) > limit {
		last := list[limit-1]
		answer.NextCursor = new(strconv.FormatInt(last.At.UnixNano(), 10) + "." + last.ID)
	}
	return writeValue(w, http.StatusOK, answer)
}

// parseDeadLetterCursor returns the dead letter after which a page begins, nil for the first page.
func parseDeadLetterCursor(text string) (*proto.DeadLetter, error) {
	if text == "" {
		return nil, nil
	}
	at, id, _ := strings.Cut(text, ".")
	nanoseconds, err := strconv.ParseInt(at, 10, 64)
	if err != nil || !proto.ValidDeadLetterID(id) {
		return nil, badCursor()
	}
	return &proto.DeadLetter{ID: id, At: time.Unix(0, nanoseconds)}, nil
}

func badCursor() error {
	return proto.FieldErrorf("cursor", "must be what next_cursor had in the answer before")
}

// deadLetterID returns the id in the path. An id of the wrong form does not exist.
func deadLetterID(r *http.Request) (string, error) {
	id := chi.URLParam(r, "id")
	if !proto.ValidDeadLetterID(id) {
		return "", deadLetterError(proto.ErrNotFound)
	}
	return id, nil
}

// deadLetterError wraps an error about a dead letter. ErrNotFound gets the message for dead
// letters.
func deadLetterError(err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "there is no dead letter of that id; see /v1/admin/dead-letters")
	}
	return err
}

// letterOrg returns the organisation of a dead letter, empty if it is no job.
func letterOrg(l *proto.DeadLetter) string {
	if l.Meta == nil {
		return ""
	}
	return l.Meta.Org
}

func (s *Server) getDeadLetter(w http.ResponseWriter, r *http.Request) error {
	id, err := deadLetterID(r)
	if err != nil {
		return err
	}
	letter, content, err := s.DeadLetters.Get(r.Context(), id)
	if err != nil {
		return deadLetterError(err)
	}
	return writeValue(w, http.StatusOK, api.NewWholeDeadLetter(letter, content))
}

func (s *Server) deleteDeadLetter(w http.ResponseWriter, r *http.Request) error {
	id, err := deadLetterID(r)
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	if letter, _, err := s.DeadLetters.Get(ctx, id); err == nil {
		auditBefore(r, letterOrg(letter), id, auditLetter(letter))
	}
	if err := s.DeadLetters.Remove(ctx, id); err != nil {
		return deadLetterError(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// requeueDeadLetter submits the job of a dead letter as a new execution. The old execution has
// ended and stays as it is.
func (s *Server) requeueDeadLetter(w http.ResponseWriter, r *http.Request) (err error) {
	id := proto.NewTraceID()
	ctx, span := s.startRequest(r, id, requeueRoute)
	defer func() { endRequest(ctx, span, infoOf(ctx).rec.status, err) }()
	letterID, err := deadLetterID(r)
	if err != nil {
		return err
	}
	letter, err := s.Submissions.Requeue(ctx, letterID, id, func(dead *proto.Job) (*proto.Job, error) { return s.renewJob(ctx, dead, id) })
	switch {
	case errors.Is(err, proto.ErrNotFound):
		return deadLetterError(err)
	case errors.Is(err, proto.ErrNoJob):
		return api.Errorf(api.CodeConflict, "this dead letter is a message that is no job, so there is nothing in it to run again; remove it when nobody needs it any more")
	case err != nil:
		return s.submitError(ctx, id, err)
	}
	auditAfter(r, letterOrg(letter), letter.ID, auditLetter(letter))
	infoOf(ctx).trace = letter.Requeued
	w.Header().Set("X-Trace-Id", string(letter.Requeued))
	w.Header().Set("Location", "/v1/executions/"+string(letter.Requeued))
	return writeValue(w, http.StatusAccepted, api.NewDeadLetter(letter))
}

// renewJob returns the job of a new execution of a dead job. The request, the sandbox and the
// webhook stay; the limits of the key's present plan apply, and its mounts narrow those of the job. No connection waits for it, so it
// may be queued as long as an async job.
func (s *Server) renewJob(ctx context.Context, dead *proto.Job, id proto.TraceID) (_ *proto.Job, err error) {
	key, plan, err := s.validKey(ctx, dead.Key)
	if refused, ok := errors.AsType[*api.Error](err); ok {
		return nil, api.Errorf(api.CodeConflict, "%s", refused.Message)
	}
	if err != nil {
		return nil, err
	}
	i := infoOf(ctx)
	i.plan = plan // for the messages of rejections
	if err := s.checkPlan(ctx, &plan, dead.Mode, dead.Timeout); err != nil {
		return nil, err
	}
	if err := s.checkQuota(ctx, dead.Org); err != nil {
		return nil, err
	}
	now := time.Now().UTC()
	job := *dead
	job.TraceID, job.RequestID, job.Prefer = id, i.requestID, ""
	job.CreatedAt, job.RunAt, job.QueueDeadline = now, time.Time{}, now.Add(s.QueueExpiry)
	job.Concurrent, job.MaxQueued, job.Weight, job.KeyConcurrent = proto.LimitOf(plan.Concurrent), proto.LimitOf(plan.MaxQueued), plan.Weight, plan.keyConcurrent
	job.Bound = slices.Clone(dead.Bound)
	mounts, err := s.renewMounts(ctx, key, dead.Mounts)
	if err != nil {
		return nil, err
	}
	job.SetMounts(mounts)
	return &job, s.sealSecrets(ctx, &job, nil)
}
