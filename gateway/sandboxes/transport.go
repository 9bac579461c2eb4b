package sandboxes

import (
	"net/http"
	"strconv"

	"github.com/bullpen-run/bullpen/proto"
)

// Transport sends this server's own requests to a sandbox: to its guest or, through that, to a port. The hosts of
// requests do not matter. It returns [ErrNotReached] if the sandbox is not on its worker any more.
type Transport struct {
	Service *Service
	Org, ID string
	Port    int // 0 for the guest
}

// RoundTrip implements [http.RoundTripper].
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx := r.Context()
	x, err := t.Service.Store.Find(ctx, t.Org, t.ID)
	if err != nil {
		return nil, err
	}
	if !x.State.Active() {
		return nil, ErrNotReached
	}
	worker, err := t.Service.workerOf(ctx, &x)
	if err != nil {
		return nil, err
	}
	transport, err := t.Service.Tunnels.transport(ctx, worker)
	if err != nil {
		return nil, err
	}
	r = r.Clone(ctx)
	r.URL.Scheme, r.URL.Host = "https", "worker"
	identify(r.Header, x.ID, t.Service.ticket(&x))
	if t.Port != 0 {
		r.Header.Set(proto.HeaderSandboxID, x.ID)
		r.Header.Set(proto.HeaderSandboxPort, strconv.Itoa(t.Port))
	}
	answer, err := transport.RoundTrip(r)
	if err == nil && answer.StatusCode == proto.StatusNoSandbox {
		_ = answer.Body.Close() // it has no content
		return nil, ErrNotReached
	}
	return answer, err
}
