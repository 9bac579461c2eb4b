package app

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage"
)

// Role is a part of bullpen that a process can play.
type Role string

// The roles. A process with all of them needs no other service.
const (
	RoleGateway   Role = "gateway"   // answers HTTP
	RoleWorker    Role = "worker"    // runs programs in jails
	RoleScheduler Role = "scheduler" // hands queued jobs to free slots; one leads, and every gateway stands by for it too
	RoleWebhook   Role = "webhook"   // sends results to their receivers; one leads, and every gateway stands by for it too
)

// Roles lists every role.
func Roles() []Role { return []Role{RoleGateway, RoleWorker, RoleScheduler, RoleWebhook} }

// Config is everything that can be set. Each setting is a flag of the same name, an environment variable and a key of the
// YAML file: a flag wins over the environment, the environment over the file, the file over the default.
type Config struct {
	// File is the YAML file with settings; empty for none.
	File configFile `name:"config" env:"BULLPEN_CONFIG" placeholder:"FILE" help:"YAML file with settings, under the names of these flags. Flags and environment variables win over it."`

	// Listen is the address of the HTTP server, HOST:PORT; empty for the default, see [Config.Address]. Port 0 takes a free one.
	Listen string `name:"listen" group:"Server" env:"BULLPEN_LISTEN" placeholder:"HOST:PORT" help:"Address to answer HTTP on (127.0.0.1:8080; without the gateway role none, and where it is given only health and metrics). Port 0 takes a free one."`
	// Data is the directory of everything that must survive a restart. It is created.
	Data string `name:"data" group:"Server" env:"BULLPEN_DATA" default:"./bullpen-data" placeholder:"DIR" help:"Directory of what must survive a restart (${default}); created, and used by one process at a time."`
	// Roles are the parts this process plays.
	Roles []Role `name:"roles" group:"Server" env:"BULLPEN_ROLES" default:"gateway,worker,scheduler,webhook" placeholder:"ROLE" help:"Parts this process plays (${default}). Fewer than all need --nats."`
	// Drain is how long running jobs may go on after SIGTERM before they are killed.
	Drain time.Duration `name:"drain" group:"Server" env:"BULLPEN_DRAIN" default:"30s" placeholder:"TIME" help:"How long running jobs may go on after SIGTERM (${default})."`
	// Memory is what this process may use, the programs that it runs aside; 0 chooses, see [Config.MemoryLimit].
	Memory proto.Bytes `name:"memory" group:"Server" env:"BULLPEN_MEMORY" default:"0" placeholder:"SIZE" help:"Memory that this process may use, the programs that it runs aside: requests and queued executions that need more are refused. 0, the default, is a quarter of what the machine or container has."`

	// ProfileListen is where this process tells what it does, ADDRESS:PORT of a loopback; empty for nowhere.
	ProfileListen string `name:"profile-listen" group:"Server" env:"BULLPEN_PROFILE_LISTEN" placeholder:"ADDRESS:PORT" help:"Loopback address to tell profiles of this process on, for go tool pprof: 127.0.0.1:6060. Everybody on this machine can read them. Without it, nobody can."`

	NATS `embed:""`

	// RedisURL is where timers are kept; empty keeps them inside this process.
	RedisURL string `name:"redis" group:"Redis" env:"BULLPEN_REDIS" placeholder:"URL" help:"Redis for timers: redis://HOST:PORT/DB, or rediss:// for TLS. Without it, one runs inside this process. Processes of the same host can read flags: give a password in the environment variable."`
	// RedisCA is a file of the certificate authorities that sign the certificate of Redis; empty for the system's.
	RedisCA string `name:"redis-ca" group:"Redis" env:"BULLPEN_REDIS_CA" placeholder:"FILE" help:"Certificate authorities to trust for Redis over TLS, PEM."`

	// Slots is how many programs the worker runs at once; 0 chooses, see [Config.SlotCount].
	Slots int `name:"slots" group:"Worker" env:"BULLPEN_SLOTS" default:"0" placeholder:"N" help:"Programs this worker runs at once. 0, the default, is 4 for each core, and no more than there are GiB of memory."`
	// WarmMemory is what jails may hold that are made before they are asked for; 0 chooses.
	WarmMemory proto.Bytes `name:"warm-memory" group:"Worker" env:"BULLPEN_WARM_MEMORY" default:"0" placeholder:"SIZE" help:"Memory for sandboxes that are made ready before they are asked for, interpreter and all, and for those that others are forked from. 0, the default, is a sixteenth of what the machine or container has; 1 has none made."`
	// NsjailPath is the nsjail program; empty looks beside the executable and on the PATH.
	NsjailPath string `name:"nsjail" group:"Worker" env:"BULLPEN_NSJAIL" placeholder:"PATH" help:"The nsjail program. Without it, the one beside the bullpen program is taken, else the one on the PATH."`
	// UIDRange is the range of the host's user ids that jails take theirs from, [UIDsPerSlot] each.
	UIDRange UIDRange `name:"uid-range" group:"Worker" env:"BULLPEN_UID_RANGE" default:"1900000000:8192" placeholder:"FIRST:COUNT" help:"User ids for jails, two for each slot of all workers of a machine (${default}, which no login, container or service manager hands out)."`
	// ImageDir is where images of sandboxes are kept unpacked.
	ImageDir string `name:"image-dir" group:"Worker" env:"BULLPEN_IMAGE_DIR" default:"/var/cache/bullpen/images" placeholder:"DIR" help:"Directory for unpacked sandbox images (${default}); made with the first image. Every user must be able to pass through the directories above it."`
	// Home is the home and working directory of programs, inside the jail.
	Home string `name:"home" group:"Worker" env:"BULLPEN_HOME" default:"/home/baponi" placeholder:"DIR" help:"Home and working directory of programs, inside the jail (${default})."`

	// StoreURL is the blob store, as storage.Open takes it; empty for the default, see [Config.StoreLocation].
	StoreURL string `name:"store" group:"Threads" env:"BULLPEN_STORE" placeholder:"URL" help:"Where the files of threads and images are kept: file:///DIR or s3://BUCKET/PREFIX?endpoint=…&region=…&path_style=1 (blobs in the data directory). The same for every gateway and worker. S3 credentials come from the usual AWS variables and files."`
	// StoreKey is a file with the key that they are encrypted with before they are stored; empty for none.
	StoreKey string `name:"store-key" group:"Threads" env:"BULLPEN_STORE_KEY" placeholder:"FILE" help:"Key to encrypt them with before they are stored, as age-keygen makes it. The same for every gateway and worker; without it they cannot be read again."`
	// HomeCache is how much disk a worker uses for homes of threads that it may need again.
	HomeCache proto.Bytes `name:"home-cache" group:"Threads" env:"BULLPEN_HOME_CACHE" default:"10GiB" placeholder:"SIZE" help:"Disk, in the data directory, that a worker uses to have the homes of recent threads at hand (${default})."`
	// ThreadExpiry is how long after its last use a thread is removed; 0 for never.
	ThreadExpiry time.Duration `name:"thread-expiry" group:"Threads" env:"BULLPEN_THREAD_EXPIRY" default:"0s" placeholder:"TIME" help:"How long after its last use a thread is removed, with its files. 0, the default, keeps threads for ever."`
	// ThreadGC is how often what no thread refers to is removed from the store.
	ThreadGC time.Duration `name:"thread-gc" group:"Threads" env:"BULLPEN_THREAD_GC" default:"1h" placeholder:"TIME" help:"How often what no thread refers to any more is looked for in the store and removed (${default})."`

	// WebhookConcurrency is how many webhooks of an organisation may be on their way to one server at once.
	WebhookConcurrency int `name:"webhook-concurrency" group:"Webhooks" env:"BULLPEN_WEBHOOK_CONCURRENCY" default:"5" placeholder:"N" help:"Webhooks of an organisation that may be on their way to one server at once (${default})."`
	// WebhookMaxBody is how large the body of a webhook may be.
	WebhookMaxBody proto.Bytes `name:"webhook-max-body" group:"Webhooks" env:"BULLPEN_WEBHOOK_MAX_BODY" default:"1MiB" placeholder:"SIZE" help:"How large a webhook may be (${default}). Of longer outputs it has the beginnings."`
	// What is open to webhooks besides public addresses over https, on the ports 443 and 8443.
	WebhookAllowCIDRs []netip.Prefix `name:"webhook-allow-cidrs" group:"Webhooks" env:"BULLPEN_WEBHOOK_ALLOW_CIDRS" placeholder:"CIDR" help:"Ranges of addresses that webhooks may go to although they are not public. For development and tests: whoever has an API key gets in there."`
	WebhookAllowHTTP  bool           `name:"webhook-allow-http" group:"Webhooks" env:"BULLPEN_WEBHOOK_ALLOW_HTTP" help:"Let webhooks go over plain http too, on port 80."`
	WebhookAllowPorts []int          `name:"webhook-allow-ports" group:"Webhooks" env:"BULLPEN_WEBHOOK_ALLOW_PORTS" placeholder:"PORT" help:"Ports that webhooks may go to besides 443 and 8443."`
	// WebhookCAFile has certificates of authorities that are trusted for webhooks besides the system's; empty for none.
	WebhookCAFile string `name:"webhook-ca-file" group:"Webhooks" env:"BULLPEN_WEBHOOK_CA_FILE" placeholder:"FILE" help:"Certificate authorities to trust for webhooks besides the system's, PEM."`

	// Region is the second part of the API keys made here.
	Region string `name:"region" group:"Server" env:"BULLPEN_REGION" default:"local" placeholder:"NAME" help:"Region named in new API keys: sk-REGION-… (${default})."`
	// BootstrapKey is the first API key, with all rights; empty makes one. It may not be given as a flag.
	BootstrapKey string `name:"bootstrap-key" env:"BULLPEN_BOOTSTRAP_KEY" hidden:""`
	// QueueWait is how long an inline or streaming job waits for a free slot before it is withdrawn.
	QueueWait time.Duration `name:"queue-wait" group:"Executions" env:"BULLPEN_QUEUE_WAIT" default:"3s" placeholder:"TIME" help:"How long an inline or streaming execution waits for a free slot (${default})."`
	// QueueExpiry is how long an async job waits for a free slot before it is withdrawn.
	QueueExpiry time.Duration `name:"queue-expiry" group:"Executions" env:"BULLPEN_QUEUE_EXPIRY" default:"24h" placeholder:"TIME" help:"How long an async execution waits for a free slot (${default})."`
	// Retention is how long records and events of an execution are kept once it has ended.
	Retention time.Duration `name:"retention" group:"Executions" env:"BULLPEN_RETENTION" default:"168h" placeholder:"TIME" help:"How long records and output of executions are kept (${default})."`
	// OutputLimit is how much of each output stream a result keeps, unless a sandbox profile says it.
	OutputLimit proto.Bytes `name:"output-limit" group:"Executions" env:"BULLPEN_OUTPUT_LIMIT" default:"16MiB" placeholder:"SIZE" help:"How much of each output stream a result keeps (${default})."`
	// UpgradeURL is where messages about a plan's limits send people.
	UpgradeURL string `name:"upgrade-url" group:"Server" env:"BULLPEN_UPGRADE_URL" default:"https://github.com/bullpen-run/bullpen#plans" placeholder:"URL" help:"Where messages about the limits of a plan send people (${default})."`

	// PublicURL is where clients reach this server; empty where nobody said. Without a slash at the end.
	PublicURL string `name:"public-url" group:"Server" env:"BULLPEN_PUBLIC_URL" placeholder:"URL" help:"Where clients reach this server, for links to it in webhooks and for URLs of files: https://HOST, or with a path. Without it, URLs of files begin with the Host of the request."`

	// LogLevel is the least level that is logged.
	LogLevel slog.Level `name:"log-level" group:"Log" env:"BULLPEN_LOG_LEVEL" default:"info" placeholder:"LEVEL" help:"Least level that is logged: debug, info, warn or error (${default})."`
	// LogFormat is the form of log lines, on standard error.
	LogFormat LogFormat `name:"log-format" group:"Log" env:"BULLPEN_LOG_FORMAT" default:"text" placeholder:"FORMAT" help:"Form of log lines: text or json (${default})."`
}

