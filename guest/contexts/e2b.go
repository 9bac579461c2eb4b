package contexts

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/guest/answer"
	"github.com/bullpen-run/bullpen/guest/cell"
	"github.com/bullpen-run/bullpen/guest/process"
)

// E2BPort is the port on which E2B's code interpreter answers.
const E2BPort = 49999

// keepAliveEvery is how often a stream without events gets a line.
const keepAliveEvery = 5 * time.Second

// e2bDefaults are the languages of which E2B's sandboxes have a context from the start. Here their
// interpreters start with their first run.
var e2bDefaults = []string{"python", "javascript"}

// e2bRequest is a request to run a cell. null stands for an absent field.
type e2bRequest struct {
	Code     string            `json:"code"`
	Context  *string           `json:"context_id"`
	Language *string           `json:"language"`
	Env      map[string]string `json:"env_vars"`
}

// e2bContext is a context as E2B's clients see it.
type e2bContext struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Dir      string `json:"cwd"`
}

// E2B returns the handler of what E2B's clients send to [E2BPort].
func (a *Contexts) E2B() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, serve func(http.ResponseWriter, *http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := serve(w, r); err != nil {
				status, message := http.StatusInternalServerError, err.Error()
				if e, ok := errors.AsType[*Error](err); ok {
					status = e.Status
				}
				if status == http.StatusGone {
					status = http.StatusNotFound // clients know no other
				}
				answer.Error(w, status, message)
			}
		})
	}
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		answer.JSON(w, http.StatusOK, "OK")
	})
	handle("POST /execute", a.e2bExecute)
	handle("POST /contexts", a.e2bCreate)
	handle("GET /contexts", a.e2bList)
	handle("POST /contexts/{id}/restart", func(_ http.ResponseWriter, r *http.Request) error {
		_, err := a.Restart(r.Context(), r.PathValue("id"))
		return err
	})
	handle("DELETE /contexts/{id}", func(_ http.ResponseWriter, r *http.Request) error {
		return a.Delete(r.Context(), r.PathValue("id"))
	})
	return mux
}

func (a *Contexts) e2bCreate(w http.ResponseWriter, r *http.Request) error {
	var request struct {
		Language *string `json:"language"`
		Dir      *string `json:"cwd"`
	}
	if err := decode(w, r, &request); err != nil {
		return err
	}
	if err := a.addDefaults(); err != nil {
		return err
	}
	c, err := a.Create(r.Context(), value(request.Language), value(request.Dir))
	if err != nil {
		return err
	}
	answer.JSON(w, http.StatusOK, e2bContext{c.id, c.language.Name, c.dir})
	return nil
}

