package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
)

// Limits of the kernel for each link, per second and in a burst. Beyond them, packets are dropped,
// and new connections and queries rejected. The worker's own limits are lower and better reported;
// these protect its CPU time.
const (
	packetRate, packetBurst = 50_000, 10_000 // of a link of the highest class, see packetClass
	openRate, openBurst     = 300, 600       // TCP connections
	queryRate, queryBurst   = 500, 1000      // packets to the resolver
	logRate, logBurst       = 100, 200       // rejections reported to the worker
	meterSize               = 1 << 16        // links with a known rate
	meterTimeout            = time.Minute
)

const logGroup = 1

// packetClasses is the number of packet-rate classes of links. The highest has packetRate, and each
// lower one half of the one above.
const packetClasses = 5

// packetClass returns the class, from 1, of a link for a number of cores. The worker handles a
// program's packets at everyone's expense, so a program with less than one core may send fewer.
func packetClass(cpu float64) uint32 {
	class := uint32(packetClasses)
	for share := 0.5; class > 1 && cpu <= share; share /= 2 {
		class--
	}
	return class
}

// firewall is the rule set of the egress namespace, the same for all links.
type firewall struct {
	mu           sync.Mutex // held while changing sets
	conn         *nftables.Conn
	table        *nftables.Table
	hosts        [2]*nftables.Set // addresses of the machine and the control plane, IPv4 and IPv6
	private      [2]*nftables.Set // private destinations of links: link, address and port
	rejectionLog map[proto.BlockReason]*nftables.Chain
}

// packetFamily is what differs between IPv4 and IPv6 packets.
type packetFamily struct {
	proto         byte
	src, dst, len uint32
	key           nftables.SetDatatype
	refused       []netip.Prefix
	gateway       netip.Addr
	name          string
}

var families = [2]packetFamily{
	{unix.NFPROTO_IPV4, 12, 16, 4, nftables.TypeIPAddr, refusedIPv4, ResolverIPv4, "4"},
	{unix.NFPROTO_IPV6, 8, 24, 16, nftables.TypeIP6Addr, refusedIPv6, ResolverIPv6, "6"},
}

func loadFirewall(s *namespace) (*firewall, error) {
	conn, err := nftables.New(nftables.WithNetNSFd(int(s.ns.Fd())), nftables.AsLasting())
	if err != nil {
		return nil, fmt.Errorf("open nftables in the egress namespace: %w; load the kernel's module nf_tables", err)
	}
	f := &firewall{conn: conn, rejectionLog: map[proto.BlockReason]*nftables.Chain{}}
	if err := f.load(); err != nil {
		return nil, errors.Join(fmt.Errorf(
			"load the rules of the egress namespace: %w; the kernel needs nf_tables with its inet, "+
				"fib, limit, log and reject expressions", err), f.close())
	}
	return f, nil
}

func (f *firewall) close() error { return f.conn.CloseLasting() }

func (f *firewall) load() error {
	f.table = f.conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "egress"})
	if err := f.addRejectChains(); err != nil {
		return err
	}
	accept, drop := nftables.ChainPolicyAccept, nftables.ChainPolicyDrop
	pre := f.addHook("pre", nftables.ChainHookPrerouting, nftables.ChainPriorityRaw, accept)
	forward := f.addHook("forward", nftables.ChainHookForward, nftables.ChainPriorityFilter, drop)
	input := f.addHook("input", nftables.ChainHookInput, nftables.ChainPriorityFilter, drop)

	// Reverse path filter: each link sends from its own addresses only. This also drops the neighbour
	// discovery of the jail's kernel, which uses others.
	f.add(pre, fromUplink, verdict(expr.VerdictAccept))
	f.add(pre, exprs{
		&expr.Fib{Register: 1, ResultOIF: true, FlagSADDR: true, FlagIIF: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: make([]byte, 4)},
	}, verdict(expr.VerdictDrop))
	for class := range uint32(packetClasses) {
		lower := packetClasses - 1 - class
		name := fmt.Sprintf("packets%d_", class+1)
		if err := f.addMeters(pre, name, packetRate>>lower, packetBurst>>lower, fromClass(class+1),
			verdict(expr.VerdictDrop)); err != nil {
			return err
		}
	}

	f.add(forward, fromUplink, verdict(expr.VerdictAccept))
	f.add(forward, exprs{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: ifname(tunName)},
	}, f.reject(proto.BlockedAddress))
	addresses := f.conn.AddChain(&nftables.Chain{Table: f.table, Name: "addresses"})
	if err := f.addAddressRules(addresses); err != nil {
		return err
	}
	f.add(forward, exprs{&expr.Verdict{Kind: expr.VerdictJump, Chain: addresses.Name}})
	f.addProtocolRules(forward)
	for _, number := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		f.add(forward, transport(number), port(53), f.reject(proto.BlockedResolver))
	}
	if err := f.addMeters(forward, "opens", openRate, openBurst, isSYN, f.reject(proto.BlockedLimit)); err != nil {
		return err
	}
	f.add(forward, verdict(expr.VerdictAccept))

	return f.loadInput(input)
}

