package api

import (
	"net/http"

	"github.com/bullpen-run/bullpen/proto"
)

func exampleSession() Session {
	return NewSession(&proto.Session{
		ID: "ses_0123456789abcdef0123456789abcdef01234567", Org: "acme", KeyID: "mem_0123456789abcdef01",
		Name: "a@example.com", UserAgent: "Mozilla/5.0",
		CreatedAt: exampleTime(), UsedAt: exampleTime(),
	})
}

// setCookie are the headers of an answer that starts a session.
var setCookie = map[string]string{"Set-Cookie": "The session."}

func sessionRoutes() []Route {
	session := exampleSession()
	caller := Caller{
		KeyID: session.KeyID, Name: session.Name, Org: session.Org, Scopes: []proto.Scope{proto.ScopeRead},
		Session: &session,
	}
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/login", ID: "getLogin", Tag: tagSessions, Public: true,
			Summary: "List the ways to sign in", Doc: "For a page on which people sign in. It needs no key.",
			Responses: ok("The ways to sign in.", Login{OIDC: true, Version: "v1.0.0"}),
		},
		{
			Method: http.MethodGet, Path: "/login", ID: "login", Tag: tagSessions, Public: true,
			Summary: "Sign in at the identity provider",
			Doc: "For browsers. The provider sends the browser back to /login/callback, which starts a session. If the " +
				"server has no identity provider (--oidc-issuer), a browser is sent to the console, which asks for an API " +
				"key; other clients get 404.",
			Params: []Param{
				query("org", "The organisation to sign in to, for a member of several.", text()),
				query("return", "The path on this server to go to after the login.",
					object{"type": "string", "pattern": "^/", "default": "/console/"}),
			},
			Responses: []Response{{
				Status: http.StatusFound, Doc: "To the provider, or to the console.",
				Headers: map[string]string{
					"Location": "An address of the provider, or of the console.", "Set-Cookie": "The login that has begun.",
				},
			}},
			Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodGet, Path: "/login/callback", ID: "loginCallback", Tag: tagSessions, Public: true,
			Summary: "Return from the identity provider",
			Doc: "For the identity provider. The person must be a member of an organisation: the one who signed in as that " +
				"member before, or else one with the member's verified address.",
			Params: []Param{
				query("state", "From /login.", text()), query("code", "Of the provider.", text()),
				query("error", "Why the provider refused the login.", text()),
				query("iss", "The provider.", text()),
			},
			Responses: []Response{
				{
					Status: http.StatusOK, Doc: "The person is a member of several organisations: a page with a link for each.",
					Text: map[string]string{"text/html": "<!DOCTYPE html>"},
				},
				{
					Status: http.StatusFound, Doc: "Signed in.",
					Headers: map[string]string{"Location": "The path that /login was given.", "Set-Cookie": "The session."},
				},
			},
			Errors: []int{http.StatusForbidden, http.StatusNotFound},
		},
		{
			Method: http.MethodGet, Path: "/v1/session", ID: "getSession", Tag: tagSessions, AnyScope: true,
			Summary:   "Show who sends the request",
			Responses: ok("Who it is, and what the API key or the session may do.", caller),
		},
		{
			Method: http.MethodPost, Path: "/v1/session", ID: "createSession", Tag: tagSessions, AnyScope: true,
			Summary: "Sign in with an API key",
			Doc: "For browsers, where there is no identity provider. The session may do what the API key may, and ends " +
				"when the key is revoked or expires, or when its secret is replaced.",
			Responses: []Response{{Status: http.StatusCreated, Doc: "The session.", Body: caller, Headers: setCookie}},
		},
		{
			Method: http.MethodDelete, Path: "/v1/session", ID: "deleteSession", Tag: tagSessions, AnyScope: true,
			Summary:   "Sign out",
			Doc:       "Ends the session that sends the request. The session at the identity provider goes on.",
			Responses: empty("The session has ended."), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/sessions", ID: "listSessions", Tag: tagAdmin, Scope: proto.ScopeAdmin,
			Summary:   "List sessions of browsers",
			Params:    pagesOfOrgs(),
			Responses: ok("The sessions, the oldest first.", Sessions{Sessions: []Session{session}}),
			Errors:    []int{http.StatusNotFound},
		},
		{
			Method: http.MethodDelete, Path: "/v1/admin/sessions/{id}", ID: "endSession", Tag: tagAdmin, Scope: proto.ScopeAdmin,
			Audit: "session.end", Summary: "End a session", PathDoc: "The session's id.",
			Doc:       "Every gateway refuses it within a second. Only a global administrator ends the session of one.",
			Responses: empty("It has ended."), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
	}
}
