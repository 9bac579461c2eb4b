// Package client is the Go client of bullpen's HTTP API. The command line is built on it.
//
//	c, err := client.New(client.Config{URL: "https://bullpen.example.com", Key: os.Getenv("BULLPEN_API_KEY")})
//	result, err := c.Execute(ctx, api.ExecuteRequest{Language: proto.Python, Code: "print(6 * 7)"})
//
// Requests and answers have the types of [github.com/bullpen-run/bullpen/proto/api]; the values in
// them, such as languages and statuses, are those of [github.com/bullpen-run/bullpen/proto]. A
// program's failure is data: [Client.Execute] returns a result for a program that fails, runs out of
// memory or exceeds its timeout. An error means that bullpen did not run it, or that the outcome is
// unknown.
//
// # Units
//
// Timeouts of programs are in whole seconds and sizes in bytes. Fields whose names end in MS are in
// milliseconds. Times are in UTC. Where an API type has a [proto.Seconds], JSON has a number of
// seconds and Go a duration.
//
// # Errors
//
// An answer with an error status is an [*Error], with the status, the API's code, the reason, the
// request id, and the time to wait before a retry. [*UnreachableError] means that no connection could
// be made. [*LostError] means that a stream could not be resumed; it names the execution and the last
// event. An error that wraps [ErrUnknownOutcome] means that the server may have carried out a request
// that changes something. Use [errors.As] and [errors.Is]:
//
//	if failed, ok := errors.AsType[*client.Error](err); ok && failed.Status == http.StatusNotFound {
//
// # Retries
//
// The client retries a request if the server answers with status 503, or with 429 and a time to wait.
// It waits as long as the server asks, with exponential backoff otherwise, and gives up after
// [Config.Patience]. A 429 without a time is a limit that waiting does not change. If a connection
// breaks, the client resends only requests that the server carries out at most once.
// [Config.NoRetry] turns all of this off.
//
// A retry never runs a program twice: [Client.Execute], [Client.Stream], [Client.Submit] and
// [Client.CreateBatch] send an idempotency key, and the server answers a repeated key with the first
// execution. To make this hold over a restart of your own program, give [Client.Submit] a key that
// you have stored.
//
// # Streams
//
// [Client.Stream] and [Client.Follow] return the events of an execution as they happen, and resume
// after a broken connection without losing or repeating an event. An execution outlives its stream:
// keep the trace id from the first event, and continue later with [Client.Follow] or [Client.Wait].
//
// # Live sandboxes
//
// [Client.CreateSandbox] starts a sandbox that lives until it is paused or deleted, or until its timeout
// passes. [Client.Guest] reaches the program inside it: [Guest.Exec] runs a command, [Guest.Upload] and
// [Guest.Download] copy files. The guest speaks E2B's protocol, so that [Guest.URL] and [Guest.HTTP] also
// serve generated clients of that protocol.
//
//	sandbox, err := c.CreateSandbox(ctx, &api.SandboxRequest{Timeout: 3600})
//	exit, err := c.Guest(sandbox.ID, "").Exec(ctx, &client.Command{Args: []string{"ls"}, Stdout: os.Stdout})
//
// # Agent sessions
//
// [Client.CreateAgentSession] creates a session of a coding agent, and [Client.StreamAgentMessage] sends a
// message and returns the events of its turn. An agent may wait for an answer: see
// [Client.AnswerAgentPermission] and [Client.AnswerAgentQuestion], after which
// [Client.FollowAgentSession] returns the rest of the turn.
//
//	_, err := c.CreateAgentSession(ctx, "demo", &client.AgentSessionRequest{Agent: "mock"})
//	for event, err := range c.StreamAgentMessage(ctx, "demo", &client.AgentMessage{Text: "hello"}) {
//
// # Webhooks
//
// [VerifyWebhook] checks the signature and the age of a webhook that your program has received.
//
// # Cancellation
//
// Every method returns soon after its context is done, with the cause of the context. This ends the
// request, not the program: the server withdraws an inline or streamed program only while it is queued.
// [Client.Cancel] ends a program. [Guest.Exec] is the exception: it ends its command first.
//
// # Administration
//
// [Client.Admin] has the methods that need an administrator's API key: organisations, plans, keys,
// profiles and the like.
package client
