package app

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/audit"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/storage"
	"github.com/bullpen-run/bullpen/storage/history"
	"github.com/bullpen-run/bullpen/webhook/guard"
)

// Role is a part of bullpen that a process runs.
type Role string

// The roles. A process with all of them needs no other service.
const (
	RoleGateway   Role = "gateway"   // serves HTTP; stands by as leader of the next two roles
	RoleScheduler Role = "scheduler" // assigns queued jobs to free slots; one process leads
	RoleWebhook   Role = "webhook"   // sends results to their receivers; one process leads
	RoleWorker    Role = "worker"    // runs programs in jails
)

// Roles lists every role.
func Roles() []Role { return []Role{RoleGateway, RoleWorker, RoleScheduler, RoleWebhook} }

// Config has all settings. The tables in docs/reference/configuration.md have their help texts. The secret
// tag marks values that are kept out of logs. Each setting is a flag, an environment variable and a
// key of the YAML file. Flags override variables, variables override the file, and the file
// overrides defaults.
type Config struct {
	File configFile `name:"config" env:"BULLPEN_CONFIG" placeholder:"FILE" help:"YAML file with settings. Its keys are the names of the flags."`

	Listen        string        `name:"listen" group:"Server" env:"BULLPEN_LISTEN" placeholder:"HOST:PORT" help:"HTTP address. Port 0 picks a free port. Default: 127.0.0.1:8080 with the gateway role, otherwise none. Without the gateway role it serves only health and metrics."`
	Data          string        `name:"data" group:"Server" env:"BULLPEN_DATA" default:"./bullpen-data" placeholder:"DIR" help:"Directory for data that must survive a restart. Created if missing; only one process can use it at a time."`
	Roles         []Role        `name:"roles" group:"Server" env:"BULLPEN_ROLES" default:"gateway,worker,scheduler,webhook" placeholder:"ROLE" help:"Roles of this process. A subset needs --nats."`
	Drain         time.Duration `name:"drain" group:"Server" env:"BULLPEN_DRAIN" default:"30s" placeholder:"TIME" help:"How long running programs may continue after SIGTERM."`
	Memory        proto.Bytes   `name:"memory" group:"Server" env:"BULLPEN_MEMORY" default:"0" placeholder:"SIZE" help:"Memory of this process, excluding programs. Requests and jobs that would exceed it are rejected. 0 is a quarter of the memory of the machine or container."`
	DiskReserve   proto.Bytes   `name:"disk-reserve" group:"Server" env:"BULLPEN_DISK_RESERVE" default:"0" placeholder:"SIZE" help:"Free space on the disk of the data directory below which executions and uploads are rejected. At least 64 MiB. 0 is a twentieth of the disk, at most 2 GiB."`
	MetricsListen string        `name:"metrics-listen" group:"Server" env:"BULLPEN_METRICS_LISTEN" placeholder:"HOST:PORT" help:"Address that serves /metrics, without TLS. --listen then serves none. Default: none, and --listen serves them."`
	ProfileListen string        `name:"profile-listen" group:"Server" env:"BULLPEN_PROFILE_LISTEN" placeholder:"ADDRESS:PORT" help:"Loopback address that serves profiles for go tool pprof, such as 127.0.0.1:6060. Every user of this machine can read them. Default: none."`

	SecretsKey     string `name:"secrets-key" group:"Secrets" env:"BULLPEN_SECRETS_KEY" placeholder:"FILE" help:"File with the keys that protect stored secrets, as age-keygen generates them. The same for every gateway, scheduler and webhook process. Without them, secrets and API keys are unusable. Default: with an embedded NATS, secrets.key in the data directory, created at the first start; with an external one, none."`
	SecretsCommand string `name:"secrets-command" group:"Secrets" env:"BULLPEN_SECRETS_COMMAND" placeholder:"FILE" help:"Program that protects stored secrets instead of --secrets-key, for example with a key management service. It is called with the argument wrap or unwrap, and encrypts or decrypts standard input to standard output."`
	SecretsPlain   bool   `name:"secrets-plain" group:"Secrets" env:"BULLPEN_SECRETS_PLAIN" help:"Store secrets unencrypted. A gateway on an external NATS needs this, --secrets-key or --secrets-command."`

	OIDCIssuer     string `name:"oidc-issuer" group:"People" env:"BULLPEN_OIDC_ISSUER" placeholder:"URL" help:"OpenID Connect provider for signing in with a browser, as its id tokens name it. Its client needs the redirect URI PUBLIC-URL/login/callback. The same for every gateway. Default: none, and browsers sign in with an API key."`
	OIDCClientID   string `name:"oidc-client-id" group:"People" env:"BULLPEN_OIDC_CLIENT_ID" placeholder:"ID" help:"Id of this server's client at the provider."`
	OIDCSecretFile string `name:"oidc-secret-file" group:"People" env:"BULLPEN_OIDC_SECRET_FILE" placeholder:"FILE" help:"File with the client secret, read at each login. Default: none, for a public client."`

	NATS `embed:""`

	RedisURL string `name:"redis" secret:"urls" group:"Redis" env:"BULLPEN_REDIS" placeholder:"URL" help:"Redis for timers: redis://HOST:PORT/DB, or rediss:// for TLS. Put a password into the environment variable: other users of this machine can read flags. Default: embedded in this process."`
	RedisCA  string `name:"redis-ca" group:"Redis" env:"BULLPEN_REDIS_CA" placeholder:"FILE" help:"Certificate authorities for Redis over TLS, PEM. Default: the system's."`

	Slots             int         `name:"slots" group:"Worker" env:"BULLPEN_SLOTS" default:"0" placeholder:"N" help:"Programs that this worker runs at once. 0 is 4 per core, at most one per GiB of memory."`
	Sandboxes         int         `name:"sandboxes" group:"Worker" env:"BULLPEN_SANDBOXES" default:"0" placeholder:"N" help:"Live sandboxes that this worker runs at once, besides programs. 0 is one for each GiB of memory; a negative number is none."`
	SandboxMemory     proto.Bytes `name:"sandbox-memory" group:"Worker" env:"BULLPEN_SANDBOX_MEMORY" default:"0" placeholder:"SIZE" help:"Memory of this worker for live sandboxes. A sandbox starts only if the memory limits of all sandboxes on the worker fit. 0 is the memory of the machine or container."`
	SandboxOvercommit float64     `name:"sandbox-overcommit" group:"Worker" env:"BULLPEN_SANDBOX_OVERCOMMIT" default:"1" placeholder:"FACTOR" help:"Factor by which the sum of the memory limits of live sandboxes may exceed the memory for them. Above 1, the machine can run out of memory if many sandboxes use theirs at the same time."`
	Tunnel            string      `name:"tunnel" group:"Worker" env:"BULLPEN_TUNNEL" default:":0" placeholder:"HOST:PORT" help:"Address on which this worker serves gateways, which pass requests on to live sandboxes. An empty host is the address from which this worker reaches NATS, or the loopback address with the embedded one. Port 0 is any."`
	Pool              string      `name:"pool" group:"Worker" env:"BULLPEN_POOL" default:"default" placeholder:"NAME" help:"Name of this worker's pool. All workers of a pool can run the same executions."`
	WarmMemory        proto.Bytes `name:"warm-memory" group:"Worker" env:"BULLPEN_WARM_MEMORY" default:"0" placeholder:"SIZE" help:"Memory for prewarmed sandboxes and zygotes. 0 is a sixteenth of the memory of the machine or container, 1 disables both."`
	NsjailPath        string      `name:"nsjail" group:"Worker" env:"BULLPEN_NSJAIL" placeholder:"PATH" help:"Path of nsjail. Default: nsjail beside the bullpen program, then in ../libexec/bullpen, then on the PATH."`
	UIDRange          UIDRange    `name:"uid-range" group:"Worker" env:"BULLPEN_UID_RANGE" default:"1900000000:532480" placeholder:"FIRST:COUNT" help:"User ids for jails of all workers on a machine: of the first 8,192 two for each slot, of the rest 2,048 for each live sandbox with a writable root. The default is outside the ranges of logins, containers and service managers."`
	ImageDir          string      `name:"image-dir" group:"Worker" env:"BULLPEN_IMAGE_DIR" default:"/var/cache/bullpen/images" placeholder:"DIR" help:"Directory for unpacked sandbox images. Every user must be able to traverse its parent directories."`
	Agents            string      `name:"agents" group:"Worker" env:"BULLPEN_AGENTS" placeholder:"DIR" help:"Directory with the programs of coding agents, as bullpen agent install fills it. Read when the worker starts. Default: none."`
	Home              string      `name:"home" group:"Worker" env:"BULLPEN_HOME" default:"/home/baponi" placeholder:"DIR" help:"Home and working directory of programs, inside the jail."`

	MountRoots []string    `name:"mount-roots" group:"Worker" env:"BULLPEN_MOUNT_ROOTS" placeholder:"DIR" help:"Directories of this machine that may contain storage connections of kind directory, each mounted nosuid, separated by commas. The Files API needs the same on gateways. Default: none."`
	MountSpool proto.Bytes `name:"mount-spool" group:"Worker" env:"BULLPEN_MOUNT_SPOOL" default:"1GiB" placeholder:"SIZE" help:"Disk space in the data directory for files that one execution is writing to its storage connections. It also limits the size of each file."`

	MountAllowCIDRs []netip.Prefix    `name:"mount-allow-cidrs" group:"Storage connections" env:"BULLPEN_MOUNT_ALLOW_CIDRS" placeholder:"CIDR" help:"Private address ranges allowed for buckets of storage connections, separated by commas. Every organisation's administrator can reach them. The same for every gateway and worker."`
	MountAllowHTTP  bool              `name:"mount-allow-http" group:"Storage connections" env:"BULLPEN_MOUNT_ALLOW_HTTP" help:"Allow buckets over plain http, and port 80. The same for every gateway and worker."`
	MaxVolumeSize   proto.Bytes       `name:"max-volume-size" group:"Storage connections" env:"BULLPEN_MAX_VOLUME_SIZE" default:"10GiB" placeholder:"SIZE" help:"Largest quota of a volume that an organisation's administrator can set, between 1MiB and 1000GiB. A program can write that much to a worker's disk for each of its volumes. The same for every gateway."`
	MountAllowPorts []guard.PortRange `name:"mount-allow-ports" group:"Storage connections" env:"BULLPEN_MOUNT_ALLOW_PORTS" placeholder:"PORT" help:"Ports of buckets besides 443 and 8443, and ranges such as 9000-9099, separated by commas. The same for every gateway and worker."`

	StoreURL     string        `name:"store" secret:"urls" group:"Threads" env:"BULLPEN_STORE" placeholder:"URL" help:"Store for images and the files of threads: file:///DIR or s3://BUCKET/PREFIX?endpoint=…&region=…&path_style=1. The same for every gateway and worker. S3 credentials come from the usual AWS variables and files. Default: blobs in the data directory."`
	StoreKey     string        `name:"store-key" group:"Threads" env:"BULLPEN_STORE_KEY" placeholder:"FILE" help:"File with the key that encrypts stored files, as age-keygen generates it. The same for every gateway and worker. Without the key, the files are unreadable. Default: no encryption."`
	HomeCache    proto.Bytes   `name:"home-cache" group:"Threads" env:"BULLPEN_HOME_CACHE" default:"10GiB" placeholder:"SIZE" help:"Disk space in the data directory for the worker's cache of recently used homes."`
	SaveTimeout  time.Duration `name:"save-timeout" group:"Threads" env:"BULLPEN_SAVE_TIMEOUT" default:"10m" placeholder:"TIME" help:"Time limit for saving a thread's home and volumes. If it is exceeded, they stay unchanged and the execution ends with thread_save_error or storage_write_error."`
	ThreadExpiry time.Duration `name:"thread-expiry" group:"Threads" env:"BULLPEN_THREAD_EXPIRY" default:"0s" placeholder:"TIME" help:"Delete a thread this long after its last use. 0 keeps threads forever."`
	ThreadGC     time.Duration `name:"thread-gc" group:"Threads" env:"BULLPEN_THREAD_GC" default:"1h" placeholder:"TIME" help:"Interval of garbage collection in the store."`

	WebhookConcurrency int               `name:"webhook-concurrency" group:"Webhooks" env:"BULLPEN_WEBHOOK_CONCURRENCY" default:"5" placeholder:"N" help:"Concurrent webhook attempts of an organisation to one server."`
	WebhookMaxBody     proto.Bytes       `name:"webhook-max-body" group:"Webhooks" env:"BULLPEN_WEBHOOK_MAX_BODY" default:"1MiB" placeholder:"SIZE" help:"Size limit of a webhook body. Longer outputs are truncated."`
	WebhookAllowCIDRs  []netip.Prefix    `name:"webhook-allow-cidrs" group:"Webhooks" env:"BULLPEN_WEBHOOK_ALLOW_CIDRS" placeholder:"CIDR" help:"Private address ranges that webhooks may be sent to. For development and tests: everyone with an API key can reach them."`
	WebhookAllowHTTP   bool              `name:"webhook-allow-http" group:"Webhooks" env:"BULLPEN_WEBHOOK_ALLOW_HTTP" help:"Allow webhooks over plain http, on port 80."`
	WebhookAllowPorts  []guard.PortRange `name:"webhook-allow-ports" group:"Webhooks" env:"BULLPEN_WEBHOOK_ALLOW_PORTS" placeholder:"PORT" help:"Ports for webhooks besides 443 and 8443, and ranges such as 9000-9099, separated by commas."`
	WebhookCAFile      string            `name:"webhook-ca-file" group:"Webhooks" env:"BULLPEN_WEBHOOK_CA_FILE" placeholder:"FILE" help:"Certificate authorities for webhooks besides the system's, PEM."`

	Region         string         `name:"region" group:"Server" env:"BULLPEN_REGION" default:"local" placeholder:"NAME" help:"Region in new API keys: sk-REGION-…."`
	Instance       string         `name:"instance" env:"BULLPEN_INSTANCE" hidden:"" help:"Unique name of this process. Default: the host name and a random part."`
	BootstrapKey   string         `name:"bootstrap-key" secret:"value" env:"BULLPEN_BOOTSTRAP_KEY" hidden:"" help:"First API key, sk-REGION-TOKEN, of a global administrator. Not a flag, because other users of the machine could read it. Default: generated at the first start and written to bootstrap.key in the data directory."`
	UpgradeURL     string         `name:"upgrade-url" group:"Server" env:"BULLPEN_UPGRADE_URL" placeholder:"URL" help:"Where users change their plan, for error messages about its limits. Default: none, and no message suggests an upgrade."`
	CORSOrigins    []string       `name:"cors-origins" group:"Server" env:"BULLPEN_CORS_ORIGINS" placeholder:"ORIGIN" help:"Origins whose web pages may call the API with an API key, such as https://app.example.com, separated by commas. Default: none."`
	TLSCert        string         `name:"tls-cert" group:"Server" env:"BULLPEN_TLS_CERT" placeholder:"FILE" help:"Certificate chain of the HTTP server, PEM. It is reloaded when the file changes. Without it the server speaks plain HTTP."`
	TLSKey         string         `name:"tls-key" group:"Server" env:"BULLPEN_TLS_KEY" placeholder:"FILE" help:"Key of the certificate, PEM."`
	TrustedProxies []netip.Prefix `name:"trusted-proxies" group:"Server" env:"BULLPEN_TRUSTED_PROXIES" placeholder:"CIDR" help:"Address ranges of proxies that terminate TLS. Their X-Forwarded-Proto sets the scheme of file URLs without --public-url. Their X-Forwarded-For is the client in the audit log and for the allowed networks of API keys. Default: none."`
	SandboxDomain  string         `name:"sandbox-domain" group:"Server" env:"BULLPEN_SANDBOX_DOMAIN" placeholder:"DOMAIN" help:"Domain whose hosts PORT-ID.DOMAIN reach the ports of live sandboxes, such as sandboxes.example.com, with :PORT unless that is the scheme's. Its wildcard must resolve to the gateways. The same for every gateway. Default: none."`
	SandboxPorts   PortAccess     `name:"sandbox-ports" group:"Server" env:"BULLPEN_SANDBOX_PORTS" default:"token" enum:"token,public" placeholder:"ACCESS" help:"What requests to the ports of sandboxes that E2B's clients create need: token, or public for nothing but the sandbox's id, for browsers. The same for every gateway."`
	PublicURL      string         `name:"public-url" group:"Server" env:"BULLPEN_PUBLIC_URL" placeholder:"URL" help:"URL of this server for clients, for links in webhooks and for file URLs. Without it, file URLs use the request's Host header."`

	DefaultImage     string        `name:"default-image" group:"Executions" env:"BULLPEN_DEFAULT_IMAGE" placeholder:"IMAGE" help:"Image of sandboxes that name none. Until it is stored, nothing runs in them. The same for every gateway. Default: the runtimes of the workers' hosts, for trying out only."`
	QueueWait        time.Duration `name:"queue-wait" group:"Executions" env:"BULLPEN_QUEUE_WAIT" default:"30s" placeholder:"TIME" help:"How long an inline or streaming execution waits for a free slot, unless its request has Prefer: wait=N. At most the larger of its timeout and 5 s."`
	QueueExpiry      time.Duration `name:"queue-expiry" group:"Executions" env:"BULLPEN_QUEUE_EXPIRY" default:"24h" placeholder:"TIME" help:"How long an async execution waits for a free slot."`
	ReservedSlots    ReservedSlots `name:"reserved-slots" group:"Executions" env:"BULLPEN_RESERVED_SLOTS" default:"12.5%" placeholder:"N|PERCENT" help:"Slots that an organisation leaves free if another one has submitted executions in the last 5 minutes: a number, or a percentage (at least one slot of two or more). 0 for none. The same for every gateway and scheduler."`
	InteractiveSlots ReservedSlots `name:"interactive-slots" group:"Executions" env:"BULLPEN_INTERACTIVE_SLOTS" default:"25%" placeholder:"N|PERCENT" help:"Slots reserved for inline and streaming executions if any were submitted in the last 5 minutes: a number, or a percentage (at least one slot of two or more). The same applies within the limits of an organisation and a key. 0 for none. The same for every gateway and scheduler."`
	Retention        time.Duration `name:"retention" group:"Executions" env:"BULLPEN_RETENTION" default:"168h" placeholder:"TIME" help:"How long to keep records and output of executions, and stored responses of agents."`
	OutputLimit      proto.Bytes   `name:"output-limit" group:"Executions" env:"BULLPEN_OUTPUT_LIMIT" default:"16MiB" placeholder:"SIZE" help:"Output of each stream that a result keeps, unless the sandbox profile sets it."`
	OutputBudget     proto.Bytes   `name:"output-budget" group:"Executions" env:"BULLPEN_OUTPUT_BUDGET" default:"1GiB" placeholder:"SIZE" help:"Output that all executions of an organisation may store per hour. Beyond it, 64 KiB of each output are kept. 0 is no limit. The same for every gateway and scheduler."`

	History string `name:"history" secret:"urls" group:"Executions" env:"BULLPEN_HISTORY" placeholder:"URL" help:"PostgreSQL database for the index of executions: postgres://USER:PASSWORD@HOST:PORT/DATABASE. The same for every gateway. Default: a SQLite file in the data directory of each gateway."`

	Autoscale        AutoscaleDriver `name:"autoscale" group:"Autoscaling" env:"BULLPEN_AUTOSCALE" default:"none" placeholder:"DRIVER" help:"Driver that starts and stops workers: none, process for workers on this machine, exec for --autoscale-command, or kubernetes for KEDA. The same for every gateway and scheduler."`
	AutoscalePolicy  string          `name:"autoscale-policy" group:"Autoscaling" env:"BULLPEN_AUTOSCALE_POLICY" placeholder:"FILE" help:"Autoscaling policy in JSON. The same for every gateway and scheduler. Default: 0 to 10 workers."`
	AutoscaleCommand string          `name:"autoscale-command" group:"Autoscaling" env:"BULLPEN_AUTOSCALE_COMMAND" placeholder:"FILE" help:"Program of the driver exec. It is called with the name of a pool and its number of workers, at each change and every minute."`
	KedaListen       string          `name:"keda-listen" group:"Autoscaling" env:"BULLPEN_KEDA_LISTEN" placeholder:"ADDRESS:PORT" help:"Address at which KEDA asks the driver kubernetes for the number of workers, such as :9077. It has neither TLS nor keys: only KEDA should reach it."`

	AgentUpstream string            `name:"agent-upstream" group:"Agents" env:"BULLPEN_AGENT_UPSTREAM" placeholder:"URL" help:"Server with language models, for the agent APIs. With --agent-protocol openai, its URL with /v1 at the end; otherwise without. The same for every gateway. Default: none, and the agent routes do not exist."`
	AgentProtocol string            `name:"agent-protocol" group:"Agents" env:"BULLPEN_AGENT_PROTOCOL" default:"openai" enum:"openai,anthropic" placeholder:"NAME" help:"API of that server: openai for chat completions (also vLLM, Ollama and llama.cpp), or anthropic for messages."`
	AgentKeyFile  string            `name:"agent-key-file" group:"Agents" env:"BULLPEN_AGENT_KEY_FILE" placeholder:"FILE" help:"File with the API key for that server, read for each turn. Default: none, for a server without keys."`
	AgentModels   map[string]string `name:"agent-models" group:"Agents" env:"BULLPEN_AGENT_MODELS" mapsep:"," placeholder:"NAME=MODEL" help:"Mapping from clients' model names to that server's, separated by commas. The name * matches all others; without it, other names are unknown. Default: clients use the server's names."`
	AgentTimeout  time.Duration     `name:"agent-timeout" group:"Agents" env:"BULLPEN_AGENT_TIMEOUT" default:"2m" placeholder:"TIME" help:"How long that server may be silent before its reply counts as failed."`
	AgentRetries  int               `name:"agent-retries" group:"Agents" env:"BULLPEN_AGENT_RETRIES" default:"2" placeholder:"N" help:"Retries of a request to that server before the first byte of its answer."`

	AgentSessionsAtRoot bool `name:"agent-sessions-at-root" group:"Agents" env:"BULLPEN_AGENT_SESSIONS_AT_ROOT" help:"Serve the Sandbox Agent API also at /v1/agents, /v1/sessions, /v1/fs and /v1/health, not only below /sandbox-agent. Must be the same on every gateway."`

	AgentMockDelay time.Duration `name:"agent-mock-delay" group:"Agents" env:"BULLPEN_AGENT_MOCK_DELAY" default:"200ms" placeholder:"TIME" help:"Time between two events of the mock agent, for tests of clients of the Sandbox Agent API."`

	AgentIdle time.Duration `name:"agent-idle" group:"Agents" env:"BULLPEN_AGENT_IDLE" default:"5m" placeholder:"TIME" help:"How long the sandbox of an agent session and the agent's program in it are kept after a turn. The next message needs no new start within this time. Must be the same on every gateway."`

	AgentWideAlways bool `name:"agent-wide-always" group:"Agents" env:"BULLPEN_AGENT_WIDE_ALWAYS" help:"A permission that a user of an agent session grants for the session covers all commands of the tool, not only those with the same beginning. Must be the same on every gateway."`

	AuditRetention time.Duration `name:"audit-retention" group:"Audit log" env:"BULLPEN_AUDIT_RETENTION" default:"0s" placeholder:"TIME" help:"How long audit records are kept. 0 keeps them forever. The same for every gateway, scheduler and webhook process."`
	AuditHTTP      string        `name:"audit-http" secret:"value" group:"Audit log" env:"BULLPEN_AUDIT_HTTP" placeholder:"URL" help:"HTTP endpoint that receives the audit log: http or https, with USER:PASSWORD@ for basic authentication. Put a password into the environment variable: other users of this machine can read flags. The same for every gateway. Default: none."`
	AuditSyslog    string        `name:"audit-syslog" group:"Audit log" env:"BULLPEN_AUDIT_SYSLOG" placeholder:"URL" help:"Syslog server that receives the audit log: udp://HOST:PORT, tcp://HOST:PORT or tls://HOST:PORT. The same for every gateway. Default: none."`

	MetricsOrg bool `name:"metrics-org" group:"Log" env:"BULLPEN_METRICS_ORG" help:"Add the label org to bullpen_executions_total, with time series for every organisation."`

	TrustTraceparent bool `name:"trust-traceparent" group:"Log" env:"BULLPEN_TRUST_TRACEPARENT" help:"Use the trace in a request's traceparent header for its execution. Otherwise the two traces are linked. Clients then control trace ids and sampling, so set it only if all clients are yours."`

	LogLevel  slog.Level `name:"log-level" group:"Log" env:"BULLPEN_LOG_LEVEL" default:"info" placeholder:"LEVEL" help:"Minimum level of log messages: debug, info, warn or error."`
	LogFormat LogFormat  `name:"log-format" group:"Log" env:"BULLPEN_LOG_FORMAT" default:"text" placeholder:"FORMAT" help:"Format of log messages: text or json."`
}

