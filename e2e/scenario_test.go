package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	connectrpc "connectrpc.com/connect"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/guest/filesystempb"
	"github.com/bullpen-run/bullpen/proto"
	schema "github.com/bullpen-run/bullpen/proto/api"
)

// scenarioArgs are the arguments of a step, by name.
type scenarioArgs map[string]json.RawMessage

// text returns an argument that is a string, empty if it is missing.
func (a scenarioArgs) text(name string) string {
	var s string
	_ = json.Unmarshal(a[name], &s) // the call fails without it
	return s
}

// as decodes all arguments but the named ones.
func as[T any](a scenarioArgs, without ...string) (T, error) {
	fields := maps.Clone(a)
	for _, name := range without {
		delete(fields, name)
	}
	text, err := json.Marshal(fields)
	var v T
	if err == nil {
		err = json.Unmarshal(text, &v)
	}
	return v, err
}

// list is the result of a call that lists objects.
func list[T any](name string, all []T, err error) (any, error) { return map[string][]T{name: all}, err }

// scenarioCalls maps the calls of sdk/scenario.json to methods of the Go client: sdk/README.md describes them.
func scenarioCalls() map[string]func(context.Context, *client.Client, scenarioArgs) (any, error) {
	return map[string]func(context.Context, *client.Client, scenarioArgs) (any, error){
		"run":    scenarioRun,
		"stream": scenarioStream,
		"submit": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			r, err := as[schema.ExecuteRequest](a, "idempotency_key")
			if err != nil {
				return nil, err
			}
			return c.Submit(ctx, r, a.text("idempotency_key"))
		},
		"wait": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			return c.Wait(ctx, proto.TraceID(a.text("trace_id")))
		},
		"map": scenarioMap,
		"executions.get": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			return c.Get(ctx, proto.TraceID(a.text("trace_id")))
		},
		"executions.cancel": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			return c.Cancel(ctx, proto.TraceID(a.text("trace_id")))
		},
		"files.write": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			text := strings.NewReader(a.text("text"))
			return nil, c.Upload(ctx, client.ThreadFiles(a.text("thread_id")), a.text("path"), text.Size(), text, nil)
		},
		"files.read": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			var b strings.Builder
			err := c.Download(ctx, client.ThreadFiles(a.text("thread_id")), a.text("path"), &b)
			return map[string]string{"text": b.String()}, err
		},
		"files.list": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			return c.Files(ctx, client.ThreadFiles(a.text("thread_id")), a.text("path"), false)
		},
		"threads.get": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			return c.Thread(ctx, a.text("id"))
		},
		"threads.list": func(ctx context.Context, c *client.Client, _ scenarioArgs) (any, error) {
			all, err := client.Collect(c.Threads(ctx))
			return list("threads", all, err)
		},
		"threads.delete": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			return nil, c.RemoveThread(ctx, a.text("id"))
		},
		"sandboxes.create": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			r, err := as[schema.SandboxRequest](a)
			if err != nil {
				return nil, err
			}
			return c.CreateSandbox(ctx, &r)
		},
		"sandbox.commands.run": scenarioCommand,
		"sandbox.files.write": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			text := strings.NewReader(a.text("text"))
			return nil, c.Guest(a.text("sandbox"), "").Upload(ctx, a.text("path"), text, text.Size())
		},
		"sandbox.files.read": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			var b strings.Builder
			err := c.Guest(a.text("sandbox"), "").Download(ctx, a.text("path"), &b)
			return map[string]string{"text": b.String()}, err
		},
		"sandbox.files.list": scenarioEntries,
		"sandbox.contexts.create": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			r, err := as[schema.ContextRequest](a, "sandbox")
			if err != nil {
				return nil, err
			}
			return c.CreateContext(ctx, a.text("sandbox"), &r)
		},
		"sandbox.contexts.run": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			r, err := as[schema.CellRequest](a, "sandbox", "context")
			if err != nil {
				return nil, err
			}
			return c.RunCell(ctx, a.text("sandbox"), a.text("context"), &r)
		},
		"sandbox.delete": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			return c.DeleteSandbox(ctx, a.text("sandbox"))
		},
		"schedules.create": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			r, err := as[schema.ScheduleRequest](a, "code")
			if err != nil {
				return nil, err
			}
			r.Request = &schema.ExecuteRequest{Code: a.text("code")}
			return c.CreateSchedule(ctx, &r)
		},
		"schedules.get": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			return c.Schedule(ctx, a.text("id"))
		},
		"schedules.list": func(ctx context.Context, c *client.Client, _ scenarioArgs) (any, error) {
			all, err := client.Collect(c.Schedules(ctx))
			return list("schedules", all, err)
		},
		"schedules.delete": func(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
			return nil, c.RemoveSchedule(ctx, a.text("id"))
		},
		"pipelines.run":   scenarioPipeline,
		"webhooks.verify": scenarioVerify,
	}
}

