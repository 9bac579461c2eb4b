package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strings"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// connect returns a client of the server that the environment names.
func connect() *client.Client {
	c, err := client.New(client.Config{URL: os.Getenv("BULLPEN_URL"), Key: os.Getenv("BULLPEN_API_KEY")})
	if err != nil {
		log.Fatal(err)
	}
	return c
}

func Example() {
	c, err := client.New(client.Config{URL: os.Getenv("BULLPEN_URL"), Key: os.Getenv("BULLPEN_API_KEY")})
	if err != nil {
		log.Fatal(err)
	}
	result, err := c.Execute(context.Background(), api.ExecuteRequest{
		Language: proto.Bash,
		Code:     "echo $((6 * 7)); exit 3",
		Timeout:  10, // seconds
	})
	if err != nil {
		log.Fatal(err) // bullpen did not run it, or the outcome is unknown
	}
	fmt.Print(result.Stdout)
	fmt.Println(result.Status(), result.ExitCode)
	// Output:
	// 42
	// failed 3
}

// A program that shows lists reads them again at each event.
func ExampleClient_Changes() {
	c, ctx := connect(), context.Background()
	started := false
	for event, err := range c.Changes(ctx, "") {
		if err != nil {
			log.Fatal(err)
		}
		if !started {
			started = true
			fmt.Println(event.Type)
			if _, err := c.Execute(ctx, api.ExecuteRequest{Language: proto.Bash, Code: "echo hello"}); err != nil {
				log.Fatal(err)
			}
			continue
		}
		if len(event.IDs[proto.ChangedExecutions]) > 0 {
			fmt.Println(event.Type)
			return
		}
	}
	// Output:
	// ready
	// changes
}

// The loop ends with the result. A broken connection is resumed inside it.
func ExampleClient_Stream() {
	c, ctx := connect(), context.Background()
	program := api.ExecuteRequest{Language: proto.Bash, Code: "echo one; echo two >&2"}
	for event, err := range c.Stream(ctx, program) {
		if err != nil {
			log.Fatal(err)
		}
		switch event.Type {
		case proto.EventOutput:
			fmt.Printf("%s: %s", event.Stream, event.Data)
		case proto.EventResult:
			fmt.Println("exit code", event.Result.ExitCode)
		}
	}
	// Unordered output:
	// stdout: one
	// stderr: two
	// exit code 0
}

// An execution outlives its stream. Another process can go on with its trace id and the number of the last
// event.
func ExampleClient_Follow() {
	c, ctx := connect(), context.Background()
	var id proto.TraceID
	var last int64
	for event, err := range c.Stream(ctx, api.ExecuteRequest{Language: proto.Bash, Code: "echo one; sleep 1; echo two"}) {
		if err != nil {
			log.Fatal(err)
		}
		if event.Type == proto.EventStatus {
			id, last = event.TraceID, event.Seq
			break // the program goes on
		}
	}
	for event, err := range c.Follow(ctx, id, last) {
		if err != nil {
			log.Fatal(err)
		}
		if event.Type == proto.EventOutput {
			fmt.Print(event.Data)
		}
	}
	// Output:
	// one
	// two
}

// A sandbox keeps its files between commands, and over a pause.
func ExampleGuest_Exec() {
	c, ctx := connect(), context.Background()
	sandbox, err := c.CreateSandbox(ctx, &api.SandboxRequest{Timeout: 600, OnTimeout: proto.SandboxPause})
	if err != nil {
		log.Fatal(err)
	}
	defer c.DeleteSandbox(ctx, sandbox.ID) //nolint:errcheck // it expires anyway
	guest := c.Guest(sandbox.ID, "")
	if err := guest.Upload(ctx, "data/input.txt", strings.NewReader("b\na\n"), 4); err != nil {
		log.Fatal(err)
	}
	command := &client.Command{Args: []string{"sort", "input.txt"}, Dir: "data", Stdout: os.Stdout}
	exit, err := guest.Exec(ctx, command)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("exit code", exit.Code)
	// Output:
	// a
	// b
	// exit code 0
}

