// Package login has the routes of logins and sessions. It signs people in at an OpenID Connect provider, with
// the authorization code flow and PKCE, and finds the API keys of their cookies. It keeps nothing about a login
// on the server: any gateway can answer the callback.
package login