// The limits of [Config.WebhookMaxBody]. The smallest fits everything but output, the largest fits
// all output.
const (
	minWebhookBody = 32 * proto.KiB
	maxWebhookBody = proto.MaxOutput
)

// NATS are the settings of the connection to NATS. With an empty URL, NATS is embedded in this
// process and the other fields must be empty.
type NATS struct {
	URL      string `name:"nats" secret:"urls" group:"NATS" env:"BULLPEN_NATS" placeholder:"URL" help:"NATS servers with JetStream, separated by commas, or unix:///DIR/nats.sock of a process with --data DIR and --autoscale process. Default: embedded in this process."`
	Creds    string `name:"nats-creds" group:"NATS" env:"BULLPEN_NATS_CREDS" placeholder:"FILE" help:"Credentials file for NATS."`
	User     string `name:"nats-user" group:"NATS" env:"BULLPEN_NATS_USER" placeholder:"NAME" help:"User name for NATS."`
	Password string `name:"nats-password" secret:"value" group:"NATS" env:"BULLPEN_NATS_PASSWORD" placeholder:"PASSWORD" help:"Password for NATS. Prefer the environment variable: other users of this machine can read flags."`
	CA       string `name:"nats-ca" group:"NATS" env:"BULLPEN_NATS_CA" placeholder:"FILE" help:"Certificate authorities for NATS over TLS, PEM. Default: the system's."`
	Cert     string `name:"nats-cert" group:"NATS" env:"BULLPEN_NATS_CERT" placeholder:"FILE" help:"Client certificate for NATS over TLS, PEM."`
	Key      string `name:"nats-key" group:"NATS" env:"BULLPEN_NATS_KEY" placeholder:"FILE" help:"Key of the client certificate, PEM."`
	Replicas int    `name:"replicas" group:"NATS" env:"BULLPEN_REPLICAS" default:"1" placeholder:"N" help:"Number of NATS servers with a copy of each stream: 1, 3 or 5."`
}

