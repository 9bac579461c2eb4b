package e2b

import (
	"context"
	"errors"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// The headers with the tokens.
const (
	headerAccess  = "X-Access-Token"
	headerTraffic = "E2b-Traffic-Access-Token"
)

// processPaths is the path prefix of the guest's service that starts processes and streams their
// output.
const processPaths = "/process.Process/"

// maxOpen is how many requests to a sandbox may be open at this gateway.
const maxOpen = 256

// Directory finds sandboxes by their ids alone.
type Directory interface {
	// Org returns the organisation of a sandbox from memory, or "".
	Org(id string) string
	// FindOrg returns the organisation of a sandbox, or [proto.ErrNotFound].
	FindOrg(ctx context.Context, id string) (string, error)
	// Find returns a sandbox, or [proto.ErrNotFound]. It may be outdated for a moment.
	Find(ctx context.Context, org, id string) (proto.LiveSandbox, error)
}

// DataPlane passes the requests of E2B's clients on to sandboxes. It decides before any route is
// looked up whether a request is for a sandbox, so that no path of a sandbox reaches a route of
// this server, and the reverse. It recognises such a request by both routing headers, or by the
// host PORT-ID.DOMAIN.
//
// A sandbox is found by its id, which nobody can guess. That is not enough to use it:
//   - The guest, which can do everything, needs the access token. Exceptions are its health, and files
//     whose URL is signed.
//   - Other ports need the access token or the traffic token, so that a sandbox whose id became known, from
//     a log or a link, is no open proxy to whatever runs in it. Clients send the traffic token by
//     themselves; browsers cannot. With public ports, the id suffices, as with E2B.
//
// The tokens and the API key are not passed on: programs in a sandbox are not to be trusted with
// them. Signed URLs need a host with the sandbox's id, since they carry no header.
type DataPlane struct {
	Core      *web.Core
	Guests    Guests
	Directory Directory
	Tokens    Tokens
	Domain    string // see [Server.Domain]

	mu   sync.Mutex
	open map[string]int // requests by sandbox
}

// Around returns a handler that serves sandboxes, and calls next for all other requests.
func (d *DataPlane) Around(next http.Handler) http.Handler {
	served := d.Core.Observe(http.HandlerFunc(d.serve))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !d.addressed(r) {
			next.ServeHTTP(w, r)
			return
		}
		named := chi.NewRouteContext() // for the log and the metrics
		named.RoutePatterns = []string{"(sandbox)"}
		served.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), chi.RouteCtxKey, named)))
	})
}

// addressed reports whether a request is for a sandbox, perhaps malformed.
func (d *DataPlane) addressed(r *http.Request) bool {
	if len(r.Header.Values(proto.HeaderSandboxID))+len(r.Header.Values(proto.HeaderSandboxPort)) > 0 {
		return true
	}
	_, _, ok := d.ofHost(r.Host)
	return ok
}

// ofHost returns the port and the id in a host PORT-ID.DOMAIN.
func (d *DataPlane) ofHost(host string) (port, id string, ok bool) {
	if d.Domain == "" {
		return "", "", false
	}
	name, inDomain := strings.CutSuffix(hostName(host), "."+hostName(d.Domain))
	port, id, dashed := strings.Cut(name, "-")
	if !inDomain || !dashed || port == "" || strings.Trim(port, "0123456789") != "" {
		return "", "", false
	}
	return port, id, true
}

// hostName returns the name in a host, in lower case.
func hostName(host string) string {
	name, _, _ := strings.Cut(host, ":")
	return strings.ToLower(strings.TrimSuffix(name, "."))
}

// errRouting means that it is not clear for which sandbox or port a request is.
var errRouting = errors.New("send one E2b-Sandbox-Id and one E2b-Sandbox-Port, from 1 to 65535, and no other host's")