// loadInput lets links reach the resolver and nothing else on the gateway.
func (f *firewall) loadInput(input *nftables.Chain) error {
	f.addProtocolRules(input)
	if err := f.addMeters(input, "queries", queryRate, queryBurst, nil, f.reject(proto.BlockedLimit)); err != nil {
		return err
	}
	for _, fam := range families {
		for _, number := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			f.add(input, isFamily(fam.proto), exprs{
				&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: fam.dst, Len: fam.len, DestRegister: 1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: fam.gateway.AsSlice()},
			}, transport(number), port(53), verdict(expr.VerdictAccept))
		}
	}
	f.add(input, f.reject(proto.BlockedAddress))
	return f.conn.Flush()
}

// addRejectChains adds a chain per reason. It logs to the worker, up to a rate per link so that
// links cannot hide each other's rejections, and rejects the packet.
func (f *firewall) addRejectChains() error {
	for _, reason := range []proto.BlockReason{
		proto.BlockedAddress, proto.BlockedResolver, proto.BlockedProtocol,
		proto.BlockedLimit,
	} {
		chain := f.conn.AddChain(&nftables.Chain{Table: f.table, Name: "refuse_" + string(reason)})
		f.rejectionLog[reason] = chain
		log := exprs{&expr.Log{
			Key: 1<<unix.NFTA_LOG_GROUP | 1<<unix.NFTA_LOG_PREFIX, Group: logGroup, Data: []byte(reason),
		}}
		if err := f.addUnderRate(chain, "logs_"+string(reason), logRate, logBurst, log); err != nil {
			return err
		}
		f.add(chain, transport(unix.IPPROTO_TCP), exprs{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}})
		f.add(chain, transport(unix.IPPROTO_UDP),
			exprs{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}})
		f.add(chain, exprs{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED}})
	}
	return nil
}

// addAddressRules rejects the addresses of the host and the control plane, and the refused ranges
// except for the link's private destinations.
func (f *firewall) addAddressRules(chain *nftables.Chain) error {
	refuse := f.reject(proto.BlockedAddress)
	for i, fam := range families {
		ranges := &nftables.Set{Table: f.table, Name: "refused" + fam.name, KeyType: fam.key, Interval: true}
		var elements []nftables.SetElement
		for _, p := range fam.refused {
			elements = append(elements, nftables.SetElement{Key: p.Masked().Addr().AsSlice()})
			// The end is exclusive. A range up to the last address has none.
			if end := lastAddr(p).Next(); end.IsValid() {
				elements = append(elements, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
			}
		}
		f.hosts[i] = &nftables.Set{Table: f.table, Name: "hosts" + fam.name, KeyType: fam.key}
		f.private[i] = &nftables.Set{
			Table: f.table, Name: "private" + fam.name,
			KeyType: nftables.MustConcatSetType(fam.key, fam.key, nftables.TypeInetService),
		}
		if err := errors.Join(f.conn.AddSet(ranges, elements), f.conn.AddSet(f.hosts[i], nil),
			f.conn.AddSet(f.private[i], nil)); err != nil {
			return fmt.Errorf("sets of addresses: %w", err)
		}
		f.add(chain, isFamily(fam.proto), fam.lookup(f.hosts[i], fam.dst), refuse)
		for _, number := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			f.add(chain, isFamily(fam.proto), transport(number), fam.lookup(f.private[i], fam.src, fam.dst),
				verdict(expr.VerdictReturn))
		}
		f.add(chain, isFamily(fam.proto), fam.lookup(ranges, fam.dst), refuse)
	}
	return nil
}

