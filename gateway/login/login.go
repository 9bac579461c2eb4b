package login

import (
	"context"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Members finds the people who may sign in.
type Members interface {
	// Member returns the cached member of an id.
	Member(id string) (m proto.Member, ok bool)
	// List returns the members of an organisation, or all if org is empty.
	List(org string) []proto.Member
	// Get returns a member, or [proto.ErrNotFound].
	Get(ctx context.Context, id string) (proto.Member, error)
	// Change stores the result of change for a member, and returns it. change may be called again.
	// Its error is returned unchanged. Change returns [proto.ErrNotFound] if there is no such
	// member.
	Change(ctx context.Context, id string, change func(*proto.Member) error) (proto.Member, error)
}

// Routes are the routes of logins and sessions.
type Routes struct {
	*web.Core
	// Provider signs people in. Without it, nil, only API keys make sessions.
	Provider *Provider
	Sessions Sessions
	Members  Members
	Keys     Keys
	Version  string // of the program

	resource *web.Resource[proto.Session, api.Session]
}

// Handlers returns the handlers of the routes.
func (s *Routes) Handlers() []web.Handler {
	s.resource = &web.Resource[proto.Session, api.Session]{ // without ETags
		Core: s.Core, Kind: "session", Path: "/v1/admin/sessions", Param: "id", Form: api.NewSession,
		Name:     func(s *proto.Session) (org, id string) { return s.Org, s.ID },
		Answer:   func(list []api.Session, next *string) any { return api.Sessions{Sessions: list, NextCursor: next} },
		NotFound: func(string) error { return errNoSession },
	}
	return []web.Handler{
		{ID: "getLogin", Handle: s.get},
		{ID: "login", Handle: s.start},
		{ID: "loginCallback", Handle: s.finish},
		{ID: "createSession", Handle: s.createSession},
		{ID: "getSession", Handle: s.getSession},
		{ID: "deleteSession", Handle: s.deleteSession},
		{ID: "listSessions", Handle: s.listSessions},
		{ID: "endSession", Handle: s.resource.Remove(s.endSession)},
	}
}

const defaultReturn = "/console/"

var errNoLogin = api.Errorf(
	api.CodeNotFound, "this server has no identity provider; sign in with an API key, or set --oidc-issuer")

// checkReturn returns an error unless a browser may be redirected to a path after the login. The
// path is appended to this server's own address.
func checkReturn(path string) error {
	if !strings.HasPrefix(path, "/") || strings.ContainsFunc(path, unicode.IsControl) || len(path) > maxReturn {
		return proto.FieldErrorf(
			"return", "must be a path on this server, which begins with /, of at most %d bytes", maxReturn)
	}
	return nil
}

const maxReturn = 1024

// get answers with the ways to sign in.
func (s *Routes) get(w http.ResponseWriter, _ *web.Request) error {
	return web.WriteValue(w, http.StatusOK, api.Login{OIDC: s.Provider != nil, Version: s.Version})
}

// start sends a browser to the identity provider.
func (s *Routes) start(w http.ResponseWriter, r *web.Request) error {
	showErrors(r)
	if s.Provider == nil {
		if !isBrowser(r.Request) {
			return errNoLogin
		}
		base, err := s.BaseURL(r.Request)
		if err != nil {
			return err
		}
		redirect(w, base+defaultReturn) // it asks for an API key
		return nil
	}
	query := r.URL.Query()
	org, returnTo := query.Get("org"), query.Get("return")
	if returnTo == "" {
		returnTo = defaultReturn
	}
	if err := checkReturn(returnTo); err != nil {
		return err
	}
	if org != "" && !proto.ValidOrg(org) {
		return proto.FieldErrorf("org", "must be the name of an organisation")
	}
	attempt := NewAttempt(org, returnTo)
	to, err := s.Provider.URL(r.Context(), &attempt)
	if err != nil {
		return s.providerError(r.Context(), err)
	}
	s.setCookie(w, r.Request, loginCookie, attempt.Cookie, AttemptLife)
	redirect(w, to)
	return nil
}

// finish starts a session for a browser that returns from the identity provider.
func (s *Routes) finish(w http.ResponseWriter, r *web.Request) error {
	showErrors(r)
	if s.Provider == nil {
		return errNoLogin
	}
	cookie := s.cookieOf(r.Request, loginCookie)
	s.setCookie(w, r.Request, loginCookie, "", -time.Second) // it is for one answer
	attempt, err := ParseAttempt(cookie)
	if err != nil {
		return s.providerError(r.Context(), err)
	}
	if err := checkReturn(attempt.Return); err != nil {
		return err
	}
	base, err := s.BaseURL(r.Request)
	if err != nil {
		return err
	}
	query := r.URL.Query()
	id, err := s.Provider.Identify(r.Context(), &attempt, Callback{
		State: query.Get("state"), Code: query.Get("code"), Error: query.Get("error"), Issuer: query.Get("iss"),
	})
	if err != nil {
		return s.providerError(r.Context(), err)
	}
	found := s.membersOf(id, attempt.Org)
	switch len(found) {
	case 0:
		return notMember(id, attempt.Org)
	case 1:
	default:
		return choosePage(w, base, attempt.Return, found)
	}
	m, err := s.bindMember(r.Context(), found[0], id)
	if err != nil {
		return err
	}
	r.Key = m.Key()
	if _, err := s.startSession(
		w, r, proto.Session{Org: m.Org, KeyID: m.ID, Name: m.Name(), Issuer: m.Issuer, Subject: m.Subject}); err != nil {
		return err
	}
	redirect(w, base+attempt.Return)
	return nil
}

func redirect(w http.ResponseWriter, to string) {
	w.Header().Set("Location", to)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusFound)
}

