package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	secretVariable  = "BULLPEN_WEBHOOK_SECRET"
	maxSecretsBytes = 64 << 10 // of a file with secrets
	maxHookBytes    = 16 << 20 // of a webhook
	// maxConcurrentHooks bounds the webhooks that are read and printed at a time.
	maxConcurrentHooks = 8
	// maxHookIDs is how many webhook-ids are remembered to detect duplicates.
	maxHookIDs = 10_000
	// shutdownTimeout bounds the requests in progress when the command is interrupted.
	shutdownTimeout = 2 * time.Second
)

type webhookListenCommand struct {
	JSON             bool       `name:"json" help:"Print each webhook as one line of JSON."`
	Port             uint16     `default:"8099" placeholder:"N" help:"Port to listen on; 0 for a free one."`
	Address          netip.Addr `default:"127.0.0.1" placeholder:"ADDRESS" help:"Address to listen on. Anyone who can reach it can print here."`
	SecretFile       string     `placeholder:"FILE" help:"File with the key's secret; - for standard input. During a rotation, one secret per line. Default: BULLPEN_WEBHOOK_SECRET."`
	SignatureHeaders *string    `placeholder:"NAME,…" help:"Headers with the hexadecimal signature, as in bullpen key webhook set; empty for none. Default: X-Baponi-Signature,X-Bullpen-Signature."`
	Answer           int        `default:"204" placeholder:"CODE" help:"Status of the responses. Use 503 to see retries."`
}

func (*webhookListenCommand) Help() string {
	return `Checks both signatures of each webhook, prints it and responds, even if verification failed. Duplicates are
recognised by their webhook-id. Ctrl-C stops the command.

By default a server does not send webhooks to private addresses. The command prints the settings that allow it.

Examples:

  bullpen webhook listen --secret-file webhook.secret
  BULLPEN_WEBHOOK_SECRET=$(cat webhook.secret) bullpen webhook listen --port 9000 --json
  bullpen webhook listen --secret-file webhook.secret --answer 503`
}

// Validate checks the flags.
func (c *webhookListenCommand) Validate() error {
	if c.Answer < 200 || c.Answer > 599 {
		return fmt.Errorf("--answer: %d is not a response status: 200 to 599", c.Answer)
	}
	return nil
}

func (c *webhookListenCommand) Run(ctx context.Context, s streams) error {
	secrets, err := c.secrets(s.in)
	if err != nil {
		return err
	}
	l := &hookListener{
		secrets: secrets, headers: proto.DefaultWebhook().SignatureHeaders, answer: c.Answer, json: c.JSON, io: s,
		active: make(chan struct{}, maxConcurrentHooks), broken: make(chan error, 1), times: map[[sha256.Size]byte]int{},
	}
	if c.SignatureHeaders != nil {
		l.headers = splitNames(*c.SignatureHeaders)
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", netip.AddrPortFrom(c.Address, c.Port).String())
	if err != nil {
		return fmt.Errorf("%w: choose another --port", err)
	}
	server := &http.Server{
		Handler: l, MaxHeaderBytes: 16 << 10, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second,
		IdleTimeout: 2 * time.Minute,
		ErrorLog:    log.New(s.err, "bullpen: ", 0),
	}
	l.printInstructions(listener.Addr().(*net.TCPAddr).AddrPort())
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case <-ctx.Done():
	case err = <-l.broken:
	case err := <-served:
		return fmt.Errorf("listen for webhooks: %w", err)
	}
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if server.Shutdown(stopping) != nil {
		_ = server.Close() // slow senders are cut off
	}
	return err
}

// secrets returns the secrets to verify with, if any. Errors never contain a secret.
func (c *webhookListenCommand) secrets(stdin io.Reader) ([]string, error) {
	text, from := os.Getenv(secretVariable), secretVariable
	if c.SecretFile != "" {
		from = "--secret-file"
		if c.SecretFile != "-" {
			file, err := os.Open(c.SecretFile)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", from, err)
			}
			defer file.Close() //nolint:errcheck // only read
			stdin = file
		}
		read, err := io.ReadAll(io.LimitReader(stdin, maxSecretsBytes))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", from, err)
		}
		if text = string(read); strings.TrimSpace(text) == "" {
			return nil, usagef("%s: has no secret", from)
		}
	}
	var secrets []string
	for line := range strings.Lines(text) {
		secret := strings.TrimRight(line, "\r\n")
		if secret == "" {
			continue
		}
		if err := proto.CheckWebhookSecret(secret); err != nil {
			return nil, usagef("%s: %w", from, err)
		}
		secrets = append(secrets, secret)
	}
	return secrets, nil
}

// hookListener receives webhooks and prints them.
type hookListener struct {
	secrets []string
	headers []string // with a hexadecimal signature
	answer  int
	json    bool
	io      streams
	active  chan struct{} // semaphore of the webhooks that are being read and printed
	broken  chan error    // receives an error of standard output

	mu    sync.Mutex
	times map[[sha256.Size]byte]int // number of arrivals by hash of the webhook-id
	order [][sha256.Size]byte       // the keys of times, oldest first
}

