package natsembed

import (
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// ClientPort is the port of a [Node] for clients.
const ClientPort = 4222

const (
	routePort = 6222
	routeUser = "route"
	// A broken route is noticed within three pings.
	routePing     = 2 * time.Second
	routeMaxPings = 2
)

// Node describes a server that clients reach over TCP and that is part of a cluster.
type Node struct {
	Name  string   // unique in the cluster; the server's files belong to it
	Host  string   // address of the server
	Peers []string // addresses of all servers of the cluster; with at most one there is no cluster
	// User and Password authenticate clients. Servers use the same password among each other.
	User, Password string
}

// OpenNode starts a server like [Open], as a node.
func OpenNode(dir string, reserve uint64, node Node, log *slog.Logger) (*Server, error) {
	return open(dir, reserve, &node, log)
}

// apply adds a node's options to an embedded server's.
func (n *Node) apply(o *server.Options) {
	o.ServerName, o.DontListen = n.Name, false
	o.Host, o.Port = n.Host, ClientPort
	o.Username, o.Password = n.User, n.Password
	if len(n.Peers) <= 1 {
		return
	}
	o.Cluster = server.ClusterOpts{
		Name: "bullpen", Host: n.Host, Port: routePort, Username: routeUser, Password: n.Password,
		PingInterval: routePing, MaxPingsOut: routeMaxPings,
	}
	for _, peer := range slices.DeleteFunc(slices.Clone(n.Peers), func(peer string) bool { return peer == n.Host }) {
		o.Routes = append(o.Routes, &url.URL{
			Scheme: "nats", User: url.UserPassword(routeUser, n.Password), Host: net.JoinHostPort(peer, strconv.Itoa(routePort)),
		})
	}
}
