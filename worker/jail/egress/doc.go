// Package egress lets sandboxes out to the public internet, as far as their policy allows, and to nothing else. A sandbox
// with the policy "blocked" has an empty network namespace and no business here.
//
// The worker process has one [Network]: a network namespace of its own, held by descriptors alone, so that nothing of it is
// seen on the host and all of it goes when the process dies, however it dies. A [Link] is a veth pair from there into the
// network namespace of one jail. The way of a connection:
//
//	program - jail's namespace - veth - egress namespace - TUN - TCP/IP stack in the worker - socket in the host's namespace
//
// Two walls stand between a program and what no program may reach (private, link-local, loopback, multicast and reserved
// addresses, metadata services, the host's own addresses, bullpen's control plane), whatever its policy says:
//
//  1. nftables in the egress namespace refuse it, and drop whatever does not come from the address that the link was given.
//     The rules are the same for all links and are loaded once: attaching a jail changes no rules.
//  2. The worker's dialer checks the address that it is about to connect to, asking the kernel whether it is the host's own.
//
// The allowlist is decided in the worker, when a connection is opened. Names count by their addresses: what our resolver
// answered for a listed name may be reached until the answer expires, and longer while a connection is open. Two names on one
// address cannot be told apart by that, so listing a name of a content network lets a program talk to other names that share
// its addresses.
//
// Names are resolved by a resolver of ours at [ResolverIPv4] and [ResolverIPv6]. It forwards to the host's resolvers,
// takes refused addresses out of the answers, and does not forward names that the allowlist does not have: a question is
// also a message to whoever owns the name. Port 53 elsewhere is refused. DNS over HTTPS is HTTPS like any other: under an
// allowlist it needs an entry, and its answers grant nothing.
//
// Refusals are seen at once: a TCP reset, or an ICMP port unreachable, which is ECONNREFUSED for both. They are listed in
// the link's [Report].
//
// A link is bounded in connections, DNS queries, packets and memory; the constants say how far. It is not bounded in bytes per
// second. Of refusals by the firewall, those beyond a rate are not listed.
package egress