// route returns the sandbox and the port of a request. The sandbox's id has the form of one, or is
// invalid.
func (d *DataPlane) route(r *http.Request) (id string, port int, err error) {
	ports, ids := r.Header.Values(proto.HeaderSandboxPort), r.Header.Values(proto.HeaderSandboxID)
	text, id, byHost := d.ofHost(r.Host)
	byHeaders := len(ports) == 1 && len(ids) == 1
	if !byHeaders && len(ports)+len(ids) > 0 || byHeaders && byHost && (ports[0] != text || ids[0] != id) {
		return "", 0, errRouting
	}
	if byHeaders {
		text, id = ports[0], ids[0]
	}
	port, err = strconv.Atoi(text)
	const maxPort = 65535
	if err != nil || port < 1 || port > maxPort || strconv.Itoa(port) != text ||
		!strings.HasPrefix(r.URL.Path, "/") || r.Method == http.MethodConnect {
		return "", 0, errRouting
	}
	return id, port, nil
}

// serve answers a request for a sandbox.
func (d *DataPlane) serve(w http.ResponseWriter, r *http.Request) {
	id, port, err := d.route(r)
	switch {
	case err != nil:
		writeStatus(w, http.StatusBadRequest, err.Error())
		return
	case !proto.ValidSandboxID(id):
		writeNotFound(w, id)
		return
	case port == proto.GuestPort && reserved(r.URL.Path):
		writeStatus(w, http.StatusNotFound, "there is nothing at this path")
		return
	case port == proto.GuestPort && allowPages(w, r):
		return
	}
	access := d.accessOf(r, id, port)
	x, err := d.find(r.Context(), id, access == granted)
	if err != nil {
		if !errors.Is(err, proto.ErrNotFound) {
			web.RequestOf(r).Err = err
		}
		writeNotFound(w, id)
		return
	}
	switch {
	case access == granted || access == byPolicy && x.PublicPorts:
	case access == expired:
		writeStatus(w, http.StatusUnauthorized, "signature is already expired")
		return
	case port == proto.GuestPort:
		writeStatus(w, http.StatusUnauthorized, "the access token of the sandbox is missing or not valid")
		return
	default:
		writeStatus(w, http.StatusForbidden, "the ports of this sandbox need its access token or its traffic token")
		return
	}
	release, ok := d.enter(id)
	if !ok {
		writeStatus(w, http.StatusTooManyRequests, "too many requests to this sandbox are open ("+strconv.Itoa(maxOpen)+")")
		return
	}
	defer release()
	d.pass(w, r, &x, port)
}

// allowPages lets web pages of all origins use the guest of a sandbox, like E2B's daemon. That is
// safe, because requests need a token in a header. It reports whether the request was a preflight,
// which it answers.
func allowPages(w http.ResponseWriter, r *http.Request) bool {
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", "*")
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		return false
	}
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
	h.Set("Access-Control-Allow-Headers", strings.Join(r.Header.Values("Access-Control-Request-Headers"), ", "))
	h.Set("Access-Control-Max-Age", "7200")
	w.WriteHeader(http.StatusNoContent)
	return true
}

// find returns a sandbox. Only a request with its token may have this read from the store, which
// costs more than a look into memory.
func (d *DataPlane) find(ctx context.Context, id string, read bool) (x proto.LiveSandbox, err error) {
	org := d.Directory.Org(id)
	if org == "" && read {
		org, err = d.Directory.FindOrg(ctx, id)
	}
	if err != nil || org == "" {
		return x, errors.Join(err, proto.ErrNotFound)
	}
	x, err = d.Directory.Find(ctx, org, id)
	if err == nil && x.State != proto.SandboxRunning && x.State != proto.SandboxStarting {
		err = proto.ErrNotFound
	}
	return x, err
}

// access is what a request proves.
type access int

const (
	refused  access = iota
	byPolicy        // it needs a token unless the sandbox's ports are public
	expired         // its signature has expired
	granted
)

// accessOf returns what a request for a sandbox proves. It reads nothing but the request.
func (d *DataPlane) accessOf(r *http.Request, id string, port int) access {
	has := func(name, token string) bool {
		given := r.Header.Values(name)
		return len(given) == 1 && matches(given[0], token)
	}
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch {
	case has(headerAccess, d.Tokens.Access(id)):
		return granted
	case port != proto.GuestPort && has(headerTraffic, d.Tokens.Traffic(id)):
		return granted
	case port != proto.GuestPort:
		return byPolicy
	case reads && r.URL.Path == "/health":
		return granted
	case r.URL.Path != "/files" || !reads && r.Method != http.MethodPost:
		return refused
	}
	operation := signedRead
	if !reads {
		operation = signedWrite
	}
	switch d.Tokens.checkSignature(id, operation, r.URL.Query(), time.Now()) {
	case signed:
		return granted
	case expiredSignature:
		return expired
	default:
		return refused
	}
}