// The limits of [Config.WebhookMaxBody]: room for all that is not output, and for all output.
const (
	minWebhookBody = 32 * proto.KiB
	maxWebhookBody = proto.MaxOutput
)

// NATS is how to reach NATS. With an empty URL, NATS runs inside this process and the rest must be empty.
type NATS struct {
	URL      string `name:"nats" group:"NATS" env:"BULLPEN_NATS" placeholder:"URL" help:"NATS servers with JetStream, separated by commas. Without it, one runs inside this process."`
	Creds    string `name:"nats-creds" group:"NATS" env:"BULLPEN_NATS_CREDS" placeholder:"FILE" help:"Credentials file for NATS."`
	User     string `name:"nats-user" group:"NATS" env:"BULLPEN_NATS_USER" placeholder:"NAME" help:"User name for NATS."`
	Password string `name:"nats-password" group:"NATS" env:"BULLPEN_NATS_PASSWORD" placeholder:"PASSWORD" help:"Password for NATS. Processes of the same host can read flags: prefer the environment variable."`
	CA       string `name:"nats-ca" group:"NATS" env:"BULLPEN_NATS_CA" placeholder:"FILE" help:"Certificate authorities to trust for NATS over TLS, PEM."`
	Cert     string `name:"nats-cert" group:"NATS" env:"BULLPEN_NATS_CERT" placeholder:"FILE" help:"Client certificate for NATS over TLS, PEM."`
	Key      string `name:"nats-key" group:"NATS" env:"BULLPEN_NATS_KEY" placeholder:"FILE" help:"Key of the client certificate, PEM."`
	// Replicas is how many NATS servers keep each stream.
	Replicas int `name:"replicas" group:"NATS" env:"BULLPEN_REPLICAS" default:"1" placeholder:"N" help:"NATS servers that keep a copy of the queue: 1, 3 or 5 (${default})."`
}

