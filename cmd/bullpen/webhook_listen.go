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
	secretVariable = "BULLPEN_WEBHOOK_SECRET"
	maxSecrets     = 64 << 10 // bytes of a file with secrets
	// maxListened is how large a webhook may be, in bytes, and readAtOnce how many are read at a time.
	maxListened = 16 << 20
	readAtOnce  = 8
	// maxRemembered is how many webhook-ids are remembered, to tell repetitions.
	maxRemembered = 10_000
	// finishWithin is how long what is under way may go on after the end was asked for.
	finishWithin = 2 * time.Second
)

type webhookListenCommand struct {
	JSON             bool       `name:"json" help:"Print one line of JSON for each webhook."`
	Port             uint16     `default:"8099" placeholder:"N" help:"The port to listen on (${default}); 0 takes a free one."`
	Address          netip.Addr `default:"127.0.0.1" placeholder:"ADDRESS" help:"The address to listen on (${default}). Whoever reaches it can have things printed here."`
	SecretFile       string     `placeholder:"FILE" help:"The key's secret, - for standard input; several, one a line, while one takes the place of another. Else BULLPEN_WEBHOOK_SECRET."`
	SignatureHeaders *string    `placeholder:"NAME,…" help:"The key's headers with the hexadecimal signature, as in bullpen key webhook set; empty for none (X-Baponi-Signature,X-Bullpen-Signature)."`
	Answer           int        `default:"204" placeholder:"CODE" help:"The status to answer with (${default}): 503, to see how webhooks come again."`
}

// Help tells what --help does not know by itself.
func (*webhookListenCommand) Help() string {
	return `A receiver for development. It checks both signatures of each webhook, prints it, and answers, also where it could not be verified. It
tells those that came before, by their webhook-id. Ctrl-C ends it.

A server sends webhooks to this machine only if it is told that it may. It prints how.

Examples:

  bullpen webhook listen --secret-file webhook.secret
  BULLPEN_WEBHOOK_SECRET=$(cat webhook.secret) bullpen webhook listen --port 9000 --json
  bullpen webhook listen --secret-file webhook.secret --answer 503`
}

// Validate checks what the flags say.
func (c *webhookListenCommand) Validate() error {
	if c.Answer < 200 || c.Answer > 599 {
		return fmt.Errorf("--answer: %d is not a status to answer with: 200 to 599", c.Answer)
	}
	return nil
}

// Run carries the command out.
func (c *webhookListenCommand) Run(ctx context.Context, io streams) error {
	secrets, err := c.secrets(io.in)
	if err != nil {
		return err
	}
	l := &hookListener{
		secrets: secrets, headers: proto.DefaultWebhook().SignatureHeaders, answer: c.Answer, json: c.JSON, io: io,
		reading: make(chan struct{}, readAtOnce), broken: make(chan error, 1), times: map[[sha256.Size]byte]int{},
	}
	if c.SignatureHeaders != nil {
		l.headers = namesOf(*c.SignatureHeaders)
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", netip.AddrPortFrom(c.Address, c.Port).String())
	if err != nil {
		return fmt.Errorf("%w: choose another --port", err)
	}
	server := &http.Server{
		Handler: l, MaxHeaderBytes: 16 << 10, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute,
		ErrorLog: log.New(io.err, "bullpen: ", 0),
	}
	l.introduce(listener.Addr().(*net.TCPAddr).AddrPort())
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case <-ctx.Done():
	case err = <-l.broken:
	case err := <-served:
		return fmt.Errorf("listen for webhooks: %w", err)
	}
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), finishWithin)
	defer cancel()
	if server.Shutdown(stopping) != nil {
		_ = server.Close() // whoever is still sending is not waited for
	}
	return err
}

