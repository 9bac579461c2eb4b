package proto

// The protocol between a gateway and a worker for live sandboxes is HTTP over TLS. The worker's
// certificate is its own; the gateway knows it from the worker's endpoint, which it gets through
// NATS.
const (
	// HeaderPrefix begins the names of headers that are this server's own. None is passed on to a
	// sandbox or from it.
	HeaderPrefix = "Bullpen-"
	// HeaderSandbox names the sandbox of a request, and HeaderTicket has its ticket, which proves
	// that a gateway sends the request.
	HeaderSandbox = "Bullpen-Sandbox"
	HeaderTicket  = "Bullpen-Ticket"
	// HeaderUntilStop, if not empty, makes the worker abort the response when the sandbox begins to
	// stop.
	HeaderUntilStop = "Bullpen-Until-Stop"
	// HeaderSandboxID and HeaderSandboxPort route a request of E2B's clients. The guest passes a
	// request with a port other than [GuestPort] on to that port of the sandbox.
	HeaderSandboxID   = "E2b-Sandbox-Id"
	HeaderSandboxPort = "E2b-Sandbox-Port"
	// GuestPort is the port of the guest itself for E2B's clients.
	GuestPort = 49983
	// ExpiryPath is a path that the worker answers itself. PUT sets when the sandbox expires, as
	// RFC 3339 text.
	ExpiryPath = "/.bullpen/expires_at"
	// SavePath is another path that the worker answers itself. POST saves the home of the sandbox. The
	// answer is a [SandboxSave] as JSON.
	SavePath = "/.bullpen/save"
	// StatusNoSandbox answers requests for a sandbox that is not on the worker, or is stopping. No
	// guest answers with this status.
	StatusNoSandbox = 530
)

// AnsweredByWorker reports whether the worker answers requests for a path itself, which gateways alone send.
func AnsweredByWorker(path string) bool { return path == ExpiryPath || path == SavePath }

// SandboxSave is what became of a save of a running sandbox's home.
type SandboxSave struct {
	Version int64 `json:"version,omitempty"` // the number of the newest version; 0 while the home is empty
	// Refused is why nothing was saved, in words for the tenant. It is empty if the home was saved.
	Refused string `json:"refused,omitempty"`
}

// WorkerEndpoint is where a worker serves gateways.
type WorkerEndpoint struct {
	Address string `json:"address"` // host:port
	// Certificate is the SHA-256 of the worker's certificate.
	Certificate [32]byte `json:"certificate"`
}