func scenarioRun(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
	r, err := as[schema.ExecuteRequest](a, "idempotency_key")
	if err != nil {
		return nil, err
	}
	header, result := map[string]string{}, map[string]any{}
	if key := a.text("idempotency_key"); key != "" { // which Execute chooses
		header["Idempotency-Key"] = key
		answer, err := c.Do(ctx, http.MethodPost, "/v1/sandbox/execute", header, r, &result)
		result["trace_id"] = answer.Get("X-Trace-Id")
		return result, err
	}
	executed, err := c.Execute(ctx, r)
	if err != nil {
		return nil, err
	}
	result, err = fieldsOf(executed)
	result["trace_id"] = executed.TraceID
	return result, err
}

func scenarioStream(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
	r, err := as[schema.ExecuteRequest](a)
	if err != nil {
		return nil, err
	}
	out := map[string]any{}
	text := map[proto.Stream]string{}
	for e, err := range c.Stream(ctx, r) {
		if err != nil {
			return nil, err
		}
		text[e.Stream] += e.Data
		out["result"] = e.Result
	}
	out["stdout"], out["stderr"] = text[proto.Stdout], text[proto.Stderr]
	return out, nil
}

func scenarioMap(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
	var rows []json.RawMessage
	if err := json.Unmarshal(a["rows"], &rows); err != nil {
		return nil, err
	}
	shared, err := as[map[string]any](a, "rows")
	if err != nil {
		return nil, err
	}
	var lines bytes.Buffer
	write := json.NewEncoder(&lines)
	err = write.Encode(map[string]any{"batch": map[string]any{"request": shared}})
	for _, row := range rows {
		err = errors.Join(err, write.Encode(map[string]string{"stdin": string(row)}))
	}
	if err != nil {
		return nil, err
	}
	open := func() io.Reader { return bytes.NewReader(lines.Bytes()) }
	batch, err := c.CreateBatch(ctx, int64(lines.Len()), open)
	if err != nil {
		return nil, err
	}
	var results []*schema.BatchResult
	for line, err := range c.BatchResults(ctx, batch.ID, -1, true) {
		if err != nil {
			return nil, err
		}
		result, err := line.Result()
		if err != nil {
			return nil, err
		}
		results = append(results, result)
	}
	return list("results", results, nil)
}

func scenarioCommand(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
	var stdout, stderr strings.Builder
	command := &client.Command{Args: []string{"bash", "-c", a.text("command")}, Stdout: &stdout, Stderr: &stderr}
	if stdin := a.text("stdin"); stdin != "" {
		command.Stdin = strings.NewReader(stdin)
	}
	if seconds, err := strconv.Atoi(string(a["timeout"])); err == nil {
		command.Timeout = time.Duration(seconds) * time.Second
	}
	exit, err := c.Guest(a.text("sandbox"), "").Exec(ctx, command)
	return map[string]any{
		"stdout": stdout.String(), "stderr": stderr.String(), "exit_code": exit.Code, "timed_out": exit.TimedOut,
	}, err
}

func scenarioEntries(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
	g := c.Guest(a.text("sandbox"), "")
	files := filesystempb.NewFilesystemClient(g.HTTP, g.URL)
	r, err := files.ListDir(ctx, connectrpc.NewRequest(&filesystempb.ListDirRequest{Path: a.text("path"), Depth: 1}))
	if err != nil {
		return nil, err
	}
	entries := []map[string]any{}
	for _, e := range r.Msg.GetEntries() {
		kind := strings.ToLower(strings.TrimPrefix(e.GetType().String(), "FILE_TYPE_"))
		entries = append(entries, map[string]any{"name": e.GetName(), "type": kind})
	}
	return list("files", entries, nil)
}

func scenarioPipeline(ctx context.Context, c *client.Client, a scenarioArgs) (any, error) {
	r, err := as[schema.PipelineRequest](a)
	if err != nil {
		return nil, err
	}
	run, err := c.StartPipeline(ctx, &r)
	for err == nil && run.EndedAt == nil {
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(10 * time.Millisecond):
		}
		run, err = c.Pipeline(ctx, run.ID)
	}
	return run, err
}

