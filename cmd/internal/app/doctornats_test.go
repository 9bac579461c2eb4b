package app

import (
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// natsServer starts a server with a monitor, and returns it and the address of the monitor.
func natsServer(t *testing.T, opts *server.Options) (*server.Server, string) {
	t.Helper()
	opts.HTTPHost, opts.HTTPPort = "127.0.0.1", -1
	s := storetest.Start(t, opts)
	return s, "http://" + s.MonitorAddr().String()
}

func TestSyncIsMeasured(t *testing.T) {
	for always, want := range map[bool]string{
		true: "every write is synchronised", false: "writes are synchronised every 2m0s only",
	} {
		s, monitor := natsServer(t, &server.Options{JetStream: true, SyncAlways: always, SyncInterval: 2 * time.Minute})
		if c := checkSync(t.Context(), monitor, s.ID()); c.OK != always || c.Found != want || !c.Optional {
			t.Errorf("always %v: %+v", always, c)
		}
		if c := checkSync(t.Context(), monitor, "another"); c.OK || !strings.Contains(c.Found, "not known") {
			t.Errorf("another server's monitor: %+v", c)
		}
	}
	nobody := httptest.NewServer(http.NotFoundHandler())
	if c := checkSync(t.Context(), nobody.URL, "x"); c.OK || !strings.Contains(c.Found, "not known") {
		t.Errorf("something else: %+v", c)
	}
	nobody.Close()
	if c := checkSync(t.Context(), nobody.URL, "x"); c.OK ||
		!strings.Contains(c.Found, "no monitor answers at "+nobody.URL) {
		t.Errorf("nobody: %+v", c)
	}
}

func TestDoctorReportsNATSProblems(t *testing.T) {
	denied := &server.Options{JetStream: true, Users: []*server.User{{
		Username: "u", Password: "p", Permissions: &server.Permissions{
			Publish: &server.SubjectPermission{Deny: []string{"$JS.>"}},
		},
	}}}
	for name, tt := range map[string]struct {
		opts *server.Options
		user string
		want []string // of the last check: what was found, what to do
	}{
		"well":            {&server.Options{JetStream: true}, "", []string{"not known", "sync_interval: always"}},
		"no JetStream":    {&server.Options{}, "", []string{"JetStream", "-js"}},
		"not permitted":   {denied, "u", []string{"Permissions Violation", "docs/guides/nats.md"}},
		"no user":         {denied, "", []string{"Authorization", "--nats-user"}},
		"nobody is there": {nil, "", []string{"no servers available", "start it"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := &Config{NATS: NATS{URL: "nats://127.0.0.1:1", User: tt.user, Password: "p"}}
			if tt.opts != nil {
				s, _ := natsServer(t, tt.opts)
				c.URL = s.ClientURL()
			}
			checks := checkNATS(t.Context(), c)
			last := checks[len(checks)-1]
			if !strings.Contains(last.Found, tt.want[0]) || !strings.Contains(last.Remedy, tt.want[1]) {
				t.Errorf("%+v", checks)
			}
		})
	}
}

func TestRemediesForNATS(t *testing.T) {
	for text, want := range map[string]string{
		"tls: failed to verify certificate: x509: certificate signed by unknown authority": "--nats-ca",
		"nats: secure connection required":                                                 "tls://",
		"nats: Authorization Violation":                                                    "--nats-user",
		"dial tcp: connect: connection refused":                                            "start it",
	} {
		if got := remedyNATS(fmt.Errorf("connect: %s", text)); !strings.Contains(got, want) {
			t.Errorf("%s: %s", text, got)
		}
	}
	if got := remedyNATS(fmt.Errorf("read --nats-ca: %w", fs.ErrPermission)); !strings.Contains(got, "read the file") {
		t.Error(got)
	}
}
