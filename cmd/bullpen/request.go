package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/cmd/internal/app"
	"github.com/bullpen-run/bullpen/proto"
)

// remote has the flags of every command that calls a server.
type remote struct {
	URL  string `name:"url" env:"BULLPEN_URL" default:"http://127.0.0.1:8080" placeholder:"URL" help:"URL of the server."`
	Key  string `name:"key" env:"BULLPEN_API_KEY" placeholder:"KEY" help:"API key. Prefer the environment variable: other users of this machine can read flags."`
	JSON bool   `name:"json" help:"Print JSON."`
}

// config returns the configuration of a client of the server that the flags name.
func (r *remote) config(s streams) (client.Config, error) {
	if err := checkURL(r.URL); err != nil {
		return client.Config{}, err
	}
	if r.Key == "" {
		return client.Config{}, errors.New(
			"no API key: set BULLPEN_API_KEY; a server's first key is in bootstrap.key in its data directory")
	}
	if err := proto.CheckKeyForm(r.Key); err != nil {
		return client.Config{}, fmt.Errorf("BULLPEN_API_KEY or --key: %w", err)
	}
	return client.Config{URL: r.URL, Key: r.Key, UserAgent: "bullpen/" + app.Version(), OnRetry: retryProgress(s)}, nil
}

// client returns a client of the server that the flags name.
func (r *remote) client(s streams) (*client.Client, error) {
	cfg, err := r.config(s)
	if err != nil {
		return nil, err
	}
	return client.New(cfg)
}

// recorded returns a client that keeps its last answer.
func (r *remote) recorded(s streams) (*client.Client, *recorder, error) {
	cfg, err := r.config(s)
	if err != nil {
		return nil, nil, err
	}
	last := new(recorder)
	cfg.HTTP = &http.Client{Transport: last}
	cl, err := client.New(cfg)
	return cl, last, err
}

// recorder sends requests and keeps the body of the last answer, as far as it is read. Requests
// must be sent one at a time.
type recorder struct{ bytes.Buffer }

// RoundTrip implements [http.RoundTripper].
func (r *recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	r.Reset()
	resp.Body = struct {
		io.Reader
		io.Closer
	}{io.TeeReader(resp.Body, r), resp.Body}
	return resp, nil
}

// print prints the last answer as the server sent it, as one line.
func (r *recorder) print(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%s\n", bytes.TrimSpace(r.Bytes()))
	return err
}

// retryProgress returns a function that reports why a request is resent, skipping repeated reasons.
// It may be called concurrently.
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

// request calls the server and prints its last answer: with --json as the server sent it, which may be
// newer than this program.
func request[T any](s streams, r *remote, call func(*client.Client) (*T, error), text func(*page, *T)) error {
	cl, last, err := r.recorded(s)
	if err != nil {
		return err
	}
	answer, err := call(cl)
	switch {
	case err != nil:
		return err
	case r.JSON:
		return last.print(s.out)
	default:
		return show(s, false, answer, text)
	}
}

// compose calls the server and prints the result that call makes of its answers.
func compose[T any](s streams, r *remote, call func(*client.Client) (T, error), text func(*page, T)) error {
	cl, err := r.client(s)
	if err != nil {
		return err
	}
	answer, err := call(cl)
	if err != nil {
		return err
	}
	return show(s, r.JSON, answer, text)
}

// list prints all entries of a list of the server.
func list[T any](s streams, r *remote, call func(*client.Client) iter.Seq2[T, error], text func(*page, []T)) error {
	return compose(s, r, func(cl *client.Client) ([]T, error) { return client.Collect(call(cl)) }, text)
}

// each calls f with the entries of a server's sequence, until either fails.
func each[T any](entries iter.Seq2[T, error], f func(T) error) error {
	for entry, err := range entries {
		if err != nil {
			return err
		}
		if err := f(entry); err != nil {
			return err
		}
	}
	return nil
}

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

// uncertain adds advice to an error after which the server may have carried out the request.
func uncertain(err error, advice string) error {
	if errors.Is(err, client.ErrUnknownOutcome) {
		return fmt.Errorf("%w: %s", err, advice)
	}
	return err
}

// explain adds advice to an error of the client.
func explain(err error) error {
	if lost, ok := errors.AsType[*client.LostError](err); ok {
		return fmt.Errorf("%w\nThe program may still run. Once the server is back: bullpen logs --follow --after-seq %d %s",
			err, lost.After, lost.ID)
	}
	if _, ok := errors.AsType[*client.UnreachableError](err); ok {
		if errors.Is(err, client.ErrUnknownOutcome) {
			return err
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
		return fmt.Errorf("%w\nThe server's first key, in bootstrap.key in its data directory, is a global administrator's",
			err)
	default:
		return err
	}
}
