package contexts

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/guest/answer"
	"github.com/bullpen-run/bullpen/guest/cell"
)

const (
	// maxBody is the size of a request to run a cell, in bytes.
	maxBody = 4 << 20
	// maxCall is the length of the name of a call, in bytes.
	maxCall = 128
	// flushDelay is how long events wait for others, to be sent together. Most cells end sooner.
	flushDelay = 2 * time.Millisecond
	// maxTimeout is the longest run time of a cell, in seconds.
	maxTimeout = 7 * 24 * 3600
)

// Handler returns the handler of the routes of contexts.
func (a *Contexts) Handler() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, serve func(http.ResponseWriter, *http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := serve(w, r); err != nil {
				writeError(w, err)
			}
		})
	}
	handle("POST /contexts", a.serveCreate)
	handle("GET /contexts", a.serveList)
	handle("GET /contexts/{id}", a.serveGet)
	handle("DELETE /contexts/{id}", a.serveDelete)
	handle("POST /contexts/{id}/restart", a.serveRestart)
	handle("POST /contexts/{id}/interrupt", a.serveInterrupt)
	handle("POST /contexts/{id}/execute", a.serveExecute)
	handle("GET /contexts/{id}/runs/{run}", a.serveRun)
	return mux
}

func writeError(w http.ResponseWriter, err error) {
	e, ok := errors.AsType[*Error](err)
	if !ok {
		e = &Error{http.StatusInternalServerError, "internal", err.Error()}
	}
	answer.JSON(w, e.Status, struct {
		Code    int    `json:"code"`
		Error   string `json:"error"`
		Message string `json:"message"`
	}{e.Status, e.Code, e.Message})
}

// decode reads a JSON body. An empty body is an empty object.
func decode(w http.ResponseWriter, r *http.Request, into any) error {
	// All of it, since the server notices only then that the client leaves.
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		return &Error{
			http.StatusRequestEntityTooLarge, "invalid", fmt.Sprintf("the request is larger than %d bytes", maxBody),
		}
	}
	if err == nil && len(body) > 0 {
		err = json.Unmarshal(body, into)
	}
	if err != nil {
		return invalid("the body is no JSON of this request: %v", err)
	}
	return nil
}

// asked is a request for a context.
type asked struct {
	Language string `json:"language"`
	Dir      string `json:"cwd"`
	// Default means the context of the language for runs that name none. It is created once.
	Default bool `json:"default"`
}

func (a *Contexts) serveCreate(w http.ResponseWriter, r *http.Request) error {
	var request asked
	if err := decode(w, r, &request); err != nil {
		return err
	}
	create := a.Create
	if request.Default {
		create = a.startDefault
	}
	c, err := create(r.Context(), request.Language, request.Dir)
	if err != nil {
		return err
	}
	answer.JSON(w, http.StatusCreated, c.info())
	return nil
}

func (a *Contexts) serveList(w http.ResponseWriter, _ *http.Request) error {
	list := []Info{}
	for _, c := range a.All() {
		list = append(list, c.info())
	}
	answer.JSON(w, http.StatusOK, struct {
		Contexts []Info `json:"contexts"`
	}{list})
	return nil
}

func (a *Contexts) serveGet(w http.ResponseWriter, r *http.Request) error {
	c, err := a.Get(r.PathValue("id"))
	if err != nil {
		return err
	}
	answer.JSON(w, http.StatusOK, c.info())
	return nil
}

func (a *Contexts) serveDelete(w http.ResponseWriter, r *http.Request) error {
	if err := a.Delete(r.Context(), r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *Contexts) serveRestart(w http.ResponseWriter, r *http.Request) error {
	c, err := a.Restart(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	answer.JSON(w, http.StatusOK, c.info())
	return nil
}

func (a *Contexts) serveInterrupt(w http.ResponseWriter, r *http.Request) error {
	c, err := a.Get(r.PathValue("id"))
	if err != nil {
		return err
	}
	answer.JSON(w, http.StatusOK, struct {
		Interrupted bool `json:"interrupted"`
	}{c.Interrupt()})
	return nil
}

func (a *Contexts) serveExecute(w http.ResponseWriter, r *http.Request) error {
	var request Execution
	if err := decode(w, r, &request); err != nil {
		return err
	}
	if err := request.validate(); err != nil {
		return err
	}
	c, err := a.Get(r.PathValue("id"))
	if err != nil {
		return err
	}
	started, err := c.startRun(&request)
	if err != nil {
		return err
	}
	if err := started.stream(r.Context(), w, 0); err != nil && request.InterruptOnClose {
		started.interrupt(cell.Interrupted)
	}
	return nil
}

func (e *Execution) validate() error {
	if e.Timeout < 0 || e.Timeout > maxTimeout {
		return invalid("timeout must be from 1 to %d seconds, or 0 for no limit", maxTimeout)
	}
	if len(e.Call) > maxCall {
		return invalid("call must have at most %d bytes", maxCall)
	}
	for name, value := range e.Env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(value, "\x00") {
			return invalid("env_vars: the name of a variable is empty or contains =, or there is a zero byte")
		}
	}
	return nil
}

func (a *Contexts) serveRun(w http.ResponseWriter, r *http.Request) error {
	c, err := a.Get(r.PathValue("id"))
	if err != nil {
		return err
	}
	number, err := strconv.ParseInt(r.PathValue("run"), 10, 64)
	if err != nil {
		return invalid("the run must be a number")
	}
	after := int64(0)
	if text := r.URL.Query().Get("after"); text != "" {
		if after, err = strconv.ParseInt(text, 10, 64); err != nil || after < 0 {
			return invalid("after must be the number of an event")
		}
	}
	found, err := c.find(number)
	if err != nil {
		return err
	}
	_ = found.stream(r.Context(), w, after) // the client has left
	return nil
}

// stream writes the events with numbers above after, one on a line. It returns an error if the client
// has left before the last one.
func (r *run) stream(ctx context.Context, w http.ResponseWriter, after int64) error {
	reader := r.events.read(after)
	defer reader.close()
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w).Flush
	timer := time.NewTimer(flushDelay) // a client learns soon that its cell waits
	defer timer.Stop()
	due := timer.C // nil when all is sent
	for {
		line, ended, changed := reader.line()
		switch {
		case line != nil:
			if _, err := w.Write(line); err != nil {
				return err
			}
			if due == nil {
				timer.Reset(flushDelay)
				due = timer.C
			}
			continue
		case ended:
			return flush()
		}
		select {
		case <-changed:
		case <-due:
			if err := flush(); err != nil {
				return err
			}
			due = nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
