// Command go uses the code execution tool and the Files API with Anthropic's SDK for Go.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/anthropics/anthropic-sdk-go"
	"github.com/anthropics/anthropic-sdk-go/option"
)

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	client := anthropic.NewClient() // ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
	params := func(text string) anthropic.MessageNewParams {
		return anthropic.MessageNewParams{
			Model: "claude-opus-4-6", MaxTokens: 4096,
			Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(text))},
			Tools:    []anthropic.ToolUnionParam{{OfCodeExecutionTool20250825: &anthropic.CodeExecutionTool20250825Param{}}},
		}
	}
	message, err := client.Messages.New(ctx, params("Calculate the mean and standard deviation"))
	if err != nil {
		return err
	}
	if err := check(message); err != nil {
		return err
	}

	stream := client.Messages.NewStreaming(ctx, params("Calculate the mean and standard deviation"))
	var streamed anthropic.Message
	for stream.Next() {
		if err := streamed.Accumulate(stream.Current()); err != nil {
			return fmt.Errorf("accumulate: %w", err)
		}
	}
	if err := stream.Err(); err != nil {
		return fmt.Errorf("stream: %w", err)
	}
	if err := check(&streamed); err != nil {
		return fmt.Errorf("streamed: %w", err)
	}

	file, err := client.Beta.Files.Upload(
		ctx, anthropic.BetaFileUploadParams{File: anthropic.File(strings.NewReader("a,1\n"), "data.csv", "text/csv")})
	if err != nil {
		return fmt.Errorf("upload: %w", err)
	}
	if file.Filename != "data.csv" || file.SizeBytes != 4 || file.CreatedAt.IsZero() {
		return fmt.Errorf("uploaded: %s", file.RawJSON())
	}
	pages := client.Beta.Files.ListAutoPaging(ctx, anthropic.BetaFileListParams{Limit: anthropic.Int(1)})
	found := false
	for pages.Next() {
		found = found || pages.Current().ID == file.ID
	}
	if err := pages.Err(); err != nil || !found {
		return fmt.Errorf("the file is not listed: %w", err)
	}
	resp, err := client.Beta.Files.Download(ctx, file.ID, anthropic.BetaFileDownloadParams{})
	if err == nil {
		_, _ = io.Copy(io.Discard, resp.Body)
		return errors.Join(errors.New("an uploaded file was downloaded"), resp.Body.Close())
	}
	if e, ok := errors.AsType[*anthropic.Error](err); !ok || e.StatusCode != 400 || e.RequestID == "" {
		return fmt.Errorf("download: %w", err)
	}
	if _, err := client.Beta.Files.Delete(ctx, file.ID, anthropic.BetaFileDeleteParams{}); err != nil {
		return fmt.Errorf("delete: %w", err)
	}

	if err := batches(ctx, &client.Messages.Batches, params); err != nil {
		return fmt.Errorf("batches: %w", err)
	}

	models, err := client.Models.List(ctx, anthropic.ModelListParams{})
	if err != nil || len(models.Data) != 1 || models.Data[0].ID != "small" {
		return fmt.Errorf("list models: %+v %w", models, err)
	}

	again := params("Read the number from /tmp/number.txt and calculate its square")
	if message, err = client.Messages.New(
		ctx, params("Write a file with a random number to /tmp/number.txt")); err != nil {
		return err
	}
	again.Container = anthropic.MessageCreateParamsContainerUnion{OfString: anthropic.String(message.Container.ID)}
	if message, err = client.Messages.New(ctx, again); err != nil ||
		!strings.Contains(message.RawJSON(), "square 22193521") {
		return fmt.Errorf("use a container again: %w", err)
	}
	again.Container = anthropic.MessageCreateParamsContainerUnion{OfString: anthropic.String("container_that_is_not")}
	for status, ask := range map[int]func() error{
		http.StatusUnauthorized: func() error {
			_, err := client.Messages.New(ctx, params("Hi"), option.WithAPIKey("sk-ant-other"))
			return err
		},
		http.StatusNotFound: func() error { _, err := client.Messages.New(ctx, again); return err },
		http.StatusTooManyRequests: func() error {
			_, err := client.Messages.New(ctx, params("Limit"), option.WithMaxRetries(0))
			return err
		},
	} {
		if e, ok := errors.AsType[*anthropic.Error](ask()); !ok || e.StatusCode != status || e.RequestID == "" {
			return fmt.Errorf("status %d: the error is %+v", status, e)
		}
	}
	return nil
}

