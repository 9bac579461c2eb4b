package filter

import "golang.org/x/sys/unix"

// rule holds the conditions on an allowed call. The first clause whose tests hold decides; if there
// is none, the call is allowed.
type rule struct {
	about   string // what the clauses refuse, for docs/reference/system-calls.md
	clauses []clause
}

// clause is a condition on a call's arguments, and the filter's action if all its tests hold.
type clause struct {
	tests  []test
	action uint32
}

// test holds if the masked argument equals one of the values or, without values, if any masked bit
// is set. It sees the low 32 bits of an argument: the kernel uses no others in these calls.
type test struct {
	argument uint32
	mask     uint32
	values   []uint32
}

const whole = 0xffff_ffff

func is(argument uint32, values ...uint32) test { return test{argument, whole, values} }

func hasAny(argument, bits uint32) test { return test{argument, bits, nil} }

// typed is a test of a socket's type, without its flags (SOCK_TYPE_MASK of linux/net.h).
func typed(types ...uint32) test { return test{1, 0xf, types} }

// namespaces are the flags of clone(2) that create namespaces. unshare(2) has one more, which means
// something else to clone.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// Options that golang.org/x/sys does not have, from linux/tcp.h and linux/in6.h.
const (
	tcpAOAddKey          = 38
	tcpAODelKey          = 39
	tcpAOInfo            = 40
	ipv6FlowLabelManager = 32
	tcpZerocopyReceive   = 35
)

var (
	ip        = is(0, unix.AF_INET, unix.AF_INET6)
	unixTypes = typed(unix.SOCK_STREAM, unix.SOCK_DGRAM, unix.SOCK_SEQPACKET)
)

// options are the prctl options that a program can use. Of the others, PR_SET_VMA takes uncharged
// memory for each name, PR_SET_MEMORY_MERGE has the host compare pages, PR_SCHED_CORE decides who
// runs on the other thread of a core, and the kernel refuses most without a capability.
var options = []uint32{ // read only
	unix.PR_SET_NAME, unix.PR_GET_NAME,
	unix.PR_SET_PDEATHSIG, unix.PR_GET_PDEATHSIG,
	unix.PR_SET_DUMPABLE, unix.PR_GET_DUMPABLE,
	unix.PR_SET_NO_NEW_PRIVS, unix.PR_GET_NO_NEW_PRIVS,
	unix.PR_SET_CHILD_SUBREAPER, unix.PR_GET_CHILD_SUBREAPER,
	unix.PR_SET_TIMERSLACK, unix.PR_GET_TIMERSLACK,
	unix.PR_SET_THP_DISABLE, unix.PR_GET_THP_DISABLE,
	unix.PR_SET_KEEPCAPS, unix.PR_GET_KEEPCAPS,
	unix.PR_CAPBSET_READ, unix.PR_CAPBSET_DROP, unix.PR_CAP_AMBIENT,
	unix.PR_SET_TAGGED_ADDR_CTRL, unix.PR_GET_TAGGED_ADDR_CTRL, unix.PR_SVE_GET_VL, unix.PR_SME_GET_VL,
	unix.PR_GET_SECCOMP, unix.PR_GET_SECUREBITS, unix.PR_GET_SPECULATION_CTRL, unix.PR_GET_TSC, unix.PR_GET_AUXV,
}