// Embedded reports whether NATS runs inside this process.
func (n *NATS) Embedded() bool { return n.URL == "" }

// defaultListen is where a gateway listens that is not told otherwise.
const defaultListen = "127.0.0.1:8080"

// Address is where this process answers HTTP; empty for nowhere. A process without the gateway role has nothing to say but its health
// and figures, and takes no port for them unless it is told to: several may run on one machine.
func (c *Config) Address() string {
	if c.Listen == "" && c.Has(RoleGateway) {
		return defaultListen
	}
	return c.Listen
}

// Has reports whether this process plays role.
func (c *Config) Has(role Role) bool { return slices.Contains(c.Roles, role) }

var regionPattern = regexp.MustCompile(`^[a-z0-9]+$`)

// UIDsPerSlot is how many user ids a jail takes: one for its init, one for the program.
const UIDsPerSlot = 2

// Validate checks everything that can be checked without touching the system. Each of its errors names the setting and what
// to do; they are joined.
func (c *Config) Validate() error {
	err := errors.Join(
		c.validateRoles(),
		c.validateListen(),
		c.validateProfileListen(),
		c.validateNATS(),
		c.validateRedis(),
		setting("data", c.Data != "", "name a directory"),
		setting("memory", c.Memory == 0 || c.Memory >= minMemory, "%s is too little: give %s or more, or 0 to have it chosen", c.Memory, minMemory),
		setting("slots", c.Slots >= 0, "give a number of programs to run at once, or 0 to have it chosen"),
		setting("slots", c.Slots <= c.UIDRange.Count/UIDsPerSlot, "%d slots need %d user ids and --uid-range has %d: widen it", c.Slots, c.Slots*UIDsPerSlot, c.UIDRange.Count),
		setting("image-dir", filepath.IsAbs(c.ImageDir), "name an absolute path"),
		setting("home", filepath.IsAbs(c.Home) && filepath.Clean(c.Home) == c.Home && strings.Count(c.Home, "/") >= 2,
			"%q must be an absolute path of at least two parts without . or .., such as /home/baponi", c.Home),
		setting("region", regionPattern.MatchString(c.Region), "%q must be of a-z and 0-9 only, such as eu1", c.Region),
		c.validateBootstrapKey(),
		positive("drain", c.Drain), positive("queue-wait", c.QueueWait),
		positive("queue-expiry", c.QueueExpiry), positive("retention", c.Retention),
		// A record that goes before its job could: the job would seem never to have run.
		setting("retention", c.Retention >= c.QueueExpiry, "%s is shorter than --queue-expiry (%s): a record is kept at least as long as a job may wait", c.Retention, c.QueueExpiry),
		setting("output-limit", c.OutputLimit > 0 && c.OutputLimit <= proto.MaxOutput, "%d bytes must be between 1 byte and %s", int64(c.OutputLimit), proto.MaxOutput),
		c.validateUpgradeURL(),
		c.validatePublicURL(),
		c.validateWebhooks(),
		c.validateStore(),
		setting("thread-expiry", c.ThreadExpiry >= 0, "%s is less than 0: give a time such as 720h, or 0 to keep threads for ever", c.ThreadExpiry),
		positive("thread-gc", c.ThreadGC),
		setting("log-format", c.LogFormat == LogText || c.LogFormat == LogJSON, "%q must be text or json", c.LogFormat),
	)
	if err != nil && c.File != "" {
		err = fmt.Errorf("%w\n(settings come from flags, BULLPEN_… variables, and %s)", err, c.File)
	}
	return err
}