// providerError returns the error for a browser whose login failed.
func (s *Routes) providerError(ctx context.Context, err error) error {
	if no, ok := errors.AsType[*RefusedError](err); ok {
		return api.Errorf(api.CodeForbidden, "%s", no.Reason)
	}
	if errors.Is(err, ErrBusy) {
		return web.ErrOverloaded
	}
	if bad, ok := errors.AsType[*AnswerError](err); ok {
		s.Log.WarnContext(ctx, "login refused", "error", bad)
		return api.Errorf(api.CodeForbidden,
			"the identity provider's answer does not prove who you are, and another attempt will end in the same way: "+
				"ask the administrator of this server, whose log has the reason")
	}
	return fmt.Errorf("%w: %w",
		api.Unavailable(loginRetry, "the identity provider does not answer; try again later, and see the server's log"), err)
}

const loginRetry = 10 // seconds

// notMember returns the error for a person who is not a member. It shows what an administrator needs
// to add the person.
func notMember(id proto.Identity, org string) error {
	where := "any organisation"
	if org != "" {
		where = "the organisation " + org
	}
	who := "you are not a member of " + where
	if id.Email == "" {
		who += "; the identity provider has not verified an address of yours"
	} else {
		who += " as " + id.Email
	}
	return api.Errorf(api.CodeForbidden, "%s; ask an administrator to add you, or the subject %s", who, id.Subject)
}

// membersOf returns a person's members, at most one per organisation. org, if not empty, is the
// only organisation.
func (s *Routes) membersOf(id proto.Identity, org string) []proto.Member {
	found := map[string]proto.Member{}
	for _, m := range s.Members.List(org) {
		if !m.Is(id) {
			continue
		}
		if other, ok := found[m.Org]; !ok || other.Subject == "" { // who was bound to the person comes first
			found[m.Org] = m
		}
	}
	var list []proto.Member
	for _, m := range found {
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b proto.Member) int { return strings.Compare(a.Org, b.Org) })
	return list
}

// bindMember binds the member to the person signing in, unless it is bound already.
func (s *Routes) bindMember(ctx context.Context, m proto.Member, id proto.Identity) (proto.Member, error) {
	if m.Issuer == id.Issuer && m.Subject == id.Subject {
		return m, nil
	}
	ctx, cancel := web.Detached(ctx)
	defer cancel()
	m, err := s.Members.Change(ctx, m.ID, func(m *proto.Member) error {
		if !m.Is(id) {
			return notMember(id, m.Org)
		}
		m.Issuer, m.Subject = id.Issuer, id.Subject
		return nil
	})
	if errors.Is(err, proto.ErrNotFound) {
		return m, notMember(id, "")
	}
	return m, err
}

var choice = template.Must(template.New("choice").Parse(`<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Sign in</title>
<h1>Sign in</h1>
<p>You are a member of several organisations.</p>
<ul>{{range .}}<li><a href="{{.URL}}">{{.Org}}</a></li>{{end}}</ul>
</html>
`))

var failure = template.Must(template.New("failure").Parse(`<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Not signed in</title>
<h1>Not signed in</h1>
<p>{{.}}</p>
</html>
`))

// isBrowser reports whether a client shows pages.
func isBrowser(r *http.Request) bool { return strings.Contains(r.Header.Get("Accept"), "text/html") }

// showErrors renders a request's errors as pages if the client is a browser that shows pages.
func showErrors(r *web.Request) {
	if !isBrowser(r.Request) {
		return
	}
	r.WriteError = func(w http.ResponseWriter, e *api.Error) {
		setPageHeaders(w.Header())
		w.WriteHeader(e.Code.Status())
		_ = failure.Execute(w, e.Message) // the client may be gone
	}
}

// setPageHeaders sets the headers of a page of the login: it is not stored, and loads nothing.
func setPageHeaders(h http.Header) {
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", pagePolicy)
}

const pagePolicy = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// choosePage lets a person choose among organisations.
func choosePage(w http.ResponseWriter, base, returnTo string, members []proto.Member) error {
	type link struct{ Org, URL string }
	var links []link
	for _, m := range members {
		links = append(links, link{m.Org, base + "/login?" + url.Values{"org": {m.Org}, "return": {returnTo}}.Encode()})
	}
	var page strings.Builder
	if err := choice.Execute(&page, links); err != nil {
		return fmt.Errorf("page of organisations: %w", err)
	}
	setPageHeaders(w.Header())
	_, _ = w.Write([]byte(page.String())) // the client may be gone
	return nil
}
