package api

import (
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

func imageRoutes() []Route {
	image := Image{
		Name: "py-3.14", Digest: "sha256:adb423b46835f52cf4e01a0a8d8eea76f122296d8332f46d137e615c3cfd223c", Size: 77594624,
		UnpackedSize: 239075328, Architecture: new("amd64"),
		Languages: map[string]string{"bash": "/usr/bin/bash", "node": "/usr/local/bin/node", "python": "/usr/bin/python3"},
		Env:       map[string]string{"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"},
		CreatedAt: Time{exampleTime()},
	}
	imageName := "The image's name."
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/admin/images", ID: "listImages", Tag: tagAdmin, Scope: proto.ScopeAdmin,
			Global: true, Summary: "List sandbox images", Params: paging(),
			Responses: ok("All images, by name.", Images{Images: []Image{image}}),
		},
		{
			Method: http.MethodPut, Path: "/v1/admin/images/{name}", ID: "putImage", Tag: tagAdmin, Scope: proto.ScopeAdmin,
			Global: true, Audit: "image.put", Summary: "Store a sandbox image", PathDoc: imageName,
			Doc: "Stores an image that `bullpen image` packed under a name, and replaces the previous image of that name. " +
				"The server reads and checks " +
				"the whole image, and finds its interpreters. An image without a name is kept until no accepted execution " +
				"can need it.",
			Params: []Param{{
				Name: "digest", In: "query", Doc: "The SHA-256 of the body.", Required: true,
				schema: object{"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
			}},
			Upload: "application/zstd",
			UploadDoc: "The image: a tar in bullpen's normal form, compressed with zstd; at most 4 GiB, and 16 GiB and " +
				"1,000,000 entries unpacked. The " +
				"body may take any time in total, but must not stall for more than 30 seconds.",
			Responses: []Response{
				{Status: http.StatusOK, Doc: "The image, which replaced another of that name.", Body: image},
				{Status: http.StatusCreated, Doc: "The image, under a new name.", Body: image},
			},
			Errors: []int{http.StatusConflict},
		},
		{
			Method: http.MethodDelete, Path: "/v1/admin/images/{name}", ID: "removeImage", Tag: tagAdmin,
			Scope: proto.ScopeAdmin, Global: true, Audit: "image.remove", Summary: "Remove a sandbox image", PathDoc: imageName,
			Doc:       "409 while a sandbox profile names it.",
			Responses: ok("The image as it was.", image), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
	}
}

func secretRoutes() []Route {
	secret := Secret{
		Org: "acme", Name: "TOKEN", Bytes: 40, Variable: true, CreatedAt: Time{exampleTime()},
		UpdatedAt: Time{exampleTime()},
	}
	ofOrg := []Param{query("org", "The organisation. By default that of the API key.", text())}
	name := "The secret's name: 1 to 63 characters of A-Z, a-z, 0-9, _ and -, the first a letter."
	injected := secret
	injected.Injection = &proto.Injection{
		Hosts:  []string{"api.example.com", "*.example.org:8443"},
		Header: "Authorization", Template: "Bearer " + proto.InjectionValue,
	}
	return []Route{{
		Method: http.MethodPut, Path: "/v1/admin/secrets/{name}", ID: "putSecret", Tag: tagAdmin, Scope: proto.ScopeAdmin,
		Audit: "secret.put", Summary: "Store a secret", PathDoc: name, Params: ofOrg,
		Doc: "Replaces one of the same name. Executions that were accepted before keep the old value. The value is stored " +
			"encrypted; no route returns it. " +
			"A secret with an `injection` is never given to programs; replacing it without one keeps the `injection`.",
		Request: SecretRequest{Value: "the-value-itself"}, Responses: ok("The secret, without its value.", secret),
		Errors: []int{http.StatusConflict, http.StatusNotFound},
	}, {
		Method: http.MethodGet, Path: "/v1/admin/secrets", ID: "listSecrets", Tag: tagAdmin, Scope: proto.ScopeAdmin,
		Summary: "List secrets", Params: append(paging(), ofOrg...),
		Responses: ok("The secrets of the organisation by name, without their values.",
			Secrets{Secrets: []Secret{secret, injected}}), Errors: []int{http.StatusNotFound},
	}, {
		Method: http.MethodGet, Path: "/v1/admin/secrets/{name}", ID: "getSecret", Tag: tagAdmin, Scope: proto.ScopeAdmin,
		Summary: "Look at a secret", PathDoc: name, Params: ofOrg,
		Responses: ok("The secret, without its value.", secret), Errors: []int{http.StatusNotFound},
	}, {
		Method: http.MethodDelete, Path: "/v1/admin/secrets/{name}", ID: "deleteSecret", Tag: tagAdmin,
		Scope: proto.ScopeAdmin, Audit: "secret.delete", Summary: "Remove a secret", PathDoc: name, Params: ofOrg,
		Doc:       "API keys and sandbox profiles that name it execute nothing until there is one again.",
		Responses: []Response{{Status: http.StatusNoContent, Doc: "Removed."}}, Errors: []int{http.StatusNotFound},
	}, {
		Method: http.MethodPost, Path: "/v1/admin/secrets/rotate-key", ID: "rotateSecretsKey", Tag: tagAdmin,
		Scope: proto.ScopeAdmin, Global: true, Audit: "secrets_key.rotate", Summary: "Rotate the operator's key of secrets",
		Doc: "Wraps the key that encrypts all secrets again, with the keys that are in --secrets-key now, or by " +
			"--secrets-command. The secrets stay " +
			"as they are. 409 if the server has no such key.",
		Responses: ok("The keys that it is wrapped for.",
			RotatedKey{"age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"}),
		Errors: []int{http.StatusConflict},
	}}
}

func workerRoutes() []Route {
	worker := NewWorker(&proto.Worker{
		Name: "node-1-AbCdEfGh", Pool: proto.DefaultPool, Version: "v1.0.0", StartedAt: exampleTime(), Slots: 8, Running: 3,
		Capabilities: []string{
			"architecture:amd64", "disk", "images", "language:bash", "language:python", "network",
			"secrets", "threads",
		}, Architecture: "amd64",
		Languages: map[proto.Language]string{proto.Bash: "GNU bash, version 5.2.15", proto.Python: "Python 3.11.2"},
		Images:    2, Threads: 40,
		Machine: proto.Machine{CPUs: 8, CPUsBusy: 2.5, Memory: 32 << 30, MemoryAvailable: 24 << 30},
	})
	draining := worker
	draining.Draining = true
	name := "The worker's name."
	pools := NewAutoscale([]proto.Pool{{
		Name: proto.DefaultPool, Capabilities: worker.Capabilities, Architecture: "amd64", WorkerSlots: 8, Workers: 2,
		Slots: 16, Queued: 120, Running: 16,
		MeanSeconds: 2.5, OldestWait: 12.4, Desired: &proto.DesiredWorkers{Workers: 5, Slots: 40, Reason: "demand"},
	}})
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/admin/autoscale", ID: "getAutoscale", Tag: tagAdmin, Scope: proto.ScopeAdmin,
			Global: true, Summary: "Show the demand for workers",
			Doc:       "The demand for the workers of each pool, and how many the autoscaler recommends. At most 32 pools.",
			Responses: ok("The pools, by name.", pools),
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/workers", ID: "listWorkers", Tag: tagAdmin, Scope: proto.ScopeAdmin,
			Global: true, Summary: "List workers",
			Doc:       "The live ones, by name. A worker that has died stays in the list for six seconds.",
			Responses: ok("The workers.", Workers{[]Worker{worker}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/processes", ID: "listProcesses", Tag: tagAdmin, Scope: proto.ScopeAdmin,
			Global:  true,
			Summary: "List the processes of the deployment",
			Doc: "Every process describes itself, which takes 3 seconds. Those that are starting or cut off from NATS " +
				"are not in the list.",
			Responses: ok("The processes, by name.", NewProcesses([]proto.Process{{
				Name: "web1-4kq2xw7", Roles: []string{"gateway"}, Version: "v0.1.0", StartedAt: exampleTime(),
				Problems: []proto.Problem{
					{Need: "store", Message: "the store is unavailable: make the bucket, or correct --store"},
				},
			}})),
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/workers/{name}/drain", ID: "drainWorker", Tag: tagAdmin,
			Scope: proto.ScopeAdmin, Global: true, Audit: "worker.drain", Summary: "Drain a worker", PathDoc: name,
			Doc: "The worker finishes its executions and gets no others. It goes on running, and takes executions " +
				"again after undrain or a restart.",
			Responses: ok("The worker, which gets no executions from now on.", draining), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/workers/{name}/undrain", ID: "undrainWorker", Tag: tagAdmin,
			Scope: proto.ScopeAdmin, Global: true, Audit: "worker.undrain", Summary: "End the draining of a worker",
			PathDoc:   name,
			Responses: ok("The worker, which gets executions again.", worker), Errors: []int{http.StatusNotFound},
		},
	}
}

func deadLetterRoutes() []Route {
	meta := proto.Meta{
		TraceID: exampleTrace, Org: "acme", Key: "key_AbCdEfGhIjKl", Language: proto.Python, Timeout: 60,
		Mode: proto.ModeAsync, MaxAttempts: 1,
		Metadata: map[string]string{"team": "blue"}, WebhookURL: exampleHook, Profile: proto.DefaultProfileName,
		RequestID: "req-1",
		CreatedAt: exampleTime().Add(-time.Minute),
	}
	letter := &proto.DeadLetter{
		ID: exampleTrace, Reason: proto.DeadWorkersLost,
		Message: "3 workers were lost with this job, each before it started the program.",
		At:      exampleTime(), Meta: &meta, Attempt: 1, Workers: []string{"w1-1a2b", "w2-3c4d", "w3-5e6f"},
	}
	whole := NewWholeDeadLetter(letter, &proto.DeadContent{Job: &proto.Job{Meta: meta}})
	requeued := NewDeadLetter(letter)
	requeued.RequeuedAs, requeued.RequeuedAt = new(proto.TraceID("trc_UvWxYz0123456789abcd")),
		&Time{exampleTime().Add(time.Hour)}
	id := "The dead letter's id."
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/admin/dead-letters", ID: "listDeadLetters", Tag: tagAdmin,
			Scope: proto.ScopeAdmin, Global: true, Summary: "List dead letters",
			Doc: "Jobs whose workers were all lost before they started the program, and messages that are no jobs, of all " +
				"organisations; the newest " +
				"first. They are kept as long as records are.",
			Params: paging(), Responses: ok("The dead letters.", DeadLetters{DeadLetters: []DeadLetter{whole.DeadLetter}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/dead-letters/{id}", ID: "getDeadLetter", Tag: tagAdmin,
			Scope: proto.ScopeAdmin, Global: true, Summary: "Look at a dead letter", PathDoc: id,
			Doc: "The program and the environment variables of a job are kept, but not shown. Of a malformed message " +
				"the first 4,096 bytes are shown.",
			Responses: ok("The dead letter.", whole), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodDelete, Path: "/v1/admin/dead-letters/{id}", ID: "deleteDeadLetter", Tag: tagAdmin,
			Scope: proto.ScopeAdmin, Global: true, Audit: "dead_letter.delete", Summary: "Remove a dead letter", PathDoc: id,
			Doc:       "For good, with its job. The record of its execution stays.",
			Responses: empty("It is removed."), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/dead-letters/{id}/requeue", ID: "requeueDeadLetter", Tag: tagAdmin,
			Starts: true, Scope: proto.ScopeAdmin, Global: true, Audit: "dead_letter.requeue",
			Summary: "Run the job of a dead letter again", PathDoc: id, Traced: true,
			Doc: "As a new execution, which the dead letter names from then on; the old execution stays as it ended. " +
				"Program, variables, sandbox, thread, " +
				"metadata, webhook and mode stay; the limits of its API key's present plan apply. The new execution may be " +
				"queued as long as an " +
				"async one. A repeated request gets the same answer and starts nothing, unless the new execution expired in the " +
				"queue. A malformed " +
				"message cannot be requeued.",
			Responses: []Response{{
				Status: http.StatusAccepted, Doc: "Accepted, and durable.", Body: requeued,
				Headers: map[string]string{"Location": "The path of the execution."},
			}},
			Errors: []int{http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests},
		},
	}
}

func storeRoutes() []Route {
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/admin/backup", ID: "backup", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true,
			Audit: "backup.create", Summary: "Back up the content of JetStream",
			Doc: "The server stays in operation. The backup has everything that was accepted before the request, and some of " +
				"what is accepted meanwhile. " +
				"It contains secrets: the secrets of webhooks, the hashes of API keys, and the key that signs URLs of files. It " +
				"does not contain the files of " +
				"threads. bullpen backup fetches it and checks that it is complete, bullpen restore restores it.",
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The backup. An answer that breaks off is incomplete.",
				Text:    map[string]string{"application/zstd": ""},
				Headers: map[string]string{"Content-Disposition": "attachment, with a file name."},
			}},
			Errors: []int{http.StatusTooManyRequests},
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/threads/gc", ID: "collectThreads", Tag: tagAdmin, Scope: proto.ScopeAdmin,
			Global: true, Audit: "thread_store.collect", Summary: "Remove garbage from the store of threads",
			Doc: "Blobs of all organisations that no version or uploaded file refers to and that are older than the safe " +
				"age: a younger one may belong to an " +
				"execution or an upload that is not done. The server also collects garbage by itself now and then.",
			Request: CollectRequest{SafeAge: proto.Seconds(proto.DefaultSafeAge)}, OptionalBody: true,
			Responses: ok("What was removed.",
				proto.Collected{Layers: proto.Swept{Blobs: 3, Bytes: 4 << 20}, Manifests: proto.Swept{Blobs: 3, Bytes: 1200}}),
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/threads/rebuild", ID: "rebuildThreads", Tag: tagAdmin,
			Scope: proto.ScopeAdmin, Global: true, Audit: "thread_store.rebuild", Summary: "Rebuild threads from the store",
			Doc: "For all organisations, after the loss of JetStream's data. Existing threads stay as they are. Uploaded " +
				"files that were in no version " +
				"are lost. No thread may be removed meanwhile.",
			Responses: ok("What was rebuilt.", proto.Rebuilt{Made: 12, Kept: 3}),
		},
	}
}

