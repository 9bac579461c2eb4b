package store

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto/doctest"
)

// TestDocsAreCurrent compares the generated parts of docs/guides/nats.md with the table. `make docs`
// writes them.
func TestDocsAreCurrent(t *testing.T) {
	for begin, part := range map[string]string{
		"<!-- streams: written by `make docs` -->\n":     streamDocs(),
		"<!-- subjects: written by `make docs` -->\n":    subjectDocs(),
		"<!-- permissions: written by `make docs` -->\n": "\n```\n" + PermissionsConf("/var/lib/nats") + "```\n\n",
	} {
		doctest.Compare(t, "../../docs/guides/nats.md", begin, "<!-- end -->\n", part)
	}
}

var roles = []string{roleGateway, roleScheduler, roleWebhook, roleWorker}

// signal is a subject whose messages are not stored.
type signal struct {
	subject    string
	publishers []string
	listeners  []string
	purpose    string
}

var signals = []signal{
	{SubmitSubject, []string{roleGateway}, []string{roleScheduler}, "submit a job (request)"},
	{StatsSubject, roles, []string{roleScheduler}, "state of the queue, for `/metrics` and `/readyz` (request)"},
	{QueueSubject, []string{roleGateway}, []string{roleScheduler}, "the queue of an API key (request)"},
	{WorkersSubject, []string{roleGateway}, []string{roleScheduler}, "the live workers (request)"},
	{
		PoolsSubject,
		[]string{roleGateway, roleScheduler},
		[]string{roleScheduler},
		"worker pools and their demand (request)",
	},
	{SlotsSubject, []string{roleWorker}, []string{roleScheduler}, "a worker reports its free slots"},
	{
		OutputBudgetSubject,
		[]string{roleWorker},
		[]string{roleScheduler},
		"reserve bytes of an organisation's output budget for an execution with much output (request), and report " +
			"their use",
	},
	{
		JobSecretsSubject,
		[]string{roleWorker},
		[]string{roleScheduler},
		"the secrets of an execution on the worker, encrypted for the worker (request)",
	},
	{
		AnnounceSubject,
		[]string{roleScheduler},
		roles,
		"a new dispatcher asks workers to announce themselves; others repeat unanswered requests",
	},
	{ProcessesSubject, roles, roles, "`bullpen doctor --cluster` asks all processes to describe themselves"},
	{ProcessSubject, roles, roles, "a process describes itself: its roles, version and problems"},
	{WebhookTestSubject, []string{roleGateway}, []string{roleWebhook}, "send a test webhook (request)"},
	{
		PingSubject("dispatcher", "*"),
		[]string{roleScheduler},
		[]string{roleScheduler},
		"whether the leading dispatcher is alive (request)",
	},
	{
		PingSubject("webhook-dispatcher", "*"),
		[]string{roleWebhook},
		[]string{roleWebhook},
		"the same for the webhook leader (request)",
	},
	{PingSubject("schedules", "*"), []string{roleGateway}, []string{roleGateway}, "the same for schedules (request)"},
	{PingSubject("batches", "*"), []string{roleGateway}, []string{roleGateway}, "the same for batches (request)"},
	{PingSubject("pipelines", "*"), []string{roleGateway}, []string{roleGateway}, "the same for pipelines (request)"},
	{
		PingSubject("agent-runs", "*"),
		[]string{roleGateway},
		[]string{roleGateway},
		"the same for background agent runs (request)",
	},
	{PingSubject("sandboxes", "*"), []string{roleGateway}, []string{roleGateway}, "the same for live sandboxes (request)"},
	{
		PingSubject("agent-sessions", "*"),
		[]string{roleGateway},
		[]string{roleGateway},
		"the same for agent sessions (request)",
	},
	{
		PingSubject("org-deletion", "*"),
		[]string{roleGateway},
		[]string{roleGateway},
		"the same for deleting organisations (request)",
	},
	{
		PingSubject("thread-gc", "*"),
		[]string{roleGateway},
		[]string{roleGateway},
		"the same for thread garbage collection (request)",
	},
	{
		PingSubject("history", "*"),
		[]string{roleGateway},
		[]string{roleGateway},
		"the same for the shared index of executions (request)",
	},
	{
		PingSubject("audit-http", "*"),
		[]string{roleGateway},
		[]string{roleGateway},
		"the same for the HTTP audit sink (request)",
	},
	{
		PingSubject("audit-syslog", "*"),
		[]string{roleGateway},
		[]string{roleGateway},
		"the same for the syslog audit sink (request)",
	},
	{
		PingSubject("usage", "*"),
		[]string{roleGateway},
		[]string{roleGateway},
		"the same for usage counting (request)",
	},
	{AssignSubject("*"), []string{roleScheduler}, []string{roleWorker}, "assign a job to a worker"},
	{
		ReadersSubject("*", "*"),
		[]string{roleWorker},
		[]string{roleGateway},
		"whether a client still reads the output of an execution (request)",
	},
	{DrainSubject("*"), []string{roleGateway}, []string{roleWorker}, "drain or resume a worker"},
	{
		EndpointSubject("*"),
		[]string{roleGateway},
		[]string{roleWorker},
		"the address at which a worker serves gateways (request)",
	},
	{CancelSubject("*"), []string{roleGateway, roleScheduler}, []string{roleWorker}, "cancel an execution"},
	{OutputPatternOf("*"), nil, []string{roleGateway}, "live output, as it is stored"},
	{
		AgentLoggedSubject("*", "*"), nil,
		[]string{roleGateway},
		"messages of the logs of agents, republished by the server once stored",
	},
	{DoneSubject("*", "*"), nil, []string{roleGateway}, "records of executions, republished by the server once stored"},
	{leaderElected + "*", nil, roles, "a cluster announces the new leader of a stream"},
	{
		Inbox("ROLE") + ".>", nil, roles,
		"replies to a process: `ROLE` is the first of its roles in the order gateway, scheduler, webhook, worker",
	},
}

