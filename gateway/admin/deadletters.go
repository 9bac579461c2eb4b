package admin

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// DeadLetters stores dead letters.
type DeadLetters interface {
	// List returns up to limit dead letters after the given one, nil for the first; the newest come
	// first. It calls wrong with the error of each letter that cannot be decoded.
	List(ctx context.Context, after *proto.DeadLetter, limit int, wrong func(error)) ([]proto.DeadLetter, error)
	// Get returns a dead letter with its content, or [proto.ErrNotFound].
	Get(ctx context.Context, id string) (*proto.DeadLetter, *proto.DeadContent, error)
	// Remove removes a dead letter. It returns [proto.ErrNotFound] if the letter does not exist.
	Remove(ctx context.Context, id string) error
}

// Requeuer submits the jobs of dead letters again.
type Requeuer interface {
	// Requeue submits the job of a dead letter as execution id, unless an earlier request has done
	// so. It returns the dead letter, which names the execution. Its errors include those of a
	// submission, [proto.ErrNotFound] and [proto.ErrNoJob].
	Requeue(ctx context.Context, letter string, id proto.TraceID, requestID string) (*proto.DeadLetter, error)
}

// DeadLetterRoutes are the routes of dead letters.
type DeadLetterRoutes struct {
	*web.Core
	DeadLetters DeadLetters
	Requeuer    Requeuer
}

// Handlers returns the handlers of the routes.
func (s *DeadLetterRoutes) Handlers() []web.Handler {
	return []web.Handler{
		{ID: "listDeadLetters", Handle: s.list},
		{ID: "getDeadLetter", Handle: s.get},
		{ID: "deleteDeadLetter", Handle: s.delete},
		{ID: "requeueDeadLetter", Handle: s.requeue},
	}
}

const requeueRoute = "POST /v1/admin/dead-letters/{id}/requeue"

func (s *DeadLetterRoutes) list(w http.ResponseWriter, r *web.Request) error {
	limit, err := web.PageSize(r)
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
	return web.WriteValue(w, http.StatusOK, answer)
}

// parseDeadLetterCursor returns the dead letter after which a page begins, nil for the first page.
func parseDeadLetterCursor(text string) (*proto.DeadLetter, error) {
	if text == "" {
		return nil, nil
	}
	at, id, _ := strings.Cut(text, ".")
	nanoseconds, err := strconv.ParseInt(at, 10, 64)
	if err != nil || !proto.ValidDeadLetterID(id) {
		return nil, web.BadCursor()
	}
	return &proto.DeadLetter{ID: id, At: time.Unix(0, nanoseconds)}, nil
}

// deadLetterID returns the id in the path. An id of the wrong form does not exist.
func deadLetterID(r *web.Request) (string, error) {
	id := chi.URLParam(r.Request, "id")
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

// letterOrg returns the organisation of a dead letter, or "" if it is no job.
func letterOrg(l *proto.DeadLetter) string {
	if l.Meta == nil {
		return ""
	}
	return l.Meta.Org
}

func (s *DeadLetterRoutes) get(w http.ResponseWriter, r *web.Request) error {
	id, err := deadLetterID(r)
	if err != nil {
		return err
	}
	letter, content, err := s.DeadLetters.Get(r.Context(), id)
	if err != nil {
		return deadLetterError(err)
	}
	return web.WriteValue(w, http.StatusOK, api.NewWholeDeadLetter(letter, content))
}

func (s *DeadLetterRoutes) delete(w http.ResponseWriter, r *web.Request) error {
	id, err := deadLetterID(r)
	if err != nil {
		return err
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	if letter, _, err := s.DeadLetters.Get(ctx, id); err == nil {
		web.AuditBefore(r, letterOrg(letter), id, auditLetter(letter))
	}
	if err := s.DeadLetters.Remove(ctx, id); err != nil {
		return deadLetterError(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// requeue submits the job of a dead letter as a new execution. The old execution has
// ended and stays as it is.
func (s *DeadLetterRoutes) requeue(w http.ResponseWriter, r *web.Request) (err error) {
	id := proto.NewTraceID()
	ctx, span := s.StartRequest(r, id, requeueRoute)
	defer func() { web.EndRequest(ctx, r.Info, span, r.Status(), err) }()
	letterID, err := deadLetterID(r)
	if err != nil {
		return err
	}
	letter, err := s.Requeuer.Requeue(ctx, letterID, id, r.RequestID)
	switch {
	case errors.Is(err, proto.ErrNotFound):
		return deadLetterError(err)
	case errors.Is(err, proto.ErrNoJob):
		return api.Errorf(api.CodeConflict,
			"this dead letter is a message that is no job, so there is nothing in it to run again; remove it when nobody "+
				"needs it any more")
	case ofKey(err):
		return api.Errorf(api.CodeConflict, "%s", api.NewError(err).Message)
	case err != nil:
		return web.SubmitError(r.Info, id, err)
	}
	web.AuditAfter(r, letterOrg(letter), letter.ID, auditLetter(letter))
	r.Trace = letter.Requeued
	w.Header().Set("X-Trace-Id", string(letter.Requeued))
	w.Header().Set("Location", "/v1/executions/"+string(letter.Requeued))
	return web.WriteValue(w, http.StatusAccepted, api.NewDeadLetter(letter))
}

// ofKey reports whether an error rejects the API key of a dead job, which is not the caller's.
func ofKey(err error) bool {
	rejection, ok := errors.AsType[*proto.Rejection](err)
	return ok && slices.Contains([]proto.Reason{
		proto.RejectedKey, proto.RejectedScope, proto.RejectedNoOrg, proto.RejectedDeleted, proto.RejectedSuspended,
		proto.RejectedNoPlan,
	}, rejection.Reason)
}
