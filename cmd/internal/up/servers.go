package up

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"

	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/timer"
)

// The hidden commands of this program that run a server.
const (
	NATSCommand  = "__nats"
	RedisCommand = "__redis"
)

// PasswordVariable is the environment variable with the password of a server.
const PasswordVariable = "BULLPEN_UP_PASSWORD"

const (
	natsUser    = "bullpen"
	redisPort   = 6379
	diskReserve = 64 << 20 // free bytes at which a NATS server is restarted after a full disk
)

func natsURL(host string) string {
	return (&url.URL{Scheme: "nats", Host: net.JoinHostPort(host, strconv.Itoa(natsembed.ClientPort))}).String()
}

func redisURL(host, password string) string {
	return (&url.URL{
		Scheme: "redis", User: url.UserPassword("", password),
		Host: net.JoinHostPort(host, strconv.Itoa(redisPort)), Path: "/0",
	}).String()
}

// ServeNATS runs a NATS server until ctx is done, as part of a cluster if there are peers.
func ServeNATS(ctx context.Context, dir, name, host string, peers []string, password string, log *slog.Logger) error {
	node := natsembed.Node{Name: name, Host: host, Peers: peers, User: natsUser, Password: password}
	s, err := natsembed.OpenNode(dir, diskReserve, node, log)
	if err != nil {
		return err
	}
	defer s.Close()
	log.Info("NATS listening", "url", natsURL(host))
	return s.Run(ctx)
}

// ServeRedis runs a Redis server without persistence, until ctx is done.
func ServeRedis(ctx context.Context, host, password string, log *slog.Logger) error {
	address := net.JoinHostPort(host, strconv.Itoa(redisPort))
	log.Info("Redis listening", "address", address)
	if err := timer.ServeRedis(ctx, address, password); err != nil {
		return fmt.Errorf("run Redis: %w", err)
	}
	return nil
}