// Embedded reports whether NATS runs in this process.
func (n *NATS) Embedded() bool { return n.URL == "" }

// defaultListen is the default address of a gateway.
const defaultListen = "127.0.0.1:8080"

// Address returns the HTTP address of this process, or "". Without the gateway role there is no
// default, so that several processes can run on one machine.
func (c *Config) Address() string {
	if c.Listen == "" && c.Has(RoleGateway) {
		return defaultListen
	}
	return c.Listen
}

// Has reports whether this process has the role.
func (c *Config) Has(role Role) bool { return slices.Contains(c.Roles, role) }

// onlyWorks reports whether this process has the worker role alone.
func (c *Config) onlyWorks() bool { return len(c.Roles) == 1 && c.Has(RoleWorker) }

var regionPattern = regexp.MustCompile(`^[a-z0-9]+$`)

// UIDsPerSlot is the number of user ids of a jail: one for its init, one for the program.
const UIDsPerSlot = 2

// Validate checks the settings without touching the system. It returns all errors joined. Each
// names the setting and the remedy.
func (c *Config) Validate() error {
	err := errors.Join(
		c.validateRoles(),
		c.validateListen(),
		c.validateProfileListen(),
		c.validateNATS(),
		c.validateRedis(),
		setting("data", c.Data != "", "must be a directory"),
		setting("memory", c.Memory == 0 || c.Memory >= minMemory, "%s is too little: give at least %s, or 0 for the default",
			c.Memory, minMemory),
		setting("disk-reserve", c.DiskReserve == 0 || c.DiskReserve >= minDiskReserve,
			"%s is too little: give at least %s, or 0 for the default", c.DiskReserve, proto.Bytes(minDiskReserve)),
		setting("tunnel", validHostPort(c.Tunnel), "%q must be HOST:PORT, such as :0 or 10.0.0.7:8090", c.Tunnel),
		setting("sandbox-memory", c.SandboxMemory >= 0, "give a size such as 16GiB, or 0 for the default"),
		setting("sandbox-overcommit", c.SandboxOvercommit >= 1 && c.SandboxOvercommit <= maxOvercommit,
			"%v must be between 1 and %d", c.SandboxOvercommit, maxOvercommit),
		setting("slots", c.Slots >= 0, "give a number of programs, or 0 for the default"),
		setting("slots", c.Slots <= c.UIDRange.Count/UIDsPerSlot, "%d slots need %d user ids, but --uid-range has %d",
			c.Slots, c.Slots*UIDsPerSlot, c.UIDRange.Count),
		setting("default-image", c.DefaultImage == "" || proto.ValidImageName(c.DefaultImage),
			"%q must be the name of an image: 1 to 63 of a-z, 0-9, ., _ and -, the first a letter or digit", c.DefaultImage),
		setting("pool", queue.ValidPool(c.Pool), "%q must be 1 to 63 of a-z, A-Z, 0-9, - and _", c.Pool),
		setting("image-dir", filepath.IsAbs(c.ImageDir), "must be an absolute path"),
		setting("agents", c.Agents == "" || filepath.IsAbs(c.Agents), "must be an absolute path"),
		setting("home", filepath.IsAbs(c.Home) && filepath.Clean(c.Home) == c.Home && strings.Count(c.Home, "/") >= 2,
			"%q must be an absolute path of at least two parts without . or .., such as /home/baponi", c.Home),
		c.validateMounts(),
		setting("region", regionPattern.MatchString(c.Region), "%q must be of a-z and 0-9 only, such as eu1", c.Region),
		c.validateBootstrapKey(),
		positive("drain", c.Drain), positive("queue-wait", c.QueueWait),
		positive("queue-expiry", c.QueueExpiry), positive("retention", c.Retention),
		// Otherwise a record could expire before its job starts.
		setting("retention", c.Retention >= c.QueueExpiry, "%s must not be shorter than --queue-expiry (%s)", c.Retention,
			c.QueueExpiry),
		setting("output-limit", c.OutputLimit > 0 && c.OutputLimit <= proto.MaxOutput,
			"%d bytes must be between 1 byte and %s", int64(c.OutputLimit), proto.MaxOutput),
		setting("output-budget", c.OutputBudget >= 0,
			"%d bytes must not be negative: give a size such as 1GiB, or 0 for no limit", int64(c.OutputBudget)),
		c.validateUpgradeURL(),
		c.validatePublicURL(),
		c.validateOrigins(),
		c.validateSandboxDomain(),
		c.validateLogin(),
		c.validateAgent(),
		setting("tls-cert", (c.TLSCert == "") == (c.TLSKey == ""),
			"--tls-cert and --tls-key go together: set both or neither"),
		c.validateNetworks(),
		c.validateStore(),
		setting("secrets-command", c.SecretsCommand == "" ||
			c.SecretsKey == "", "does not go with --secrets-key: give one of the two"),
		setting("secrets-plain", !c.SecretsPlain || c.SecretsCommand == "" && c.SecretsKey == "",
			"does not go with a key or command"),
		c.validateAutoscale(),
		c.validateHistory(),
		c.validateAudit(),
		setting("thread-expiry", c.ThreadExpiry >= 0,
			"%s must not be negative: give a time such as 720h, or 0 to keep threads forever", c.ThreadExpiry),
		positive("thread-gc", c.ThreadGC),
		positive("save-timeout", c.SaveTimeout),
		setting("log-format", c.LogFormat == LogText || c.LogFormat == LogJSON, "%q must be text or json", c.LogFormat),
	)
	if err != nil && c.File != "" {
		err = fmt.Errorf("%w\n(settings come from flags, BULLPEN_… variables and %s)", err, c.File)
	}
	return err
}

