// Command go uses the code interpreter, the shell and containers with OpenAI's SDK for Go.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	openaihooks "github.com/openai/openai-go/v3/webhooks"
)

const question = "The mean and standard deviation of 1 to 10?"

func main() {
	client := openai.NewClient(option.WithMaxRetries(0)) // OPENAI_BASE_URL and OPENAI_API_KEY
	for name, example := range map[string]func(ctx context.Context, client *openai.Client) error{
		"create": create, "stream": stream, "shell": shell, "containers": containers, "background": background,
		"cut stream": cutStream, "cancel": cancel, "previous": previous, "webhooks": webhooks, "models": models,
		"errors": failures,
	} {
		if err := example(context.Background(), &client); err != nil {
			log.Fatalf("%s: %v", name, err)
		}
	}
}

// params returns a request whose programs run in a container.
func params[T string | responses.ToolCodeInterpreterContainerCodeInterpreterContainerAutoParam](
	input string, container T,
) responses.ResponseNewParams {
	return responses.ResponseNewParams{
		Model: "gpt-5.5", Include: []responses.ResponseIncludable{responses.ResponseIncludableCodeInterpreterCallOutputs},
		Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(input)},
		Tools: []responses.ToolUnionParam{responses.ToolParamOfCodeInterpreter(container)},
	}
}

var auto = responses.ToolCodeInterpreterContainerCodeInterpreterContainerAutoParam{MemoryLimit: "1g"}

// printed returns what the first program of a response printed.
func printed(r *responses.Response) (string, error) {
	for _, item := range r.Output {
		call, ok := item.AsAny().(responses.ResponseCodeInterpreterToolCall)
		if ok && call.Status == responses.ResponseCodeInterpreterToolCallStatusCompleted && len(call.Outputs) == 1 {
			return call.Outputs[0].AsLogs().Logs, nil
		}
	}
	return "", fmt.Errorf("no program printed anything: %s", r.RawJSON())
}

func check(r *responses.Response) error {
	logs, err := printed(r)
	if err == nil && (logs != "5.5 2.8723\n" || r.Status != responses.ResponseStatusCompleted ||
		!strings.Contains(r.OutputText(), "5.5 2.8723")) {
		err = fmt.Errorf("the response is %s", r.RawJSON())
	}
	return err
}

func create(ctx context.Context, client *openai.Client) error {
	r, err := client.Responses.New(ctx, params(question, auto))
	if err != nil {
		return err
	}
	return check(r)
}

func stream(ctx context.Context, client *openai.Client) error {
	events := client.Responses.NewStreaming(ctx, params(question, auto))
	var text strings.Builder
	var completed *responses.Response
	for n := int64(0); events.Next(); n++ {
		event := events.Current()
		if event.SequenceNumber != n {
			return fmt.Errorf("event %d has the number %d", n, event.SequenceNumber)
		}
		switch event := event.AsAny().(type) {
		case responses.ResponseTextDeltaEvent:
			text.WriteString(event.Delta)
		case responses.ResponseCompletedEvent:
			completed = &event.Response
		}
	}
	if err := events.Err(); err != nil {
		return err
	}
	if completed == nil {
		return errors.New("the stream did not complete")
	}
	if text.String() != completed.OutputText() {
		return fmt.Errorf("the deltas are %q, and the text is %q", text.String(), completed.OutputText())
	}
	return check(completed)
}

func shell(ctx context.Context, client *openai.Client) error {
	p := params("List", auto)
	p.Tools = []responses.ToolUnionParam{{OfShell: &responses.FunctionShellToolParam{
		Environment: responses.FunctionShellToolEnvironmentUnionParam{OfContainerAuto: &responses.ContainerAutoParam{}},
	}}}
	r, err := client.Responses.New(ctx, p)
	if err != nil {
		return err
	}
	for _, item := range r.Output {
		if out, ok := item.AsAny().(responses.ResponseFunctionShellToolCallOutput); ok && len(out.Output) == 2 &&
			out.Output[0].Stdout == "list.txt\n" && out.Output[1].Outcome.AsExit().ExitCode == 2 {
			return nil
		}
	}
	return fmt.Errorf("the response is %s", r.RawJSON())
}