// A key that is stored before the request makes it safe to send the request again, also after a restart.
func ExampleClient_Submit() {
	c, ctx := connect(), context.Background()
	program := api.ExecuteRequest{Language: proto.Bash, Code: "echo report"}
	first, err := c.Submit(ctx, program, "report-2026-11")
	if err != nil {
		log.Fatal(err)
	}
	again, err := c.Submit(ctx, program, "report-2026-11")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("one execution:", first.TraceID == again.TraceID)
	done, err := c.Wait(ctx, first.TraceID)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(done.Status, " ", *done.Stdout)
	// Output:
	// one execution: true
	// success report
}

// The end of a context ends the request, and Cancel ends the program.
func ExampleClient_Cancel() {
	c, ctx := connect(), context.Background()
	accepted, err := c.Submit(ctx, api.ExecuteRequest{Language: proto.Bash, Code: "sleep 60"}, "")
	if err != nil {
		log.Fatal(err)
	}
	if _, err := c.Cancel(ctx, accepted.TraceID); err != nil {
		log.Fatal(err)
	}
	done, err := c.Wait(ctx, accepted.TraceID)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(done.Status)
	// Output: cancelled
}

func ExampleError() {
	_, err := connect().Get(context.Background(), "trc_aaaaaaaaaaaaaaaaaaaa")
	if failed, ok := errors.AsType[*client.Error](err); ok {
		fmt.Println(failed.Status, failed.Code)
	}
	// Output: 404 not_found
}

func ExampleClient_CreateBatch() {
	c, ctx := connect(), context.Background()
	items := `{"language": "bash", "code": "echo one"}
{"language": "bash", "code": "echo two"}
`
	batch, err := c.CreateBatch(ctx, int64(len(items)), func() io.Reader { return strings.NewReader(items) })
	if err != nil {
		log.Fatal(err)
	}
	for line, err := range c.BatchResults(ctx, batch.ID, -1, true) {
		if err != nil {
			log.Fatal(err)
		}
		result, err := line.Result()
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(result.Index, " ", result.Status, " ", *result.Stdout)
	}
	// Output:
	// 0 success one
	// 1 success two
}

// Executions in a thread share its home directory, and files can be put there.
func ExampleClient_Upload() {
	c, ctx := connect(), context.Background()
	data := "1\n2\n3\n"
	err := c.Upload(ctx, client.ThreadFiles("sums"), "numbers", int64(len(data)), strings.NewReader(data), nil)
	if err != nil {
		log.Fatal(err)
	}
	_, err = c.Execute(ctx, api.ExecuteRequest{Language: proto.Bash, Code: "wc -l <numbers >count", ThreadID: "sums"})
	if err != nil {
		log.Fatal(err)
	}
	if err := c.Download(ctx, client.ThreadFiles("sums"), "count", os.Stdout); err != nil {
		log.Fatal(err)
	}
	// Output: 3
}

// Lists are iterators, which read a page when the one before is used up.
func ExampleCollect() {
	c, ctx := connect(), context.Background()
	for plan, err := range c.Admin().Plans.List(ctx, "") {
		if err != nil {
			log.Fatal(err)
		}
		if plan.Name == "unlimited" {
			fmt.Println("found", plan.Name)
			break
		}
	}
	schedules, err := client.Collect(c.Schedules(ctx))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(schedules), "schedules")
	// Output:
	// found unlimited
	// 0 schedules
}

func ExampleAdmin() {
	ctx, admin := context.Background(), connect().Admin()
	key, err := admin.Keys.Create(ctx, &api.KeyRequest{Org: "acme", KeySettings: api.KeySettings{Name: "ci"}})
	if err != nil {
		log.Fatal(err)
	}
	tenant, err := client.New(client.Config{URL: os.Getenv("BULLPEN_URL"), Key: key.Secret})
	if err != nil {
		log.Fatal(err)
	}
	result, err := tenant.Execute(ctx, api.ExecuteRequest{Language: proto.Bash, Code: "echo hello"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(result.Stdout)
	org, err := admin.Orgs.Edit(ctx, "acme", func(o *api.OrgRequest) { o.Suspended = true })
	if err != nil {
		log.Fatal(err)
	}
	_, err = tenant.Execute(ctx, api.ExecuteRequest{Language: proto.Bash, Code: "echo hello"})
	failed, _ := errors.AsType[*client.Error](err)
	fmt.Println(org.Suspended, failed.Code)
	// Output:
	// hello
	// true forbidden
}
