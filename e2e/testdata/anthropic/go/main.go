// Command go uses the code execution tool and the Files API with Anthropic's SDK for Go.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"strings"

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

	file, err := client.Beta.Files.Upload(ctx, anthropic.BetaFileUploadParams{File: anthropic.File(strings.NewReader("a,1\n"), "data.csv", "text/csv")})
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

	models, err := client.Models.List(ctx, anthropic.ModelListParams{})
	if err != nil || len(models.Data) != 1 || models.Data[0].ID != "small" {
		return fmt.Errorf("list models: %+v %w", models, err)
	}

	again := params("Read the number from /tmp/number.txt and calculate its square")
	if message, err = client.Messages.New(ctx, params("Write a file with a random number to /tmp/number.txt")); err != nil {
		return err
	}
	again.Container = anthropic.MessageCreateParamsContainerUnion{OfString: anthropic.String(message.Container.ID)}
	if message, err = client.Messages.New(ctx, again); err != nil || !strings.Contains(message.RawJSON(), "square 22193521") {
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

// check returns an error unless a message has the call and its result.
func check(m *anthropic.Message) error {
	for _, block := range m.Content {
		if result, ok := block.AsAny().(anthropic.BashCodeExecutionToolResultBlock); ok {
			if got := result.Content.AsResponseBashCodeExecutionResultBlock(); got.Stdout == "5.5 2.8723\n" && got.ReturnCode == 0 && m.StopReason == anthropic.StopReasonEndTurn {
				return nil
			}
		}
	}
	return fmt.Errorf("there is no such result: %s", m.RawJSON())
}
