package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/time/rate"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

const (
	uplinkNIC   = 1
	segmentMTU  = 16 << 10  // of packets to and from the worker; large ones need fewer system calls
	tcpBuffer   = 128 << 10 // bytes of a connection in each direction
	udpBuffer   = 64 << 10  // unsent bytes of a flow
	synRetries  = 2         // about 7 s until a silent program is given up
	tcpRetries  = 8         // about 50 s
	tcpTimeWait = time.Second
	tcpLinger   = 10 * time.Second // after we half-closed and the program does not close
)

// uplink is the worker's TCP/IP stack.
type uplink struct {
	*stack.Stack
	device stack.LinkEndpoint
}

// close stops the reader first. Otherwise the stack would wait for the reader while holding locks
// that the reader may need.
func (u *uplink) close() {
	u.device.Attach(nil)
	u.Destroy()
}

// newUplink creates the TCP/IP stack behind the egress namespace. It has no addresses of its own:
// it accepts packets to every destination and passes new connections to the handlers.
func newUplink(
	tun int, handleTCP, handleUDP func(stack.TransportEndpointID, *stack.PacketBuffer) bool,
) (*uplink, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
	})
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, handleTCP)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, handleUDP)
	device, err := configureUplink(s, tun)
	if err != nil {
		s.Destroy()
		return nil, fmt.Errorf("uplink: %w", err)
	}
	return &uplink{s, device}, nil
}

func configureUplink(s *stack.Stack, tun int) (stack.LinkEndpoint, error) {
	s.SetICMPLimit(rate.Inf) // ICMP errors report rejections
	sack, cubic := tcpip.TCPSACKEnabled(true), tcpip.CongestionControlOption("cubic")
	moderate, retries := tcpip.TCPModerateReceiveBufferOption(false), tcpip.TCPMaxRetriesOption(tcpRetries)
	syn, wait, linger := tcpip.TCPSynRetriesOption(synRetries), tcpip.TCPTimeWaitTimeoutOption(tcpTimeWait),
		tcpip.TCPLingerTimeoutOption(tcpLinger)
	for _, option := range []tcpip.SettableTransportProtocolOption{
		&sack, &cubic, &moderate, &retries, &syn, &wait, &linger,
		&tcpip.TCPReceiveBufferSizeRangeOption{Min: 4096, Default: tcpBuffer, Max: tcpBuffer},
		&tcpip.TCPSendBufferSizeRangeOption{Min: 4096, Default: tcpBuffer, Max: tcpBuffer},
	} {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			return nil, fmt.Errorf("set %T: %s", option, err)
		}
	}
	// One goroutine processes packets synchronously, so that the device's bounded queue drops a
	// flood. Several goroutines would have an unbounded queue.
	device, err := fdbased.New(&fdbased.Options{FDs: []int{tun}, MTU: segmentMTU, ProcessorsPerChannel: 1})
	if err != nil {
		return nil, fmt.Errorf("read the TUN device: %w", err)
	}
	if err := s.CreateNIC(uplinkNIC, device); err != nil {
		return nil, errors.New(err.String())
	}
	if err := s.SetPromiscuousMode(uplinkNIC, true); err != nil {
		return nil, errors.New(err.String())
	}
	if err := s.SetSpoofing(uplinkNIC, true); err != nil {
		return nil, errors.New(err.String())
	}
	s.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: uplinkNIC},
		{Destination: header.IPv6EmptySubnet, NIC: uplinkNIC},
	})
	return device, nil
}

func addrOf(a tcpip.Address) netip.Addr {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return addr
}

// abortAll resets every connection of the stack with addrs, including those being opened or closed.
func abortAll(s *stack.Stack, addrs ...netip.Addr) {
	for _, e := range s.RegisteredEndpoints() {
		ep, ok := e.(tcpip.Endpoint)
		if !ok {
			continue
		}
		info, ok := ep.Info().(*stack.TransportEndpointInfo)
		if !ok {
			continue
		}
		for _, addr := range addrs {
			if addrOf(info.ID.RemoteAddress) == addr {
				ep.Abort()
			}
		}
	}
}