// minMountSpool is the minimum of [Config.MountSpool].
const minMountSpool = proto.MiB

func (c *Config) validateMounts() error {
	errs := []error{
		setting("mount-spool", c.MountSpool >= minMountSpool, "%s is too little: give at least %s", c.MountSpool,
			minMountSpool),
		setting("max-volume-size", c.MaxVolumeSize >= proto.MinVolume && c.MaxVolumeSize <= proto.MaxVolume,
			"%s must be between %s and %s", c.MaxVolumeSize, proto.MinVolume, proto.MaxVolume),
	}
	for _, root := range c.MountRoots {
		errs = append(errs, setting("mount-roots", filepath.IsAbs(root) && filepath.Clean(root) == root && root != "/",
			"%q must be an absolute path without . or .., and not /", root))
	}
	return errors.Join(errs...)
}

func (c *Config) validateRoles() error {
	if err := setting("roles", len(c.Roles) > 0, "name at least one of %s", roleNames(Roles())); err != nil {
		return err
	}
	for i, r := range c.Roles {
		if !slices.Contains(Roles(), r) {
			return setting("roles", false, "unknown role %q: choose from %s", r, roleNames(Roles()))
		}
		if slices.Contains(c.Roles[:i], r) {
			return setting("roles", false, "%q is given twice", r)
		}
	}
	return setting("roles", !c.Embedded() || len(c.Roles) == len(Roles()),
		"a process with only %s needs an external NATS server: set --nats", roleNames(c.Roles))
}

