package app

import (
	"bytes"
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
	if c.Address() != "127.0.0.1:8080" || c.Data != "./bullpen-data" || len(c.Roles) != 3 || c.Drain != 30*time.Second ||
		!c.Embedded() || c.Replicas != 1 || c.QueueWait != 3*time.Second || c.QueueExpiry != 24*time.Hour ||
		c.Retention != 168*time.Hour || c.OutputLimit != 16<<20 || c.Home != "/home/baponi" || c.Region != "local" ||
		c.UIDRange != (UIDRange{1900000000, 8192}) || c.LogLevel != slog.LevelInfo || c.LogFormat != LogText {
		t.Errorf("got %+v", c)
	}
	if n := c.SlotCount(); n < 1 {
		t.Errorf("chose %d slots", n)
	}
}

func TestOnlyGatewaysListenUnasked(t *testing.T) {
	c, err := ParseConfig([]string{"--roles", "worker", "--nats", "nats://127.0.0.1:4222"})
	if err != nil || c.Address() != "" {
		t.Errorf("a worker listens on %q, %v", c.Address(), err)
	}
	c, err = ParseConfig([]string{"--roles", "worker", "--nats", "nats://127.0.0.1:4222", "--listen", "127.0.0.1:0"})
	if err != nil || c.Address() != "127.0.0.1:0" {
		t.Errorf("a worker that is told to listens on %q, %v", c.Address(), err)
	}
}