// printInstructions prints how to make a server send webhooks here.
func (l *hookListener) printInstructions(at netip.AddrPort) {
	to := at.Addr()
	switch {
	case to.IsUnspecified() && to.Is4():
		to = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case to.IsUnspecified():
		to = netip.IPv6Loopback()
	}
	open := netip.PrefixFrom(to, to.BitLen())
	if to.Is4() && to.IsLoopback() {
		open = netip.MustParsePrefix("127.0.0.0/8")
	}
	url := fmt.Sprintf("http://%s/", netip.AddrPortFrom(to, at.Port()))
	secret := ""
	if len(l.secrets) == 0 {
		secret = `
No secret is configured, so webhooks cannot be verified. The first bullpen key webhook set prints one:

  (umask 077; bullpen key webhook set ` + url + ` >webhook.secret)
  bullpen webhook listen --secret-file webhook.secret
`
	}
	_, _ = fmt.Fprintf(l.io.err, `bullpen: listening on http://%s/, answering %d

Start a development server that may send webhooks here, and set the URL of the key:

  bullpen serve --webhook-allow-http --webhook-allow-cidrs %s --webhook-allow-ports %d
  bullpen key webhook set %s
%s
`, at, l.answer, open, at.Port(), url, secret)
}

// received is a received webhook, as --json prints it.
type received struct {
	At        string           `json:"received_at"`
	Verified  bool             `json:"verified"`
	Problems  []string         `json:"problems"`
	WebhookID string           `json:"webhook_id"`
	Times     int              `json:"times"` // number of arrivals of this id, including this one
	Answer    int              `json:"answer"`
	Event     string           `json:"event"`
	TraceID   string           `json:"trace_id"`
	Status    string           `json:"status"`
	Duration  *int64           `json:"duration_ms"`
	Body      *json.RawMessage `json:"body"` // null if it is not JSON
	hook      hookBody
	at        time.Time
}

// hookBody is the part of a webhook's body that is printed.
type hookBody struct {
	Event     string            `json:"event"`
	TraceID   string            `json:"trace_id"`
	Status    string            `json:"status"`
	Result    *proto.Result     `json:"result"`
	Metadata  map[string]string `json:"metadata"`
	ResultURL string            `json:"result_url"`
}

// ServeHTTP receives a webhook. It prints before it responds, so that the webhook is printed before
// the sender continues.
func (l *hookListener) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		w.WriteHeader(http.StatusMethodNotAllowed)
		l.errorf("refused a %s request: webhooks are POST requests", r.Method)
		return
	}
	select {
	case l.active <- struct{}{}:
		defer func() { <-l.active }()
	case <-r.Context().Done():
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxHookBytes))
	var long *http.MaxBytesError
	switch {
	case errors.As(err, &long):
		w.WriteHeader(http.StatusRequestEntityTooLarge)
		l.errorf("refused a webhook larger than %d MiB", maxHookBytes>>20)
		return
	case err != nil:
		l.errorf("read a webhook: %v", err)
		return
	}
	h := l.receive(r.Header, body)
	if err := l.print(h); err != nil {
		select {
		case l.broken <- fmt.Errorf("print a webhook: %w", err):
		default:
		}
		return
	}
	w.WriteHeader(l.answer)
}

// errorf reports a request that is not a valid webhook.
func (l *hookListener) errorf(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = fmt.Fprintln(l.io.err, strings.Map(printable, fmt.Sprintf("bullpen: "+format, args...)))
}

// receive verifies and decodes a webhook.
func (l *hookListener) receive(header http.Header, body []byte) *received {
	now := time.Now()
	h := &received{at: now, At: now.UTC().Format(proto.TimeLayout), WebhookID: header.Get("Webhook-Id"), Answer: l.answer}
	h.Problems = append([]string{}, verifyWebhook(header, body, l.secrets, l.headers, now)...)
	h.Verified = len(h.Problems) == 0
	if h.WebhookID != "" {
		h.Times = l.count(h.WebhookID)
	}
	if err := json.Unmarshal(body, &h.hook); err != nil {
		h.Problems = append(h.Problems, "invalid body: "+err.Error())
	}
	if json.Valid(body) {
		h.Body = (*json.RawMessage)(&body)
	}
	h.Event, h.TraceID, h.Status = h.hook.Event, h.hook.TraceID, h.hook.Status
	if h.hook.Result != nil {
		h.Duration = &h.hook.Result.DurationMS
	}
	return h
}

// count returns the number of arrivals of a webhook-id, including this one.
func (l *hookListener) count(id string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	hash := sha256.Sum256([]byte(id))
	if l.times[hash] == 0 {
		if l.order = append(l.order, hash); len(l.order) > maxHookIDs {
			delete(l.times, l.order[0])
			l.order = l.order[1:]
		}
	}
	l.times[hash]++
	return l.times[hash]
}

// print prints a webhook in one write.
func (l *hookListener) print(h *received) error {
	text := formatWebhook(h)
	if l.json {
		line, err := json.Marshal(h)
		if err != nil {
			return err
		}
		text = escapeControls(string(line)) + "\n"
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, err := io.WriteString(l.io.out, text)
	return err
}
