package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

type keyWebhookCommands struct {
	Show   keyWebhookShowCommand   `cmd:"" help:"Show the webhook settings, without the secret."`
	Set    keyWebhookSetCommand    `cmd:"" help:"Set where results go and how. The first time a secret is made, and shown once."`
	Rotate keyWebhookRotateCommand `cmd:"" help:"Make another secret, shown once; the one before signs too for a while."`
	Rm     keyWebhookRmCommand     `cmd:"" help:"Remove the webhook settings, the secret too."`
}

type keyWebhookShowCommand struct {
	remote `embed:""`
}

// Run carries the command out.
func (c *keyWebhookShowCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	w, raw, err := api.Webhook(ctx)
	if err != nil {
		return err
	}
	return printWebhook(io, c.JSON, w, raw)
}

// printWebhook prints settings, or a secret that was just made: alone on standard output, so that a script can keep it.
func printWebhook(io streams, asJSON bool, w *client.Webhook, raw json.RawMessage) error {
	if asJSON {
		return printRaw(io.out, raw)
	}
	if w.Secret != "" {
		if w.OldSecretUntil != nil {
			_, _ = fmt.Fprintf(io.err, "The secret before signs too until %s.\n", w.OldSecretUntil.Local().Format(timeLayout))
		}
		_, _ = fmt.Fprintln(io.err, "The secret that webhooks are signed with. It is not shown again:")
		_, err := fmt.Fprintln(io.out, w.Secret)
		return err
	}
	t := tabwriter.NewWriter(io.out, 0, 0, 2, ' ', 0)
	row := func(name, value string) { _, _ = fmt.Fprintf(t, "%s\t%s\n", name, value) } // Flush gives the error
	row("url", orDash(w.URL))
	if w.SecretHint == nil {
		row("secret", "none, so nothing is signed: see bullpen key webhook rotate")
	} else {
		row("secret", *w.SecretHint)
	}
	if w.OldSecretUntil != nil {
		row("old secret", "signs too until "+w.OldSecretUntil.Local().Format(timeLayout))
	}
	row("max attempts", strconv.Itoa(w.MaxAttempts))
	var waits []string
	for _, s := range w.Waits {
		waits = append(waits, secondsOf(s).String())
	}
	row("waits", strings.Join(waits, ","))
	row("signature headers", strings.Join(w.SignatureHeaders, ","))
	row("timeout", secondsOf(w.Timeout).String())
	row("updated", w.UpdatedAt.Local().Format(timeLayout))
	return t.Flush()
}

func orDash(s *string) string {
	if s == nil {
		return "-"
	}
	return *s
}

func secondsOf(f float64) time.Duration { return time.Duration(f * float64(time.Second)) }

type keyWebhookSetCommand struct {
	remote           `embed:""`
	Secret           *string   `placeholder:"-" help:"The secret to sign with, 16 characters or more; - reads it from standard input. Other users of this machine can read flags: prefer that."`
	MaxAttempts      *int      `placeholder:"N" help:"How often a delivery is tried: 1 to 20."`
	Waits            *string   `placeholder:"WAIT,…" help:"Pauses before the second attempt, the third and so on, such as 1s,10s,1m; or durable: ten attempts over three days."`
	SignatureHeaders *string   `placeholder:"NAME,…" help:"Headers with the hexadecimal signature; empty for none."`
	Timeout          *duration `placeholder:"TIME" help:"How long one attempt may take, such as 15s: up to 30s."`
	Target           *string   `arg:"" optional:"" name:"target" help:"The URL that results of async executions go to that name no webhook_url themselves."`
}

// Help tells what --help does not know by itself.
func (*keyWebhookSetCommand) Help() string {
	return `The settings are those of the key that asks: BULLPEN_API_KEY or --key. The first time, the URL is needed, and a secret is made unless one
is given. After that, what is not named stays as it is. A secret in the place of another: the one before signs too for a day.

Examples:

  bullpen key webhook set https://ci.example.com/hooks/bullpen
  bullpen key webhook set --waits 1s,10s,1m --max-attempts 4
  bullpen key webhook set --waits durable
  bullpen key webhook set --secret - <secret.txt`
}

// duration is a flag's time: a number of seconds, or one with a unit such as 500ms.
type duration time.Duration