func (c *Config) validateListen() error {
	if c.Listen == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(c.Listen)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	return setting("listen", err == nil, "%q must be HOST:PORT, such as 127.0.0.1:8080", c.Listen)
}

func (c *Config) validateBootstrapKey() error {
	if c.BootstrapKey == "" {
		return nil
	}
	if err := proto.CheckKeyForm(c.BootstrapKey); err != nil {
		return fmt.Errorf("BULLPEN_BOOTSTRAP_KEY: %w", err) // without the value, a secret
	}
	return nil
}

func (c *Config) validateUpgradeURL() error {
	if c.UpgradeURL == "" {
		return nil
	}
	u, err := url.Parse(c.UpgradeURL)
	return setting("upgrade-url", err == nil && u.Host != "" && (u.Scheme == "https" || u.Scheme == "http"),
		"%q must be an http or https URL", c.UpgradeURL)
}

func (c *Config) validatePublicURL() error {
	if c.PublicURL == "" {
		return nil
	}
	u, err := url.Parse(c.PublicURL)
	ok := err == nil && u.Hostname() != "" && (u.Scheme == "https" || u.Scheme == "http") && u.User == nil &&
		u.Opaque == "" &&
		!strings.ContainsAny(c.PublicURL, "?#") && !strings.HasSuffix(c.PublicURL, "/")
	return setting("public-url", ok,
		"must be an http or https URL such as https://bullpen.example.com, without a trailing slash, user, query or fragment")
}

