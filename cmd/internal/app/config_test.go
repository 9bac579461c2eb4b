package app

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "bullpen.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestDefaults(t *testing.T) {
	c, err := ParseConfig(nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.Address() != "127.0.0.1:8080" || c.Data != "./bullpen-data" || len(c.Roles) != 4 || c.Drain != 30*time.Second ||
		!c.Embedded() || c.RedisURL != "" || c.Replicas != 1 || c.QueueWait != 30*time.Second ||
		c.QueueExpiry != 24*time.Hour ||
		c.Retention != 168*time.Hour || c.OutputLimit != 16<<20 || c.Home != "/home/baponi" || c.Region != "local" ||
		c.WebhookMaxBody != 1<<20 || c.WebhookAllowHTTP || len(c.WebhookAllowCIDRs)+len(c.WebhookAllowPorts) > 0 ||
		c.WebhookCAFile != "" ||
		c.MountAllowHTTP || len(c.MountAllowCIDRs)+len(c.MountAllowPorts) > 0 || c.PublicURL != "" ||
		c.StoreURL != "" || c.StoreKey != "" || c.HomeCache != 10<<30 || c.ThreadExpiry != 0 || c.ThreadGC != time.Hour ||
		c.SaveTimeout != 10*time.Minute || c.ReservedSlots != (ReservedSlots{Percent: 12.5}) ||
		c.InteractiveSlots != (ReservedSlots{Percent: 25}) ||
		c.UIDRange != (UIDRange{1900000000, 532480}) || c.LogLevel != slog.LevelInfo || c.LogFormat != LogText {
		t.Errorf("got %+v", c)
	}
	if n := c.SlotCount(); n < 1 {
		t.Errorf("chose %d slots", n)
	}
}

func TestDefaultAddress(t *testing.T) {
	const store = "s3://bucket"
	c, err := ParseConfig([]string{"--roles", "worker", "--nats", "nats://127.0.0.1:4222", "--store", store})
	if err != nil || c.Address() != "" {
		t.Errorf("a worker listens on %q, %v", c.Address(), err)
	}
	c, err = ParseConfig([]string{
		"--roles", "worker", "--nats", "nats://127.0.0.1:4222", "--store", store, "--listen",
		"127.0.0.1:0",
	})
	if err != nil || c.Address() != "127.0.0.1:0" {
		t.Errorf("a worker with --listen listens on %q, %v", c.Address(), err)
	}
}

func TestFlagWinsOverEnvironmentOverFileOverDefault(t *testing.T) {
	file := writeFile(t, `
slots: 3
drain: 5s
roles: [gateway, worker, scheduler, webhook]
output-limit: 2 MiB
log-level: warn
bootstrap-key: sk-local-abcdefghijklmnopqrst
`)
	t.Setenv("BULLPEN_DRAIN", "6s")
	t.Setenv("BULLPEN_LOG_LEVEL", "error")
	for name, args := range map[string][]string{
		"flag": {"--config", file, "--log-level", "debug"}, "environment": {"--log-level", "debug"},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "environment" {
				t.Setenv("BULLPEN_CONFIG", file)
			}
			c, err := ParseConfig(args)
			if err != nil {
				t.Fatal(err)
			}
			if c.LogLevel != slog.LevelDebug {
				t.Errorf("log-level is %s, want the flag's debug", c.LogLevel)
			}
			if c.Drain != 6*time.Second {
				t.Errorf("drain is %s, want the environment's 6s", c.Drain)
			}
			if c.Slots != 3 || c.OutputLimit != 2<<20 || c.BootstrapKey == "" {
				t.Errorf("got %+v, want slots, output-limit and bootstrap-key of the file", c)
			}
			if c.Address() != "127.0.0.1:8080" {
				t.Errorf("listens on %s, want the default", c.Address())
			}
		})
	}
}

func TestSettingsOfDays(t *testing.T) {
	t.Setenv("BULLPEN_THREAD_EXPIRY", "2w")
	c, err := ParseConfig([]string{"--retention", "7d", "--config", writeFile(t, "audit-retention: 52w\n")})
	if err != nil {
		t.Fatal(err)
	}
	if c.Retention != 168*time.Hour || c.ThreadExpiry != 14*24*time.Hour || c.AuditRetention != 364*24*time.Hour {
		t.Errorf("got %s, %s and %s", c.Retention, c.ThreadExpiry, c.AuditRetention)
	}
	for _, args := range [][]string{{"--retention", "7"}, {"--config", writeFile(t, "retention: 7 days\n")}} {
		if _, err := ParseConfig(args); err == nil || !strings.Contains(err.Error(), "7d") ||
			!strings.Contains(err.Error(), "retention") {
			t.Errorf("%q: %v", args, err)
		}
	}
}

