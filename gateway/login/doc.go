// Package login has the routes of logins and sessions. It signs people in at an OpenID Connect
// provider, with the authorization code flow and PKCE, and maps session cookies to API keys. It
// keeps no login state on the server: any gateway can answer the callback.
package login