// secrets gives the secrets to verify with, none where none is given. Nothing of them gets into an error.
func (c *webhookListenCommand) secrets(stdin io.Reader) ([]string, error) {
	text, from := os.Getenv(secretVariable), secretVariable
	if c.SecretFile != "" {
		from = "--secret-file"
		if c.SecretFile != "-" {
			file, err := os.Open(c.SecretFile)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", from, err)
			}
			defer file.Close() //nolint:errcheck // it was only read
			stdin = file
		}
		read, err := io.ReadAll(io.LimitReader(stdin, maxSecrets))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", from, err)
		}
		if text = string(read); strings.TrimSpace(text) == "" {
			return nil, usagef("%s: it holds no secret", from)
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

// hookListener takes webhooks and prints them.
type hookListener struct {
	secrets []string
	headers []string // with the hexadecimal signature
	answer  int
	json    bool
	io      streams
	reading chan struct{} // holds one for each webhook that is being read and printed
	broken  chan error    // that nothing more can be printed

	mu     sync.Mutex
	times  map[[sha256.Size]byte]int // how often a webhook-id came, by its hash
	oldest [][sha256.Size]byte       // what times has, in the order in which it came first
}

// introduce tells how to have webhooks sent here.
func (l *hookListener) introduce(at netip.AddrPort) {
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
No secret is known here, so nothing can be verified. The first set prints one, and bullpen key webhook rotate another:

  (umask 077; bullpen key webhook set ` + url + ` >webhook.secret)
  bullpen webhook listen --secret-file webhook.secret
`
	}
	_, _ = fmt.Fprintf(l.io.err, `bullpen: listening on http://%s/, answering %d

To have webhooks sent here, start a server for development so that it may, and give the key this URL:

  bullpen serve --webhook-allow-http --webhook-allow-cidrs %s --webhook-allow-ports %d
  bullpen key webhook set %s
%s
`, at, l.answer, open, at.Port(), url, secret)
}

// received is a webhook that came, in the form that --json prints.
type received struct {
	At        string           `json:"received_at"`
	Verified  bool             `json:"verified"`
	Problems  []string         `json:"problems"`
	WebhookID string           `json:"webhook_id"`
	Times     int              `json:"times"` // that this id came, this time included
	Answer    int              `json:"answer"`
	Event     string           `json:"event"`
	TraceID   string           `json:"trace_id"`
	Status    string           `json:"status"`
	Duration  *int64           `json:"duration_ms"`
	Body      *json.RawMessage `json:"body"` // null where it is not JSON
	hook      hookBody
	at        time.Time
}

// hookBody is what is printed of the body of a webhook.
type hookBody struct {
	Event     string            `json:"event"`
	TraceID   string            `json:"trace_id"`
	Status    string            `json:"status"`
	Result    *proto.Result     `json:"result"`
	Metadata  map[string]string `json:"metadata"`
	ResultURL string            `json:"result_url"`
}

// ServeHTTP takes a webhook. It is printed before it is answered: who has seen the answer can look for it.
func (l *hookListener) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		w.WriteHeader(http.StatusMethodNotAllowed)
		l.note("a %s was refused: webhooks are POSTs", r.Method)
		return
	}
	select {
	case l.reading <- struct{}{}:
		defer func() { <-l.reading }()
	case <-r.Context().Done():
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxListened))
	var long *http.MaxBytesError
	switch {
	case errors.As(err, &long):
		w.WriteHeader(http.StatusRequestEntityTooLarge)
		l.note("a webhook of more than %d MiB was refused", maxListened>>20)
		return
	case err != nil:
		l.note("a webhook broke off: %v", err)
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

// note tells of a request that was no webhook.
func (l *hookListener) note(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = fmt.Fprintln(l.io.err, strings.Map(printable, fmt.Sprintf("bullpen: "+format, args...)))
}

// receive finds out what is to be said of a webhook.
func (l *hookListener) receive(header http.Header, body []byte) *received {
	now := time.Now()
	h := &received{at: now, At: now.UTC().Format(proto.TimeLayout), WebhookID: header.Get("Webhook-Id"), Answer: l.answer}
	h.Problems = append([]string{}, verifyWebhook(header, body, l.secrets, l.headers, now)...)
	h.Verified = len(h.Problems) == 0
	if h.WebhookID != "" {
		h.Times = l.count(h.WebhookID)
	}
	if err := json.Unmarshal(body, &h.hook); err != nil {
		h.Problems = append(h.Problems, "its body is not that of a webhook: "+err.Error())
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

// count tells how often a webhook-id has come now.
func (l *hookListener) count(id string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	hash := sha256.Sum256([]byte(id))
	if l.times[hash] == 0 {
		if l.oldest = append(l.oldest, hash); len(l.oldest) > maxRemembered {
			delete(l.times, l.oldest[0])
			l.oldest = l.oldest[1:]
		}
	}
	l.times[hash]++
	return l.times[hash]
}

// print prints a webhook in one piece.
func (l *hookListener) print(h *received) error {
	text := pretty(h)
	if l.json {
		line, err := json.Marshal(h)
		if err != nil {
			return err
		}
		text = harmless(string(line)) + "\n"
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, err := io.WriteString(l.io.out, text)
	return err
}