func TestNestedSettingsInFile(t *testing.T) {
	for name, file := range map[string]string{
		"flags": "webhook-allow-cidrs: [127.0.0.0/8, \"fd00::/8\"]\nwebhook-allow-http: true\nwebhook-allow-ports: [80, " +
			"9000]\nwebhook-ca-file: ca.pem\nwebhook-max-body: 2MiB\n",
		"below": "webhook:\n  allow_cidrs: [127.0.0.0/8, \"fd00::/8\"]\n  allow_http: true\n  allow-ports: \"80,9000\"\n " +
			" ca_file: ca.pem\n  max_body: 2 MiB\n",
		"flow": "webhook: {allow_cidrs: \"127.0.0.0/8,fd00::/8\", allow: {http: true, ports: [80, 9000]}, ca_file: " +
			"ca.pem, max_body: 2097152}\n",
		"dotted": "webhook.allow_cidrs: [127.0.0.0/8, \"fd00::/8\"]\nwebhook.allow_http: true\nwebhook.allow_ports: [80, " +
			"9000]\nwebhook.ca_file: ca.pem\nwebhook_max_body: 2MiB\n",
	} {
		t.Run(name, func(t *testing.T) {
			c, err := ParseConfig([]string{
				"--config", writeFile(t, file+"nats:\n  user: u\n  password: p\nnats.creds: \"\"\nqueue_wait: 4s\n"), "--nats",
				"nats://x",
			})
			if err != nil {
				t.Fatal(err)
			}
			if fmt.Sprintf("%v %v %v %v %v", c.WebhookAllowCIDRs, c.WebhookAllowHTTP, c.WebhookAllowPorts, c.WebhookCAFile,
				c.WebhookMaxBody) != "[127.0.0.0/8 fd00::/8] true [80 9000] ca.pem 2MiB" {
				t.Errorf("got %+v", c)
			}
			if c.User != "u" || c.Password != "p" || c.QueueWait != 4*time.Second {
				t.Errorf("got %+v", c)
			}
		})
	}
}

