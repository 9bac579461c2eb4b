package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type keyWebhookCommands struct {
	Show   keyWebhookShowCommand   `cmd:"" help:"Show the webhook settings, without the secret."`
	Set    keyWebhookSetCommand    `cmd:"" help:"Change the webhook settings."`
	Rotate keyWebhookRotateCommand `cmd:"" help:"Replace the webhook secret."`
	Rm     keyWebhookRmCommand     `cmd:"" help:"Remove the webhook settings and the secret."`
}

// settingsOf names the API key whose settings a command is about.
type settingsOf struct {
	For string `name:"for" placeholder:"KEY_ID" help:"Id of the API key, as bullpen key list prints it. Default: the key in use."`
}

type keyWebhookShowCommand struct {
	remote     `embed:""`
	settingsOf `embed:""`
}

func (c *keyWebhookShowCommand) Run(ctx context.Context, s streams) error {
	return requestWebhook(s, &c.remote, func(cl *client.Client) (*api.Webhook, error) {
		return cl.Webhook(ctx, c.For)
	})
}

// requestWebhook makes a request whose answer is the webhook settings. A new secret is printed
// alone on standard output, for scripts.
func requestWebhook(s streams, r *remote, call func(*client.Client) (*api.Webhook, error)) error {
	return request(s, r, call, func(p *page, w *api.Webhook) {
		if w.Secret == "" {
			printWebhook(p, w)
			return
		}
		if w.OldSecretUntil != nil {
			_, _ = fmt.Fprintf(s.err, "Webhooks are also signed with the old secret until %s.\n", cell(w.OldSecretUntil))
		}
		_, _ = fmt.Fprintln(s.err, "The new secret. It is not shown again:")
		p.textf("%s\n", w.Secret)
	})
}

func printWebhook(p *page, w *api.Webhook) {
	p.row("url", w.URL)
	if w.SecretHint == nil {
		p.row("secret", "none, webhooks are not signed: see bullpen key webhook rotate")
	} else {
		p.row("secret", w.SecretHint)
	}
	if w.OldSecretUntil != nil {
		p.row("old secret", "also signs until "+cell(w.OldSecretUntil))
	}
	p.row("max attempts", w.MaxAttempts)
	var waits []string
	for _, seconds := range w.Waits {
		waits = append(waits, time.Duration(seconds).String())
	}
	p.row("waits", strings.Join(waits, ","))
	p.row("signature headers", strings.Join(w.SignatureHeaders, ","))
	p.row("timeout", time.Duration(w.Timeout))
	p.row("updated", w.UpdatedAt)
}

func secondsOf(f float64) time.Duration { return time.Duration(f * float64(time.Second)) }

type keyWebhookSetCommand struct {
	remote           `embed:""`
	settingsOf       `embed:""`
	Secret           *string   `placeholder:"-" help:"Signing secret of 16 or more characters; - reads it from standard input. Prefer that: other users of this machine can read flags."`
	MaxAttempts      *int      `placeholder:"N" help:"Attempts per delivery, 1 to 20."`
	Waits            *string   `placeholder:"WAIT,…" help:"Waits between attempts, such as 1s,10s,1m; or durable: ten attempts over three days."`
	SignatureHeaders *string   `placeholder:"NAME,…" help:"Headers that carry the hexadecimal signature; empty for none."`
	Timeout          *duration `placeholder:"TIME" help:"Timeout of an attempt, such as 15s; at most 30s."`
	Target           *string   `arg:"" optional:"" name:"target" help:"URL for results of async executions that name no webhook_url of their own."`
}

func (*keyWebhookSetCommand) Help() string {
	return `Settings that are not given keep their value. The first time, the URL is required, and a secret is generated
and printed unless --secret is given. After a change of the secret, webhooks are also signed with the old one for a
day.

Examples:

  bullpen key webhook set https://ci.example.com/hooks/bullpen
  bullpen key webhook set --waits 1s,10s,1m --max-attempts 4
  bullpen key webhook set --waits durable
  bullpen key webhook set --for key_1a2b https://ci.example.com/hooks/bullpen
  bullpen key webhook set --secret - <secret.txt`
}

// duration is a time in seconds, or with a unit such as 500ms.
type duration time.Duration