func auditRoutes() []Route {
	record := AuditRecord{
		Time: Time{exampleTime()}, Stage: AuditOutcome, Intent: new(int64(1)), Action: "secret.put",
		Actor: AuditActor{"key", "key_1", "ci", "acme"}, Object: AuditObject{"secret", "TOKEN", new("acme")},
		Before: nil, After: []byte(`{"bytes":40,"name":"TOKEN","org":"acme"}`), Status: new(http.StatusOK),
		SourceIP: "203.0.113.7", UserAgent: "bullpen/v1.0.0", RequestID: "req_1",
	}
	line, err := record.Seal(&AuditRecord{Sequence: 1, Hash: firstPrevious})
	if err != nil {
		line = nil // it has only text and times
	}
	moment := object{"type": "string", "format": "date-time"}
	params := append([]Param{
		query("org", "Only acts by keys of this organisation, or on its objects. By default all for a global "+
			"administrator, otherwise those of the API key's organisation.", text()),
		query("actor", "Only acts with the API key of this id.", filter()),
		query("action", "Only this action, such as key.create.", filter()),
		query("created_after", "Only records of this time or later.", moment),
		query("created_before", "Only records before this time.", moment),
		query("after", "Of an export: the sequence of the last record that the client has.",
			object{"type": "integer", "minimum": 0, "maximum": MaxWhole, "default": 0}),
		query("all", "Of an export: the records of all organisations as they are, which a verification of the chain "+
			"needs. For global administrators only, and without filters.", object{"type": "boolean", "default": false}),
		header("Accept", "application/json, or application/x-ndjson for an export.",
			object{"type": "string", "default": typeJSON}),
	}, paging()...)
	return []Route{{
		Method: http.MethodGet, Path: "/v1/admin/audit", ID: "listAudit", Tag: tagAdmin, Scope: proto.ScopeAdmin,
		Summary: "List administrative acts",
		Doc: "The audit log: who did what with administrative objects, from where, and how it ended. Attempts that were " +
			"refused are in it, too. " +
			"With Accept: application/x-ndjson the answer is an export: all records that match, the oldest first, one in " +
			"each line.",
		Params: params,
		Responses: []Response{{
			Status: http.StatusOK, Doc: "The records.", Body: AuditRecords{Records: []AuditRecord{record}},
			Text: map[string]string{typeNDJSON: string(line) + "\n"},
		}},
		Errors: []int{http.StatusNotFound, http.StatusTooManyRequests},
	}, {
		Method: http.MethodPost, Path: "/v1/admin/audit/verify", ID: "verifyAudit", Tag: tagAdmin, Scope: proto.ScopeAdmin,
		Global: true, Summary: "Verify the audit log",
		Doc: "Computes the hash of each record, and checks that the next record has it. A million records take about a " +
			"minute; the answer is 503 after 10 minutes. `bullpen audit verify` does the same on your machine, without " +
			"trust in the server.",
		Request: AuditVerifyRequest{},
		Responses: ok("The result.", AuditVerification{
			Records: 2, First: 1, Last: 2, Valid: true, HeadHash: record.Hash, Unfinished: []int64{},
		}),
		Errors: []int{http.StatusTooManyRequests},
	}}
}
