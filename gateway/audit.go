package gateway

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"
	"golang.org/x/time/rate"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// The audit log is kept for ever, and every record is a durable write that all gateways wait for. So
// an organisation's administrative requests have a rate, and those that its keys may not make, which
// any tenant can send, a lower one. Each gateway counts for itself.
const (
	auditRate         = rate.Limit(5) // a second
	auditBurst        = 100
	auditRefusedRate  = rate.Limit(0.1)
	auditRefusedBurst = 20
	// maxUserAgent is the part of a User-Agent that is recorded, in bytes.
	maxUserAgent = 256
	redacted     = "[redacted]"
)

// act is an administrative request that is being carried out.
type act struct {
	record api.AuditRecord // of the outcome
	err    error           // of encoding an object
}

// audited returns the middleware that records the requests of a route in the audit log, if they are
// to be. It comes before authorized, so that refused requests are recorded as well.
func (s *Server) audited(route *api.Route) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		if route.Audit == "" {
			return next
		}
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			i := infoOf(r.Context())
			i.act = s.newAct(r, route.Audit)
			mayUse := authorize(&i.key, route) == nil
			if !i.key.GlobalAdmin() && !s.mayAct(i.key.Org, mayUse) {
				s.writeError(w, r, &api.Error{Code: api.CodeRateLimited, RetryAfter: 10, Message: "too many administrative requests of this organisation; send the request again"})
				return
			}
			if mayUse {
				if err := s.recordIntent(r.Context(), i.act); err != nil {
					s.writeError(w, r, err)
					return
				}
			}
			if r.Method == http.MethodGet || r.Method == http.MethodHead {
				s.auditStreamed(w, r, next)
				return
			}
			s.auditHeld(w, r, next)
		})
	}
}

// mayAct reports whether an organisation may make an administrative request now. mayUse is whether
// its key may use the route.
func (s *Server) mayAct(org string, mayUse bool) bool {
	acts, limit, burst := &s.refusedActs, auditRefusedRate, auditRefusedBurst
	if mayUse {
		acts, limit, burst = &s.acts, auditRate, auditBurst
	}
	_, wait := acts.take(org, limit, burst, time.Now())
	return wait == 0
}

// newAct returns the record of a request's outcome, as far as it is known before.
func (s *Server) newAct(r *http.Request, action string) *act {
	i := infoOf(r.Context())
	kind, _, _ := strings.Cut(action, ".")
	name := cmp.Or(chi.URLParam(r, "id"), chi.URLParam(r, "name"), chi.URLParam(r, "slug"))
	actor := api.AuditActor{Type: "key", ID: i.key.ID, Name: i.key.Name, Org: i.key.Org}
	if strings.HasPrefix(i.key.ID, proto.MemberPrefix) {
		actor.Type = "member"
	}
	return &act{record: api.AuditRecord{
		Action: action, Actor: actor,
		Object:   api.AuditObject{Kind: kind, Name: proto.Shorten(strings.ToValidUTF8(name, "\uFFFD"))},
		SourceIP: s.clientAddress(r), UserAgent: userAgent(r), RequestID: i.requestID,
	}}
}

// userAgent returns the part of the User-Agent that is recorded.
func userAgent(r *http.Request) string {
	agent := strings.ToValidUTF8(r.UserAgent(), "\uFFFD")
	agent = agent[:min(len(agent), maxUserAgent)]
	return agent[:proto.CutUTF8(agent)]
}

// recordIntent appends the record that an act begins. Its error is for the client.
func (s *Server) recordIntent(ctx context.Context, a *act) error {
	ctx, cancel := detached(ctx)
	defer cancel()
	intent := a.record
	intent.Stage, intent.Time = api.AuditIntent, api.Time{Time: time.Now()}
	stored, err := s.Audit.Append(ctx, intent)
	if err != nil {
		return fmt.Errorf("%w: %w", api.Unavailable(2, "the audit log cannot be written now, so that nothing was changed; send the request again"), err)
	}
	a.record.Intent = &stored.Sequence
	return nil
}

// recordOutcome appends the record that the act of a request has ended with a status.
func (s *Server) recordOutcome(r *http.Request, status int) error {
	i := infoOf(r.Context())
	return s.appendOutcome(r, i.act, status, i.err)
}

