package login

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Sessions stores the logins of browsers.
type Sessions interface {
	// Session returns the session with a token, even if it has expired, or [proto.ErrNotFound].
	Session(ctx context.Context, token string) (proto.Session, error)
	web.Pages[proto.Session] // those that have not expired
	// Create stores a new session, and returns it with its token.
	Create(ctx context.Context, s proto.Session) (session proto.Session, token string, err error)
	// Use stores that a session is used.
	Use(ctx context.Context, id string) error
	// End ends a session, or returns [proto.ErrNotFound].
	End(ctx context.Context, id string) error
}

// Keys finds the API keys of sessions.
type Keys interface {
	// Hash returns the hash under which the key with a secret is stored.
	Hash(secret string) string
	// WithHash returns the key with a secret that has this hash.
	WithHash(hash string) (key *proto.Key, ok bool)
}

// The cookies. Over TLS their names have hostPrefix: browsers then accept them from this host only,
// and never send them over plain HTTP.
const (
	hostPrefix    = "__Host-"
	sessionCookie = "bullpen_session"
	loginCookie   = "bullpen_login"
)

// orgHeader names the session's organisation in requests that change something.
const orgHeader = "X-Bullpen-Org"

var (
	errSessionEnded = api.Errorf(api.CodeUnauthorized, "the session has ended; sign in again")
	errNoSession    = api.Errorf(api.CodeNotFound, "there is no session of that id; see /v1/admin/sessions")
)

// secureCookies reports whether browsers reach this server over TLS.
func (s *Routes) secureCookies(r *http.Request) bool {
	base, err := s.BaseURL(r)
	return err == nil && strings.HasPrefix(base, "https://")
}

// setCookie sets a cookie for a time; a negative time removes it.
func (s *Routes) setCookie(w http.ResponseWriter, r *http.Request, name, value string, life time.Duration) {
	c := &http.Cookie{ //nolint:gosec // without TLS, browsers would not send it with Secure
		Name: name, Value: value, Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode, MaxAge: int(life / time.Second),
		Secure: s.secureCookies(r),
	}
	if c.Secure {
		c.Name = hostPrefix + name
	}
	http.SetCookie(w, c)
}

// cookieOf returns the value of a cookie, or "". It ignores duplicates: over plain HTTP another
// server of the same domain could have set one of them.
func (s *Routes) cookieOf(r *http.Request, name string) string {
	if s.secureCookies(r) {
		name = hostPrefix + name
	}
	if found := r.CookiesNamed(name); len(found) == 1 {
		return found[0].Value
	}
	return ""
}

// CheckCookie returns the API key that a request's session acts as. It does not count as a use of
// the session: otherwise an open page would keep its session forever.
func (s *Routes) CheckCookie(r *http.Request) (*proto.Key, error) {
	key, _, err := s.lookUpCookie(r)
	return key, err
}

// KeyOfCookie returns a request's session and the API key that it acts as.
func (s *Routes) KeyOfCookie(r *http.Request) (*proto.Key, *proto.Session, error) {
	key, session, err := s.lookUpCookie(r)
	if err != nil {
		return nil, nil, err
	}
	if session.Stale(time.Now()) {
		ctx, cancel := web.Detached(r.Context())
		defer cancel()
		if err := s.Sessions.Use(ctx, session.ID); err != nil { // the next request tries again
			s.Log.WarnContext(ctx, "use of a session not stored", "session", session.ID, "error", err)
		}
	}
	return key, session, nil
}

func (s *Routes) lookUpCookie(r *http.Request) (*proto.Key, *proto.Session, error) {
	token := s.cookieOf(r, sessionCookie)
	if token == "" {
		return nil, nil, web.Unauthorized()
	}
	session, err := s.Sessions.Session(r.Context(), token)
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		return nil, nil, fmt.Errorf("look up session: %w", err)
	}
	if err != nil || session.Expired(time.Now()) {
		return nil, nil, errSessionEnded
	}
	key, err := s.readKeyOfSession(r.Context(), &session)
	if err != nil {
		return nil, nil, err
	}
	if err := s.checkSessionRequest(r, session.Org); err != nil {
		return nil, nil, err
	}
	return key, &session, nil
}

// keyOfSession returns the API key that a session acts as. ok is false if its member or API key has
// changed since the login.
func (s *Routes) keyOfSession(session *proto.Session) (key *proto.Key, ok bool) {
	if session.KeyHash != "" {
		key, ok = s.Keys.WithHash(session.KeyHash)
		return key, ok && key.Valid(time.Now())
	}
	m, ok := s.Members.Member(session.KeyID)
	if !ok || !session.Of(&m) {
		return nil, false
	}
	return new(m.Key()), true
}

