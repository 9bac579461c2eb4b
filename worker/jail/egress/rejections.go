package egress

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
)

// rejectedPacket is a packet that the firewall rejected.
type rejectedPacket struct {
	reason   proto.BlockReason
	src      netip.Addr
	dst      netip.AddrPort
	protocol string
}

// rejectionLog reads the firewall's log (NFLOG): the head of each rejected packet, with the reason
// as its prefix.
type rejectionLog struct {
	sock   *os.File
	raw    syscall.RawConn
	handle func(rejectedPacket)

	mu  sync.Mutex // held while reading the socket
	buf []byte
}

const (
	logSnap   = 80      // logged bytes of a packet: its headers
	logBuffer = 4 << 20 // bytes, in the kernel
)

func openRejectionLog(s *namespace, handle func(rejectedPacket)) (r *rejectionLog, err error) {
	var fd int
	err = InNamespace(s.ns, func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open the log of rejected packets: %w", err)
	}
	r = &rejectionLog{sock: os.NewFile(uintptr(fd), "nflog"), handle: handle, buf: make([]byte, 64<<10)}
	defer func() {
		if err != nil {
			_ = r.sock.Close()
		}
	}()
	if r.raw, err = r.sock.SyscallConn(); err != nil {
		return nil, fmt.Errorf("open the log of rejected packets: %w", err)
	}
	// a smaller buffer only loses entries in a flood
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, logBuffer)
	if err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("bind the log of rejected packets: %w", err)
	}
	if err = configureLog(fd); err != nil {
		return nil, fmt.Errorf("subscribe to the log of rejected packets: %w; load the kernel's module nfnetlink_log", err)
	}
	return r, nil
}

// Constants of nfnetlink_log.h.
const (
	nfulnlMsgPacket, nfulnlMsgConfig                  = 0, 1
	nfulaCfgCmd, nfulaCfgMode, nfulaCfgQThresh        = 1, 2, 5
	nfulnlCfgCmdBind, nfulnlCopyPacket                = 1, 2
	nfulaPayload, nfulaPrefix                  uint16 = 9, 10
)

// configureLog binds the socket to the log group. Packets are delivered without delay, so that a
// report is complete when its program ends.
func configureLog(fd int) error {
	mode := binary.BigEndian.AppendUint32(nil, logSnap)
	mode = append(mode, nfulnlCopyPacket, 0)
	for _, attr := range []struct {
		kind uint16
		data []byte
	}{
		{nfulaCfgCmd, []byte{nfulnlCfgCmdBind}},
		{nfulaCfgMode, mode},
		{nfulaCfgQThresh, binary.BigEndian.AppendUint32(nil, 1)},
	} {
		var body []byte
		body = append(body, unix.AF_UNSPEC, unix.NFNETLINK_V0)
		body = binary.BigEndian.AppendUint16(body, logGroup)
		body = binary.NativeEndian.AppendUint16(body, uint16(4+len(attr.data)))
		body = binary.NativeEndian.AppendUint16(body, attr.kind)
		body = append(body, attr.data...)
		for len(body)%4 != 0 {
			body = append(body, 0)
		}
		msg := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
		msg = binary.NativeEndian.AppendUint16(msg, unix.NFNL_SUBSYS_ULOG<<8|nfulnlMsgConfig)
		msg = binary.NativeEndian.AppendUint16(msg, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
		msg = append(msg, make([]byte, 8)...)
		if err := unix.Sendto(fd, append(msg, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return err
		}
		if err := awaitAck(fd); err != nil {
			return err
		}
	}
	return nil
}

// awaitAck reads the answer to a request, which is available once the request has been sent. Logged
// packets may precede it.
func awaitAck(fd int) error {
	buf := make([]byte, 64<<10)
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			return err
		}
		msgs, err := syscall.ParseNetlinkMessage(buf[:n])
		if err != nil {
			return err
		}
		for _, msg := range msgs {
			if msg.Header.Type == unix.NLMSG_ERROR && len(msg.Data) >= 4 {
				if code := int32(binary.NativeEndian.Uint32(msg.Data)); code != 0 {
					return unix.Errno(-code)
				}
				return nil
			}
		}
	}
}

// run reads until the socket is closed.
func (r *rejectionLog) run() {
	_ = r.raw.Read(func(fd uintptr) bool {
		r.read(int(fd))
		return false
	})
}

// drain reads what is available. All packets of a program that has ended are in the buffer.
func (r *rejectionLog) drain() {
	_ = r.raw.Control(func(fd uintptr) { r.read(int(fd)) })
}

func (r *rejectionLog) close() { _ = r.sock.Close() }

func (r *rejectionLog) read(fd int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		n, _, err := unix.Recvfrom(fd, r.buf, 0)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOBUFS) {
			continue
		}
		if err != nil {
			return
		}
		msgs, err := syscall.ParseNetlinkMessage(r.buf[:n])
		if err != nil {
			continue
		}
		for _, msg := range msgs {
			if msg.Header.Type != unix.NFNL_SUBSYS_ULOG<<8|nfulnlMsgPacket || len(msg.Data) < 4 {
				continue
			}
			if found, ok := parseLog(msg.Data[4:]); ok {
				r.handle(found)
			}
		}
	}
}

func parseLog(attrs []byte) (found rejectedPacket, ok bool) {
	for len(attrs) >= 4 {
		size := int(binary.NativeEndian.Uint16(attrs))
		if size < 4 || size > len(attrs) {
			return found, false
		}
		switch data := attrs[4:size]; binary.NativeEndian.Uint16(attrs[2:]) &^
			(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER) {
		case nfulaPrefix:
			found.reason = proto.BlockReason(unix.ByteSliceToString(data))
		case nfulaPayload:
			ok = found.parsePacket(data)
		}
		attrs = attrs[min((size+3)&^3, len(attrs)):]
	}
	return found, ok
}

// parsePacket reads source, destination and protocol from the head of an IP packet, which a tenant
// wrote.
func (f *rejectedPacket) parsePacket(p []byte) bool {
	var number byte
	var rest []byte
	var dst netip.Addr
	switch {
	case len(p) >= 20 && p[0]>>4 == 4:
		number, rest = p[9], p[min(int(p[0]&15)*4, len(p)):]
		f.src, dst = netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20]))
	case len(p) >= 40 && p[0]>>4 == 6:
		number, rest = p[6], p[40:]
		f.src, dst = netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
	default:
		return false
	}
	var port uint16
	switch number {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP:
		f.protocol = "tcp"
		if number == unix.IPPROTO_UDP {
			f.protocol = "udp"
		}
		if len(rest) >= 4 {
			port = binary.BigEndian.Uint16(rest[2:])
		}
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		f.protocol = "icmp"
	default:
		f.protocol = "ip/" + strconv.Itoa(int(number))
	}
	f.dst = netip.AddrPortFrom(dst, port)
	return true
}
