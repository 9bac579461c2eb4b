package web

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"
	"golang.org/x/time/rate"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// The audit log is kept for ever, and every record is a durable write that all gateways wait for.
// So an organisation's administrative requests are rate-limited. Requests that its keys may not
// make, which any tenant can send, have a lower rate. Each gateway counts for itself.
const (
	auditRate         = rate.Limit(5) // a second
	AuditBurst        = 100
	auditRefusedRate  = rate.Limit(0.1)
	AuditRefusedBurst = 20
	// maxUserAgent is the part of a User-Agent that is recorded, in bytes.
	maxUserAgent = 256
	Redacted     = "[redacted]"
)

// act is an administrative request that is being carried out.
type act struct {
	record api.AuditRecord // of the outcome
	err    error           // of encoding an object
}

// audited returns the middleware that records a route's requests in the audit log, if required. It
// runs before authorized, so that refused requests are recorded as well.
func (c *Core) audited(route *api.Route) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		if route.Audit == "" {
			return next
		}
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			i := infoOf(r.Context())
			i.act = c.newAct(r, route.Audit)
			mayUse := authorize(&i.Key, route) == nil
			if !i.Key.GlobalAdmin() && !c.mayAct(i.Key.Org, mayUse) {
				c.writeError(w, r, &api.Error{Code: api.CodeRateLimited, RetryAfter: 10, Message: "too many administrative " +
					"requests of this organisation; send the request again"})
				return
			}
			if mayUse {
				if err := c.recordIntent(r.Context(), i.act); err != nil {
					c.writeError(w, r, err)
					return
				}
			}
			if r.Method == http.MethodGet || r.Method == http.MethodHead {
				c.auditStreamed(w, r, next)
				return
			}
			c.auditHeld(w, r, next)
		})
	}
}

// mayAct reports whether an organisation may make an administrative request now. mayUse is whether
// its key may use the route.
func (c *Core) mayAct(org string, mayUse bool) bool {
	acts, limit, burst := &c.refusedActs, auditRefusedRate, AuditRefusedBurst
	if mayUse {
		acts, limit, burst = &c.acts, auditRate, AuditBurst
	}
	_, wait := acts.take(org, limit, burst, time.Now())
	return wait == 0
}

// newAct returns the known part of the record of a request's outcome.
func (c *Core) newAct(r *http.Request, action string) *act {
	i := infoOf(r.Context())
	kind, _, _ := strings.Cut(action, ".")
	name := cmp.Or(chi.URLParam(r, "id"), chi.URLParam(r, "name"), chi.URLParam(r, "slug"))
	actor := api.AuditActor{Type: "key", ID: i.Key.ID, Name: i.Key.Name, Org: i.Key.Org}
	if strings.HasPrefix(i.Key.ID, proto.MemberPrefix) {
		actor.Type = "member"
	}
	return &act{record: api.AuditRecord{
		Action: action, Actor: actor,
		Object:   api.AuditObject{Kind: kind, Name: proto.Shorten(strings.ToValidUTF8(name, "\uFFFD"))},
		SourceIP: c.ClientAddress(r), UserAgent: userAgent(r), RequestID: i.RequestID,
	}}
}

// userAgent returns the part of the User-Agent that is recorded.
func userAgent(r *http.Request) string {
	agent := strings.ToValidUTF8(r.UserAgent(), "\uFFFD")
	agent = agent[:min(len(agent), maxUserAgent)]
	return agent[:proto.CutUTF8(agent)]
}

// recordIntent appends the record that an act begins. Its error is for the client.
func (c *Core) recordIntent(ctx context.Context, a *act) error {
	ctx, cancel := Detached(ctx)
	defer cancel()
	intent := a.record
	intent.Stage, intent.Time = api.AuditIntent, api.Time{Time: time.Now()}
	stored, err := c.Auditor.Append(ctx, intent)
	if err != nil {
		return fmt.Errorf("%w: %w", api.Unavailable(2, "the audit log cannot be written now, so that nothing was "+
			"changed; send the request again"), err)
	}
	a.record.Intent = &stored.Sequence
	return nil
}

// recordOutcome appends the outcome of a request's act with the answer's status.
func (c *Core) recordOutcome(r *http.Request, status int) error {
	i := infoOf(r.Context())
	return c.appendOutcome(r, i.act, status, i.Err)
}

