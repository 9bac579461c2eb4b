package store

import (
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
)

// Names that more than the table needs.
const (
	outputName    = "BULLPEN_OUT"
	controlName   = "bullpen_control"
	preloadName   = "bullpen_preload"
	secretsName   = "bullpen_secrets"
	restoringName = "BULLPEN_RESTORING" // exists while a backup is being restored
)

// BindingTTL is how long an idempotency key stands for its execution. It is shorter if the
// execution's record is: a key that outlived the record would seem to be unused.
const BindingTTL = 24 * time.Hour

// WebhookMarkerTTL is how long the marker of a removed key stays in buckets whose keys come and go.
// A process that is disconnected for longer does not learn of the removal.
const WebhookMarkerTTL = 7 * 24 * time.Hour

// A body that is stored apart outlives the message that names it: a record by its retention,
// a job by the time it may be queued and run.
const (
	bodiesGrace   = 24 * time.Hour
	bodiesAtLeast = 48 * time.Hour
)

// access is what a role may do with a stream or bucket.
type access uint8

const (
	mayWrite  access = 1 << iota // on its subjects
	mayLookup                    // the last message on a subject
	mayScan                      // messages by sequence number
	mayFollow                    // with a consumer
	mayPurge                     // many messages
	mayRemove                    // one message by sequence number
)

// Roles as in --roles. A gateway stands by as scheduler and webhook as well.
const (
	roleGateway   = "gateway"
	roleScheduler = "scheduler"
	roleWebhook   = "webhook"
	roleWorker    = "worker"
)

// grants are what each role may do with a row of the table.
type grants map[string]access

// retention is how long messages are kept.
type retention struct {
	text string                     // for the documentation
	age  func(Config) time.Duration // 0 for ever
}

var (
	untilRemoved = retention{"until removed", func(Config) time.Duration { return 0 }}
	asConfigured = retention{"`--retention`", func(c Config) time.Duration { return c.Retention }}
	asBinding    = retention{"24 h, at most `--retention`", func(c Config) time.Duration {
		return min(BindingTTL, c.Retention)
	}}
	asAudit = retention{"`--audit-retention`, forever by default", func(c Config) time.Duration {
		return c.AuditRetention
	}}
	asSession = retention{"7 days after the last use", func(Config) time.Duration { return proto.SessionLife }}
	forADay   = retention{"24 h", func(Config) time.Duration { return 24 * time.Hour }}
	forUsage  = retention{"3 years after the last change", func(Config) time.Duration {
		return 3 * 366 * 24 * time.Hour
	}}
	asBody = retention{"`--retention` (at least 48 h) plus 24 h", func(c Config) time.Duration {
		return max(c.Retention, bodiesAtLeast) + bodiesGrace
	}}
)

// row declares one stream or bucket.
type row struct {
	name  string
	holds string // for the documentation

	// One of these is set.
	stream func(*Store) *Stream
	bucket func(*Store) *jetstream.KeyValue

	subjects   []string // of a stream, which keeps all messages on a subject if history is set, else the last one
	history    bool
	retention  retention
	markerTTL  time.Duration // of the markers of removed keys; 0 for none
	onDemand   bool          // a worker starts without it, and opens it when it needs it
	leaderOnly bool          // reads are answered by the stream's leader, never by a replica
	backup     bool
	ofOrg      *orgKeys // nil if no key belongs to one, or if package orgdata empties the bucket in a fixed place
	grants     grants
	ownKey     map[string]string // the only key of a bucket that a role may use
	tune       func(*jetstream.StreamConfig, Config)
}

// orgKeys says which keys of a bucket belong to an organisation.
type orgKeys struct {
	kind string   // what they are, for people
	keys []string // patterns in which %s is the organisation
}

