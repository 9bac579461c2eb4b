// Package gateway is the way in over HTTP: it authenticates, validates, admits, and words every answer. It knows nothing of
// how jobs are queued or run; it asks for that through the small interfaces it declares, which other rooms implement.
//
// The contract is docs and schemas at /openapi.json. What belongs to this surface (authentication, the error envelope, the
// cap on bodies, the path prefix) hangs on its route group, so that other surfaces with other envelopes can stand beside it.
package gateway
