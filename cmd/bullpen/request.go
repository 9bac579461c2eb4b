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
	"sync"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

// remote has the flags of every command that calls a server.
type remote struct {
	URL  string `name:"url" env:"BULLPEN_URL" default:"http://127.0.0.1:8080" placeholder:"URL" help:"URL of the server."`
	Key  string `name:"key" env:"BULLPEN_API_KEY" placeholder:"KEY" help:"API key. Prefer the environment variable: other users of this machine can read flags."`
	JSON bool   `name:"json" help:"Print JSON."`
}

// client returns a client of the server that the flags name.
func (r *remote) client(s streams) (*client.Client, error) {
	if err := checkURL(r.URL); err != nil {
		return nil, err
	}
	if r.Key == "" {
		return nil, errors.New("no API key: set BULLPEN_API_KEY; a server's first key is in bootstrap.key in its data directory")
	}
	if err := proto.CheckKeyForm(r.Key); err != nil {
		return nil, fmt.Errorf("BULLPEN_API_KEY or --key: %w", err)
	}
	return &client.Client{URL: r.URL, Key: r.Key, Agent: "bullpen/" + app.Version(), Retrying: retryProgress(s)}, nil
}

// retryProgress returns a function that reports why a request is sent again, each reason once in a
// row. It may be called concurrently.
func retryProgress(s streams) func(error) {
	var mu sync.Mutex
	var last string
	return func(err error) {
		mu.Lock()
		defer mu.Unlock()
		why := err.Error()
		if refused, ok := errors.AsType[*client.Error](err); ok {
			why = refused.Message // without the request id, which differs each time
		}
		if why != last {
			s.progressf("trying again: %s", why)
		}
		last = why
	}
}

func checkURL(text string) error {
	u, err := url.Parse(text)
	if err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.RawQuery == "" && u.Fragment == "" {
		return nil
	}
	if !strings.Contains(text, "://") && text != "" {
		return usagef("--url or BULLPEN_URL: %q has no scheme: write http://%[1]s or https://%[1]s", text)
	}
	return usagef("--url or BULLPEN_URL: %q is not the URL of a server: write http://HOST:PORT", text)
}

// request calls the server and prints its answer, as show does. The answer's bytes may be nil, see
// decoded.
func request[T any](s streams, r *remote, call func(*client.Client) (T, json.RawMessage, error), text func(*page, T)) error {
	api, err := r.client(s)
	if err != nil {
		return err
	}
	answer, raw, err := call(api)
	switch {
	case err != nil:
		return err
	case r.JSON && raw != nil:
		return printRaw(s.out, raw)
	default:
		return show(s, r.JSON, answer, text)
	}
}

// decoded completes the results of a client method that returns no bytes.
func decoded[T any](answer T, err error) (T, json.RawMessage, error) { return answer, nil, err }

// show prints v as one line of JSON, or with text.
func show[T any](s streams, asJSON bool, v T, text func(*page, T)) error {
	if asJSON {
		return printJSON(s.out, v)
	}
	p := newPage(s.out)
	text(p, v)
	return p.flush()
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

// removed is the answer of commands that remove something.
type removed struct {
	ID string `json:"id"`
}

func printRemoved(p *page, r removed) { p.textf("%s is removed\n", r.ID) }

// traceArg is the argument that names an execution.
type traceArg struct {
	ID string `arg:"" name:"trace" help:"Id of the execution: trc_…"`
}

func (t *traceArg) Validate() error {
	if _, err := proto.ParseTraceID(t.ID); err != nil {
		return fmt.Errorf("%q is not an execution's id: %w", t.ID, err)
	}
	return nil
}

func (t *traceArg) id() proto.TraceID { return proto.TraceID(t.ID) }

// explain adds advice to an error of the client.
func explain(err error) error {
	if lost, ok := errors.AsType[*client.LostError](err); ok {
		return fmt.Errorf("%w\nThe program may still run. Once the server is back: bullpen logs --follow --after-seq %d %s", err, lost.After, lost.ID)
	}
	if unreachable, ok := errors.AsType[*client.UnreachableError](err); ok {
		if unreachable.Broke {
			return fmt.Errorf("%w\nThe server may still have carried out the request", err)
		}
		return fmt.Errorf("%w\nIs `bullpen serve` running there? Name another server with --url or BULLPEN_URL", err)
	}
	refused, ok := errors.AsType[*client.Error](err)
	if !ok {
		return err
	}
	switch refused.Status {
	case http.StatusUnauthorized:
		return fmt.Errorf("%w\nCheck BULLPEN_API_KEY or --key; the key may be revoked, or belong to another server", err)
	case http.StatusForbidden:
		return fmt.Errorf("%w\nThe server's first key, in bootstrap.key in its data directory, is a global administrator's", err)
	default:
		return err
	}
}