func scenarioVerify(_ context.Context, _ *client.Client, a scenarioArgs) (any, error) {
	var headers map[string]string
	if err := json.Unmarshal(a["headers"], &headers); err != nil {
		return nil, err
	}
	header := http.Header{}
	for name, value := range headers {
		header.Set(name, value)
	}
	tolerance, err := strconv.ParseInt(string(a["tolerance"]), 10, 64)
	if err != nil {
		return nil, err
	}
	body := []byte(a.text("body"))
	if err := client.VerifyWebhook(body, header, a.text("secret"), time.Duration(tolerance)*time.Second); err != nil {
		return nil, err
	}
	return json.RawMessage(body), nil
}

// fieldsOf returns a result as the scenario has it.
func fieldsOf(result any) (map[string]any, error) {
	text, err := json.Marshal(result)
	fields := map[string]any{}
	if err == nil {
		err = json.Unmarshal(text, &fields)
	}
	return fields, err
}

// scenarioCode returns the code of an error as the scenario has it.
func scenarioCode(err error) string {
	if refused, ok := errors.AsType[*client.Error](err); ok {
		return refused.Code
	}
	if failed, ok := errors.AsType[*client.GuestError](err); ok {
		return failed.Code
	}
	if errors.Is(err, client.ErrWebhookSignature) {
		return "webhook_verification"
	}
	return ""
}

// scenarioStep is one step of sdk/scenario.json.
type scenarioStep struct {
	Name, Call, As, Error string
	Args, Expect          map[string]any
}

// testScenario runs sdk/scenario.json with the Go client.
func testScenario(t *testing.T, p *programs) {
	sys := newSystem(t, p, topologies()[0], manySlots)
	c, err := client.New(client.Config{URL: sys.base, Key: sys.key})
	if err != nil {
		t.Fatal(err)
	}
	var scenario struct{ Steps []scenarioStep }
	text, err := os.ReadFile("../sdk/scenario.json")
	if err == nil {
		err = json.Unmarshal(text, &scenario)
	}
	if err != nil || len(scenario.Steps) == 0 {
		t.Fatalf("%v: sdk/scenario.json has %d steps", err, len(scenario.Steps))
	}
	calls, saved := scenarioCalls(), map[string]any{"run": "r" + strings.ToLower(rand.Text())}
	for _, step := range scenario.Steps {
		if calls[step.Call] == nil {
			t.Fatalf("%s: no call %s", step.Name, step.Call)
		}
		args := scenarioArgs{}
		for name, value := range step.Args {
			if args[name], err = json.Marshal(filled(value, saved)); err != nil {
				t.Fatal(err)
			}
		}
		result, err := calls[step.Call](t.Context(), c, args)
		if step.Error != "" {
			if scenarioCode(err) != step.Error {
				t.Errorf("%s: %v, not %s", step.Name, err, step.Error)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v", step.Name, err)
		}
		fields, err := fieldsOf(result)
		if err != nil {
			t.Fatalf("%s: %v", step.Name, err)
		}
		if step.As != "" {
			saved[step.As] = fields
		}
		for path, want := range step.Expect {
			if got := at(fields, path); !expected(got, filled(want, saved)) {
				t.Errorf("%s: %s is %#v, not %v", step.Name, path, got, want)
			}
		}
	}
}

var savedResult = regexp.MustCompile(`\$\{([^}]+)\}`)

// filled returns a value in which the results of earlier steps have taken the place of their names.
func filled(value any, saved map[string]any) any {
	switch v := value.(type) {
	case string:
		return savedResult.ReplaceAllStringFunc(v, func(name string) string {
			return fmt.Sprint(at(saved, name[2:len(name)-1]))
		})
	case map[string]any:
		out := map[string]any{}
		for k, x := range v {
			out[k] = filled(x, saved)
		}
		return out
	default:
		return value
	}
}

// at returns the value at a dotted path, nil if there is none.
func at(value any, path string) any {
	for part := range strings.SplitSeq(path, ".") {
		switch v := value.(type) {
		case map[string]any:
			value = v[part]
		case []any:
			i, err := strconv.Atoi(part)
			switch {
			case part == "length":
				value = float64(len(v))
			case err != nil || i >= len(v):
				return nil
			default:
				value = v[i]
			}
		default:
			return nil
		}
	}
	return value
}

// expected reports whether a value is as a step expects it.
func expected(got, want any) bool {
	loose, _ := want.(map[string]any)
	if part, ok := loose["contains"].(string); ok {
		return strings.Contains(fmt.Sprint(got), part)
	}
	if pattern, ok := loose["matches"].(string); ok {
		return regexp.MustCompile(pattern).MatchString(fmt.Sprint(got))
	}
	return reflect.DeepEqual(got, want)
}
