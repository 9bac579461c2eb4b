package admin

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// AuditLog is the append-only log of administrative acts.
type AuditLog interface {
	// Append stores a record at the end of the log, and returns it with its sequence number and
	// hashes.
	Append(ctx context.Context, r api.AuditRecord) (api.AuditRecord, error)
	// List returns up to limit matching records, newest first, with sequence numbers below before
	// (0 for all). A page may be short. next is the before of the next page, 0 after the last one.
	List(ctx context.Context, f *api.AuditFilter, before int64, limit int) (page []api.AuditRecord, next int64, err error)
	// Export calls each with the existing records after a sequence number and their lines, oldest
	// first. It stops if each returns an error.
	Export(ctx context.Context, after int64, each func(r *api.AuditRecord, line []byte) error) error
}

// AuditRoutes are the routes of the audit log.
type AuditRoutes struct {
	*web.Core
	Audit AuditLog
}

// Handlers returns the handlers of the routes.
func (s *AuditRoutes) Handlers() []web.Handler {
	return []web.Handler{{ID: "listAudit", Handle: s.list}, {ID: "verifyAudit", Handle: s.verify}}
}

// The forms of objects in the audit log are the API's, without the values of variables. URLs are
// reduced to scheme and host: a path is often a credential.

func auditKey(k *proto.Key) any {
	key := api.NewKey(k)
	key.Env = redactEnv(key.Env)
	return key
}

func auditProfile(p *proto.Profile) any {
	redacted := *p
	redacted.Env = redactEnv(p.Env)
	return redacted
}

func auditImage(img *proto.Image) any {
	image := api.NewImage(img)
	image.Env = redactEnv(image.Env)
	return image
}

// auditLetter omits a dead letter's message, which quotes its content.
func auditLetter(l *proto.DeadLetter) any {
	letter := api.NewDeadLetter(l)
	letter.Message = ""
	return letter
}

func redactEnv(env map[string]string) map[string]string {
	out := maps.Clone(env)
	for name := range out {
		out[name] = web.Redacted
	}
	return out
}

// auditQuery is the query of a request for the audit log.
type auditQuery struct {
	filter api.AuditFilter
	cursor string
	after  int64 // of an export
	limit  int
}

func parseAuditQuery(r *web.Request) (q auditQuery, err error) {
	query, key := r.URL.Query(), &r.Key
	filtered := false
	for name := range query {
		value := query.Get(name)
		switch name {
		case "limit", "after", "all":
			continue
		case "cursor":
			q.cursor = value
		case "org":
			q.filter.Org, err = web.AdminOrg(r, value)
		case "actor":
			err = web.ParseText(&q.filter.Actor, name, value)
		case "action":
			err = web.ParseText(&q.filter.Action, name, value)
		case "created_after":
			err = web.ParseTime(&q.filter.From.Time, name, value)
		case "created_before":
			err = web.ParseTime(&q.filter.Before.Time, name, value)
		default:
			err = proto.FieldErrorf(proto.Shorten(name), "is no parameter of this list; see /docs")
		}
		if err != nil {
			return q, err
		}
		filtered = filtered || name != "cursor"
	}
	if q.limit, err = web.PageSize(r); err != nil {
		return q, err
	}
	if q.after, err = web.QueryInt(r, "after", 0, api.MaxWhole, 0); err != nil {
		return q, err
	}
	all, err := web.QueryBool(r, "all", false)
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

// list answers with a page of the audit log, or with an export.
func (s *AuditRoutes) list(w http.ResponseWriter, r *web.Request) error {
	q, err := parseAuditQuery(r)
	if err != nil {
		return err
	}
	if web.Preferred(r.Header, web.TypeJSON, web.TypeNDJSON) == web.TypeNDJSON {
		return s.export(w, r, &q)
	}
	var before int64
	if q.cursor != "" {
		if before, err = s.OpenCursor("audit", &q.filter, q.cursor); err != nil {
			return err
		}
	}
	records, next, err := s.Audit.List(r.Context(), &q.filter, before, q.limit)
	if err != nil {
		return fmt.Errorf("list the audit log: %w", err)
	}
	answer := api.AuditRecords{Records: []api.AuditRecord{}}
	key := &r.Key
	for _, record := range records {
		if !key.Global {
			record = record.VisibleTo(key.Org)
		}
		answer.Records = append(answer.Records, record)
	}
	if next != 0 {
		cursor, err := s.SealCursor("audit", &q.filter, next)
		if err != nil {
			return err
		}
		answer.NextCursor = &cursor
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

// export answers with all records that match, one in each line.
func (s *AuditRoutes) export(w http.ResponseWriter, r *web.Request, q *auditQuery) error {
	key := &r.Key
	done, err := s.Transfers.Begin(r.Context(), key.Org)
	if err != nil {
		return err
	}
	defer done()
	out := web.NewLazyWriter(w, r, func(h http.Header) {
		h.Set("Content-Type", web.TypeNDJSON)
		h.Set("Cache-Control", "no-store")
	})
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
	return out.Begin() // there may be no such record
}

const (
	// verifyTimeout limits a verification.
	verifyTimeout = 10 * time.Minute
	// maxUnfinished limits the unfinished intents in the answer.
	maxUnfinished = 100
)

// verify verifies the whole audit log. It stops when the client disconnects.
func (s *AuditRoutes) verify(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeOptionalBody[api.AuditVerifyRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	done, err := s.Transfers.Begin(r.Context(), r.Key.Org)
	if err != nil {
		return err
	}
	defer done()
	connected, release := r.WhileConnected()
	defer release()
	ctx, cancel := s.UntilLeave(connected.Context())
	defer cancel()
	ctx, stop := context.WithTimeoutCause(ctx, verifyTimeout, api.Unavailable(0,
		"the audit log is too long to be verified here; use bullpen audit verify"))
	defer stop()
	chain := api.AuditChain{Expect: req.Expect}
	var problem error
	err = s.Audit.Export(ctx, 0, func(_ *api.AuditRecord, line []byte) error {
		_, problem = chain.Add(line)
		return problem
	})
	if problem == nil && err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("verify the audit log: %w", err)
	}
	if problem == nil {
		problem = chain.End()
	}
	unfinished := chain.Unfinished()
	answer := api.AuditVerification{
		Records: chain.Records, First: chain.First, Last: chain.Last, Valid: problem == nil, HeadHash: chain.Head,
		Unfinished: append([]int64{}, unfinished[:min(len(unfinished), maxUnfinished)]...),
	}
	if problem != nil {
		answer.Problem = new(problem.Error())
	}
	return web.WriteValue(w, http.StatusOK, answer)
}
