package egress_test

import (
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

// The tests measure from outside that no more passes than a limit allows. They expect no minimum, since
// a busy machine may be slower.

func limited(bandwidth proto.Bytes, connectionRate int) proto.Network {
	policy := unrestricted
	policy.Bandwidth, policy.ConnectionRate = bandwidth, connectionRate
	return policy
}

// leastTime is the least time that bytes need at a bandwidth, of which a burst passes at once.
func leastTime(bytes int64, bandwidth proto.Bytes) time.Duration {
	return time.Duration(float64(bytes-egress.MinBurst) / float64(bandwidth) * float64(time.Second))
}

func TestBandwidthKeepsData(t *testing.T) {
	const bandwidth, size = 512 * proto.KiB, 1 << 20
	n := open(t)
	for _, to := range []string{net.JoinHostPort(webIPv4, "7"), net.JoinHostPort(webIPv6, "7")} {
		j, l := attach(t, n, limited(bandwidth, 0))
		start := time.Now()
		if a := j.do(order{Do: "bulk", To: to, N: size}); a.Error != "" || a.Count["bytes"] != size {
			t.Errorf("%s: %+v", to, a)
		}
		if took, least := time.Since(start), leastTime(size, bandwidth); took < least {
			t.Errorf("%s: %d bytes took %s, want at least %s", to, size, took, least)
		}
		if got := l.Close().Traffic; got != (proto.Traffic{BytesIn: size, BytesOut: size}) {
			t.Errorf("%s: traffic %+v", to, got)
		}
	}
}

func TestBandwidthOfDatagrams(t *testing.T) {
	const bandwidth, size, count = 64 * proto.KiB, 30000, 8
	j, l := attach(t, open(t), limited(bandwidth, 0))
	data := strings.Repeat("d", size)
	start := time.Now()
	for range count {
		if a := j.udp(webIPv4+":7", data); a.Data != data {
			t.Fatalf("%d bytes came back, %s", len(a.Data), a.Error)
		}
	}
	if took, least := time.Since(start), leastTime(count*size, bandwidth); took < least {
		t.Errorf("%d bytes took %s, want at least %s", count*size, took, least)
	}
	if got := l.Close().Traffic; got != (proto.Traffic{BytesIn: count * size, BytesOut: count * size}) {
		t.Errorf("traffic %+v", got)
	}
}

// All connections of a sandbox share its bandwidth, and those of others do not.
func TestBandwidthIsShared(t *testing.T) {
	const bandwidth, size = 256 * proto.KiB, 1 << 20
	n := open(t)
	j, l := attach(t, n, limited(bandwidth, 0))
	other, _ := attach(t, n, limited(bandwidth, 0))
	start := time.Now()
	for _, to := range slices.Repeat([]string{webIPv4 + ":19", net.JoinHostPort(webIPv6, "19")}, 4) {
		if a := j.do(order{Do: "begin", To: to}); a.Error != "" {
			t.Fatalf("%s: %+v", to, a)
		}
	}
	until(t, "the program to receive data", func() bool { return l.BytesIn() >= egress.MinBurst })
	if a := other.tcp(webIPv4+":7", "x"); a.Data != "x" {
		t.Errorf("another sandbox: %+v", a)
	}
	until(t, "the program to receive it all", func() bool { return l.BytesIn() >= size })
	if took, least := time.Since(start), leastTime(size, bandwidth); took < least {
		t.Errorf("%d bytes took %s, want at least %s", size, took, least)
	}
}

// The limits also hold for connections to hosts of secrets.
func TestBandwidthOfInterceptedConnections(t *testing.T) {
	const bandwidth, size = 256 * proto.KiB, 512 << 10
	s := newSites(t)
	j, l, ca := s.injecting(t, open(t), limited(bandwidth, 0), injectedHosts...)
	start := time.Now()
	a := j.do(order{Do: "fetch", To: "https://" + apiName, Data: strings.Repeat("x", size), CA: ca})
	if !strings.HasSuffix(a.Data, "and 524288 bytes") {
		t.Errorf("%+v", a)
	}
	if took, least := time.Since(start), leastTime(size, bandwidth); took < least {
		t.Errorf("%d bytes took %s, want at least %s", size, took, least)
	}
	if got := l.Close().Traffic; got.BytesOut < size {
		t.Errorf("traffic %+v", got)
	}
}

func TestConnectionsWaitForTheirRate(t *testing.T) {
	const perSecond, count = 5, 15
	j, l := attach(t, open(t), limited(0, perSecond))
	start := time.Now()
	for i := range count {
		var a answer
		if i%2 == 0 {
			a = j.tcp(webIPv4+":7", "x")
		} else {
			a = j.udp(webIPv4+":7", "x")
		}
		if a.Data != "x" {
			t.Errorf("connection %d: %+v", i, a)
		}
	}
	if took, least := time.Since(start), time.Second*(count-perSecond-1)/perSecond; took < least {
		t.Errorf("%d connections took %s, want at least %s", count, took, least)
	}
	wantBlocked(t, l)
}

// A connection that would wait for too long is refused at once, and the report says why.
func TestConnectionsBeyondTheirRateAreRefused(t *testing.T) {
	j, l := attach(t, open(t), limited(0, 1))
	if a := j.do(order{Do: "crowd", To: webIPv4 + ":7", N: 100}); a.Count["ECONNREFUSED"] == 0 {
		t.Errorf("%+v", a)
	}
	wantBlocked(t, l, proto.BlockedConnection{
		Address: webIPv4, Port: 7, Protocol: "tcp", Reason: proto.BlockedLimit,
	})
}