func TestWebhookSettingsInEnvironment(t *testing.T) {
	for name, value := range map[string]string{
		"WEBHOOK_ALLOW_CIDRS": "10.0.0.0/8,::1/128", "WEBHOOK_ALLOW_HTTP": "true", "WEBHOOK_ALLOW_PORTS": "80",
		"WEBHOOK_CA_FILE":  "f",
		"WEBHOOK_MAX_BODY": "64KiB", "PUBLIC_URL": "https://x/y",
	} {
		t.Setenv("BULLPEN_"+name, value)
	}
	c, err := ParseConfig(nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprintf("%v %v %v %v %v %v", c.WebhookAllowCIDRs, c.WebhookAllowHTTP, c.WebhookAllowPorts,
		c.WebhookCAFile, c.WebhookMaxBody, c.PublicURL); got != "[10.0.0.0/8 ::1/128] true [80] f 64KiB https://x/y" {
		t.Errorf("got %s", got)
	}
}

func TestReservedSlots(t *testing.T) {
	for setting, want := range map[string]map[int]int{ // reserved, by the number of slots
		"12.5%": {0: 0, 1: 0, 2: 1, 8: 1, 15: 1, 16: 2, 800: 100}, "3": {1: 0, 2: 1, 3: 2, 4: 3, 800: 3}, "0": {8: 0},
		"0%": {8: 0}, "99%": {8: 7},
	} {
		c, err := ParseConfig([]string{"--reserved-slots", setting})
		if err != nil {
			t.Fatal(err)
		}
		for slots, reserved := range want {
			if got := c.ReservedSlots.Of(slots); got != reserved {
				t.Errorf("%s: %d of %d slots are reserved, want %d", setting, got, slots, reserved)
			}
		}
	}
}

func TestInvalidSettings(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		file string
		env  map[string]string
		want []string
	}{
		"unknown in file": {
			file: "slot: 3\nlistn: x\nslots: 1\n",
			want: []string{"unknown settings: listn (line 2), slot (line 1).", "output-limit"},
		},
		"nested, unknown": {file: "nats:\n  url: x\n", want: []string{"unknown settings: nats-url (line 2)."}},
		"nested, empty": {
			file: "\nwebhook: {}\n", want: []string{"bullpen.yaml:2: webhook: ", "must be a value or a list"},
		},
		"nested, no value": {
			file: "webhook:\n  ca_file:\n", want: []string{"bullpen.yaml:2: webhook.ca_file: has no value"},
		},
		"settings in a list": {
			file: "webhook:\n  allow_ports: [1, {a: b}]\n",
			want: []string{"bullpen.yaml:2: webhook.allow_ports: ", "must be a value or a list"},
		},
		"twice in two forms": {
			file: "webhook:\n  allow_http: true\nwebhook-allow-http: false\n",
			want: []string{"bullpen.yaml:3: webhook-allow-http is already set on line 2"},
		},
		"nested, wrong type": {file: "webhook:\n  max_body: many\n", want: []string{"bullpen.yaml:2: webhook-max-body: "}},
		"no value":           {file: "\nnats:\n", want: []string{"bullpen.yaml:2: nats: has no value"}},
		"not YAML":           {file: "{", want: []string{"bullpen.yaml:1: must be YAML"}},
		"unterminated quote": {
			file: "slots: 1\nbootstrap-key: \"sk-local-hunter2hunter2hunter2\n",
			want: []string{"bullpen.yaml:2: must be YAML"},
		},
		"a setting twice": {file: "slots: 1\nslots: 2\n", want: []string{"bullpen.yaml:2: ", "already defined"}},
		"two documents":   {file: "slots: 1\n---\nslots: 2\n", want: []string{"bullpen.yaml must have one"}},
		"invalid in file": {file: "drain: 0s\n", want: []string{"--drain", "bullpen.yaml)"}},
		"not settings":    {file: "- a\n", want: []string{"bullpen.yaml:1: must be YAML with one"}},
		"no file": {
			args: []string{"--config", "/nonexistent/file"}, want: []string{"read settings", "/nonexistent/file"},
		},
		"wrong type in file": {file: "\nslots: many\n", want: []string{"bullpen.yaml:2: slots: ", "many"}},
		"wrong type in env":  {env: map[string]string{"BULLPEN_DRAIN": "soon"}, want: []string{"BULLPEN_DRAIN", "soon"}},
		"listen":             {args: []string{"--listen", "8080"}, want: []string{"--listen", "HOST:PORT"}},
		"port":               {args: []string{"--listen", ":65536"}, want: []string{"--listen"}},
		"role": {
			args: []string{"--roles", "archive"}, want: []string{"--roles", `"archive"`, "gateway, worker, scheduler, webhook"},
		},
		"role twice": {args: []string{"--roles", "worker,worker"}, want: []string{"--roles", "twice"}},
		"role alone": {args: []string{"--roles", "worker"}, want: []string{"set --nats"}},
		"NATS URL": {
			args: []string{"--nats", "http://user:hunter2@x"}, want: []string{"--nats", "nats://HOST:PORT"},
		},
		"credentials alone":  {args: []string{"--nats-creds", "f"}, want: []string{"--nats", "give its URL"}},
		"user alone":         {args: []string{"--nats", "nats://x", "--nats-user", "u"}, want: []string{"--nats-password"}},
		"certificate alone":  {args: []string{"--nats", "tls://x", "--nats-cert", "u"}, want: []string{"--nats-key"}},
		"replicas, embedded": {args: []string{"--replicas", "3"}, want: []string{"--replicas", "set --nats"}},
		"replicas": {
			args: []string{"--nats", "nats://x", "--replicas", "2"}, want: []string{"--replicas", "1, 3 or 5"},
		},
		"Redis URL": {
			args: []string{"--redis", "http://user:hunter2@x"}, want: []string{"--redis", "redis://HOST:PORT"},
		},
		"Redis URL, host": {
			args: []string{"--redis", "redis://:hunter2@/0"}, want: []string{"--redis", "redis://HOST:PORT"},
		},
		"Redis URL, database": {
			args: []string{"--redis", "redis://:hunter2@x/main"}, want: []string{"--redis", "database N"},
		},
		"Redis URL, options": {
			args: []string{"--redis", "rediss://:hunter2@x?skip_verify=true"},
			want: []string{"--redis", "redis://HOST:PORT"},
		},
		"Redis CA alone": {args: []string{"--redis-ca", "f"}, want: []string{"--redis-ca", "set --redis"}},
		"Redis CA without TLS": {
			args: []string{"--redis", "redis://x", "--redis-ca", "f"}, want: []string{"--redis-ca", "rediss://"},
		},
		"slots": {args: []string{"--slots=-1"}, want: []string{"--slots"}},
		"slots over ids": {
			args: []string{"--slots", "3", "--uid-range", "1000:5"}, want: []string{"--slots", "need 6 user ids", "has 5"},
		},
		"range of root": {args: []string{"--uid-range", "0:10"}, want: []string{"--uid-range", "without root's id 0"}},
		"reserved share": {
			args: []string{"--reserved-slots", "100%"},
			want: []string{"--reserved-slots", `"100%" must be a number of slots, or a percentage below 100%`},
		},
		"reserved slots": {
			args: []string{"--reserved-slots=-1"}, want: []string{"--reserved-slots", "number of slots"},
		},
		"range too far": {
			args: []string{"--uid-range", "2147483640:10"}, want: []string{"--uid-range", "none above 2147483646"},
		},
		"range form":         {args: []string{"--uid-range", "1000"}, want: []string{"--uid-range", "FIRST:COUNT"}},
		"home":               {args: []string{"--home", "/home/../x"}, want: []string{"--home"}},
		"home at the root":   {args: []string{"--home", "/x"}, want: []string{"--home", "two parts"}},
		"region":             {args: []string{"--region", "EU-1"}, want: []string{"--region", "a-z"}},
		"drain":              {args: []string{"--drain", "0s"}, want: []string{"--drain", "more than 0"}},
		"memory":             {args: []string{"--memory", "255MiB"}, want: []string{"--memory", "256MiB"}},
		"output limit":       {args: []string{"--output-limit", "1GiB"}, want: []string{"--output-limit", "256MiB"}},
		"output limit, form": {args: []string{"--output-limit", "16MB"}, want: []string{"--output-limit", "16MiB"}},
		"upgrade URL":        {args: []string{"--upgrade-url", "javascript:x"}, want: []string{"--upgrade-url", "http"}},
		"public URL": {
			args: []string{"--public-url", "bullpen.example.com"},
			want: []string{"--public-url", "https://bullpen.example.com"},
		},
		"sandbox domain": {
			args: []string{"--sandbox-domain", "*.example.com"}, want: []string{"--sandbox-domain", "sandboxes.example.com"},
		},
		"provider, public URL": {
			args: []string{"--oidc-issuer", "https://id.example.com", "--oidc-client-id", "x"},
			want: []string{"--public-url", "--oidc-issuer"},
		},
		"provider, plain URL": {
			args: []string{
				"--oidc-issuer", "https://id.example.com", "--oidc-client-id", "x", "--public-url",
				"http://bullpen.example.com",
			}, want: []string{"--public-url", "https"},
		},
		"provider, plain": {
			args: []string{
				"--oidc-issuer", "http://id.example.com", "--oidc-client-id", "x", "--public-url",
				"https://bullpen.example.com",
			}, want: []string{"--oidc-issuer", "https"},
		},
		"provider, client": {
			args: []string{"--oidc-issuer", "https://id.example.com", "--public-url", "https://bullpen.example.com"},
			want: []string{"--oidc-client-id"},
		},
		"agents, no server": {
			args: []string{"--agent-models", "a=b"}, want: []string{"--agent-upstream", "--agent-models"},
		},
		"agents, user in URL": {
			args: []string{"--agent-upstream", "http://user:pass@models/v1"},
			want: []string{"--agent-upstream"},
		},
		"agents, timeout": {
			args: []string{"--agent-upstream", "http://models/v1", "--agent-timeout", "0s"},
			want: []string{"--agent-timeout"},
		},
		"no provider": {
			args: []string{"--oidc-client-id", "x"}, want: []string{"--oidc-issuer", "--oidc-client-id"},
		},
		"public URL, user": {
			args: []string{"--public-url", "https://u:hunter2@x"}, want: []string{"--public-url", "without"},
		},
		"public URL, slash": {
			args: []string{"--public-url", "https://x/"}, want: []string{"--public-url", "trailing slash"},
		},
		"public URL, query": {args: []string{"--public-url", "https://x/a?b"}, want: []string{"--public-url", "query"}},
		"webhook range": {
			args: []string{"--webhook-allow-cidrs", "10.0.0.1"}, want: []string{"--webhook-allow-cidrs", "10.0.0.1"},
		},
		"webhook range, form": {
			args: []string{"--webhook-allow-cidrs", "::ffff:10.0.0.0/104"},
			want: []string{"--webhook-allow-cidrs", "IPv4"},
		},
		"mount range, form": {
			args: []string{"--mount-allow-cidrs", "::ffff:10.0.0.0/104"},
			want: []string{"--mount-allow-cidrs", "IPv4"},
		},
		"mount port": {args: []string{"--mount-allow-ports", "0"}, want: []string{"--mount-allow-ports", "0"}},
		"mount ports": {
			args: []string{"--mount-allow-ports", "9001-9000"}, want: []string{"--mount-allow-ports", "9001-9000", "such as"},
		},
		"proxy range, form": {
			args: []string{"--trusted-proxies", "::ffff:10.0.0.0/104"}, want: []string{"--trusted-proxies", "IPv4"},
		},
		"webhook port": {
			args: []string{"--webhook-allow-ports", "80,65536"}, want: []string{"--webhook-allow-ports", "65536"},
		},
		"webhook concurrency": {
			args: []string{"--webhook-concurrency", "0"}, want: []string{"--webhook-concurrency", "at least 1"},
		},
		"webhook body": {
			args: []string{"--webhook-max-body", "1KiB"}, want: []string{"--webhook-max-body", "32KiB", "256MiB"},
		},
		"store": {args: []string{"--store", "/blobs"}, want: []string{"--store: ", "file:///directory"}},
		"store, password": {
			args: []string{"--store", "s3://user:hunter2@bucket/x"}, want: []string{"--store: ", "AWS_ACCESS_KEY_ID"},
		},
		"store, endpoint": {
			args: []string{"--store", "s3://bucket?endpoint=http://user:hunter2@x"},
			want: []string{"--store: ", "without credentials"},
		},
		"store, parameter": {
			args: []string{"--store", "s3://bucket?secret=hunter2"}, want: []string{"--store: ", `no parameter "secret"`},
		},
		"store of a worker": {
			args: []string{"--nats", "nats://x", "--roles", "worker"},
			want: []string{"--store: ", "only worker", "every gateway and worker the same"},
		},
		"store of a gateway": {
			args: []string{"--nats", "nats://x", "--roles", "gateway,scheduler"},
			want: []string{"--store: ", "only gateway, scheduler"},
		},
		"home cache":      {args: []string{"--home-cache", "10GB"}, want: []string{"--home-cache", "GiB"}},
		"thread expiry":   {args: []string{"--thread-expiry=-1h"}, want: []string{"--thread-expiry", "forever"}},
		"audit retention": {args: []string{"--audit-retention=-1h"}, want: []string{"--audit-retention", "negative"}},
		"audit endpoint": {
			args: []string{"--audit-http", "ftp://u:hunter2@example.com/"},
			want: []string{"--audit-http", "http or https"},
		},
		"audit syslog": {
			args: []string{"--audit-syslog", "tcp://example.com"}, want: []string{"--audit-syslog", "HOST:PORT"},
		},
		"save timeout": {args: []string{"--save-timeout", "0s"}, want: []string{"--save-timeout", "more than 0"}},
		"thread gc":    {args: []string{"--thread-gc", "0s"}, want: []string{"--thread-gc", "more than 0"}},
		"log format":   {args: []string{"--log-format", "xml"}, want: []string{"--log-format", "text or json"}},
		"log level":    {args: []string{"--log-level", "loud"}, want: []string{"--log-level", "loud"}},
		"bootstrap key": {
			env:  map[string]string{"BULLPEN_BOOTSTRAP_KEY": "hunter2"},
			want: []string{"BULLPEN_BOOTSTRAP_KEY", "sk-<region>-<token>"},
		},
		"bootstrap key, flag": {
			args: []string{"--bootstrap-key", "sk-local-hunter2hunter2hunter2"},
			want: []string{"set BULLPEN_BOOTSTRAP_KEY"},
		},
		"several errors": {args: []string{"--drain", "0s", "--region", "_"}, want: []string{"--drain", "--region"}},
		"unknown flag":   {args: []string{"--nonsense"}, want: []string{"--nonsense"}},
	} {
		t.Run(name, func(t *testing.T) {
			for k, v := range test.env {
				t.Setenv(k, v)
			}
			args := test.args
			if test.file != "" {
				args = append(args, "--config", writeFile(t, test.file))
			}
			_, err := ParseConfig(args)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not contain %q", err, want)
				}
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("%q has a secret", err)
			}
		})
	}
}

