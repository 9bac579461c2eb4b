package guard_test

import (
	"errors"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/bullpen-run/bullpen/webhook/guard"
)

func wantRefused(t *testing.T, err error) {
	t.Helper()
	if refused, ok := errors.AsType[*guard.RefusedError](err); !ok {
		t.Errorf("got %v, want a RefusedError", err)
	} else if strings.Contains(refused.Reason, closed) {
		t.Errorf("%q contains an address", refused.Reason)
	}
}

func (r *receiver) wantPosts(t *testing.T, posts, connections int32) {
	t.Helper()
	if p, c := r.posts.Load(), r.connections.Load(); p != posts || c != connections {
		t.Errorf("%d posts over %d connections arrived at %s, want %d over %d", p, c, r.Listener.Addr(), posts, connections)
	}
}

func TestReboundName(t *testing.T) {
	ok, hostile, g, names := pair(t)
	names.set("A hooks.test.", []string{open}, []string{closed})
	if err := g.Check(t.Context(), "url", "http://hooks.test:"+strconv.Itoa(ok.port)+"/"); err != nil {
		t.Fatal(err)
	}
	wantRefused(t, post(t, g, "hooks.test", ok.port))
	hostile.wantPosts(t, 0, 0)
	ok.wantPosts(t, 0, 0)
}

func TestTransportConnectsToAllowedAddressesOnly(t *testing.T) {
	ok, hostile, g, names := pair(t)
	names.set("A private.test.", []string{closed})
	names.set("CNAME alias.test.", []string{"private.test."})
	names.set("AAAA mapped.test.", []string{"::ffff:" + closed})
	names.set("A mixed.test.", []string{closed, open})
	names.set("AAAA mixed.test.", []string{"fd00::1"})
	for _, host := range []string{
		"private.test", "alias.test", "mapped.test", closed, "::ffff:" + closed, "::1",
		"0.0.0.0",
	} {
		wantRefused(t, post(t, g, host, ok.port))
	}
	wantRefused(t, post(t, g, open, 9)) // a port that is not allowed
	ok.wantPosts(t, 0, 0)
	if err := post(t, g, "mixed.test", ok.port); err != nil {
		t.Error(err)
	}
	ok.wantPosts(t, 1, 1)
	hostile.wantPosts(t, 0, 0)
}

func TestIdleConnectionIsReusedAfterTheNameChanged(t *testing.T) {
	ok, hostile, g, names := pair(t)
	names.set("A hooks.test.", []string{open})
	if err := post(t, g, "hooks.test", ok.port); err != nil {
		t.Fatal(err)
	}
	names.set("A hooks.test.", []string{closed})
	if err := post(t, g, "hooks.test", ok.port); err != nil {
		t.Errorf("the idle connection is to an allowed address: %v", err)
	}
	ok.wantPosts(t, 2, 1)
	g.Transport().CloseIdleConnections()
	wantRefused(t, post(t, g, "hooks.test", ok.port))
	ok.wantPosts(t, 2, 1)
	hostile.wantPosts(t, 0, 0)
}

// net/http never uses a proxy for loopback addresses, so the receiver has a name.
func TestProxiesFromTheEnvironmentAreNotUsed(t *testing.T) {
	proxy := newReceiver(t, open, 0)
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"} {
		t.Setenv(name, proxy.URL)
		t.Setenv(strings.ToLower(name), proxy.URL)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://hooks.test/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if u, err := http.ProxyFromEnvironment(req); err != nil || u == nil {
		t.Fatalf("the environment names the proxy %v, %v", u, err)
	}
	ok, _, g, names := pair(t)
	names.set("A hooks.test.", []string{open})
	if err := post(t, g, "hooks.test", ok.port); err != nil {
		t.Error(err)
	}
	ok.wantPosts(t, 1, 1)
	proxy.wantPosts(t, 0, 0)
}

// A public address is rejected as soon as this machine has it.
func TestOwnAddressesAreRejected(t *testing.T) {
	g := newGuard(t, guard.Config{})
	runtime.LockOSThread() // not unlocked, so that the thread ends with this test
	here, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	there, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(netns.Set(here), here.Close(), there.Close()); err != nil {
			t.Error(err)
		}
	})
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
	dial := func() error {
		conn, err := g.Transport().DialContext(t.Context(), "tcp", "11.22.33.44:443")
		if err == nil {
			err = conn.Close()
		}
		return err
	}
	var refused *guard.RefusedError
	if err := dial(); err == nil || errors.As(err, &refused) {
		t.Errorf("an unassigned address: got %v, want unreachable", err)
	}
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(11, 22, 33, 44), Mask: net.CIDRMask(32, 32)}}
	if err := netlink.AddrAdd(lo, addr); err != nil {
		t.Fatal(err)
	}
	wantRefused(t, dial())
	if err := netlink.AddrDel(lo, addr); err != nil {
		t.Fatal(err)
	}
	if err := dial(); err == nil || errors.As(err, &refused) {
		t.Errorf("an address that was removed: got %v", err)
	}
}
