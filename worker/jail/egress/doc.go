// Package egress connects sandboxes to the public internet, as far as their policy allows, and to
// nothing else. It is not used for sandboxes with the policy "blocked", whose network namespace is
// empty.
//
// The worker process has one [Network]: a network namespace that is held by descriptors only, so
// that it is invisible on the host and disappears with the process. A [Link] is a veth pair from it
// into the network namespace of one jail. A connection passes through:
//
// program - jail's namespace - veth - egress namespace - TUN - TCP/IP stack in the worker - socket
// in the host's namespace
//
// Some addresses are refused to every program: link-local, loopback, multicast and reserved
// addresses, metadata services, the host's own addresses, and bullpen's control plane. Private
// addresses are refused unless the policy lists them as private destinations. Two independent layers
// enforce this:
//
//  1. nftables in the egress namespace reject these destinations, and drop packets whose source is
//     not the link's address. The rules are the same for all links and are loaded once. Attaching a
//     jail changes no rules; private destinations are elements of a set.
//  2. The worker's dialer checks the address that it is about to connect to. It asks the kernel
//     whether the address is the host's.
//
// The worker enforces the allowlist when a connection is opened. A listed name grants the addresses
// that our resolver returned for it, until the answer expires or longer while a connection is open.
// A private destination that is listed by name works alike, on its ports alone; names that are not
// private destinations never grant a private address. Names that share an address cannot be
// distinguished, so listing a name of a content network also allows other names on the same
// addresses.
//
// Our resolver at [ResolverIPv4] and [ResolverIPv6] forwards queries to the host's resolvers and
// removes refused addresses from the answers. It does not forward names that are not on the
// allowlist, because a query is also a message to the owner of the name. Port 53 elsewhere is
// refused. DNS over HTTPS is ordinary HTTPS: under an allowlist it needs an entry, and its answers
// grant nothing.
//
// Programs see a rejection at once, as a TCP reset or an ICMP port unreachable, which is
// ECONNREFUSED for both. Rejections are listed in the link's [Report], except for those of the
// firewall beyond a rate.
//
// Connections, DNS queries, packets and memory of a link are limited; see the constants. Bytes and
// new connections per second are limited as the policy says: the worker reads on only when what it
// has read may pass, so that TCP slows the sender down and nothing is lost.
package egress