// A gateway or worker alone needs a shared store. A process with both may use its data directory.
func TestStoreOfRoles(t *testing.T) {
	for _, args := range [][]string{
		nil,
		{"--nats", "nats://x"},
		{"--nats", "nats://x", "--roles", "gateway,worker"},
		{"--nats", "nats://x", "--roles", "scheduler,webhook"},
	} {
		c := config(t, args...)
		at, err := c.StoreLocation()
		if err != nil || at != "file://"+filepath.Join(c.Data, "blobs") {
			t.Errorf("%v: %s, %v", args, at, err)
		}
	}
	for _, role := range []string{"gateway", "worker"} {
		c := config(t, "--nats", "nats://x", "--roles", role, "--store", "s3://bucket/prefix")
		if at, err := c.StoreLocation(); err != nil || at != "s3://bucket/prefix" {
			t.Errorf("%s: %s, %v", role, at, err)
		}
	}
}

func TestThreadSettings(t *testing.T) {
	for name, file := range map[string]string{
		"flags": "store: s3://b/p\nstore-key: k\nhome-cache: 1GiB\nthread-expiry: 720h\nthread-gc: 5m\n",
		"below": "store: s3://b/p\nstore_key: k\nhome_cache: 1 GiB\nthread:\n  expiry: 720h\n  gc: 5m\n",
	} {
		c := config(t, "--config", writeFile(t, file))
		if got := fmt.Sprint(c.StoreURL, " ", c.StoreKey, " ", c.HomeCache, " ", c.ThreadExpiry, " ",
			c.ThreadGC); got != "s3://b/p k 1GiB 720h0m0s 5m0s" {
			t.Errorf("%s: %s", name, got)
		}
	}
	for name, value := range map[string]string{
		"STORE": "file:///s", "STORE_KEY": "k", "HOME_CACHE": "0", "THREAD_EXPIRY": "1h", "THREAD_GC": "1s",
	} {
		t.Setenv("BULLPEN_"+name, value)
	}
	c := config(t)
	if got := fmt.Sprint(c.StoreURL, " ", c.StoreKey, " ", c.HomeCache, " ", c.ThreadExpiry, " ",
		c.ThreadGC); got != "file:///s k 0 1h0m0s 1s" {
		t.Error(got)
	}
	var log bytes.Buffer
	NewLogger(&log, slog.LevelInfo, LogText).Info("starts", "config", c)
	for _, want := range []string{
		"store=file:///s", "store_key=k", "home_cache=0", "thread_expiry=1h0m0s",
		"thread_gc=1s",
	} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("%s is not in the log: %s", want, &log)
		}
	}
}