// appendOutcome appends the record that an act has ended with a status, and with the error failed if
// it is not nil. Its own error is for the client.
func (s *Server) appendOutcome(r *http.Request, a *act, status int, failed error) error {
	ctx, cancel := detached(r.Context())
	defer cancel()
	i := infoOf(r.Context())
	outcome := a.record
	outcome.Stage, outcome.Time, outcome.Status = api.AuditOutcome, api.Time{Time: time.Now()}, &status
	if failed != nil {
		outcome.Error = &toAPI(failed, &i.plan).Code
	}
	if i.trace != "" {
		outcome.TraceID = &i.trace
	}
	err := a.err
	if err == nil {
		_, err = s.Audit.Append(ctx, outcome)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", api.Errorf(api.CodeInternal,
			"the outcome of this request could not be recorded in the audit log; it may have been carried out: look before you send it again"), err)
	}
	return nil
}

// auditPart records a part of a request that is an act of its own, such as the creation of the
// organisation of a new key. do creates an object, and returns its form without secrets.
func (s *Server) auditPart(r *http.Request, action, org, name string, do func() (object any, err error)) error {
	a := s.newAct(r, action)
	a.name(org, name)
	if err := s.recordIntent(r.Context(), a); err != nil {
		return err
	}
	status := http.StatusCreated
	object, failed := do()
	if failed != nil {
		status = toAPI(failed, &infoOf(r.Context()).plan).Code.Status()
	} else {
		a.record.After = a.encode(object)
	}
	fault.Here(fault.AfterChangeBeforeOutcome)
	return errors.Join(failed, s.appendOutcome(r, a, status, failed))
}

// auditHeld calls next, and sends its answer when the outcome is recorded. If that fails, an error
// takes the place of the answer.
func (s *Server) auditHeld(w http.ResponseWriter, r *http.Request, next http.Handler) {
	held := &heldAnswer{header: w.Header().Clone(), status: http.StatusOK}
	done := false
	defer func() {
		if !done { // next panics, which ends the request
			s.recordPanic(r)
		}
	}()
	next.ServeHTTP(held, r)
	done = true
	fault.Here(fault.AfterChangeBeforeOutcome)
	if err := s.recordOutcome(r, held.status); err != nil {
		s.writeError(w, r, err)
		return
	}
	held.send(w)
}

// auditStreamed is auditHeld for an answer that is too large to hold. It breaks the answer off if
// the outcome cannot be recorded.
func (s *Server) auditStreamed(w http.ResponseWriter, r *http.Request, next http.Handler) {
	done := false
	defer func() {
		if !done {
			s.recordPanic(r)
		}
	}()
	next.ServeHTTP(w, r)
	done = true
	if err := s.recordOutcome(r, cmp.Or(infoOf(r.Context()).rec.status, http.StatusOK)); err != nil {
		infoOf(r.Context()).err = fmt.Errorf("record the outcome: %w", err)
		panic(http.ErrAbortHandler)
	}
}

// recordPanic records the outcome of a request that gets no answer, or a broken one.
func (s *Server) recordPanic(r *http.Request) {
	i := infoOf(r.Context())
	if i.err == nil {
		i.err = errors.New("the handler panicked")
	}
	if err := s.recordOutcome(r, toAPI(i.err, &i.plan).Code.Status()); err != nil {
		s.Log.ErrorContext(r.Context(), "outcome not in the audit log", "action", i.act.record.Action, "request_id", i.requestID, "error", err)
	}
}

// auditBefore hands the audit log the object that a request is about, before the request changes it.
// org is empty for an object of the server. object is its form without secrets, nil for none. A
// handler that cannot read the object goes on: what cannot be decoded is repaired by replacing it.
func auditBefore(r *http.Request, org, name string, object any) {
	if a := infoOf(r.Context()).act; a != nil {
		a.name(org, name)
		a.record.Before = a.encode(object)
	}
}