func streamDocs() string {
	var b strings.Builder
	b.WriteString("\n| stream or bucket | contents | subjects | kept | in a backup | written by " +
		"|\n|---|---|---|---|---|---|\n")
	for i := range table {
		r := &table[i]
		backup := "no"
		if r.backup {
			backup = "yes"
		}
		var writers []string
		for _, role := range roles {
			if r.grants[role]&mayWrite != 0 {
				writers = append(writers, role)
			}
		}
		fmt.Fprintf(&b, "| `%s` | %s | `%s` | %s | %s | %s |\n",
			r.name, r.holds, strings.Join(r.patterns(), "` `"), r.retention.text, backup, strings.Join(writers, ", "))
	}
	return b.String() + "\n"
}

func subjectDocs() string {
	var b strings.Builder
	b.WriteString("\n| subject | published by | received by | purpose |\n|---|---|---|---|\n")
	list := func(of []string) string {
		switch len(of) {
		case 0:
			return "NATS"
		case len(roles):
			return "every role"
		default:
			return strings.Join(of, ", ")
		}
	}
	for _, s := range signals {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", s.subject, list(s.publishers), list(s.listeners), s.purpose)
	}
	return b.String() + "\n"
}

// actsAs returns the roles whose permissions a role needs.
func actsAs(role string) []string {
	if role == roleGateway {
		return []string{roleGateway, roleScheduler, roleWebhook}
	}
	return []string{role}
}

// publishes returns the subjects on which a role publishes.
func publishes(role string) []string {
	var subjects []string
	for _, role := range actsAs(role) {
		for _, s := range signals {
			if slices.Contains(s.publishers, role) {
				subjects = append(subjects, s.subject)
			}
		}
		subjects = append(subjects, "$JS.API.INFO", "$JS.API.STREAM.INFO.*")
		if role != roleWorker {
			subjects = append(subjects, "$JS.API.STREAM.CREATE.*", "$JS.API.STREAM.UPDATE.*")
		}
		for i := range table {
			subjects = append(subjects, table[i].publishes(role)...)
		}
	}
	subjects = append(subjects, "$JS.FC.>")
	var unique []string
	for _, s := range subjects {
		if !slices.Contains(unique, s) {
			unique = append(unique, s)
		}
	}
	return unique
}