// Buckets are the buckets in the table.
type Buckets struct {
	Keys          jetstream.KeyValue // API keys by id, and the secret they are hashed with, encrypted
	Connections   jetstream.KeyValue // storage connections of organisations
	Secrets       jetstream.KeyValue // secrets of organisations and their data key, see package keyring
	KeyUses       jetstream.KeyValue // when API keys were used last, by their ids
	Orgs          jetstream.KeyValue // organisations by name
	Plans         jetstream.KeyValue // stored plans by name
	Members       jetstream.KeyValue // people who may sign in, by id
	Sessions      jetstream.KeyValue // sessions of browsers by id
	Profiles      jetstream.KeyValue // sandbox profiles by name
	Preload       jetstream.KeyValue // why modules of sandboxes cannot be preloaded; nil in a worker, see PreloadBucket
	Bindings      jetstream.KeyValue // idempotency keys
	Control       jetstream.KeyValue // elected leaders
	Images        jetstream.KeyValue // the catalog of sandbox images
	Webhooks      jetstream.KeyValue // webhook settings of API keys, and failing endpoints
	Schedules     jetstream.KeyValue // schedules and what has happened to them
	Batches       jetstream.KeyValue // batches and how far they have come
	Pipelines     jetstream.KeyValue // runs of pipelines and what has happened to them
	Sandboxes     jetstream.KeyValue // live sandboxes
	AgentFiles    jetstream.KeyValue // files of agents, without their content
	AgentRuns     jetstream.KeyValue // runs of agents that go on in the background
	AgentSessions jetstream.KeyValue // sessions of coding agents
	Usage         jetstream.KeyValue // what organisations used, see package usage
}