func value(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func (a *Contexts) e2bList(w http.ResponseWriter, _ *http.Request) error {
	if err := a.addDefaults(); err != nil {
		return err
	}
	list := []e2bContext{}
	for _, c := range a.All() {
		list = append(list, e2bContext{c.id, c.language.Name, c.dir})
	}
	answer.JSON(w, http.StatusOK, list)
	return nil
}

// addDefaults adds the contexts that E2B's sandboxes have from the start.
func (a *Contexts) addDefaults() error {
	for _, name := range e2bDefaults {
		if _, err := a.defaultOf(name); err != nil {
			return err
		}
	}
	return nil
}

// defaultOf returns the context of a language for runs that name no context.
func (a *Contexts) defaultOf(language string) (*Context, error) {
	l, ok := cell.LanguageOf(language)
	if !ok {
		_, err := a.add("", language, "")
		return nil, err
	}
	a.defaults.Lock()
	defer a.defaults.Unlock()
	id := a.defaultIDs[l.Name]
	if id != "" {
		if c, err := a.Get(id); err == nil {
			return c, nil
		}
	}
	c, err := a.add("", l.Name, "")
	if err != nil {
		return nil, err
	}
	if a.defaultIDs == nil {
		a.defaultIDs = map[string]string{}
	}
	a.defaultIDs[l.Name] = c.id
	return c, nil
}

// startDefault returns the context of a language for runs that name no context, with its interpreter unless that was
// lost.
func (a *Contexts) startDefault(ctx context.Context, language, _ string) (*Context, error) {
	c, err := a.defaultOf(language)
	if err != nil {
		return nil, err
	}
	return c, c.startFirst(ctx)
}

func (a *Contexts) e2bExecute(w http.ResponseWriter, r *http.Request) error {
	var request e2bRequest
	if err := decode(w, r, &request); err != nil {
		return err
	}
	asked := &Execution{Code: request.Code, Env: request.Env}
	if err := asked.validate(); err != nil {
		return err
	}
	if err := a.addDefaults(); err != nil {
		return err
	}
	var c *Context
	var err error
	switch {
	case request.Context != nil && request.Language != nil:
		return invalid("only one of context_id or language can be provided")
	case request.Context != nil:
		c, err = a.Get(*request.Context)
	case request.Language != nil:
		c, err = a.defaultOf(*request.Language)
	default:
		c, err = a.defaultOf("python")
	}
	if err != nil {
		return err
	}
	if err := c.startFirst(r.Context()); err != nil {
		return err
	}
	started, err := c.startRun(asked)
	e := e2bStream{w: w, table: a.Table}
	if err != nil {
		if known, ok := errors.AsType[*Error](err); !ok || known.Status != http.StatusGone {
			return err
		}
		// As E2B does: the error of this run says that the memory is gone, and the next finds a new interpreter.
		e.write(e2bFailure(err.Error()))
		e.write(e2bEnd())
		_, _ = a.Restart(r.Context(), c.id) // the next run says why, if it fails
		return nil
	}
	if err := e.stream(r.Context(), started); err != nil {
		started.interrupt(cell.Interrupted)
	}
	return nil
}

// startFirst starts the interpreter of a context that never had one.
func (c *Context) startFirst(ctx context.Context) error {
	c.mu.Lock()
	first := c.state == stateStarting
	c.mu.Unlock()
	if !first {
		return nil
	}
	return c.start(ctx)
}

func e2bEnd() any {
	return struct {
		Type string `json:"type"`
	}{"end_of_execution"}
}

func e2bFailure(message string) any {
	return struct {
		Type      string `json:"type"`
		Name      string `json:"name"`
		Value     string `json:"value"`
		Traceback string `json:"traceback"`
	}{"error", "ContextRestarting", message, message}
}

// e2bStream writes events as E2B's clients read them.
type e2bStream struct {
	w       http.ResponseWriter
	table   *process.Table
	started bool
	err     error
}

func (e *e2bStream) write(v any) {
	if !e.started {
		e.w.Header().Set("Content-Type", "application/x-ndjson")
		e.w.WriteHeader(http.StatusOK)
		e.started = true
	}
	line, err := json.Marshal(v)
	if err == nil {
		_, err = e.w.Write(append(escape(line), '\n'))
	}
	if e.err == nil {
		e.err = err
	}
}

// escape escapes all characters of JSON that are not ASCII: JavaScript's client decodes pieces of the
// stream one by one.
func escape(line []byte) []byte {
	if !bytes.ContainsFunc(line, func(c rune) bool { return c >= utf8.RuneSelf }) {
		return line
	}
	escaped := make([]byte, 0, len(line)+len(line)/2)
	for _, c := range string(line) {
		switch {
		case c < utf8.RuneSelf:
			escaped = append(escaped, byte(c))
		case c > 0xffff:
			high, low := utf16.EncodeRune(c)
			escaped = fmt.Appendf(escaped, `\u%04x\u%04x`, high, low)
		default:
			escaped = fmt.Appendf(escaped, `\u%04x`, c)
		}
	}
	return escaped
}

// stream writes the events of a run. It returns an error if the client has left.
func (e *e2bStream) stream(ctx context.Context, r *run) error {
	reader := r.events.read(0)
	defer reader.close()
	flush := http.NewResponseController(e.w).Flush
	keepAlive := time.NewTicker(keepAliveEvery)
	defer keepAlive.Stop()
	for {
		line, ended, changed := reader.line()
		switch {
		case line != nil:
			e.event(line)
			if e.err != nil {
				return e.err
			}
			continue
		case ended:
			e.write(e2bEnd())
			return e.err
		}
		if e.started {
			if err := flush(); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-keepAlive.C:
			e.write(struct {
				Type string `json:"type"`
			}{"keepalive"})
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// e2bText is a piece of output.
type e2bText struct {
	Type string    `json:"type"`
	Text string    `json:"text"`
	At   time.Time `json:"timestamp"`
}

// event writes one event.
func (e *e2bStream) event(line []byte) {
	var x struct {
		base
		Text string `json:"text"`
		cell.Display
		cell.Failure
		cell.End
		Message string `json:"message"`
	}
	if err := json.Unmarshal(line, &x); err != nil {
		e.err = err
		return
	}
	switch x.Type {
	case typeStdout, typeStderr:
		e.write(e2bText{x.Type, x.Text, time.Now().UTC()})
	case cell.TypeDisplay:
		e.write(e2bResult(&x.Display))
	case cell.TypeError:
		e.write(struct {
			Type      string `json:"type"`
			Name      string `json:"name"`
			Value     string `json:"value"`
			Traceback string `json:"traceback"`
		}{"error", x.Name, x.Value, strings.Join(x.Traceback, "\n")})
	case cell.TypeEnd:
		if x.Status == statusLost && e.table.Stopping() {
			panic(http.ErrAbortHandler) // clients find out why by themselves
		}
		if x.Status == statusLost {
			e.write(e2bFailure(x.Message))
		}
		e.write(struct {
			Type  string `json:"type"`
			Count int64  `json:"execution_count"`
		}{"number_of_executions", x.Count})
	case "gap":
		e.write(struct {
			Type string `json:"type"`
			Name string `json:"name"`
			Text string `json:"value"`
			Back string `json:"traceback"`
		}{"error", "OutputLost", "the client read too slowly, and output was lost", ""})
	}
}

// e2bFields are the fields of a result by MIME types.
var e2bFields = map[string]string{
	"text/plain": "text", "text/html": "html", "text/markdown": "markdown", "text/latex": "latex", "image/svg+xml": "svg",
	"image/png": "png", "image/jpeg": "jpeg", "application/pdf": "pdf", "application/json": "json",
	"application/javascript": "javascript",
}

// e2bResult returns a result in E2B's form.
func e2bResult(d *cell.Display) any {
	result := map[string]any{"type": "result", "is_main_result": d.Result}
	extra := map[string]json.RawMessage{}
	for kind, data := range d.Data {
		name := e2bFields[kind]
		switch name {
		case "":
			extra[kind] = data
		case "text":
			var text string
			if json.Unmarshal(data, &text) == nil {
				result[name] = unquoted(text)
			}
		default:
			result[name] = data
		}
	}
	if d.Chart != nil {
		result["chart"] = d.Chart
	}
	if d.Columns != nil {
		result["data"] = d.Columns
	}
	if len(extra) > 0 {
		result["extra"] = extra
	}
	return result
}

// unquoted returns a text without one pair of quotation marks around it.
func unquoted(text string) string {
	if n := len(text); n >= 2 && text[0] == text[n-1] && (text[0] == '\'' || text[0] == '"') {
		return text[1 : n-1]
	}
	return text
}
