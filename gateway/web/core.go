package web

import (
	"context"
	"log/slog"
	"net/http"
	"net/netip"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// The deadlines of bodies, answers and changes.
const (
	BodyTimeout = 30 * time.Second // a body must have arrived by then
	// WriteTimeout is how long a client may take to read writePiece bytes of an answer before the
	// connection is dropped, so that a stalled client does not keep an answer in memory.
	WriteTimeout = 60 * time.Second
	writePiece   = 256 << 10
	// storeTimeout bounds a change that is completed even if the client is gone.
	storeTimeout = 4 * time.Second
	// VersionsTimeout limits a change of a thread's versions, which completes even if the client is
	// gone.
	VersionsTimeout = time.Minute
	// Keepalive is how often an idle answer gets a sign of life.
	Keepalive = 15 * time.Second
)

// DefaultMaxBody is the documented cap on request bodies, in bytes.
const DefaultMaxBody = 8 << 20

// entitlements knows what API keys may do.
type entitlements interface {
	// Entitlement returns what a key may do.
	Entitlement(ctx context.Context, key *proto.Key) (proto.Entitlement, error)
	// QuotaUses returns how much of its plan's monthly quotas an organisation has used.
	QuotaUses(ctx context.Context, org string, quotas proto.Quotas) []proto.QuotaUse
}

// authenticator finds the API keys of requests.
type authenticator interface {
	// Authenticate returns the key with this secret, in time independent of the secret.
	Authenticate(secret string) (key *proto.Key, ok bool)
}

// cookies finds the sessions of browsers.
type cookies interface {
	// KeyOfCookie returns a request's session and the API key that it acts as.
	KeyOfCookie(r *http.Request) (*proto.Key, *proto.Session, error)
	// CheckCookie is KeyOfCookie without counting as a use of the session.
	CheckCookie(r *http.Request) (*proto.Key, error)
}

// auditor appends to the audit log.
type auditor interface {
	// Append stores a record at the end of the log, and returns it with its sequence number and
	// hashes.
	Append(ctx context.Context, r api.AuditRecord) (api.AuditRecord, error)
}

// Core is shared by all routes: it identifies callers, enforces permissions and limits, reads
// bodies, and writes and logs answers and errors. Its exported fields are set before Init is called
// and not changed afterwards. All but Done, PublicURL, TrustedProxies, CORSOrigins and DiskFull are
// required. It is safe for concurrent use.
type Core struct {
	Callers      authenticator
	Cookies      cookies
	KeyUses      KeyUses
	Entitlements entitlements
	Auditor      auditor
	// Transfers are shared by all surfaces and admission's checks of buckets.
	Transfers *Transfers
	// Surfaces are served besides this server's own API.
	Surfaces []Surface

	Log    *slog.Logger
	Tracer trace.Tracer
	// TrustTraceparent makes the trace of a request's Traceparent header the parent of the request's
	// spans. Otherwise it is linked.
	TrustTraceparent bool
	// Done, if not nil, is called after each request with the pattern of its route.
	Done func(route, method string, status int, took time.Duration)

	MaxBody   int64  // largest request body, in bytes
	Memory    int64  // limit of open requests and their bodies, in bytes
	PublicURL string // the address for URLs of files, without a final slash; empty for the Host of the request
	// TrustedProxies are the addresses whose X-Forwarded-Proto determines the scheme of file URLs,
	// and whose X-Forwarded-For determines a request's source address, for the audit log and the
	// allowed networks of API keys.
	TrustedProxies []netip.Prefix
	// CORSOrigins are the origins whose web pages may call this server, such as https://example.com.
	CORSOrigins []string
	// DiskFull, if not nil, returns why this server's disk must not store more, or "".
	DiskFull func() string
	// CursorSecret encrypts the cursors of lists. All gateways have the same random secret.
	CursorSecret *[32]byte

	draining context.Context // cancelled by Drain
	drain    context.CancelFunc
	budget   budget
	leaving  context.Context // of all waits for executions; cancelled by Leave
	leave    context.CancelFunc
	reads    Transfers // from the store
	Turns    Turns     // of decoding large bodies
	rates    rateLimits
	// acts and refusedActs bound what an organisation adds to the audit log.
	acts, refusedActs rateLimits
}

// Init prepares the core for requests. It is called once.
func (c *Core) Init() {
	c.draining, c.drain = context.WithCancel(context.Background())
	c.leaving, c.leave = context.WithCancel(context.Background())
}

// IsDraining reports whether Drain was called.
func (c *Core) IsDraining() bool { return c.draining.Err() != nil }

// CheckDisk returns an error if this server's disk must not store more.
func (c *Core) CheckDisk() error {
	if c.DiskFull != nil && c.DiskFull() != "" {
		return api.DiskFull()
	}
	return nil
}

// HasLeft reports whether Leave was called.
func (c *Core) HasLeft() bool { return c.leaving.Err() != nil }

// KeyUses remembers when API keys were used last.
type KeyUses interface {
	// Used notes that a key was used.
	Used(org, key string, at time.Time)
	// LastUsed returns when a key was last used. ok is false if no use is known.
	LastUsed(org, key string) (at time.Time, ok bool)
}
