package app

import (
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
)

// redisWith starts a Redis that reports the eviction policy.
func redisWith(t *testing.T, policy string) *miniredis.Miniredis {
	t.Helper()
	redis := miniredis.RunT(t)
	redis.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
		if cmd == "INFO" { // miniredis reports less
			c.WriteBulk("redis_version:7.0.15\r\n" + policy)
		}
		return cmd == "INFO"
	})
	return redis
}

func TestDoctorChecksRedis(t *testing.T) {
	locked := redisWith(t, "")
	locked.RequireAuth("hunter2")
	gone := miniredis.RunT(t)
	goneURL := "redis://" + gone.Addr()
	gone.Close()
	for name, test := range map[string]struct {
		url, found, remedy string // of the last check
		ok                 bool
	}{
		"embedded": {found: "inside the process", ok: true},
		"noeviction": {
			url:   "redis://" + redisWith(t, "maxmemory_policy:noeviction\r\n").Addr(),
			found: "kept when", ok: true,
		},
		"evicts": {
			url: "redis://" + redisWith(t, "maxmemory_policy:allkeys-lru\r\n").Addr(), found: "is allkeys-lru",
			remedy: "noeviction",
		},
		"unknown policy": {url: "redis://" + redisWith(t, "").Addr(), found: "not known", remedy: "noeviction"},
		"no password":    {url: "redis://" + locked.Addr(), found: "NOAUTH", remedy: "BULLPEN_REDIS"},
		"wrong password": {url: "redis://:hunter3@" + locked.Addr(), found: "WRONGPASS", remedy: "BULLPEN_REDIS"},
		"gone":           {url: goneURL, found: "connection refused", remedy: "start it"},
	} {
		t.Run(name, func(t *testing.T) {
			checks := checkRedis(t.Context(), &Config{RedisURL: test.url})
			last := checks[len(checks)-1]
			if last.OK != test.ok || !strings.Contains(last.Found, test.found) || !strings.Contains(last.Remedy, test.remedy) ||
				strings.Contains(last.Found+last.Remedy, "hunter") {
				t.Errorf("%+v", checks)
			}
			if checks[0].Name != "Redis" || len(checks) == 2 && !strings.Contains(checks[0].Found, "version 7.0.15") {
				t.Errorf("%+v", checks)
			}
		})
	}
}

func TestRemediesForRedis(t *testing.T) {
	for text, want := range map[string]string{
		"tls: failed to verify certificate: x509: certificate signed by unknown authority": "--redis-ca",
		"tls: first record does not look like a TLS handshake":                             "redis://",
		"NOPERM this user has no permissions to run the 'info' command":                    "asynq:*",
		"dial tcp: connect: connection refused":                                            "start it",
	} {
		if got := remedyRedis(fmt.Errorf("connect: %s", text)); !strings.Contains(got, want) {
			t.Errorf("%s: %s", text, got)
		}
	}
	if got := remedyRedis(fmt.Errorf("read certificate authorities: %w", fs.ErrPermission)); !strings.Contains(
		got, "read the file") {
		t.Error(got)
	}
}