// addProtocolRules rejects everything but plain TCP and UDP: other protocols, fragments, and
// headers with options, which few programs send and which are hard to parse.
func (f *firewall) addProtocolRules(chain *nftables.Chain) {
	refuse := f.reject(proto.BlockedProtocol)
	v4 := isFamily(unix.NFPROTO_IPV4)
	f.add(chain, v4, exprs{
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: 0, Len: 1, DestRegister: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{0x45}},
	}, refuse)
	f.add(chain, v4, exprs{
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: 6, Len: 2, DestRegister: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 2, Mask: []byte{0x3f, 0xff}, Xor: []byte{0, 0}},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{0, 0}},
	}, refuse)
	// ICMP errors of the jail's kernel, such as for a late answer, are not the program's doing.
	for number, echo := range map[byte]byte{unix.IPPROTO_ICMP: 8, unix.IPPROTO_ICMPV6: 128} {
		f.add(chain, transport(number), exprs{
			&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1, DestRegister: 1},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{echo}},
		}, verdict(expr.VerdictDrop))
	}
	for _, where := range []struct {
		family byte
		offset uint32
	}{{unix.NFPROTO_IPV4, 9}, {unix.NFPROTO_IPV6, 6}} {
		f.add(chain, isFamily(where.family), exprs{
			&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: where.offset, Len: 1, DestRegister: 1},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		}, refuse)
	}
}

// addMeters applies then to packets beyond a rate per source address.
func (f *firewall) addMeters(chain *nftables.Chain, name string, rate uint64, burst uint32, match, then exprs) error {
	return f.addRated(chain, name,
		&expr.Limit{Type: expr.LimitTypePkts, Rate: rate, Unit: expr.LimitTimeSecond, Burst: burst, Over: true},
		match, then)
}

// addUnderRate applies then to packets within a rate.
func (f *firewall) addUnderRate(chain *nftables.Chain, name string, rate uint64, burst uint32, then exprs) error {
	return f.addRated(chain, name,
		&expr.Limit{Type: expr.LimitTypePkts, Rate: rate, Unit: expr.LimitTimeSecond, Burst: burst}, nil, then)
}

func (f *firewall) addRated(chain *nftables.Chain, name string, limit *expr.Limit, match, then exprs) error {
	for _, fam := range families {
		set := &nftables.Set{
			Table: f.table, Name: name + fam.name, KeyType: fam.key,
			Dynamic: true, HasTimeout: true, Timeout: meterTimeout, Size: meterSize,
		}
		if err := f.conn.AddSet(set, nil); err != nil {
			return fmt.Errorf("set %s: %w", set.Name, err)
		}
		f.add(chain, isFamily(fam.proto), match, exprs{
			&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: fam.src, Len: fam.len, DestRegister: 1},
			&expr.Dynset{
				SrcRegKey: 1, SetID: set.ID, SetName: set.Name, Operation: unix.NFT_DYNSET_OP_UPDATE,
				Timeout: meterTimeout, Exprs: []expr.Any{limit},
			},
		}, then)
	}
	return nil
}

// admitPrivate admits private destinations of a link until they are revoked.
func (f *firewall) admitPrivate(l *Link, list []netip.AddrPort) error {
	if err := f.changePrivate(l, list, f.conn.SetAddElements); err != nil {
		return fmt.Errorf("load private destinations into the egress namespace: %w", err)
	}
	return nil
}

// revokePrivate revokes private destinations of a link, all of which are admitted.
func (f *firewall) revokePrivate(l *Link, list []netip.AddrPort) error {
	if err := f.changePrivate(l, list, f.conn.SetDeleteElements); err != nil {
		return fmt.Errorf("remove private destinations from the egress namespace: %w", err)
	}
	return nil
}

