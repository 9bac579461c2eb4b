package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

// remote is what every command that speaks to a server takes.
type remote struct {
	URL  string `name:"url" env:"BULLPEN_URL" default:"http://127.0.0.1:8080" placeholder:"URL" help:"The server (${default})."`
	Key  string `name:"key" env:"BULLPEN_API_KEY" placeholder:"KEY" help:"The API key. Other users of this machine can read flags: prefer the environment variable."`
	JSON bool   `name:"json" help:"Print JSON for programs."`
}

func (r *remote) client() (*client.Client, error) {
	if err := checkURL(r.URL); err != nil {
		return nil, err
	}
	if r.Key == "" {
		return nil, errors.New("no API key: set BULLPEN_API_KEY; a server's first key is in bootstrap.key in its data directory")
	}
	if err := proto.CheckKeyForm(r.Key); err != nil {
		return nil, fmt.Errorf("BULLPEN_API_KEY or --key: %w", err)
	}
	return &client.Client{URL: r.URL, Key: r.Key, Agent: "bullpen/" + app.Version()}, nil
}

// checkURL refuses what no request can be sent to.
func checkURL(text string) error {
	u, err := url.Parse(text)
	if err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.RawQuery == "" && u.Fragment == "" {
		return nil
	}
	if !strings.Contains(text, "://") && text != "" {
		return usagef("--url or BULLPEN_URL: %q does not say how to reach it: write http://%[1]s, or https://", text)
	}
	return usagef("--url or BULLPEN_URL: %q is not the address of a server: write http://HOST:PORT", text)
}

// trace is the argument that names an execution.
type trace struct {
	ID string `arg:"" name:"trace" help:"The execution's id: trc_…"`
}

// Validate checks the form of the id before anything is sent.
func (t *trace) Validate() error {
	if _, err := proto.ParseTraceID(t.ID); err != nil {
		return fmt.Errorf("%q is not an execution's id: %w", t.ID, err)
	}
	return nil
}

func (t *trace) id() proto.TraceID { return proto.TraceID(t.ID) }

// explain adds to an error of the client what the reader can do about it.
func explain(err error) error {
	if lost, ok := errors.AsType[*client.LostError](err); ok {
		return fmt.Errorf("%w\nThe program may go on there. Once the server is back: bullpen logs --follow --after-seq %d %s", err, lost.After, lost.ID)
	}
	if unreachable, ok := errors.AsType[*client.UnreachableError](err); ok {
		if unreachable.Broke {
			return fmt.Errorf("%w\nWhat was asked for before it went away may be done all the same", err)
		}
		return fmt.Errorf("%w\nIs `bullpen serve` running there? Name another server with --url or BULLPEN_URL", err)
	}
	var refused *client.Error
	if !errors.As(err, &refused) {
		return err
	}
	switch refused.Status {
	case http.StatusUnauthorized:
		return fmt.Errorf("%w\nCheck BULLPEN_API_KEY or --key; the key may have been revoked, or be of another server", err)
	case http.StatusForbidden:
		return fmt.Errorf("%w\nThis takes a key with all rights, such as the server's first: see bootstrap.key in its data directory", err)
	default:
		return err
	}
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// printRaw prints JSON as the server sent it, as one line.
func printRaw(w io.Writer, raw json.RawMessage) error {
	_, err := fmt.Fprintf(w, "%s\n", bytes.TrimSpace(raw))
	return err
}