func (c *Config) validateOrigins() error {
	for _, origin := range c.CORSOrigins {
		u, err := url.Parse(origin)
		if err != nil || (u.Scheme != "https" && u.Scheme != "http") || u.Hostname() == "" ||
			origin != u.Scheme+"://"+u.Host {
			return setting("cors-origins", false,
				"%q must be the origin of a page, such as https://app.example.com, without a path and without *", origin)
		}
	}
	return nil
}

func (c *Config) validateAudit() error {
	errs := []error{setting("audit-retention", c.AuditRetention >= 0,
		"%s must not be negative: give a time such as 8760h, or 0 to keep records forever", c.AuditRetention)}
	if c.AuditHTTP != "" {
		// The error omits the URL, which may contain a password.
		u, err := url.Parse(c.AuditHTTP)
		errs = append(errs, setting("audit-http", err == nil && (u.Scheme == "http" || u.Scheme == "https") &&
			u.Hostname() != "", "must be an http or https URL"))
	}
	if c.AuditSyslog != "" {
		_, err := audit.NewSyslogSink(c.AuditSyslog)
		errs = append(errs, setting("audit-syslog", err == nil, "%v", err))
	}
	return errors.Join(errs...)
}

func (c *Config) validateLogin() error {
	if c.OIDCIssuer == "" {
		return setting("oidc-issuer", c.OIDCClientID == "" && c.OIDCSecretFile == "",
			"must be set for --oidc-client-id and --oidc-secret-file")
	}
	return errors.Join(
		setting("oidc-issuer", safeURL(c.OIDCIssuer), "%q must be an https URL, or an http one of this machine",
			c.OIDCIssuer),
		setting("oidc-client-id", c.OIDCClientID != "", "must be set with --oidc-issuer"),
		setting("public-url", safeURL(c.PublicURL),
			"must be set with --oidc-issuer, and be an https URL, or an http one of this machine"),
	)
}