func (c *Config) validateRoles() error {
	if err := setting("roles", len(c.Roles) > 0, "name at least one of %s", roleNames(Roles())); err != nil {
		return err
	}
	for i, r := range c.Roles {
		if !slices.Contains(Roles(), r) {
			return setting("roles", false, "there is no role %q: choose from %s", r, roleNames(Roles()))
		}
		if slices.Contains(c.Roles[:i], r) {
			return setting("roles", false, "%q is named twice", r)
		}
	}
	return setting("roles", !c.Embedded() || len(c.Roles) == len(Roles()),
		"a process with only %s needs a NATS that the others reach too: set --nats", roleNames(c.Roles))
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
		return fmt.Errorf("BULLPEN_BOOTSTRAP_KEY: %w", err) // never the value: it is a secret
	}
	return nil
}

func (c *Config) validateUpgradeURL() error {
	u, err := url.Parse(c.UpgradeURL)
	return setting("upgrade-url", err == nil && u.Host != "" && (u.Scheme == "https" || u.Scheme == "http"),
		"%q must be an http or https URL", c.UpgradeURL)
}

func (c *Config) validatePublicURL() error {
	if c.PublicURL == "" {
		return nil
	}
	u, err := url.Parse(c.PublicURL)
	ok := err == nil && u.Hostname() != "" && (u.Scheme == "https" || u.Scheme == "http") && u.User == nil && u.Opaque == "" &&
		!strings.ContainsAny(c.PublicURL, "?#") && !strings.HasSuffix(c.PublicURL, "/")
	return setting("public-url", ok, "must be an http or https URL such as https://bullpen.example.com, without a slash at the end, a user, a query or a fragment")
}