// pass passes an admitted request on.
func (d *DataPlane) pass(w http.ResponseWriter, r *http.Request, x *proto.LiveSandbox, port int) {
	request, release := web.RequestOf(r).WhileConnected()
	defer release()
	ctx, cancel := d.Core.UntilLeave(request.Context())
	defer cancel()
	out := request.Clone(ctx)
	if d.Core.IsDraining() {
		w.Header().Set("Connection", "close")
	}
	to := sandboxes.Target{Org: x.Org, ID: x.ID, Path: r.URL.Path, RawPath: r.URL.RawPath, Port: port}
	if port == proto.GuestPort {
		to.Port = 0
		// Like E2B's sandboxes, which end without reporting the end of their processes.
		to.UntilStop = strings.HasPrefix(r.URL.Path, processPaths)
		for _, name := range []string{"Connection", "Upgrade"} {
			out.Header.Del(name)
		}
		user, _, ok := r.BasicAuth()
		out.Header.Del("Authorization")
		if ok {
			out.SetBasicAuth(user, "")
		}
	} else {
		// The pages of a sandbox decide for themselves what browsers may do.
		for _, name := range []string{"Content-Security-Policy", "X-Content-Type-Options", "Referrer-Policy"} {
			w.Header().Del(name)
		}
		out.Header["Authorization"] = slices.DeleteFunc(out.Header["Authorization"], func(value string) bool {
			return proto.CheckKeyForm(web.Bearer(value)) == nil
		})
	}
	web.RequestOf(r).Relayed = true
	// An answer may begin before the body of the request has ended.
	_ = http.NewResponseController(w).EnableFullDuplex()
	d.Guests.Serve(w, out, to, func(cause error) { unreachable(w, request, x.ID, cause) })
}

// unreachable answers a request that did not reach its sandbox.
func unreachable(w http.ResponseWriter, r *web.Request, id string, cause error) {
	_, stopped := errors.AsType[*sandboxes.ConflictError](cause)
	switch {
	case r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // the client has left
	case stopped, errors.Is(cause, proto.ErrNotFound), errors.Is(cause, sandboxes.ErrNotReached):
		writeNotFound(w, id)
	default:
		r.Err = cause
		writeBadGateway(w, id, "The sandbox cannot be reached now")
	}
}

// enter counts a request to a sandbox. ok is false if too many are open.
func (d *DataPlane) enter(id string) (release func(), ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open[id] >= maxOpen {
		return nil, false
	}
	if d.open == nil {
		d.open = map[string]int{}
	}
	d.open[id]++
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.open[id]--; d.open[id] == 0 {
			delete(d.open, id)
		}
	}, true
}

// reservedPaths are of E2B's control plane, and never answered from outside.
var reservedPaths = []string{"/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade"}

// reserved reports whether a decoded path is, or is below, one of reservedPaths.
func reserved(decoded string) bool {
	clean := path.Clean(decoded)
	return slices.ContainsFunc(reservedPaths, func(p string) bool {
		return clean == p || strings.HasPrefix(clean, p+"/")
	})
}

// writeNotFound answers that a sandbox is not running. E2B's clients look for the text.
func writeNotFound(w http.ResponseWriter, id string) {
	writeBadGateway(w, id, "The sandbox was not found")
}

func writeBadGateway(w http.ResponseWriter, id, message string) {
	_ = web.WriteValue(w, http.StatusBadGateway, struct { // these are always encoded
		SandboxID string `json:"sandboxId"`
		Message   string `json:"message"`
		Code      int    `json:"code"`
	}{proto.Shorten(id), message, http.StatusBadGateway})
}

// writeStatus answers with an error of the data plane.
func writeStatus(w http.ResponseWriter, status int, message string) {
	_ = web.WriteValue(w, status, struct { // these are always encoded
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, message})
}