// batches runs a batch with requests that succeed and fail, and cancels another one.
func batches(
	ctx context.Context, batches *anthropic.MessageBatchService, params func(text string) anthropic.MessageNewParams,
) error {
	create := func(texts ...string) (*anthropic.MessageBatch, error) {
		var p anthropic.MessageBatchNewParams
		for i, text := range texts {
			m := params(text)
			p.Requests = append(p.Requests, anthropic.MessageBatchNewParamsRequest{
				CustomID: fmt.Sprint("r", i), Params: anthropic.MessageBatchNewParamsRequestParams{
					Model: m.Model, MaxTokens: m.MaxTokens, Messages: m.Messages, Tools: m.Tools},
			})
		}
		return batches.New(ctx, p)
	}
	created, err := create("mean and standard deviation", "Break")
	if err != nil {
		return err
	}
	counts, results, err := ended(ctx, batches, created)
	if err != nil {
		return err
	}
	mean, broken := results["r0"], results["r1"]
	if counts.Succeeded != 1 || counts.Errored != 1 || counts.Processing != 0 || len(results) != 2 {
		return fmt.Errorf("the counts are %s", counts.RawJSON())
	}
	if succeeded, ok := mean.AsAny().(anthropic.MessageBatchSucceededResult); !ok || check(&succeeded.Message) != nil {
		return fmt.Errorf("the result is %s", mean.RawJSON())
	}
	errored, ok := broken.AsAny().(anthropic.MessageBatchErroredResult)
	if !ok {
		return fmt.Errorf("the result is %s", broken.RawJSON())
	}
	if e, ok := errored.Error.Error.AsAny().(anthropic.APIErrorObject); !ok || e.Message == "" {
		return fmt.Errorf("the error is %s", errored.RawJSON())
	}

	slow, err := create("Sleep")
	if err != nil {
		return err
	}
	_, err = batches.Delete(ctx, slow.ID, anthropic.MessageBatchDeleteParams{})
	if e, ok := errors.AsType[*anthropic.Error](err); !ok || e.StatusCode != http.StatusBadRequest {
		return fmt.Errorf("delete before the end: %w", err)
	}
	if slow, err = batches.Cancel(ctx, slow.ID, anthropic.MessageBatchCancelParams{}); err != nil ||
		slow.CancelInitiatedAt.IsZero() {
		return fmt.Errorf("cancel: %w", err)
	}
	if counts, results, err = ended(ctx, batches, slow); err != nil {
		return err
	}
	result := results["r0"]
	if _, ok := result.AsAny().(anthropic.MessageBatchCanceledResult); !ok || counts.Canceled != 1 {
		return fmt.Errorf("the result is %s", result.RawJSON())
	}

	var listed []string
	pages := batches.ListAutoPaging(ctx, anthropic.MessageBatchListParams{Limit: anthropic.Int(1)})
	for pages.Next() {
		listed = append(listed, pages.Current().ID)
	}
	if err := pages.Err(); err != nil || !slices.Equal(listed, []string{slow.ID, created.ID}) {
		return fmt.Errorf("listed are %q: %w", listed, err)
	}
	for _, id := range listed {
		if deleted, err := batches.Delete(ctx, id, anthropic.MessageBatchDeleteParams{}); err != nil || deleted.ID != id {
			return fmt.Errorf("delete: %w", err)
		}
	}
	_, err = batches.Get(ctx, created.ID, anthropic.MessageBatchGetParams{})
	if e, ok := errors.AsType[*anthropic.Error](err); !ok || e.StatusCode != http.StatusNotFound {
		return fmt.Errorf("get after the deletion: %w", err)
	}
	return nil
}

// ended waits for the end of a batch. It returns its counts, and its results by their ids.
func ended(
	ctx context.Context, batches *anthropic.MessageBatchService, batch *anthropic.MessageBatch,
) (anthropic.MessageBatchRequestCounts, map[string]anthropic.MessageBatchResultUnion, error) {
	var none anthropic.MessageBatchRequestCounts
	for batch.ProcessingStatus != anthropic.MessageBatchProcessingStatusEnded {
		time.Sleep(100 * time.Millisecond)
		var err error
		if batch, err = batches.Get(ctx, batch.ID, anthropic.MessageBatchGetParams{}); err != nil {
			return none, nil, fmt.Errorf("get: %w", err)
		}
	}
	results, lines := map[string]anthropic.MessageBatchResultUnion{},
		batches.ResultsStreaming(ctx, batch.ID, anthropic.MessageBatchResultsParams{})
	for lines.Next() {
		results[lines.Current().CustomID] = lines.Current().Result
	}
	if err := errors.Join(lines.Err(), lines.Close()); err != nil {
		return none, nil, fmt.Errorf("results: %w", err)
	}
	return batch.RequestCounts, results, nil
}

// check returns an error unless a message has the call and its result.
func check(m *anthropic.Message) error {
	for _, block := range m.Content {
		if result, ok := block.AsAny().(anthropic.BashCodeExecutionToolResultBlock); ok {
			if got := result.Content.AsResponseBashCodeExecutionResultBlock(); got.Stdout == "5.5 2.8723\n" &&
				got.ReturnCode == 0 && m.StopReason == anthropic.StopReasonEndTurn {
				return nil
			}
		}
	}
	return fmt.Errorf("there is no such result: %s", m.RawJSON())
}