// table declares all that is stored in JetStream. Opening, backup, restore and the permissions in
// docs/guides/nats.md are derived from it.
//
// A backup reads the streams in this order; package backup explains it. The deletion of an organisation
// empties buckets in this order. A worker opens the rows
// that it has access to, and never creates one.
var table = []row{
	{
		name: "bullpen_usage", holds: "usage of organisations and API keys, by month",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.Usage },
		retention: forUsage, backup: true,
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "bullpen_schedules", holds: "schedules and their state",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.Schedules },
		retention: untilRemoved, backup: true,
		ofOrg:  &orgKeys{"schedules", []string{"def.%s.*", "run.%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow | mayPurge},
	},
	{
		name: "bullpen_batches", holds: "batches and their progress", bucket: func(s *Store) *jetstream.KeyValue {
			return &s.Batches
		},
		retention: untilRemoved, backup: true,
		ofOrg:  &orgKeys{"batches", []string{"def.%s.*", "run.%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow | mayPurge},
	},
	{
		name: "bullpen_pipelines", holds: "pipeline runs and their state",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.Pipelines },
		retention: untilRemoved, markerTTL: WebhookMarkerTTL, backup: true,
		ofOrg:  &orgKeys{"pipelines", []string{"def.%s.*", "run.%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "bullpen_sandboxes", holds: "live sandboxes", bucket: func(s *Store) *jetstream.KeyValue {
			return &s.Sandboxes
		},
		retention: untilRemoved, markerTTL: WebhookMarkerTTL, backup: true,
		ofOrg:  &orgKeys{"sandboxes", []string{"%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "BULLPEN_JOBS", holds: "jobs that have not ended", stream: func(s *Store) *Stream { return &s.Jobs.Stream },
		subjects: []string{root + "job.>"}, retention: untilRemoved, backup: true,
		grants: grants{
			roleGateway:   mayWrite | mayLookup | mayScan | mayFollow | mayPurge | mayRemove,
			roleScheduler: mayWrite | mayLookup | mayScan | mayFollow | mayPurge | mayRemove,
			roleWebhook:   mayLookup | mayScan, roleWorker: mayLookup | mayScan,
		},
	},
	{
		name: "BULLPEN_DEAD", holds: "dead letters", stream: func(s *Store) *Stream { return &s.DeadLetters },
		subjects: []string{DeadLetterPattern}, retention: asConfigured, backup: true,
		grants: grants{
			roleGateway:   mayWrite | mayLookup | mayScan | mayFollow | mayRemove,
			roleScheduler: mayWrite | mayLookup,
		},
	},
	{
		name: "BULLPEN_DELIVERIES", holds: "webhook deliveries", stream: func(s *Store) *Stream {
			return &s.Deliveries
		},
		subjects: []string{DeliveryPattern("")}, retention: asConfigured, backup: true,
		grants: grants{
			roleGateway: mayWrite | mayLookup | mayFollow | mayPurge, roleScheduler: mayWrite,
			roleWebhook: mayWrite | mayLookup | mayFollow,
		},
	},
	{
		name: "BULLPEN_EXECS", holds: "records of executions", stream: func(s *Store) *Stream {
			return &s.Records.Stream
		},
		subjects: []string{AllRecords}, retention: asConfigured, backup: true,
		grants: grants{
			roleGateway: mayWrite | mayLookup | mayScan | mayFollow | mayRemove, roleScheduler: mayWrite | mayLookup | mayFollow,
			roleWebhook: mayLookup, roleWorker: mayWrite | mayLookup,
		},
		tune: func(st *jetstream.StreamConfig, _ Config) {
			// The server itself sends a stored record to waiting clients.
			st.RePublish = &jetstream.RePublish{
				Source: AllRecords, Destination: DoneSubject("{{wildcard(1)}}", "{{wildcard(2)}}"),
			}
		},
	},
	{
		// A backup has none: no worker holds what was restored.
		name: "BULLPEN_LEASES", holds: "leases of workers", stream: func(s *Store) *Stream { return &s.Leases },
		subjects: []string{LeaseSubject("*")}, retention: forADay, leaderOnly: true,
		grants: grants{
			roleGateway: mayWrite | mayLookup | mayFollow, roleScheduler: mayWrite | mayLookup | mayFollow,
			roleWorker: mayWrite | mayLookup,
		},
	},
	{
		name: "BULLPEN_THREADS", holds: "heads of threads", stream: func(s *Store) *Stream { return &s.Threads },
		subjects: []string{ThreadPattern}, retention: untilRemoved, leaderOnly: true, backup: true,
		grants: grants{
			roleGateway: mayWrite | mayLookup | mayFollow | mayPurge, roleScheduler: mayWrite | mayLookup,
			roleWorker: mayWrite | mayLookup,
		},
	},
	{
		name: outputName, holds: "output of executions", stream: func(s *Store) *Stream { return &s.Output.Stream },
		subjects: []string{OutputPatternOf("*")}, history: true, retention: asConfigured, backup: true,
		grants: grants{
			roleGateway: mayLookup | mayScan | mayRemove, roleScheduler: mayLookup, roleWebhook: mayLookup,
			roleWorker: mayWrite | mayLookup | mayPurge,
		},
		tune: func(st *jetstream.StreamConfig, cfg Config) {
			if cfg.Replicas == 1 { // the server offers it for unreplicated streams only; the result repeats all output
				st.PersistMode = jetstream.AsyncPersistMode
			}
		},
	},
	{
		name: "bullpen_keys", holds: "API keys", bucket: func(s *Store) *jetstream.KeyValue { return &s.Keys },
		retention: untilRemoved, backup: true,
		ofOrg:  &orgKeys{"API keys", []string{"key.%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "bullpen_key_uses", holds: "the last use of each API key", bucket: func(s *Store) *jetstream.KeyValue {
			return &s.KeyUses
		},
		retention: untilRemoved, backup: true,
		ofOrg:  &orgKeys{"last uses of API keys", []string{"%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "bullpen_orgs", holds: "organisations", bucket: func(s *Store) *jetstream.KeyValue { return &s.Orgs },
		retention: untilRemoved, backup: true,
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "bullpen_plans", holds: "custom plans", bucket: func(s *Store) *jetstream.KeyValue {
			return &s.Plans
		},
		retention: untilRemoved, backup: true,
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "bullpen_members", holds: "members of organisations",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.Members },
		retention: untilRemoved, markerTTL: WebhookMarkerTTL, backup: true,
		ofOrg:  &orgKeys{"members", []string{"%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		// A backup has none, so that no session that was ended is restored.
		name: "bullpen_sessions", holds: "browser sessions, by token hash",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.Sessions },
		retention: asSession, markerTTL: WebhookMarkerTTL,
		ofOrg:  &orgKeys{"sessions of browsers", []string{"%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: secretsName, holds: "encrypted secrets, and their data key wrapped with the operator's key",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.Secrets },
		retention: untilRemoved, markerTTL: WebhookMarkerTTL, backup: true,
		ofOrg:  &orgKeys{"secrets", []string{"secret.%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow, roleScheduler: mayLookup, roleWebhook: mayLookup},
		ownKey: map[string]string{roleScheduler: "data_key", roleWebhook: "data_key"},
	},
	{
		name: "bullpen_connections", holds: "storage connections of organisations",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.Connections },
		retention: untilRemoved, markerTTL: WebhookMarkerTTL, backup: true,
		ofOrg:  &orgKeys{"storage connections", []string{"%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "bullpen_agent_files", holds: "metadata of agent files; their content is in threads",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.AgentFiles },
		retention: untilRemoved, markerTTL: WebhookMarkerTTL, backup: true,
		ofOrg:  &orgKeys{"files of agents", []string{"%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "BULLPEN_AGENT_LOGS", holds: "event logs of agent runs and agent sessions", stream: func(s *Store) *Stream {
			return &s.AgentLogs
		},
		subjects: []string{AgentLogSubject("*", "*")}, history: true, retention: asConfigured, backup: true,
		grants: grants{roleGateway: mayWrite | mayLookup | mayScan | mayFollow | mayPurge},
		tune: func(st *jetstream.StreamConfig, _ Config) {
			// Readers get messages without a request, and never before they are stored.
			st.RePublish = &jetstream.RePublish{
				Source: AgentLogSubject("*", "*"), Destination: AgentLoggedSubject("{{wildcard(1)}}", "{{wildcard(2)}}"),
			}
		},
	},
	{
		name: "bullpen_agent_sessions", holds: "records of agent sessions, whose events are in `BULLPEN_AGENT_LOGS`, and " +
			"the tools that are configured for them",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.AgentSessions },
		retention: untilRemoved, markerTTL: WebhookMarkerTTL, backup: true,
		ofOrg:  &orgKeys{"agent sessions", []string{"%s.*", "config.%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "bullpen_agent_runs", holds: "background agent runs",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.AgentRuns },
		retention: untilRemoved, markerTTL: WebhookMarkerTTL, backup: true,
		ofOrg:  &orgKeys{"active runs of agents", []string{"%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "bullpen_profiles", holds: "sandbox profiles", bucket: func(s *Store) *jetstream.KeyValue {
			return &s.Profiles
		},
		retention: untilRemoved, backup: true,
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: preloadName, holds: "why modules cannot be preloaded", bucket: func(s *Store) *jetstream.KeyValue {
			return &s.Preload
		},
		retention: forADay, onDemand: true, // so that workers may be upgraded before gateways
		grants: grants{roleGateway: mayLookup, roleWorker: mayWrite | mayLookup},
	},
	{
		name: "bullpen_webhooks", holds: "webhook settings of API keys, and failing endpoints",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.Webhooks },
		retention: untilRemoved, markerTTL: WebhookMarkerTTL, backup: true,
		ofOrg:  &orgKeys{"webhook settings", []string{"key.%s.*", "url.%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow, roleWebhook: mayWrite | mayLookup | mayFollow},
	},
	{
		name: "bullpen_images", holds: "the catalog of sandbox images", bucket: func(s *Store) *jetstream.KeyValue {
			return &s.Images
		},
		retention: untilRemoved, backup: true,
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow, roleWorker: mayLookup},
	},
	{
		name: "BULLPEN_AUDIT", holds: "the audit log; NATS rejects requests to delete its messages",
		stream:   func(s *Store) *Stream { return &s.Audit },
		subjects: []string{root + "audit.*"}, history: true, retention: asAudit, leaderOnly: true, backup: true,
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
		tune:   func(st *jetstream.StreamConfig, _ Config) { st.DenyDelete, st.DenyPurge = true, true },
	},
	{
		name: "bullpen_bindings", holds: "idempotency keys", bucket: func(s *Store) *jetstream.KeyValue {
			return &s.Bindings
		},
		retention: asBinding, backup: true,
		ofOrg:  &orgKeys{"idempotency keys", []string{"%s.*"}},
		grants: grants{roleGateway: mayWrite | mayLookup | mayFollow},
	},
	{
		name: controlName, holds: "elected leaders, the last run of their periodic work, the progress of audit sinks, " +
			"recent submitters, known worker pools, and what workers can run",
		bucket:    func(s *Store) *jetstream.KeyValue { return &s.Control },
		retention: untilRemoved,
		grants: grants{
			roleGateway: mayWrite | mayLookup | mayFollow, roleScheduler: mayWrite | mayLookup,
			roleWebhook: mayWrite | mayLookup,
		},
		ownKey: map[string]string{roleWebhook: "webhook-dispatcher"},
	},
	{
		name: "BULLPEN_BODIES", holds: "bodies too large for a message", stream: func(s *Store) *Stream {
			return &s.Bodies.Stream
		},
		subjects: []string{BodyPatternOf("*")}, history: true, retention: asBody,
		grants: grants{
			roleGateway: mayWrite | mayLookup | mayScan | mayPurge, roleScheduler: mayWrite | mayLookup | mayScan | mayPurge,
			roleWebhook: mayLookup | mayScan,
			roleWorker:  mayWrite | mayLookup | mayScan | mayPurge,
		},
	},
}

// streamName is the name of the stream that holds the row.
func (r *row) streamName() string {
	if r.stream != nil {
		return r.name
	}
	return bucketPrefix + r.name
}

// patterns are the subjects of the row's stream.
func (r *row) patterns() []string {
	if r.stream != nil {
		return r.subjects
	}
	return []string{"$KV." + r.name + ".>"}
}

// config is the configuration of the row's stream. Those of buckets are the ones that the library
// makes, which offers no way to set AllowDirect.
func (r *row) config(cfg Config) jetstream.StreamConfig {
	st := jetstream.StreamConfig{
		Name: r.streamName(), Subjects: r.patterns(), Storage: jetstream.FileStorage, Replicas: cfg.Replicas,
		MaxAge: r.retention.age(cfg),
		// A replica that lags behind the leader would answer with an outdated message, and one that
		// has stopped would leave its share of the questions unanswered.
		AllowDirect: cfg.Replicas == 1 && !r.leaderOnly,
	}
	switch {
	case r.bucket != nil:
		st.MaxMsgsPerSubject, st.Discard, st.AllowRollup, st.DenyDelete = 1, jetstream.DiscardNew, true, true
		st.MaxMsgs, st.MaxBytes, st.MaxMsgSize, st.MaxConsumers = -1, -1, -1, -1
		st.Duplicates = bucketDuplicates
		if st.MaxAge > 0 {
			st.Duplicates = min(st.MaxAge, bucketDuplicates)
		}
		st.AllowMsgTTL, st.SubjectDeleteMarkerTTL = r.markerTTL > 0, r.markerTTL
	case !r.history:
		st.MaxMsgsPerSubject = 1
	}
	if r.tune != nil {
		r.tune(&st, cfg)
	}
	return st
}

// rowOf returns the row that stores messages on a subject, nil if there is none.
func rowOf(subject string) *row {
	for i := range table {
		for _, pattern := range table[i].patterns() {
			if strings.HasPrefix(subject, pattern[:strings.IndexAny(pattern, "*>")]) {
				return &table[i]
			}
		}
	}
	return nil
}

// OrgBucket is a bucket with what belongs to organisations.
type OrgBucket struct {
	jetstream.KeyValue
	Kind string   // of what belongs to them, for people
	Keys []string // patterns of the keys of an organisation, in which %s is its name
}

// OrgBuckets returns the buckets with keys of organisations, in the order of the table.
func OrgBuckets(s *Store) (list []OrgBucket) {
	for i := range table {
		if r := &table[i]; r.ofOrg != nil {
			list = append(list, OrgBucket{*r.bucket(s), r.ofOrg.kind, r.ofOrg.keys})
		}
	}
	return list
}

// Rows returns the names of all streams and buckets.
func Rows() []string {
	names := make([]string, len(table))
	for i := range table {
		names[i] = table[i].name
	}
	return names
}