func containers(ctx context.Context, client *openai.Client) error {
	upload, err := client.Files.New(ctx, openai.FileNewParams{
		File: openai.File(strings.NewReader("b,2"), "report.csv", "text/csv"), Purpose: openai.FilePurposeUserData})
	if err != nil {
		return fmt.Errorf("upload: %w", err)
	}
	container, err := client.Containers.New(
		ctx, openai.ContainerNewParams{Name: "test", MemoryLimit: openai.ContainerNewParamsMemoryLimit1g})
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	if _, err := client.Containers.Files.New(
		ctx, container.ID, openai.ContainerFileNewParams{FileID: openai.String(upload.ID)}); err != nil {
		return fmt.Errorf("add the upload: %w", err)
	}
	r, err := client.Responses.New(ctx, params("Read the file", container.ID))
	if err != nil {
		return err
	}
	if logs, err := printed(r); err != nil || logs != "b,2\n" {
		return fmt.Errorf("the file is %q: %w", logs, err)
	}
	files, err := client.Containers.Files.List(ctx, container.ID, openai.ContainerFileListParams{})
	if err != nil || len(files.Data) != 1 || files.Data[0].Path != "/mnt/data/report.csv" {
		return fmt.Errorf("list files: %+v %w", files, err)
	}
	content, err := client.Containers.Files.Content.Get(ctx, container.ID, files.Data[0].ID)
	if err != nil {
		return fmt.Errorf("download: %w", err)
	}
	text, err := io.ReadAll(content.Body)
	if err := errors.Join(err, content.Body.Close()); err != nil || string(text) != "b,2" {
		return fmt.Errorf("downloaded %q: %w", text, err)
	}
	if err := client.Containers.Files.Delete(ctx, container.ID, files.Data[0].ID); err != nil {
		return fmt.Errorf("delete a file: %w", err)
	}
	list, found := client.Containers.ListAutoPaging(ctx, openai.ContainerListParams{Limit: openai.Int(1)}), false
	for list.Next() {
		found = found || list.Current().ID == container.ID
	}
	if err := list.Err(); err != nil || !found {
		return fmt.Errorf("the container is not listed: %w", err)
	}
	return client.Containers.Delete(ctx, container.ID)
}

// ended waits for the end of a response in the background.
func ended(ctx context.Context, client *openai.Client, r *responses.Response) (*responses.Response, error) {
	for r.Status == responses.ResponseStatusQueued || r.Status == responses.ResponseStatusInProgress {
		time.Sleep(100 * time.Millisecond)
		var err error
		query := responses.ResponseGetParams{
			Include: []responses.ResponseIncludable{responses.ResponseIncludableCodeInterpreterCallOutputs}}
		if r, err = client.Responses.Get(ctx, r.ID, query); err != nil {
			return nil, fmt.Errorf("get: %w", err)
		}
	}
	return r, nil
}

// fails returns an error unless err is an error of the API with a status.
func fails(err error, status int) error {
	if e, ok := errors.AsType[*openai.Error](err); !ok || e.StatusCode != status {
		return fmt.Errorf("the error is %w in place of status %d", err, status)
	}
	return nil
}

func inBackground(input string) responses.ResponseNewParams {
	p := params(input, auto)
	p.Background = openai.Bool(true)
	return p
}

func background(ctx context.Context, client *openai.Client) error {
	queued, err := client.Responses.New(ctx, inBackground(question))
	if err != nil {
		return err
	}
	if queued.Status != responses.ResponseStatusQueued || !queued.Background || len(queued.Output) != 0 {
		return fmt.Errorf("the response is %s", queued.RawJSON())
	}
	r, err := ended(ctx, client, queued)
	if err != nil {
		return err
	}
	if err := check(r); err != nil {
		return err
	}
	if err := client.Responses.Delete(ctx, r.ID); err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	_, err = client.Responses.Get(ctx, r.ID, responses.ResponseGetParams{})
	return fails(err, http.StatusNotFound)
}

// cutStream closes a stream after some events, and goes on after the last one.
func cutStream(ctx context.Context, client *openai.Client) error {
	var id, text string
	var last int64 = -1
	var completed *responses.Response
	read := func(event responses.ResponseStreamEventUnion) error {
		if last++; event.SequenceNumber != last {
			return fmt.Errorf("event %d has the number %d", last, event.SequenceNumber)
		}
		switch event := event.AsAny().(type) {
		case responses.ResponseCreatedEvent:
			id = event.Response.ID
		case responses.ResponseTextDeltaEvent:
			text += event.Delta
		case responses.ResponseCompletedEvent:
			completed = &event.Response
		}
		return nil
	}
	events := client.Responses.NewStreaming(ctx, inBackground(question))
	for last < 4 && events.Next() {
		if err := read(events.Current()); err != nil {
			return err
		}
	}
	if err := errors.Join(events.Err(), events.Close()); err != nil {
		return err
	}
	events = client.Responses.GetStreaming(ctx, id, responses.ResponseGetParams{
		StartingAfter: openai.Int(last), Include: []responses.ResponseIncludable{
			responses.ResponseIncludableCodeInterpreterCallOutputs},
	})
	for events.Next() {
		if err := read(events.Current()); err != nil {
			return err
		}
	}
	if err := events.Err(); err != nil {
		return err
	}
	if completed == nil || completed.OutputText() != text {
		return fmt.Errorf("the stream did not complete; its text is %q", text)
	}
	return check(completed)
}

