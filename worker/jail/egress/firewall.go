package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
)

// What the kernel lets through of each link, per second and at once. Beyond it, packets are dropped, new connections and
// queries refused. The worker's own limits are lower and tell more; these keep its processor time from being taken.
const (
	packetRate, packetBurst = 50_000, 10_000
	openRate, openBurst     = 300, 600  // TCP connections
	queryRate, queryBurst   = 500, 1000 // packets to the resolver
	logRate, logBurst       = 100, 200  // refusals that the worker hears of
	meterSize               = 1 << 16   // links whose rates are known
	meterTimeout            = time.Minute
)

const logGroup = 1

// firewall is the rule set of the egress namespace. It is the same for all links.
type firewall struct {
	conn     *nftables.Conn
	table    *nftables.Table
	hosts    [2]*nftables.Set // addresses that the worker's machine and the control plane have, IPv4 and IPv6
	refusals map[proto.BlockReason]*nftables.Chain
}

// families are what is different between IPv4 and IPv6 in a packet.
var families = [2]struct {
	proto         byte
	src, dst, len uint32
	key           nftables.SetDatatype
	refused       []netip.Prefix
	gateway       netip.Addr
	name          string
}{
	{unix.NFPROTO_IPV4, 12, 16, 4, nftables.TypeIPAddr, refusedIPv4, ResolverIPv4, "4"},
	{unix.NFPROTO_IPV6, 8, 24, 16, nftables.TypeIP6Addr, refusedIPv6, ResolverIPv6, "6"},
}

func loadFirewall(s *space) (*firewall, error) {
	conn, err := nftables.New(nftables.WithNetNSFd(int(s.ns.Fd())), nftables.AsLasting())
	if err != nil {
		return nil, fmt.Errorf("open nftables in the egress namespace: %w; load the kernel's module nf_tables", err)
	}
	f := &firewall{conn: conn, refusals: map[proto.BlockReason]*nftables.Chain{}}
	if err := f.load(); err != nil {
		return nil, errors.Join(fmt.Errorf("load the rules of the egress namespace: %w; the kernel needs nf_tables with its inet, "+
			"fib, limit, log and reject expressions", err), f.close())
	}
	return f, nil
}

func (f *firewall) close() error { return f.conn.CloseLasting() }

func (f *firewall) load() error {
	f.table = f.conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "egress"})
	if err := f.addRefusals(); err != nil {
		return err
	}
	accept, drop := nftables.ChainPolicyAccept, nftables.ChainPolicyDrop
	pre := f.addHook("pre", nftables.ChainHookPrerouting, nftables.ChainPriorityRaw, accept)
	forward := f.addHook("forward", nftables.ChainHookForward, nftables.ChainPriorityFilter, drop)
	input := f.addHook("input", nftables.ChainHookInput, nftables.ChainPriorityFilter, drop)

	// A packet may enter where a packet to its source would leave: each link sends from its own addresses only. What the
	// kernel in the jail says to its neighbours by itself has others, and goes unheard too.
	f.add(pre, fromUplink, verdict(expr.VerdictAccept))
	f.add(pre, exprs{
		&expr.Fib{Register: 1, ResultOIF: true, FlagSADDR: true, FlagIIF: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: make([]byte, 4)},
	}, verdict(expr.VerdictDrop))
	if err := f.addMeters(pre, "packets", packetRate, packetBurst, nil, verdict(expr.VerdictDrop)); err != nil {
		return err
	}

	f.add(forward, fromUplink, verdict(expr.VerdictAccept))
	f.add(forward, exprs{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: ifname(tunName)},
	}, f.refuse(proto.BlockedAddress))
	if err := f.addAddressRules(forward); err != nil {
		return err
	}
	f.addFormRules(forward)
	for _, number := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		f.add(forward, transport(number), port(53), f.refuse(proto.BlockedResolver))
	}
	if err := f.addMeters(forward, "opens", openRate, openBurst, opening, f.refuse(proto.BlockedLimit)); err != nil {
		return err
	}
	f.add(forward, verdict(expr.VerdictAccept))

	return f.loadInput(input)
}

