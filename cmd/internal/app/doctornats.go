package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	monitorPort    = "8222" // default of nats-server
	monitorTimeout = 2 * time.Second
	maxMonitor     = 1 << 20 // bytes of its answer
)

// checkNATS checks that NATS and JetStream answer, and that acknowledged writes are on a disk.
func checkNATS(ctx context.Context, c *Config) []Check {
	if c.Embedded() {
		return []Check{
			{Name: "NATS", OK: true, Found: "inside the process"},
			{Name: "store", OK: true, Found: "JetStream in the data directory, every write synchronised"},
		}
	}
	check := Check{Name: "NATS"}
	conn, err := store.Dial(c.access("bullpen doctor"), slog.New(slog.DiscardHandler))
	if err != nil {
		check.Found, check.Remedy = err.Error(), remedyNATS(err)
		return []Check{check}
	}
	defer conn.Close()
	check.OK, check.Found = true, "version "+conn.ConnectedServerVersion()
	if rtt, err := conn.RTT(); err == nil {
		check.Found += fmt.Sprintf(", answers within %.1f ms", float64(rtt.Microseconds())/1000)
	}
	if _, err := conn.TLSConnectionState(); err != nil {
		check.Found += ", not encrypted"
	}
	store := Check{Name: "store", Remedy: "start nats-server with JetStream (-js), and enable it for this account"}
	ctx, cancel := context.WithTimeout(ctx, flushTime)
	defer cancel()
	reply, err := conn.RequestWithContext(ctx, "$JS.API.INFO", nil)
	var info struct {
		Error *struct {
			Description string `json:"description"`
		} `json:"error"`
	}
	if err == nil {
		err = json.Unmarshal(reply.Data, &info)
	}
	switch denied := conn.LastError(); {
	case err != nil && denied != nil && strings.Contains(strings.ToLower(denied.Error()), "permissions violation"):
		store.Found = denied.Error()
		store.Remedy = "name the roles of the process with --roles, and give this user their permissions: " +
			"docs/guides/nats.md lists them"
	case err != nil:
		store.Found = "JetStream does not answer: " + err.Error()
	case info.Error != nil:
		store.Found = "JetStream rejects requests: " + info.Error.Description
	default:
		store.OK, store.Found = true, "JetStream"
	}
	checks := []Check{check, store}
	if at, err := url.Parse(conn.ConnectedUrl()); err == nil && store.OK {
		checks = append(checks, checkSync(ctx, "http://"+net.JoinHostPort(at.Hostname(), monitorPort),
			conn.ConnectedServerId()))
	}
	return checks
}

// remedyNATS returns advice about a failed connection.
func remedyNATS(err error) string {
	text := strings.ToLower(err.Error())
	contains := func(words ...string) bool {
		for _, word := range words {
			if strings.Contains(text, word) {
				return true
			}
		}
		return false
	}
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, fs.ErrNotExist):
		return "correct the path, or let this user read the file"
	case contains("authorization", "authentication", "user authentication"):
		return "check --nats-user with BULLPEN_NATS_PASSWORD, or --nats-creds"
	case contains("x509:", "certificate"):
		return "name who signed the server's certificate with --nats-ca, and the server as its certificate does; " +
			"where the server wants one of yours, give --nats-cert and --nats-key"
	case contains("secure connection", "tls:"):
		return "write tls:// in --nats where the server speaks TLS, and nats:// where it does not"
	default:
		return "start it, or correct --nats"
	}
}

// checkSync asks the monitor of a NATS server whether it synchronises each write. If it does not, a
// power cut may lose accepted executions.
func checkSync(ctx context.Context, monitor, serverID string) Check {
	check := Check{
		Name: "durability", Optional: true,
		Remedy: "set `sync_interval: always` in the jetstream block of every nats-server, or accept that a power cut may " +
			"lose accepted executions",
	}
	unknown := func(cause string) Check {
		check.Found = "not known: " + cause
		check.Remedy += "; with `http: " + monitorPort + "` in its configuration this can be checked"
		return check
	}
	ctx, cancel := context.WithTimeout(ctx, monitorTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, monitor+"/varz", nil)
	if err != nil {
		return unknown(err.Error())
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return unknown("no monitor answers at " + monitor)
	}
	defer func() { _ = resp.Body.Close() }() // nothing more is read from it
	var vars struct {
		ServerID  string `json:"server_id"`
		JetStream struct {
			Config struct {
				SyncAlways   bool          `json:"sync_always"`
				SyncInterval time.Duration `json:"sync_interval"` // nanoseconds
			} `json:"config"`
		} `json:"jetstream"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxMonitor)).Decode(&vars); err != nil ||
		vars.ServerID != serverID {
		return unknown("what answers at " + monitor + " is not this server's monitor")
	}
	if check.OK = vars.JetStream.Config.SyncAlways; check.OK {
		check.Found = "every write is synchronised"
	} else {
		check.Found = fmt.Sprintf("writes are synchronised every %s only", vars.JetStream.Config.SyncInterval)
	}
	return check
}