// readKeyOfSession is keyOfSession that also knows a member who has just signed in for the first
// time at another gateway.
func (s *Routes) readKeyOfSession(ctx context.Context, session *proto.Session) (*proto.Key, error) {
	if key, ok := s.keyOfSession(session); ok {
		return key, nil
	}
	if session.KeyHash != "" {
		return nil, errSessionEnded
	}
	m, err := s.Members.Get(ctx, session.KeyID)
	switch {
	case errors.Is(err, proto.ErrNotFound):
		return nil, errSessionEnded
	case err != nil:
		return nil, fmt.Errorf("look up the member of a session: %w", err)
	case !session.Of(&m):
		return nil, errSessionEnded
	default:
		return new(m.Key()), nil
	}
}

// checkSessionRequest refuses a session's request that a page of another origin may have sent: a
// browser adds the cookie to such requests, too. Requests that change something also need a header
// that forms cannot set. It names the organisation of the page, so that a tab does nothing after
// the browser has signed in to another organisation.
func (s *Routes) checkSessionRequest(r *http.Request, org string) error {
	origin := r.Header.Get("Origin")
	switch site := r.Header.Get("Sec-Fetch-Site"); {
	case site == "same-origin" || site == "none": // the browser has compared the origins
	case site != "":
		return api.Errorf(api.CodeForbidden, "requests of web pages of other origins are not accepted with a session")
	case origin != "" && !s.OwnOrigin(r, origin):
		return api.Errorf(api.CodeForbidden,
			"requests of web pages of this origin are not accepted with a session; if it is this server's own, set --public-url")
	}
	named := r.Header.Get(orgHeader)
	if named == "" && (r.Method == http.MethodGet || r.Method == http.MethodHead) || named == org {
		return nil
	}
	return &api.Error{
		Code: api.CodeForbidden, Reason: api.ReasonSession,
		Message: "the session is one of the organisation " + org +
			"; a request that changes something must name it in the header " + orgHeader + ", or sign in to another one",
	}
}

// startSession stores a new session and sends its cookie. The session that the browser has had ends.
func (s *Routes) startSession(w http.ResponseWriter, r *web.Request, session proto.Session) (proto.Session, error) {
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	session.UserAgent = web.ClientText(r.Header, "User-Agent")
	session, token, err := s.Sessions.Create(ctx, session)
	if err != nil {
		return session, fmt.Errorf("create session: %w", err)
	}
	if old := s.cookieOf(r.Request, sessionCookie); old != "" {
		if err := s.Sessions.End(ctx, proto.SessionID(old)); err != nil && !errors.Is(err, proto.ErrNotFound) {
			return session, fmt.Errorf("end the earlier session: %w", err)
		}
	}
	s.setCookie(w, r.Request, sessionCookie, token, proto.SessionLife)
	s.Log.InfoContext(ctx, "signed in", "org", session.Org, "key", session.KeyID, "session", session.ID)
	return session, nil
}

// createSession starts a session with the API key of the request.
func (s *Routes) createSession(w http.ResponseWriter, r *web.Request) error {
	i := r.Info
	if i.Session != nil {
		return api.Errorf(api.CodeForbidden, "a session starts no other one; send an API key")
	}
	session, err := s.startSession(
		w, r, proto.Session{Org: i.Key.Org, KeyID: i.Key.ID, Name: i.Key.Name, KeyHash: s.Keys.Hash(web.SecretOf(r.Request))})
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusCreated, api.NewCaller(&i.Key, &session))
}

func (s *Routes) getSession(w http.ResponseWriter, r *web.Request) error {
	i := r.Info
	return web.WriteValue(w, http.StatusOK, api.NewCaller(&i.Key, i.Session))
}

// deleteSession ends the session of the request.
func (s *Routes) deleteSession(w http.ResponseWriter, r *web.Request) error {
	session := r.Session
	if session == nil {
		return api.Errorf(api.CodeNotFound, "the request has an API key, and no session")
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	if err := s.Sessions.End(ctx, session.ID); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("end session: %w", err)
	}
	s.setCookie(w, r.Request, sessionCookie, "", -time.Second)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Routes) listSessions(w http.ResponseWriter, r *web.Request) error {
	org, err := web.ListedOrg(r)
	if err != nil {
		return err
	}
	return s.resource.WritePage(w, r, s.Sessions, org, s.goesOn)
}

// goesOn reports whether the session's member or API key is unchanged since the login.
func (s *Routes) goesOn(session *proto.Session) bool {
	_, ok := s.keyOfSession(session)
	return ok
}

func (s *Routes) endSession(ctx context.Context, r *web.Request, id string) (*proto.Session, error) {
	found, _ := s.Sessions.Page("", "", 1, func(session *proto.Session) bool {
		return session.ID == id && s.goesOn(session)
	})
	if len(found) == 0 {
		return nil, proto.ErrNotFound
	}
	key, ok := s.keyOfSession(&found[0])
	if !ok {
		return nil, proto.ErrNotFound
	}
	if err := web.Administer(r, key, true); err != nil {
		return nil, err
	}
	web.AuditBefore(r, found[0].Org, id, api.NewSession(&found[0]))
	return nil, s.Sessions.End(ctx, id)
}