// auditAfter is auditBefore for the changed object.
func auditAfter(r *http.Request, org, name string, object any) {
	if a := infoOf(r.Context()).act; a != nil {
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

// The forms of objects in the audit log are the API's forms without the values of variables. Of a URL
// they have scheme and host only: its path is often a credential.

func auditKey(k *proto.Key) api.Key {
	key := api.NewKey(k)
	key.Env = redactEnv(key.Env)
	return key
}

func auditProfile(p proto.Profile) proto.Profile {
	p.Env = redactEnv(p.Env)
	return p
}

func auditImage(img *proto.Image) api.Image {
	image := api.NewImage(img)
	image.Env = redactEnv(image.Env)
	return image
}

func auditWebhook(settings *proto.Webhook) any {
	if settings == nil {
		return nil
	}
	public := *settings
	if u, err := url.Parse(public.URL); err == nil && u.Host != "" {
		public.URL = u.Scheme + "://" + u.Host + "/" + redacted
	} else if public.URL != "" {
		public.URL = redacted
	}
	return api.NewWebhook(&public, "", time.Now())
}

// auditLetter leaves out the message about a dead letter, which quotes it.
func auditLetter(l *proto.DeadLetter) any {
	letter := api.NewDeadLetter(l)
	letter.Message = ""
	return letter
}

func redactEnv(env map[string]string) map[string]string {
	out := maps.Clone(env)
	for name := range out {
		out[name] = redacted
	}
	return out
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

// auditQuery is what a request for the audit log asks for.
type auditQuery struct {
	filter api.AuditFilter
	before int64 // of a page: the sequence number of the last record of the page before; 0 for the first page
	after  int64 // of an export
	limit  int
}

func (s *Server) parseAuditQuery(r *http.Request) (q auditQuery, err error) {
	query, key := r.URL.Query(), &infoOf(r.Context()).key
	filtered := false
	for name := range query {
		value := query.Get(name)
		switch name {
		case "limit", "after", "all":
			continue
		case "cursor":
			if q.before, err = strconv.ParseInt(value, 10, 64); err != nil || q.before < 1 {
				err = badCursor()
			}
		case "org":
			q.filter.Org, err = adminOrg(r, value)
		case "actor":
			err = some(&q.filter.Actor, name, value)
		case "action":
			err = some(&q.filter.Action, name, value)
		case "created_after":
			err = instant(&q.filter.From.Time, name, value)
		case "created_before":
			err = instant(&q.filter.Before.Time, name, value)
		default:
			err = proto.FieldErrorf(proto.Shorten(name), "is no parameter of this list; see /docs")
		}
		if err != nil {
			return q, err
		}
		filtered = filtered || name != "cursor"
	}
	if q.limit, err = pageSize(r); err != nil {
		return q, err
	}
	if q.after, err = queryInt(r, "after", 0, api.MaxWhole, 0); err != nil {
		return q, err
	}
	all, err := queryBool(r, "all", false)
	switch {
	case err != nil:
		return q, err
	case all && !key.Global:
		return q, api.NotGlobal("only a global administrator reads the records of all organisations")
	case all && filtered:
		return q, proto.FieldErrorf("all", "must be given without filters")
	case !key.Global:
		q.filter.Org = key.Org
	}
	return q, nil
}

// listAudit answers with a page of the audit log, or with an export.
func (s *Server) listAudit(w http.ResponseWriter, r *http.Request) error {
	q, err := s.parseAuditQuery(r)
	if err != nil {
		return err
	}
	if preferred(r.Header, typeJSON, typeNDJSON) == typeNDJSON {
		return s.exportAudit(w, r, &q)
	}
	records, next, err := s.Audit.List(r.Context(), &q.filter, q.before, q.limit)
	if err != nil {
		return fmt.Errorf("list the audit log: %w", err)
	}
	answer := api.AuditRecords{Records: []api.AuditRecord{}}
	key := &infoOf(r.Context()).key
	for _, record := range records {
		if !key.Global {
			record = record.VisibleTo(key.Org)
		}
		answer.Records = append(answer.Records, record)
	}
	if next != 0 {
		answer.NextCursor = new(strconv.FormatInt(next, 10))
	}
	return writeValue(w, http.StatusOK, answer)
}

// exportAudit answers with all records that match, one in each line.
func (s *Server) exportAudit(w http.ResponseWriter, r *http.Request, q *auditQuery) error {
	key := &infoOf(r.Context()).key
	done, err := s.transfers.begin(r.Context(), key.Org)
	if err != nil {
		return err
	}
	defer done()
	out := &lazyWriter{w: w, head: r.Method == http.MethodHead, begin: func(h http.Header) {
		h.Set("Content-Type", typeNDJSON)
		h.Set("Cache-Control", "no-store")
	}}
	err = s.Audit.Export(r.Context(), q.after, func(record *api.AuditRecord, line []byte) (err error) {
		if !q.filter.Matches(record) {
			return nil
		}
		if !key.Global {
			visible := record.VisibleTo(key.Org)
			if line, err = visible.Line(); err != nil {
				return err
			}
		}
		_, err = out.Write(append(line, '\n'))
		return err
	})
	if err != nil {
		return fmt.Errorf("export the audit log: %w", err)
	}
	if !out.begun { // there is no such record
		_, err = out.Write(nil)
	}
	return err
}