// rules are the conditions on allowed calls.
var rules = map[string]rule{ // read only
	"clone":   {"new namespaces: `EPERM`", []clause{{[]test{hasAny(0, namespaces)}, fail(unix.EPERM)}}},
	"unshare": {"new namespaces: `EPERM`", []clause{{[]test{hasAny(0, namespaces|unix.CLONE_NEWTIME)}, fail(unix.EPERM)}}},
	// Compiled filters count against a limit of the whole host (net.core.bpf_jit_limit). A few
	// programs could exhaust it, and no jail could start.
	"seccomp": {
		"filters: `EINVAL`, as on a kernel without them",
		[]clause{{[]test{is(0, unix.SECCOMP_SET_MODE_FILTER)}, fail(unix.EINVAL)}},
	},
	"prctl": {"all options but names, `PR_…_PDEATHSIG`, `…_DUMPABLE`, `…_NO_NEW_PRIVS`, `…_CHILD_SUBREAPER`, " +
		"`…_TIMERSLACK`, `…_THP_DISABLE`, `…_KEEPCAPS`, `…_TAGGED_ADDR_CTRL`, `PR_CAPBSET_…`, `PR_CAP_AMBIENT`, and " +
		"questions about seccomp, securebits, speculation, vectors, the TSC and the auxiliary vector: `EINVAL`, as on a " +
		"kernel without them", []clause{
		{[]test{is(0, options...)}, allow},
		{nil, fail(unix.EINVAL)},
	}},
	// The kernel's migration threads carry it out, on uncharged CPU time.
	"sched_setaffinity": {"succeeds without effect: moving a program is not charged to it", []clause{{nil, fail(0)}}},
	"personality": {"all but 0, `ADDR_NO_RANDOMIZE` and the question: `EPERM`", []clause{
		{[]test{is(0, 0, 0x0040000, whole)}, allow},
		{nil, fail(unix.EPERM)},
	}},
	// TIOCSETD may load kernel modules, and reaches protocols that have nothing to do with terminals.
	"ioctl": {"`TIOCSTI` and `TIOCLINUX`, which type into a terminal, and `TIOCSETD`, which changes its line " +
		"discipline: `EPERM`", []clause{
		{[]test{is(1, unix.TIOCSTI, unix.TIOCLINUX, unix.TIOCSETD)}, fail(unix.EPERM)},
	}},
	"sync":   {"succeeds without effect: it would write pages of the whole host", []clause{{nil, fail(0)}}},
	"syncfs": {"the same", []clause{{nil, fail(0)}}},
	"fadvise64": {
		"`POSIX_FADV_DONTNEED` succeeds without effect: it would evict pages of files that all programs share",
		[]clause{
			{[]test{is(3, unix.FADV_DONTNEED)}, fail(0)},
		},
	},
	// Others may load kernel modules.
	"socket": {"all but streams, datagrams and packets of Unix, TCP and UDP over IPv4 and IPv6, and routing netlink: " +
		"the error of a kernel that lacks it", []clause{
		{[]test{is(0, unix.AF_UNIX), unixTypes, is(2, 0, unix.AF_UNIX)}, allow},
		{[]test{is(0, unix.AF_UNIX), unixTypes}, fail(unix.EPROTONOSUPPORT)},
		{[]test{is(0, unix.AF_UNIX)}, fail(unix.ESOCKTNOSUPPORT)},
		{[]test{ip, typed(unix.SOCK_STREAM), is(2, 0, unix.IPPROTO_TCP)}, allow},
		{[]test{ip, typed(unix.SOCK_DGRAM), is(2, 0, unix.IPPROTO_UDP)}, allow},
		{[]test{ip, typed(unix.SOCK_STREAM, unix.SOCK_DGRAM)}, fail(unix.EPROTONOSUPPORT)},
		{[]test{ip, typed(unix.SOCK_RAW)}, fail(unix.EPERM)},
		{[]test{ip}, fail(unix.ESOCKTNOSUPPORT)},
		// The kernel does not charge for messages in the buffers of netlink sockets. The init
		// creates these sockets and limits their number. Before Linux 5.14 there are none.
		{[]test{is(0, unix.AF_NETLINK), is(2, unix.NETLINK_ROUTE)}, notify},
		{[]test{is(0, unix.AF_NETLINK)}, fail(unix.EPROTONOSUPPORT)},
		{nil, fail(unix.EAFNOSUPPORT)},
	}},
	"listen": {"`ENOBUFS` while the program has 256 TCP sockets or more", []clause{{nil, notify}}},
	"socketpair": {"all but streams, datagrams and packets of Unix", []clause{
		{[]test{is(0, unix.AF_UNIX), unixTypes}, allow},
		{[]test{is(0, unix.AF_UNIX)}, fail(unix.ESOCKTNOSUPPORT)},
		{nil, fail(unix.EAFNOSUPPORT)},
	}},
	// The kernel does not charge for a connection's pages that a program maps.
	"getsockopt": {
		"pages of TCP connections to map (`TCP_ZEROCOPY_RECEIVE`): `ENOPROTOOPT`, as on a kernel without it",
		[]clause{{[]test{is(1, unix.SOL_TCP), is(2, tcpZerocopyReceive)}, fail(unix.ENOPROTOOPT)}},
	},
	"setsockopt": {
		"attached programs and transmit timestamps: `EPERM`; TLS, IPsec and other protocols in the kernel " +
			"(`TCP_ULP`, `UDP_ENCAP`), keys of TCP connections (`TCP_MD5SIG`, `TCP_AO_ADD_KEY`), `IPV6_FLOWLABEL_MGR` and " +
			"`IPV6_2292PKTOPTIONS`: as on a kernel without them; joining multicast groups: `ENODEV`, as without a route to " +
			"the group; `SO_RCVBUF`, `SO_RCVLOWAT`, `SO_SNDBUF`, `IP_RECVERR` and `IPV6_RECVERR` succeed without effect",
		[]clause{
			// The programs they attach use up net.core.bpf_jit_limit.
			{[]test{
				is(1, unix.SOL_SOCKET),
				is(2, unix.SO_ATTACH_FILTER, unix.SO_ATTACH_BPF, unix.SO_ATTACH_REUSEPORT_CBPF, unix.SO_ATTACH_REUSEPORT_EBPF),
			}, fail(unix.EPERM)},
			// Protocols that a program can use as well without the kernel.
			{[]test{is(1, unix.SOL_TCP), is(2, unix.TCP_ULP)}, fail(unix.ENOENT)},
			{[]test{is(1, unix.SOL_UDP), is(2, unix.UDP_ENCAP)}, fail(unix.ENOPROTOOPT)},
			// A sent packet stays in uncharged memory until the program reads its timestamp.
			{[]test{is(1, unix.SOL_SOCKET), is(2, unix.SO_TIMESTAMPING, unix.SO_TIMESTAMPING_NEW)}, fail(unix.EPERM)},
			// The kernel does not charge for keys and groups. A socket can have hundreds of them.
			{
				[]test{is(1, unix.SOL_TCP), is(2, unix.TCP_MD5SIG, unix.TCP_MD5SIG_EXT, tcpAOAddKey, tcpAODelKey, tcpAOInfo)},
				fail(unix.ENOPROTOOPT),
			},
			{[]test{
				is(1, unix.SOL_IP),
				is(2, unix.IP_ADD_MEMBERSHIP, unix.IP_ADD_SOURCE_MEMBERSHIP, unix.MCAST_JOIN_GROUP, unix.MCAST_JOIN_SOURCE_GROUP),
			}, fail(unix.ENODEV)},
			{[]test{
				is(1, unix.SOL_IPV6),
				is(2, unix.IPV6_JOIN_GROUP, unix.IPV6_JOIN_ANYCAST, unix.MCAST_JOIN_GROUP, unix.MCAST_JOIN_SOURCE_GROUP),
			}, fail(unix.ENODEV)},
			// The kernel does not charge for the options of a socket's packets and for flow labels.
			// Flow labels have one limit for the whole host.
			{[]test{is(1, unix.SOL_IPV6), is(2, unix.IPV6_2292PKTOPTIONS, ipv6FlowLabelManager)}, fail(unix.ENOPROTOOPT)},
			// With these two, each error that ICMP reports stays in uncharged memory. They succeed,
			// because glibc's resolver gives up without them; a connected socket reports its next
			// error all the same.
			{[]test{is(1, unix.SOL_IP), is(2, unix.IP_RECVERR)}, fail(0)},
			{[]test{is(1, unix.SOL_IPV6), is(2, unix.IPV6_RECVERR)}, fail(0)},
			// It enlarges the uncharged buffers of connections that the program has not accepted.
			{[]test{is(1, unix.SOL_SOCKET), is(2, unix.SO_RCVLOWAT)}, fail(0)},
			// The buffers of netlink sockets must stay small, and a filter cannot tell these sockets from
			// others. An attempt succeeds without effect, as beyond net.core.rmem_max.
			{[]test{is(1, unix.SOL_SOCKET), is(2, unix.SO_RCVBUF, unix.SO_SNDBUF)}, fail(0)},
		},
	},
}