func cancel(ctx context.Context, client *openai.Client) error {
	r, err := client.Responses.New(ctx, inBackground("Sleep"))
	if err != nil {
		return err
	}
	if r, err = client.Responses.Cancel(ctx, r.ID); err != nil {
		return fmt.Errorf("cancel: %w", err)
	}
	if r, err = ended(ctx, client, r); err != nil || r.Status != responses.ResponseStatusCancelled {
		return fmt.Errorf("the response is %v: %w", r, err)
	}
	if r, err = client.Responses.New(ctx, params("Hi", auto)); err != nil {
		return err
	}
	_, err = client.Responses.Cancel(ctx, r.ID) // it was not in the background
	return fails(err, http.StatusBadRequest)
}

func previous(ctx context.Context, client *openai.Client) error {
	first, err := client.Responses.New(ctx, inBackground("Save a file"))
	if err != nil {
		return err
	}
	if first, err = ended(ctx, client, first); err != nil {
		return err
	}
	p := params("Read the file", auto)
	p.PreviousResponseID = openai.String(first.ID)
	second, err := client.Responses.New(ctx, p)
	if err != nil {
		return err
	}
	logs, err := printed(second)
	if err != nil || logs != "a,1\n" || second.PreviousResponseID != first.ID ||
		second.Output[0].ContainerID != first.Output[0].ContainerID {
		return fmt.Errorf("the response is %s: %w", second.RawJSON(), err)
	}
	p.Store = openai.Bool(false)
	hidden, err := client.Responses.New(ctx, p)
	if err != nil {
		return err
	}
	_, err = client.Responses.Get(ctx, hidden.ID, responses.ResponseGetParams{})
	if err := fails(err, http.StatusNotFound); err != nil {
		return err
	}
	p.PreviousResponseID = openai.String(hidden.ID)
	_, err = client.Responses.New(ctx, p)
	return fails(err, http.StatusBadRequest)
}

// webhooks verifies the webhook of a response. A server passes each webhook on, with its headers.
func webhooks(ctx context.Context, client *openai.Client) error {
	r, err := client.Responses.New(ctx, inBackground("Hi"))
	if err != nil {
		return err
	}
	for {
		got, err := http.Get(os.Getenv("WEBHOOKS_URL"))
		if err != nil {
			return err
		}
		body, err := io.ReadAll(got.Body)
		if err := errors.Join(err, got.Body.Close()); err != nil {
			return err
		}
		event, err := client.Webhooks.Unwrap(body, got.Header) // with OPENAI_WEBHOOK_SECRET
		if err != nil {
			return fmt.Errorf("unwrap: %w", err)
		}
		if _, err := client.Webhooks.Unwrap(append(body, ' '), got.Header); err == nil {
			return errors.New("a webhook with another body was accepted")
		}
		completed, ok := event.AsAny().(openaihooks.ResponseCompletedWebhookEvent)
		if ok && completed.Data.ID == r.ID {
			if completed.CreatedAt < int64(r.CreatedAt) ||
				completed.Object != openaihooks.ResponseCompletedWebhookEventObjectEvent {
				return fmt.Errorf("the webhook is %s", body)
			}
			return nil
		}
	}
}

func models(ctx context.Context, client *openai.Client) error {
	list, err := client.Models.List(ctx)
	if err != nil || len(list.Data) != 1 || list.Data[0].ID != "small" {
		return fmt.Errorf("list models: %+v %w", list, err)
	}
	_, err = client.Models.Get(ctx, "openai/gpt-5.5") // since * stands for all names
	return err
}

// failures checks that errors are typed.
func failures(ctx context.Context, client *openai.Client) error {
	for status, ask := range map[int]func() error{
		http.StatusUnauthorized: func() error {
			_, err := client.Responses.New(ctx, params("Hi", auto), option.WithAPIKey("sk-other"))
			return err
		},
		http.StatusNotFound: func() error {
			_, err := client.Responses.New(ctx, params("Hi", "cntr_none"))
			return err
		},
		http.StatusTooManyRequests: func() error { _, err := client.Responses.New(ctx, params("Limit", auto)); return err },
	} {
		e, ok := errors.AsType[*openai.Error](ask())
		if !ok || e.StatusCode != status || e.Message == "" || e.Response.Header.Get("X-Request-Id") == "" {
			return fmt.Errorf("status %d: the error is %+v", status, e)
		}
		if status == http.StatusTooManyRequests && e.Response.Header.Get("Retry-After") != "7" {
			return fmt.Errorf("the headers are %v", e.Response.Header)
		}
	}
	return nil
}