func (c *Config) validateWebhooks() error {
	errs := []error{setting("webhook-max-body", c.WebhookMaxBody >= minWebhookBody && c.WebhookMaxBody <= maxWebhookBody,
		"%d bytes must be between %s and %s", int64(c.WebhookMaxBody), minWebhookBody, maxWebhookBody)}
	errs = append(errs, setting("webhook-concurrency", c.WebhookConcurrency >= 1, "%d must be at least 1", c.WebhookConcurrency))
	for _, p := range c.WebhookAllowCIDRs {
		errs = append(errs, setting("webhook-allow-cidrs", !p.Addr().Is4In6(), "%s must be written as a range of IPv4 addresses", p))
	}
	for _, port := range c.WebhookAllowPorts {
		errs = append(errs, setting("webhook-allow-ports", port >= 1 && port <= 65535, "%d must be 1 to 65535", port))
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
		"a process with only %s keeps files of threads and images where the others do not find them: give every gateway and worker the same s3://BUCKET/PREFIX, "+
			"or file:///DIR with a directory that they share", roleNames(c.Roles))
}

func (n *NATS) validateNATS() error {
	rest := n.Creds + n.User + n.Password + n.CA + n.Cert + n.Key
	if n.Embedded() {
		return errors.Join(
			setting("nats", rest == "", "credentials and certificates for NATS are set but no server is: give its URL"),
			setting("replicas", n.Replicas == 1, "NATS inside this process keeps one copy: set --nats for %d", n.Replicas),
		)
	}
	for one := range strings.SplitSeq(n.URL, ",") {
		u, err := url.Parse(strings.TrimSpace(one))
		if err != nil || u.Host == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme) {
			// The URL itself may hold a password, so that it is not repeated.
			return setting("nats", false, "not a NATS URL: write nats://HOST:PORT or tls://HOST:PORT")
		}
	}
	return errors.Join(
		setting("replicas", n.Replicas == 1 || n.Replicas == 3 || n.Replicas == 5, "%d copies: choose 1, 3 or 5", n.Replicas),
		setting("nats-user", (n.User == "") == (n.Password == ""), "--nats-user and --nats-password go together: set both or neither"),
		setting("nats-creds", n.Creds == "" || n.User == "", "give a credentials file or a user and password, not both"),
		setting("nats-cert", (n.Cert == "") == (n.Key == ""), "--nats-cert and --nats-key go together: set both or neither"),
	)
}