// safeURL reports whether a URL's connection is protected against reading and changes on the way.
func safeURL(text string) bool {
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || u.User != nil || strings.ContainsAny(text, "?#") {
		return false
	}
	addr, err := netip.ParseAddr(u.Hostname())
	return u.Scheme == "https" || u.Scheme == "http" && (u.Hostname() == "localhost" || err == nil && addr.IsLoopback())
}

// validateNetworks checks the settings of webhooks, the ranges of addresses and the ports.
func (c *Config) validateNetworks() error {
	errs := []error{setting("webhook-max-body", c.WebhookMaxBody >= minWebhookBody && c.WebhookMaxBody <= maxWebhookBody,
		"%d bytes must be between %s and %s", int64(c.WebhookMaxBody), minWebhookBody, maxWebhookBody)}
	errs = append(errs, setting("webhook-concurrency", c.WebhookConcurrency >= 1, "%d must be at least 1",
		c.WebhookConcurrency))
	for name, ranges := range map[string][]netip.Prefix{
		"webhook-allow-cidrs": c.WebhookAllowCIDRs,
		"mount-allow-cidrs":   c.MountAllowCIDRs, "trusted-proxies": c.TrustedProxies,
	} {
		for _, p := range ranges {
			errs = append(errs, setting(name, !p.Addr().Is4In6(), "%s must be written as a range of IPv4 addresses", p))
		}
	}
	return errors.Join(errs...)
}