// appendOutcome appends the outcome of an act with a status, and with the error failed if it is not
// nil. Its own error is for the client.
func (c *Core) appendOutcome(r *http.Request, a *act, status int, failed error) error {
	ctx, cancel := Detached(r.Context())
	defer cancel()
	i := infoOf(r.Context())
	outcome := a.record
	outcome.Stage, outcome.Time, outcome.Status = api.AuditOutcome, api.Time{Time: time.Now()}, &status
	if failed != nil {
		outcome.Error = &api.NewError(failed).Code
	}
	if i.Trace != "" {
		outcome.TraceID = &i.Trace
	}
	err := a.err
	if err == nil {
		_, err = c.Auditor.Append(ctx, outcome)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", api.Errorf(api.CodeInternal,
			"the outcome of this request could not be recorded in the audit log; it may have been carried out: look before "+
				"you send it again"), err)
	}
	return nil
}

// AuditPart records a part of a request as a separate act, such as creating the organisation of a
// new key. do creates an object, and returns its form without secrets.
func (c *Core) AuditPart(r *Request, action, org, name string, do func() (object any, err error)) error {
	a := c.newAct(r.Request, action)
	a.name(org, name)
	if err := c.recordIntent(r.Context(), a); err != nil {
		return err
	}
	status := http.StatusCreated
	object, failed := do()
	if failed != nil {
		status = api.NewError(failed).Code.Status()
	} else {
		a.record.After = a.encode(object)
	}
	fault.Here(fault.AfterChangeBeforeOutcome)
	return errors.Join(failed, c.appendOutcome(r.Request, a, status, failed))
}

// auditHeld calls next, and sends its answer once the outcome is recorded. If that fails, an error
// replaces the answer.
func (c *Core) auditHeld(w http.ResponseWriter, r *http.Request, next http.Handler) {
	held := &heldAnswer{header: w.Header().Clone(), status: http.StatusOK}
	done := false
	defer func() {
		if !done { // next panics, which ends the request
			c.recordPanic(r)
		}
	}()
	next.ServeHTTP(held, r)
	done = true
	fault.Here(fault.AfterChangeBeforeOutcome)
	if err := c.recordOutcome(r, held.status); err != nil {
		c.writeError(w, r, err)
		return
	}
	held.send(w)
}

// auditStreamed is auditHeld for an answer that is too large to hold. It aborts the answer if the
// outcome cannot be recorded.
func (c *Core) auditStreamed(w http.ResponseWriter, r *http.Request, next http.Handler) {
	done := false
	defer func() {
		if !done {
			c.recordPanic(r)
		}
	}()
	next.ServeHTTP(w, r)
	done = true
	if err := c.recordOutcome(r, cmp.Or(infoOf(r.Context()).Rec.status, http.StatusOK)); err != nil {
		infoOf(r.Context()).Err = fmt.Errorf("record the outcome: %w", err)
		panic(http.ErrAbortHandler)
	}
}

// recordPanic records the outcome of a request whose answer is missing or aborted.
func (c *Core) recordPanic(r *http.Request) {
	i := infoOf(r.Context())
	if i.Err == nil {
		i.Err = errors.New("the handler panicked")
	}
	if err := c.recordOutcome(r, api.NewError(i.Err).Code.Status()); err != nil {
		c.Log.ErrorContext(r.Context(), "outcome not in the audit log", "action", i.act.record.Action, "request_id",
			i.RequestID, "error", err)
	}
}

// AuditBefore gives the audit log the object of a request before the request changes it. org is
// empty for an object of the server. object is its form without secrets, or nil. If a handler
// cannot read the object, it continues: replacing an undecodable object repairs it.
func AuditBefore(r *Request, org, name string, object any) {
	if a := r.act; a != nil {
		a.name(org, name)
		a.record.Before = a.encode(object)
	}
}

// AuditAfter is auditBefore for the changed object.
func AuditAfter(r *Request, org, name string, object any) {
	if a := r.act; a != nil {
		a.name(org, name)
		a.record.After = a.encode(object)
	}
}

func (a *act) name(org, name string) {
	a.record.Object.Name, a.record.Object.Org = name, nil
	if org != "" {
		a.record.Object.Org = &org
	}
}

func (a *act) encode(object any) json.RawMessage {
	if object == nil {
		return nil
	}
	text, err := json.Marshal(object)
	if err != nil {
		a.err = fmt.Errorf("encode an object for the audit log: %w", err)
	}
	return text
}

// heldAnswer is an answer in memory.
type heldAnswer struct {
	header http.Header
	status int
	body   bytes.Buffer
	begun  bool
}

func (h *heldAnswer) Header() http.Header { return h.header }

func (h *heldAnswer) WriteHeader(status int) {
	if !h.begun {
		h.status, h.begun = status, true
	}
}

func (h *heldAnswer) Write(p []byte) (int, error) {
	h.begun = true
	return h.body.Write(p)
}

func (h *heldAnswer) send(w http.ResponseWriter) {
	clear(w.Header())
	maps.Copy(w.Header(), h.header)
	w.WriteHeader(h.status)
	_, _ = w.Write(h.body.Bytes()) // the client may be gone
	_ = http.NewResponseController(w).Flush()
}