var databasePattern = regexp.MustCompile(`^(/[0-9]*)?$`)

func (c *Config) validateRedis() error {
	if c.RedisURL == "" {
		return setting("redis-ca", c.RedisCA == "", "certificate authorities for Redis are set but no server is: give --redis its URL")
	}
	u, err := url.Parse(c.RedisURL)
	if err != nil || u.Hostname() == "" || u.Scheme != "redis" && u.Scheme != "rediss" || u.RawQuery != "" || u.Fragment != "" ||
		!databasePattern.MatchString(u.Path) {
		// The URL itself may hold a password, so that it is not repeated.
		return setting("redis", false, "not a Redis URL: write redis://HOST:PORT or rediss://HOST:PORT, with /N for the database of that number")
	}
	return setting("redis-ca", c.RedisCA == "" || u.Scheme == "rediss", "certificate authorities are of no use without TLS: write rediss:// in --redis")
}

// setting gives nil when ok, else the error of the setting name.
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

// LogValue gives the settings for a log line, secrets left out.
func (c *Config) LogValue() slog.Value {
	return slog.GroupValue(
		slog.String("config", string(c.File)), slog.String("listen", c.Listen), slog.String("data", c.Data),
		slog.String("roles", roleNames(c.Roles)), slog.Duration("drain", c.Drain), slog.String("memory", c.Memory.String()),
		slog.String("profile_listen", c.ProfileListen), slog.Any("nats", &c.NATS),
		slog.String("redis", redactURL(c.RedisURL)), slog.String("redis_ca", c.RedisCA),
		slog.Int("slots", c.Slots), slog.String("nsjail", c.NsjailPath), slog.String("image_dir", c.ImageDir), slog.String("uid_range", c.UIDRange.String()),
		slog.String("store", redactURL(c.StoreURL)), slog.String("store_key", c.StoreKey), slog.String("home_cache", c.HomeCache.String()),
		slog.Duration("thread_expiry", c.ThreadExpiry), slog.Duration("thread_gc", c.ThreadGC),
		slog.String("home", c.Home), slog.String("region", c.Region), slog.String("bootstrap_key", redact(c.BootstrapKey)),
		slog.Duration("queue_wait", c.QueueWait), slog.Duration("queue_expiry", c.QueueExpiry),
		slog.Duration("retention", c.Retention), slog.String("output_limit", c.OutputLimit.String()),
		slog.String("upgrade_url", c.UpgradeURL), slog.String("public_url", c.PublicURL),
		slog.Any("webhook_allow_cidrs", c.WebhookAllowCIDRs), slog.Bool("webhook_allow_http", c.WebhookAllowHTTP), slog.Any("webhook_allow_ports", c.WebhookAllowPorts),
		slog.String("webhook_ca_file", c.WebhookCAFile), slog.String("webhook_max_body", c.WebhookMaxBody.String()), slog.Int("webhook_concurrency", c.WebhookConcurrency),
		slog.String("log_level", c.LogLevel.String()),
		slog.String("log_format", string(c.LogFormat)),
	)
}

// LogValue gives the settings for a log line, secrets left out, also those inside the URLs.
func (n *NATS) LogValue() slog.Value {
	if n.Embedded() {
		return slog.StringValue("embedded")
	}
	var urls []string
	for one := range strings.SplitSeq(n.URL, ",") {
		urls = append(urls, redactURL(strings.TrimSpace(one)))
	}
	return slog.GroupValue(
		slog.String("url", strings.Join(urls, ",")), slog.String("creds", n.Creds), slog.String("user", n.User),
		slog.String("password", redact(n.Password)), slog.String("ca", n.CA), slog.String("cert", n.Cert),
		slog.String("key", n.Key), slog.Int("replicas", n.Replicas),
	)
}

func redactURL(secret string) string {
	u, err := url.Parse(secret)
	if err != nil {
		return "(unreadable)"
	}
	if u.User != nil {
		u.User = url.User("xxxxx") // all of it: a user without a password is a token
	}
	return u.String()
}

func redact(secret string) string {
	if secret == "" {
		return ""
	}
	return "(set)"
}