// publishes returns the subjects on which a role publishes in order to use the row.
func (r *row) publishes(role string) []string {
	const api = "$JS.API."
	st, patterns, found := r.streamName(), r.patterns(), ".>"
	if key := r.ownKey[role]; key != "" {
		patterns = []string{"$KV." + r.name + "." + key}
		found = "." + patterns[0]
	}
	consumers := []string{api + "CONSUMER.CREATE." + st + ".>", api + "CONSUMER.DELETE." + st + ".*"}
	if r.stream != nil {
		consumers = append(consumers, api+"CONSUMER.MSG.NEXT."+st+".*", api+"CONSUMER.INFO."+st+".*")
	}
	lookups := []string{api + "STREAM.MSG.GET." + st}
	if !r.leaderOnly {
		lookups = append(lookups, api+"DIRECT.GET."+st+found)
	}
	var subjects []string
	for _, grant := range []struct {
		may      access
		subjects []string
	}{
		{mayWrite, patterns},
		{mayLookup, lookups},
		{mayScan, []string{api + "DIRECT.GET." + st}},
		{mayFollow, consumers},
		{mayPurge, []string{api + "STREAM.PURGE." + st}},
		{mayRemove, []string{api + "STREAM.MSG.DELETE." + st}},
	} {
		if r.grants[role]&grant.may != 0 {
			subjects = append(subjects, grant.subjects...)
		}
	}
	return subjects
}

// listens returns the subjects to which a role subscribes.
func listens(role string) []string {
	var subjects []string
	for _, s := range signals {
		if slices.ContainsFunc(actsAs(role), func(role string) bool { return slices.Contains(s.listeners, role) }) {
			subjects = append(subjects, strings.Replace(s.subject, Inbox("ROLE"), Inbox(role), 1))
		}
	}
	return subjects
}

// PermissionsConf is the configuration of a server with a user for each role.
func PermissionsConf(storeDir string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `# nats.conf
server_name: n1
listen: "0.0.0.0:4222"
max_payload: 1MB                      # the default; not less

jetstream {
  store_dir: %q
  sync_interval: always               # an acknowledged write is on the disk
}

accounts {
  BULLPEN {                           # an account of its own: nothing else shares its subjects
    jetstream: enabled
    users: [
`, storeDir)
	for _, role := range roles {
		fmt.Fprintf(&b, "      { user: %s, password: %q, permissions: {\n", role, role+"-secret")
		fmt.Fprintf(&b, "          publish: [\n%s          ]\n", wrapped(publishes(role)))
		fmt.Fprintf(&b, "          subscribe: [\n%s          ]\n", wrapped(listens(role)))
		if role != roleWorker { // it answers no requests
			b.WriteString("          allow_responses: true\n")
		}
		b.WriteString("      } }\n")
	}
	b.WriteString("    ]\n  }\n}\n")
	return b.String()
}

// wrapped formats a list of strings as lines of at most 120 columns.
func wrapped(list []string) string {
	const indent, width = "            ", 120
	var b strings.Builder
	line := indent
	for i, s := range list {
		item := fmt.Sprintf("%q", s)
		if i < len(list)-1 {
			item += ","
		}
		if line != indent && len(line)+1+len(item) > width {
			b.WriteString(line + "\n")
			line = indent
		}
		if line != indent {
			line += " "
		}
		line += item
	}
	return b.String() + line + "\n"
}

// TestANewBucketIsOneRow shows that a row is all that a bucket needs to be created, found by its
// subjects, kept in backups and granted to roles.
func TestANewBucketIsOneRow(t *testing.T) {
	r := &row{
		name: "bullpen_example", holds: "examples", bucket: func(s *Store) *jetstream.KeyValue { return &s.Keys },
		retention: untilRemoved, backup: true,
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow, roleWorker: mayLookup},
	}
	table = append(table, *r)
	t.Cleanup(func() { table = table[:len(table)-1] })
	if !InBackup("$KV.bullpen_example.nightly") {
		t.Error("it is not in a backup")
	}
	if cfg := r.config(Config{Replicas: 3}); cfg.Name != "KV_bullpen_example" || cfg.Replicas != 3 || cfg.AllowDirect {
		t.Errorf("its stream is %+v", cfg)
	}
	if !r.attached() || !strings.Contains(streamDocs(), "| `bullpen_example` | examples |") {
		t.Error("a worker does not open it, or it is not documented")
	}
	if !slices.Contains(publishes(roleGateway), "$KV.bullpen_example.>") ||
		slices.Contains(publishes(roleWorker), "$KV.bullpen_example.>") {
		t.Error("its permissions are not those of the row")
	}
}