// loadInput lets links reach the resolver and nothing else of the gateway.
func (f *firewall) loadInput(input *nftables.Chain) error {
	f.addFormRules(input)
	if err := f.addMeters(input, "queries", queryRate, queryBurst, nil, f.refuse(proto.BlockedLimit)); err != nil {
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
	f.add(input, f.refuse(proto.BlockedAddress))
	return f.conn.Flush()
}

// addRefusals makes a chain for each reason. It tells the worker, up to a rate for each link so that one cannot hide the
// refusals of another, and then the program.
func (f *firewall) addRefusals() error {
	for _, reason := range []proto.BlockReason{proto.BlockedAddress, proto.BlockedResolver, proto.BlockedProtocol, proto.BlockedLimit} {
		chain := f.conn.AddChain(&nftables.Chain{Table: f.table, Name: "refuse_" + string(reason)})
		f.refusals[reason] = chain
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

// addAddressRules refuses the ranges that are always refused, and the addresses of the host and the control plane.
func (f *firewall) addAddressRules(chain *nftables.Chain) error {
	for i, fam := range families {
		ranges := &nftables.Set{Table: f.table, Name: "refused" + fam.name, KeyType: fam.key, Interval: true}
		var elements []nftables.SetElement
		for _, p := range fam.refused {
			elements = append(elements, nftables.SetElement{Key: p.Masked().Addr().AsSlice()})
			// The end is exclusive; a range up to the last address has none.
			if end := lastAddr(p).Next(); end.IsValid() {
				elements = append(elements, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
			}
		}
		if err := f.conn.AddSet(ranges, elements); err != nil {
			return fmt.Errorf("set of refused ranges: %w", err)
		}
		f.hosts[i] = &nftables.Set{Table: f.table, Name: "hosts" + fam.name, KeyType: fam.key}
		if err := f.conn.AddSet(f.hosts[i], nil); err != nil {
			return fmt.Errorf("set of the host's addresses: %w", err)
		}
		for _, set := range []*nftables.Set{ranges, f.hosts[i]} {
			f.add(chain, isFamily(fam.proto), exprs{
				&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: fam.dst, Len: fam.len, DestRegister: 1},
				&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID},
			}, f.refuse(proto.BlockedAddress))
		}
	}
	return nil
}

// addFormRules refuses what is neither plain TCP nor plain UDP: other protocols, fragments, and headers with options, which
// few programs send and which parsers have most trouble with.
func (f *firewall) addFormRules(chain *nftables.Chain) {
	refuse := f.refuse(proto.BlockedProtocol)
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
	// What the jail's kernel says by itself, such as that nobody waits for a late answer any more, is not a program's doing.
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

// addMeters does what then says to packets beyond a rate, counted for each source address.
func (f *firewall) addMeters(chain *nftables.Chain, name string, rate uint64, burst uint32, match, then exprs) error {
	return f.addRated(chain, name, &expr.Limit{Type: expr.LimitTypePkts, Rate: rate, Unit: expr.LimitTimeSecond, Burst: burst, Over: true},
		match, then)
}

// addUnderRate does what then says to packets within a rate.
func (f *firewall) addUnderRate(chain *nftables.Chain, name string, rate uint64, burst uint32, then exprs) error {
	return f.addRated(chain, name, &expr.Limit{Type: expr.LimitTypePkts, Rate: rate, Unit: expr.LimitTimeSecond, Burst: burst}, nil, then)
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

// setHosts replaces the addresses of the host and the control plane, in one step.
func (f *firewall) setHosts(addrs []netip.Addr) error {
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

func (f *firewall) addHook(name string, hook *nftables.ChainHook, priority *nftables.ChainPriority, policy nftables.ChainPolicy) *nftables.Chain {
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

func (f *firewall) refuse(reason proto.BlockReason) exprs {
	return exprs{&expr.Verdict{Kind: expr.VerdictGoto, Chain: f.refusals[reason].Name}}
}

type exprs []expr.Any

var (
	fromUplink = exprs{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ifname(tunName)},
	}
	// opening matches a TCP packet with SYN and without ACK.
	opening = append(transport(unix.IPPROTO_TCP),
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1, DestRegister: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{0x12}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{0x02}})
)

func verdict(kind expr.VerdictKind) exprs { return exprs{&expr.Verdict{Kind: kind}} }

func isFamily(number byte) exprs {
	return exprs{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{number}},
	}
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

// ifname gives a name as the kernel compares it: whole, with its zeros.
func ifname(name string) []byte {
	raw := make([]byte, unix.IFNAMSIZ)
	copy(raw, name)
	return raw
}