// UnmarshalText parses the duration.
func (d *duration) UnmarshalText(text []byte) error {
	if f, err := strconv.ParseFloat(string(text), 64); err == nil && f >= 0 && f < 1e9 {
		*d = duration(secondsOf(f))
		return nil
	}
	parsed, err := proto.ParseDuration(string(text))
	if err != nil || parsed < 0 {
		return fmt.Errorf("%q is not a duration: write seconds, or a number with a unit such as 500ms or 1m", text)
	}
	*d = duration(parsed)
	return nil
}

// settings returns the settings that the flags name.
func (c *keyWebhookSetCommand) settings(stdin io.Reader) (*api.WebhookRequest, error) {
	settings := &api.WebhookRequest{URL: c.Target, MaxAttempts: c.MaxAttempts}
	if c.Waits != nil {
		waits, err := parseWaits(*c.Waits)
		if err != nil {
			return nil, usagef("--waits: %w", err)
		}
		settings.Waits = waits
	}
	if c.SignatureHeaders != nil {
		settings.SignatureHeaders = new(splitNames(*c.SignatureHeaders))
	}
	if c.Timeout != nil {
		settings.Timeout = new(proto.Seconds(*c.Timeout))
	}
	if *settings == (api.WebhookRequest{}) && c.Secret == nil {
		return nil, usagef("nothing to set: give the URL or a flag")
	}
	if c.Secret != nil {
		secret, err := readSecret(*c.Secret, stdin)
		if err != nil {
			return nil, err
		}
		settings.Secret = &secret
	}
	return settings, nil
}

// parseWaits parses a list of waits, or "durable".
func parseWaits(text string) (*api.Waits, error) {
	waits := new(api.Waits)
	if text == "durable" {
		waits.Durable = true
		return waits, nil
	}
	for item := range strings.SplitSeq(text, ",") {
		var wait duration
		if err := wait.UnmarshalText([]byte(strings.TrimSpace(item))); err != nil {
			return nil, err
		}
		waits.Pauses = append(waits.Pauses, proto.Seconds(wait))
	}
	return waits, nil
}

// splitNames splits a list of names at its commas.
func splitNames(list string) []string {
	names := []string{}
	for name := range strings.SplitSeq(list, ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// readSecret returns the value of a --secret flag, or the first line of stdin if the value is "-".
func readSecret(flag string, stdin io.Reader) (string, error) {
	secret := flag
	if flag == "-" {
		line, err := bufio.NewReader(io.LimitReader(stdin, maxSecretsBytes)).ReadString('\n')
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

func (c *keyWebhookSetCommand) Run(ctx context.Context, s streams) error {
	settings, err := c.settings(s.in)
	if err != nil {
		return err
	}
	return requestWebhook(s, &c.remote, func(cl *client.Client) (*api.Webhook, error) {
		_, err := cl.Webhook(ctx, c.For)
		if err == nil {
			return cl.PatchWebhook(ctx, c.For, settings)
		}
		if refused, ok := errors.AsType[*client.Error](err); !ok || refused.Status != http.StatusNotFound {
			return nil, err
		}
		if settings.URL == nil {
			return nil, usagef("this key has no webhook settings yet: give the URL as well")
		}
		w, err := cl.PutWebhook(ctx, c.For, settings)
		return w, uncertain(err, lostSecret)
	})
}

// lostSecret is the advice after a request that may have changed a secret.
const lostSecret = "see `bullpen key webhook show`, and `bullpen key webhook rotate` for a new secret"

type keyWebhookRotateCommand struct {
	remote     `embed:""`
	settingsOf `embed:""`
	Secret     *string   `placeholder:"-" help:"New secret; - reads it from standard input. Prefer that: other users of this machine can read flags. Default: a generated one."`
	Overlap    *duration `placeholder:"TIME" help:"Time for which the old secret also signs, 0 to 168h. Default: 24h."`
}

func (c *keyWebhookRotateCommand) Run(ctx context.Context, s streams) error {
	secret := ""
	if c.Secret != nil {
		var err error
		if secret, err = readSecret(*c.Secret, s.in); err != nil {
			return err
		}
	}
	return requestWebhook(s, &c.remote, func(cl *client.Client) (*api.Webhook, error) {
		w, err := cl.RotateWebhook(ctx, c.For, secret, (*time.Duration)(c.Overlap))
		return w, uncertain(err, lostSecret)
	})
}

type keyWebhookRmCommand struct {
	remote     `embed:""`
	settingsOf `embed:""`
}

func (c *keyWebhookRmCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) (struct{}, error) {
		return struct{}{}, cl.RemoveWebhook(ctx, c.For)
	}, func(p *page, _ struct{}) { p.textf("the webhook settings are removed\n") })
}