// UnmarshalText reads it.
func (d *duration) UnmarshalText(text []byte) error {
	if f, err := strconv.ParseFloat(string(text), 64); err == nil && f >= 0 && f < 1e9 {
		*d = duration(secondsOf(f))
		return nil
	}
	parsed, err := time.ParseDuration(string(text))
	if err != nil || parsed < 0 {
		return fmt.Errorf("%q is not a time: write seconds, or a number with a unit such as 500ms or 1m", text)
	}
	*d = duration(parsed)
	return nil
}

func (d duration) seconds() float64 { return time.Duration(d).Seconds() }

// settings gives what the flags name.
func (c *keyWebhookSetCommand) settings(stdin io.Reader) (*client.WebhookSettings, error) {
	s := &client.WebhookSettings{URL: c.Target, MaxAttempts: c.MaxAttempts}
	if c.Waits != nil {
		s.Waits = *c.Waits
		if *c.Waits != "durable" {
			waits := []float64{}
			for text := range strings.SplitSeq(*c.Waits, ",") {
				var wait duration
				if err := wait.UnmarshalText([]byte(strings.TrimSpace(text))); err != nil {
					return nil, usagef("--waits: %w", err)
				}
				waits = append(waits, wait.seconds())
			}
			s.Waits = waits
		}
	}
	if c.SignatureHeaders != nil {
		s.SignatureHeaders = new(namesOf(*c.SignatureHeaders))
	}
	if c.Timeout != nil {
		s.Timeout = new(c.Timeout.seconds())
	}
	if *s == (client.WebhookSettings{}) && c.Secret == nil {
		return nil, usagef("nothing to set: give the URL, or one of the flags")
	}
	if c.Secret != nil {
		secret, err := secretOf(*c.Secret, stdin)
		if err != nil {
			return nil, err
		}
		s.Secret = &secret
	}
	return s, nil
}

// namesOf reads a list of names that commas separate.
func namesOf(list string) []string {
	names := []string{}
	for name := range strings.SplitSeq(list, ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// secretOf gives the secret that a flag names: its value, or what standard input has for "-".
func secretOf(flag string, stdin io.Reader) (string, error) {
	secret := flag
	if flag == "-" {
		line, err := bufio.NewReader(io.LimitReader(stdin, 64<<10)).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return "", fmt.Errorf("read the secret from standard input: %w", err)
		}
		secret = strings.TrimRight(line, "\r\n")
	}
	if err := proto.CheckWebhookSecret(secret); err != nil {
		return "", usagef("--secret: %w", err)
	}
	return secret, nil
}

// Run carries the command out.
func (c *keyWebhookSetCommand) Run(ctx context.Context, io streams) error {
	s, err := c.settings(io.in)
	if err != nil {
		return err
	}
	api, err := c.client()
	if err != nil {
		return err
	}
	change := api.PatchWebhook
	var refused *client.Error
	if _, _, err := api.Webhook(ctx); errors.As(err, &refused) && refused.Status == http.StatusNotFound {
		if s.URL == nil {
			return usagef("nothing is set for this key yet: give the URL, too")
		}
		change = api.PutWebhook
	} else if err != nil {
		return err
	}
	w, raw, err := change(ctx, s)
	if err != nil {
		return err
	}
	return printWebhook(io, c.JSON, w, raw)
}

type keyWebhookRotateCommand struct {
	remote  `embed:""`
	Secret  *string   `placeholder:"-" help:"The new secret, instead of one that is made; - reads it from standard input. Other users of this machine can read flags: prefer that."`
	Overlap *duration `placeholder:"TIME" help:"How long the present secret signs too, such as 1h: 0 to 168h (24h)."`
}

// Run carries the command out.
func (c *keyWebhookRotateCommand) Run(ctx context.Context, io streams) error {
	secret := ""
	if c.Secret != nil {
		var err error
		if secret, err = secretOf(*c.Secret, io.in); err != nil {
			return err
		}
	}
	api, err := c.client()
	if err != nil {
		return err
	}
	w, raw, err := api.RotateWebhook(ctx, secret, (*time.Duration)(c.Overlap))
	if err != nil {
		return err
	}
	return printWebhook(io, c.JSON, w, raw)
}

type keyWebhookRmCommand struct {
	remote `embed:""`
}

// Run carries the command out.
func (c *keyWebhookRmCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	if err := api.RemoveWebhook(ctx); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, struct{}{})
	}
	_, err = fmt.Fprintln(io.out, "the webhook settings are removed")
	return err
}