func TestLogHidesSecrets(t *testing.T) {
	t.Setenv("BULLPEN_BOOTSTRAP_KEY", "sk-local-hunter2hunter2hunter2")
	for _, args := range [][]string{
		{"--nats", "nats://user:hunter2@one:4222, tls://hunter2@two:4222"},
		{"--nats", "nats://one:4222", "--nats-user", "u", "--nats-password", "hunter2"},
		{"--nats", "nats://one:4222", "--redis", "rediss://u:hunter2@two:6379/1"},
		{"--nats", "nats://one:4222", "--redis", "redis://hunter2@two:6379"},
	} {
		c, err := ParseConfig(args)
		if err != nil {
			t.Fatal(err)
		}
		for _, format := range []LogFormat{LogText, LogJSON} {
			var log bytes.Buffer
			NewLogger(&log, slog.LevelInfo, format).Info("starts", "config", c)
			if strings.Contains(log.String(), "hunter2") {
				t.Errorf("the log has a secret: %s", &log)
			}
			if c.RedisURL != "" && !strings.Contains(log.String(), "two:6379") {
				t.Errorf("the log does not name the Redis server: %s", &log)
			}
			if !strings.Contains(log.String(), "one:4222") || !strings.Contains(log.String(), "(set)") {
				t.Errorf("the log does not contain the settings: %s", &log)
			}
		}
	}
}