func TestFlagWinsOverEnvironmentOverFileOverDefault(t *testing.T) {
	file := writeFile(t, `
slots: 3
drain: 5s
roles: [gateway, worker, scheduler]
output-limit: 2 MiB
log-level: warn
bootstrap-key: sk-local-abcdefghijklmnopqrst
`)
	t.Setenv("BULLPEN_DRAIN", "6s")
	t.Setenv("BULLPEN_LOG_LEVEL", "error")
	for name, args := range map[string][]string{"flag": {"--config", file, "--log-level", "debug"}, "environment": {"--log-level", "debug"}} {
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

func TestBadSettingsAreNamed(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		file string
		env  map[string]string
		want []string
	}{
		"unknown in file":      {file: "slot: 3\nlistn: x\nslots: 1\n", want: []string{"unknown settings: listn (line 2), slot (line 1).", "output-limit"}},
		"below a setting":      {file: "nats:\n  url: x\n", want: []string{"bullpen.yaml:1: nats: write a value"}},
		"no value":             {file: "\nnats:\n", want: []string{"bullpen.yaml:2: nats: has no value"}},
		"not YAML":             {file: "{", want: []string{"bullpen.yaml:1: must be YAML"}},
		"a quote is open":      {file: "slots: 1\nbootstrap-key: \"sk-local-hunter2hunter2hunter2\n", want: []string{"bullpen.yaml:2: must be YAML"}},
		"a setting twice":      {file: "slots: 1\nslots: 2\n", want: []string{"bullpen.yaml:2: ", "already defined"}},
		"two documents":        {file: "slots: 1\n---\nslots: 2\n", want: []string{"bullpen.yaml must hold one"}},
		"impossible in file":   {file: "drain: 0s\n", want: []string{"--drain", "bullpen.yaml)"}},
		"not settings":         {file: "- a\n", want: []string{"bullpen.yaml:1: must be YAML with one"}},
		"no file":              {args: []string{"--config", "/nonexistent/file"}, want: []string{"read settings", "/nonexistent/file"}},
		"wrong kind in file":   {file: "\nslots: many\n", want: []string{"bullpen.yaml:2: slots: ", "many"}},
		"wrong kind in env":    {env: map[string]string{"BULLPEN_DRAIN": "soon"}, want: []string{"BULLPEN_DRAIN", "soon"}},
		"listen":               {args: []string{"--listen", "8080"}, want: []string{"--listen", "HOST:PORT"}},
		"port":                 {args: []string{"--listen", ":65536"}, want: []string{"--listen"}},
		"role":                 {args: []string{"--roles", "webhook"}, want: []string{"--roles", `"webhook"`, "gateway, worker, scheduler"}},
		"role twice":           {args: []string{"--roles", "worker,worker"}, want: []string{"--roles", "twice"}},
		"role alone":           {args: []string{"--roles", "worker"}, want: []string{"set --nats"}},
		"NATS URL":             {args: []string{"--nats", "http://user:hunter2@x"}, want: []string{"--nats", "nats://HOST:PORT"}},
		"credentials alone":    {args: []string{"--nats-creds", "f"}, want: []string{"--nats", "give its URL"}},
		"user alone":           {args: []string{"--nats", "nats://x", "--nats-user", "u"}, want: []string{"--nats-password"}},
		"certificate alone":    {args: []string{"--nats", "tls://x", "--nats-cert", "u"}, want: []string{"--nats-key"}},
		"replicas, embedded":   {args: []string{"--replicas", "3"}, want: []string{"--replicas", "set --nats"}},
		"replicas":             {args: []string{"--nats", "nats://x", "--replicas", "2"}, want: []string{"--replicas", "1, 3 or 5"}},
		"slots":                {args: []string{"--slots=-1"}, want: []string{"--slots"}},
		"slots over ids":       {args: []string{"--slots", "3", "--uid-range", "1000:5"}, want: []string{"--slots", "need 6 user ids", "has 5"}},
		"range of root":        {args: []string{"--uid-range", "0:10"}, want: []string{"--uid-range", "not that of root"}},
		"range too far":        {args: []string{"--uid-range", "2147483640:10"}, want: []string{"--uid-range", "none above 2147483646"}},
		"range form":           {args: []string{"--uid-range", "1000"}, want: []string{"--uid-range", "FIRST:COUNT"}},
		"home":                 {args: []string{"--home", "/home/../x"}, want: []string{"--home"}},
		"home at the root":     {args: []string{"--home", "/x"}, want: []string{"--home", "two parts"}},
		"region":               {args: []string{"--region", "EU-1"}, want: []string{"--region", "a-z"}},
		"drain":                {args: []string{"--drain", "0s"}, want: []string{"--drain", "more than 0"}},
		"output limit":         {args: []string{"--output-limit", "1GiB"}, want: []string{"--output-limit", "256MiB"}},
		"output limit, form":   {args: []string{"--output-limit", "16MB"}, want: []string{"--output-limit", "16MiB"}},
		"upgrade URL":          {args: []string{"--upgrade-url", "javascript:x"}, want: []string{"--upgrade-url", "http"}},
		"log format":           {args: []string{"--log-format", "xml"}, want: []string{"--log-format", "text or json"}},
		"log level":            {args: []string{"--log-level", "loud"}, want: []string{"--log-level", "loud"}},
		"bootstrap key":        {env: map[string]string{"BULLPEN_BOOTSTRAP_KEY": "hunter2"}, want: []string{"BULLPEN_BOOTSTRAP_KEY", "sk-<region>-<token>"}},
		"bootstrap key, flag":  {args: []string{"--bootstrap-key", "sk-local-hunter2hunter2hunter2"}, want: []string{"set BULLPEN_BOOTSTRAP_KEY"}},
		"several are told":     {args: []string{"--drain", "0s", "--region", "_"}, want: []string{"--drain", "--region"}},
		"flags cannot be read": {args: []string{"--nonsense"}, want: []string{"--nonsense"}},
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
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("%q tells a secret", err)
			}
		})
	}
}

func TestLogHidesSecrets(t *testing.T) {
	t.Setenv("BULLPEN_BOOTSTRAP_KEY", "sk-local-hunter2hunter2hunter2")
	for _, args := range [][]string{
		{"--nats", "nats://user:hunter2@one:4222, tls://hunter2@two:4222"},
		{"--nats", "nats://one:4222", "--nats-user", "u", "--nats-password", "hunter2"},
	} {
		c, err := ParseConfig(args)
		if err != nil {
			t.Fatal(err)
		}
		for _, format := range []LogFormat{LogText, LogJSON} {
			var log bytes.Buffer
			NewLogger(&log, slog.LevelInfo, format).Info("starts", "config", c)
			if strings.Contains(log.String(), "hunter2") {
				t.Errorf("the log tells a secret: %s", &log)
			}
			if !strings.Contains(log.String(), "one:4222") || !strings.Contains(log.String(), "(set)") {
				t.Errorf("the log does not tell what is set: %s", &log)
			}
		}
	}
}
