package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/bullpen-run/bullpen/scheduler/timer"
)

// checkRedis checks that Redis answers, and that it evicts no timers when its memory is full.
func checkRedis(ctx context.Context, c *Config) []Check {
	if c.RedisURL == "" {
		return []Check{{Name: "Redis", OK: true, Found: "inside the process"}}
	}
	check := Check{Name: "Redis"}
	server, err := timer.Check(ctx, timer.Config{URL: c.RedisURL, CA: c.RedisCA})
	if err != nil {
		check.Found, check.Remedy = err.Error(), remedyRedis(err)
		return []Check{check}
	}
	check.OK = true
	check.Found = fmt.Sprintf("version %s, answers within %.1f ms", orDefault(server.Version, "unknown"),
		float64(server.RTT.Microseconds())/1000)
	if !server.Encrypted {
		check.Found += ", not encrypted"
	}
	eviction := Check{
		Name: "timers", OK: server.Policy == "noeviction", Optional: true, Found: "kept when the memory of Redis is full",
		Remedy: "set `maxmemory-policy noeviction` in Redis: timers that it drops come late",
	}
	if !eviction.OK {
		eviction.Found = "Redis may drop them when its memory is full: its maxmemory-policy is " +
			orDefault(server.Policy, "not known")
	}
	return []Check{check, eviction}
}

// remedyRedis returns advice about an error of Redis.
func remedyRedis(err error) string {
	text := strings.ToLower(err.Error())
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, fs.ErrNotExist), strings.Contains(text, "pem certificate"):
		return "correct --redis-ca, or let this user read the file"
	case strings.Contains(text, "wrongpass"), strings.Contains(text, "noauth"), strings.Contains(text, "invalid password"):
		return "write the user and password in BULLPEN_REDIS: redis://USER:PASSWORD@HOST:PORT"
	case strings.Contains(text, "noperm"):
		return "let this user run every command on keys asynq:* and channels asynq:*"
	case strings.Contains(text, "x509:"), strings.Contains(text, "certificate"):
		return "name who signed the certificate of Redis with --redis-ca, and the server as its certificate does"
	case strings.Contains(text, "tls:"), strings.Contains(text, "eof"):
		return "write rediss:// in --redis where the server speaks TLS, and redis:// where it does not"
	default:
		return "start it, or correct --redis"
	}
}