func (c *Config) validateStore() error {
	if c.StoreURL != "" {
		if err := storage.Check(c.StoreURL); err != nil {
			return fmt.Errorf("--store: %w", err)
		}
		return nil
	}
	return setting("store", c.Embedded() || c.Has(RoleGateway) == c.Has(RoleWorker),
		"a process with only %s needs a shared store: give every gateway and worker the same s3://BUCKET/PREFIX, or "+
			"file:///DIR of a shared "+
			"directory", roleNames(c.Roles))
}

func (c *Config) validateHistory() error {
	if c.History == "" {
		return nil
	}
	if err := history.Check(c.History); err != nil {
		return fmt.Errorf("--history: %w", err)
	}
	return nil
}

func (n *NATS) validateNATS() error {
	rest := n.Creds + n.User + n.Password + n.CA + n.Cert + n.Key
	if n.Embedded() {
		return errors.Join(
			setting("nats", rest == "", "credentials or certificates for NATS are set, but no server: give its URL"),
			setting("replicas", n.Replicas == 1, "the embedded NATS stores one copy: set --nats for %d", n.Replicas),
		)
	}
	if path, ok := strings.CutPrefix(n.URL, unixScheme); ok {
		return errors.Join(
			setting("nats", filepath.IsAbs(path) && !strings.Contains(path, ","), "not a socket: write unix:///PATH"),
			setting("nats", rest == "", "a socket needs no credentials and no certificates"),
			setting("replicas", n.Replicas == 1, "the embedded NATS stores one copy: set --nats for %d", n.Replicas),
		)
	}
	for one := range strings.SplitSeq(n.URL, ",") {
		u, err := url.Parse(strings.TrimSpace(one))
		if err != nil || u.Host == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme) {
			// The error omits the URL, which may contain a password.
			return setting("nats", false, "not a NATS URL: write nats://HOST:PORT or tls://HOST:PORT")
		}
	}
	return errors.Join(
		setting("replicas", n.Replicas == 1 || n.Replicas == 3 || n.Replicas == 5, "%d copies: choose 1, 3 or 5", n.Replicas),
		setting("nats-user", (n.User == "") == (n.Password == ""),
			"--nats-user and --nats-password go together: set both or neither"),
		setting("nats-creds", n.Creds == "" || n.User == "", "give a credentials file or a user and password, not both"),
		setting("nats-cert", (n.Cert == "") == (n.Key == ""), "--nats-cert and --nats-key go together: set both or neither"),
	)
}

var databasePattern = regexp.MustCompile(`^(/[0-9]*)?$`)

func (c *Config) validateRedis() error {
	if c.RedisURL == "" {
		return setting("redis-ca", c.RedisCA == "", "certificate authorities for Redis are set, but no server: set --redis")
	}
	u, err := url.Parse(c.RedisURL)
	if err != nil || u.Hostname() == "" || u.Scheme != "redis" && u.Scheme != "rediss" || u.RawQuery != "" ||
		u.Fragment != "" ||
		!databasePattern.MatchString(u.Path) {
		// The error omits the URL, which may contain a password.
		return setting("redis", false,
			"not a Redis URL: write redis://HOST:PORT or rediss://HOST:PORT, with /N for database N")
	}
	return setting("redis-ca", c.RedisCA == "" || u.Scheme == "rediss",
		"certificate authorities need TLS: write rediss:// in --redis")
}

// setting returns nil if ok, otherwise an error for the setting.
func setting(name string, ok bool, format string, args ...any) error {
	if ok {
		return nil
	}
	return fmt.Errorf("--"+name+": "+format, args...)
}

func positive(name string, d time.Duration) error {
	return setting(name, d > 0, "%s must be more than 0, such as 30s or 24h", d)
}

func roleNames(roles []Role) string {
	names := make([]string, len(roles))
	for i, r := range roles {
		names[i] = string(r)
	}
	return strings.Join(names, ", ")
}

// LogValue returns the settings without secrets.
func (c *Config) LogValue() slog.Value {
	return slog.GroupValue(settingAttrs(reflect.ValueOf(c).Elem())...)
}

// settingAttrs returns an attribute for each setting in a struct, with the underscored name of its
// flag.
func settingAttrs(settings reflect.Value) (attrs []slog.Attr) {
	for field, value := range settings.Fields() {
		name := strings.ReplaceAll(field.Tag.Get("name"), "-", "_")
		if field.Anonymous {
			attrs = append(attrs, settingAttrs(value)...)
			continue
		}
		switch field.Tag.Get("secret") {
		case "value":
			attrs = append(attrs, slog.String(name, redact(value.String())))
		case "urls":
			attrs = append(attrs, slog.String(name, redactURLs(value.String())))
		default:
			attrs = append(attrs, slog.String(name, fmt.Sprint(value.Interface())))
		}
	}
	return attrs
}

// redactURLs removes the user names and passwords of URLs that are separated by commas.
func redactURLs(text string) string {
	urls := strings.Split(text, ",")
	for i, one := range urls {
		urls[i] = redactURL(strings.TrimSpace(one))
	}
	return strings.Join(urls, ",")
}

func redactURL(secret string) string {
	u, err := url.Parse(secret)
	if err != nil {
		return "(unreadable)"
	}
	if u.User != nil {
		u.User = url.User("xxxxx") // a user name without a password is a token
	}
	return u.String()
}

func redact(secret string) string {
	if secret == "" {
		return ""
	}
	return "(set)"
}