// privateBatch is a number of elements that fits a netlink attribute.
const privateBatch = 512

// changePrivate makes one change of all elements, or none.
func (f *firewall) changePrivate(
	l *Link, list []netip.AddrPort, change func(*nftables.Set, []nftables.SetElement) error,
) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, fam := range families {
		src := []netip.Addr{l.ip4, l.ip6}[i]
		var elements []nftables.SetElement
		for _, to := range list {
			if to.Addr().BitLen() == int(fam.len)*8 {
				key := slices.Concat(src.AsSlice(), to.Addr().AsSlice(), binaryutil.BigEndian.PutUint16(to.Port()), []byte{0, 0})
				elements = append(elements, nftables.SetElement{Key: key})
			}
		}
		for batch := range slices.Chunk(elements, privateBatch) {
			if err := change(f.private[i], batch); err != nil {
				return err
			}
		}
	}
	return f.conn.Flush()
}

// setHosts replaces the addresses of the host and the control plane atomically.
func (f *firewall) setHosts(addrs []netip.Addr) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, fam := range families {
		var elements []nftables.SetElement
		for _, addr := range addrs {
			if addr.BitLen() == int(fam.len)*8 {
				elements = append(elements, nftables.SetElement{Key: addr.AsSlice()})
			}
		}
		f.conn.FlushSet(f.hosts[i])
		if err := f.conn.SetAddElements(f.hosts[i], elements); err != nil {
			return fmt.Errorf("addresses of the host: %w", err)
		}
	}
	if err := f.conn.Flush(); err != nil {
		return fmt.Errorf("load the host's addresses into the egress namespace: %w", err)
	}
	return nil
}

func (f *firewall) addHook(
	name string, hook *nftables.ChainHook, priority *nftables.ChainPriority, policy nftables.ChainPolicy,
) *nftables.Chain {
	return f.conn.AddChain(&nftables.Chain{
		Table: f.table, Name: name, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: priority, Policy: &policy,
	})
}

func (f *firewall) add(chain *nftables.Chain, parts ...exprs) {
	var all exprs
	for _, part := range parts {
		all = append(all, part...)
	}
	f.conn.AddRule(&nftables.Rule{Table: f.table, Chain: chain, Exprs: all})
}

func (f *firewall) reject(reason proto.BlockReason) exprs {
	return exprs{&expr.Verdict{Kind: expr.VerdictGoto, Chain: f.rejectionLog[reason].Name}}
}

type exprs []expr.Any

var (
	fromUplink = exprs{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ifname(tunName)},
	}
	// isSYN matches a TCP packet with SYN and without ACK.
	isSYN = append(transport(unix.IPPROTO_TCP),
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1, DestRegister: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{0x12}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{0x02}})
)

// fromClass matches a packet of a link of a class, which is the group of its interface.
func fromClass(class uint32) exprs {
	return exprs{
		&expr.Meta{Key: expr.MetaKeyIIFGROUP, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(class)},
	}
}

func verdict(kind expr.VerdictKind) exprs { return exprs{&expr.Verdict{Kind: kind}} }

func isFamily(number byte) exprs {
	return exprs{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{number}},
	}
}

// lookup matches packets with an element in a set: the address at an offset, or the addresses at two
// offsets and the port.
func (fam *packetFamily) lookup(set *nftables.Set, offsets ...uint32) (match exprs) {
	const first = 8 // NFT_REG32_00
	register := uint32(first)
	for _, offset := range offsets {
		match = append(match, &expr.Payload{
			Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: fam.len, DestRegister: register,
		})
		register += fam.len / 4
	}
	if len(offsets) > 1 {
		match = append(match, &expr.Payload{
			Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: register,
		})
	}
	return append(match, &expr.Lookup{SourceRegister: first, SetName: set.Name, SetID: set.ID})
}

func transport(number byte) exprs {
	return exprs{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{number}},
	}
}

func port(number uint16) exprs {
	return exprs{
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(number)},
	}
}

// ifname returns a name padded with zeros, as the kernel compares it.
func ifname(name string) []byte {
	raw := make([]byte, unix.IFNAMSIZ)
	copy(raw, name)
	return raw
}
