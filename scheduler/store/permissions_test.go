package store_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// restricted starts a server with the documented permissions, and returns a function that connects
// as a role.
func restricted(t *testing.T) func(role string, cfg store.Config) *store.Store {
	t.Helper()
	conf := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(conf, []byte(store.PermissionsConf(t.TempDir())), 0o600); err != nil {
		t.Fatal(err)
	}
	opts, err := server.ProcessConfigFile(conf)
	if err != nil {
		t.Fatal(err)
	}
	opts.Host, opts.Port = "", 0
	s := storetest.Start(t, opts)
	return func(role string, cfg store.Config) *store.Store {
		t.Helper()
		access := store.Access{URL: s.ClientURL(), User: role, Password: role + "-secret", Name: role, Role: role}
		st, err := store.Connect(storetest.Context(t), access, cfg, storetest.Log(t))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(st.Close)
		return st
	}
}

// What a role does at the border of its permissions: it opens the streams, and uses those that it
// may. Everything that is denied times out.
func TestDocumentedPermissions(t *testing.T) {
	connect, ctx := restricted(t), storetest.Context(t)
	all := store.Config{Replicas: 1, Retention: time.Hour}
	gateway := connect("gateway", all)
	scheduler, webhook, worker := connect("scheduler", all), connect("webhook", all),
		connect("worker", store.Config{AttachOnly: true})

	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.Code = string(make([]byte, 600<<10)) // too large for the message
	if err := storetest.PutJob(ctx, scheduler, job); err != nil {
		t.Fatal(err)
	}
	for name, st := range map[string]*store.Store{
		"gateway": gateway, "scheduler": scheduler, "webhook": webhook,
		"worker": worker,
	} {
		if m, err := st.Jobs.Last(ctx, store.JobPattern(job.Org, job.TraceID)); err != nil || len(m.Data) < 600<<10 {
			t.Errorf("%s reads a job: %v", name, err)
		}
	}
	if _, err := worker.Records.Put(
		ctx, &proto.Record{Meta: job.Meta, Status: proto.StatusRunning, Worker: "w", Attempt: 1}, 0); err != nil {
		t.Errorf("a worker writes a record: %v", err)
	}
	lease, err := worker.Leases.Write(ctx, store.LeaseSubject("e"), nats.Header{}, nil, 0)
	if err != nil {
		t.Errorf("a worker acquires a lease: %v", err)
	}
	if _, err := worker.Leases.Last(ctx, store.LeaseSubject("e"), store.FromLeader); err != nil {
		t.Errorf("a worker reads its lease: %v", err)
	}
	if err := scheduler.Leases.Read(ctx, store.Range{}, func(*store.Message) {}); err != nil {
		t.Errorf("a scheduler follows leases: %v", err)
	}
	if _, err := scheduler.Leases.Write(ctx, store.LeaseSubject("e"), nats.Header{}, nil, lease); err != nil {
		t.Errorf("a scheduler ends a lease: %v", err)
	}
	if status, _, err := scheduler.Records.Status(ctx, job.Org, job.TraceID); err != nil || status != proto.StatusRunning {
		t.Errorf("a scheduler reads a status: %v, %v", status, err)
	}
	records := store.RecordPatternOf(job.Org)
	if err := gateway.Records.Read(ctx, store.Range{Subject: records}, func(*store.Message) {}); err != nil {
		t.Errorf("a gateway follows records: %v", err)
	}
	if _, err := webhook.Deliveries.Write(
		ctx, store.DeliverySubject("acme", job.TraceID), nats.Header{}, nil, 0); err != nil {
		t.Errorf("a webhook process writes a delivery: %v", err)
	}
	if _, err := webhook.Control.Create(ctx, "webhook-dispatcher", nil); err != nil {
		t.Errorf("a webhook process is elected: %v", err)
	}
	if err := store.ReadBucket(ctx, webhook.Webhooks, ">", func(jetstream.KeyValueEntry) {}); err != nil {
		t.Errorf("a webhook process follows the settings: %v", err)
	}
	if _, err := gateway.Keys.Put(ctx, "key.k", []byte("secret")); err != nil {
		t.Errorf("a gateway stores an API key: %v", err)
	}

	if _, err := gateway.Audit.Write(ctx, store.AuditSubject, nats.Header{}, []byte("{}"), 0); err != nil {
		t.Errorf("a gateway appends to the audit log: %v", err)
	}
	if _, err := gateway.Audit.Last(ctx, store.AuditSubject, store.FromLeader); err != nil {
		t.Errorf("a gateway reads the audit log: %v", err)
	}
	if _, err := gateway.Audit.At(ctx, 1); err != nil {
		t.Errorf("a gateway reads a record of the audit log: %v", err)
	}
	if _, err := gateway.Usage.Put(ctx, "position", []byte("{}")); err != nil {
		t.Errorf("a gateway stores usage: %v", err)
	}
	for _, bucket := range []jetstream.KeyValue{gateway.Batches, gateway.Schedules} {
		if err := bucket.Purge(ctx, "key"); err != nil {
			t.Errorf("a gateway removes a key of %s: %v", bucket.Bucket(), err)
		}
		if err := store.PurgeMarkers(ctx, gateway, bucket, 0); err != nil {
			t.Errorf("a gateway removes markers: %v", err)
		}
	}
	if err := store.ReadBucket(ctx, gateway.Usage, "org.*.2026-11", func(jetstream.KeyValueEntry) {}); err != nil {
		t.Errorf("a gateway reads the usage of a month: %v", err)
	}

	if _, err := gateway.Conn.Subscribe(store.ReadersSubject(job.Org, job.TraceID), func(m *nats.Msg) {
		_ = m.Respond(nil)
	}); err != nil {
		t.Fatal(err)
	}
	if err := gateway.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := worker.Conn.RequestWithContext(ctx, store.ReadersSubject(job.Org, job.TraceID), nil); err != nil {
		t.Errorf("a worker asks for readers: %v", err)
	}

	followed, err := gateway.Conn.SubscribeSync(store.AgentLoggedSubject("acme", "run"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gateway.AgentLogs.Write(
		ctx, store.AgentLogSubject("acme", "run"), nats.Header{}, []byte("{}"), 0); err != nil {
		t.Errorf("a gateway stores a run of an agent: %v", err)
	}
	if _, err := followed.NextMsgWithContext(ctx); err != nil {
		t.Errorf("a gateway follows a run of an agent: %v", err)
	}
	if _, err := gateway.AgentLogs.Next(ctx, 1, store.AgentLogSubject("acme", "run")); err != nil {
		t.Errorf("a gateway reads a run of an agent: %v", err)
	}

	for _, name := range []string{
		"dispatcher", "webhook-dispatcher", "schedules", "batches", "pipelines", "sandboxes", "agent-runs", "agent-sessions",
		"org-deletion", "thread-gc", "history", "audit-http", "audit-syslog", "usage",
	} {
		ping := store.PingSubject(name, "g")
		if _, err := gateway.Conn.Subscribe(ping, func(m *nats.Msg) { _ = m.Respond(nil) }); err != nil {
			t.Fatal(err)
		}
		if _, err := gateway.Conn.RequestWithContext(ctx, ping, nil); err != nil {
			t.Errorf("a gateway asks whether the leader of %s lives: %v", name, err)
		}
	}

	checkGatewayRemoves(t, gateway, job)

	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if _, err := webhook.Control.Create(short, "dispatcher", nil); err == nil {
		t.Error("a webhook process was elected dispatcher")
	}
	if _, err := worker.JS.KeyValue(short, "bullpen_keys"); err == nil {
		kv, err := worker.JS.KeyValue(ctx, "bullpen_keys")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := kv.Get(short, "key.k"); err == nil {
			t.Error("a worker reads an API key")
		}
	}
	if _, err := gateway.Secrets.Put(ctx, "data_key", []byte("wrapped")); err != nil {
		t.Errorf("a gateway stores the key of secrets: %v", err)
	}
	for name, st := range map[string]*store.Store{"scheduler": scheduler, "webhook": webhook} {
		if _, err := st.Secrets.Get(ctx, "data_key"); err != nil {
			t.Errorf("a %s process reads the key of secrets: %v", name, err)
		}
		if _, err := st.Secrets.Put(short, "data_key", nil); err == nil {
			t.Errorf("a %s process changes the key of secrets", name)
		}
	}
	for _, bucket := range []string{"bullpen_keys", "bullpen_webhooks", "bullpen_secrets", "bullpen_usage"} {
		for _, request := range []struct{ subject, body string }{
			{"$JS.API.DIRECT.GET.KV_" + bucket + ".$KV." + bucket + ".>", ""},
			{"$JS.API.DIRECT.GET.KV_" + bucket, `{"seq":1}`},
			{"$JS.API.STREAM.MSG.GET.KV_" + bucket, `{"seq":1}`},
			{"$JS.API.CONSUMER.CREATE.KV_" + bucket, "{}"},
			{"$JS.API.STREAM.SNAPSHOT.KV_" + bucket, `{"deliver_subject":"_INBOX.worker.x"}`},
		} {
			denied, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
			if answer, err := worker.Conn.RequestWithContext(denied, request.subject, []byte(request.body)); err == nil {
				t.Errorf("a worker gets an answer on %s: %s", request.subject, answer.Data)
			}
			cancel()
		}
	}
	for _, request := range []struct{ subject, body string }{
		{store.AuditSubject, "{}"},
		{"$JS.API.DIRECT.GET.BULLPEN_AUDIT", `{"seq":1}`},
		{"$JS.API.STREAM.MSG.GET.BULLPEN_AUDIT", `{"seq":1}`},
		{"$JS.API.CONSUMER.CREATE.BULLPEN_AUDIT", "{}"},
		{"$JS.API.STREAM.UPDATE.BULLPEN_AUDIT", `{"name":"BULLPEN_AUDIT","subjects":["x"]}`},
		{"$JS.API.STREAM.DELETE.BULLPEN_AUDIT", ""},
	} {
		denied, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		for name, st := range map[string]*store.Store{"worker": worker, "scheduler": scheduler, "webhook": webhook} {
			if name != "worker" && strings.Contains(request.subject, "UPDATE") {
				continue // each of them creates the streams
			}
			if answer, err := st.Conn.RequestWithContext(denied, request.subject, []byte(request.body)); err == nil {
				t.Errorf("a %s process gets an answer on %s: %s", name, request.subject, answer.Data)
			}
		}
		if _, err := gateway.Conn.RequestWithContext(denied, "$JS.API.STREAM.DELETE.BULLPEN_AUDIT", nil); err == nil {
			t.Error("a gateway deletes the audit log")
		}
		cancel()
	}
	if err := worker.JS.DeleteStream(short, "BULLPEN_JOBS"); err == nil {
		t.Error("a worker deletes a stream")
	}
	if err := storetest.PutJob(short, worker, storetest.Job("acme", "k", proto.ModeAsync)); err == nil {
		t.Error("a worker stores a job")
	}
}

// checkGatewayRemoves checks that a gateway may remove what an organisation has.
func checkGatewayRemoves(t *testing.T, gateway *store.Store, job *proto.Job) {
	t.Helper()
	ctx := storetest.Context(t)
	check := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("a gateway %s: %v", what, err)
		}
	}
	for name, x := range map[string]struct {
		stream  store.Stream
		pattern string
	}{
		"records":      {gateway.Records.Stream, store.RecordPatternOf(job.Org)},
		"output":       {gateway.Output.Stream, store.OutputPatternOf(job.Org)},
		"dead letters": {gateway.DeadLetters, store.DeadLetterPatternOf(job.Org)},
	} {
		_, err := x.stream.Subjects(ctx, x.pattern)
		check("counts the "+name, err)
		check("erases the "+name, x.stream.EraseSubject(ctx, x.pattern))
	}
	bodies, err := gateway.Bodies.Subjects(ctx, store.BodyPatternOf(job.Org))
	check("counts bodies", err)
	if len(bodies) != 1 {
		t.Errorf("the bodies are %v", bodies)
	}
	check("purges bodies", gateway.Bodies.PurgeSubject(ctx, store.BodyPatternOf(job.Org)))
	check("purges deliveries", gateway.Deliveries.PurgeSubject(ctx, store.DeliveryPattern(job.Org)))
	check("purges threads", gateway.Threads.PurgeSubject(ctx, store.ThreadPatternOf(job.Org)))
	check("reads idempotency keys", store.ReadBucket(
		ctx, gateway.Bindings, job.Org+".*", func(jetstream.KeyValueEntry) {}))
}

// The server delivers the messages of a consumer to any subject that its creator names.
func TestWorkerCannotSendOnSubjectsOfOthers(t *testing.T) {
	connect, ctx := restricted(t), storetest.Context(t)
	connect("gateway", store.Config{Replicas: 1, Retention: time.Hour})
	worker := connect("worker", store.Config{AttachOnly: true})
	if _, err := worker.JS.Publish(ctx, "bullpen.body.acme.x", []byte("forged")); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for i := range 2 {
		subject := "$JS.API.CONSUMER.CREATE.BULLPEN_BODIES" + []string{".x", ""}[i]
		answer, err := worker.Conn.RequestWithContext(short, subject, []byte(
			`{"stream_name":"BULLPEN_BODIES","config":{"name":"x","deliver_subject":"bullpen.ctl.submit",`+
				`"ack_policy":"none"}}`))
		if err == nil {
			t.Errorf("the answer on %s is %s", subject, answer.Data)
		}
	}
}

// Answers to a role contain what it may read, so that no other role may listen to them.
func TestRolesHaveInboxesOfTheirOwn(t *testing.T) {
	connect, ctx := restricted(t), storetest.Context(t)
	gateway := connect("gateway", store.Config{Replicas: 1, Retention: time.Hour})
	worker := connect("worker", store.Config{AttachOnly: true})
	var subs []*nats.Subscription
	for _, subject := range []string{">", "_INBOX.>", "_INBOX.gateway.>", "_INBOX.*.*.*"} {
		sub, err := worker.Conn.SubscribeSync(subject)
		if err != nil {
			t.Fatal(err)
		}
		subs = append(subs, sub)
	}
	if err := worker.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := gateway.Keys.Put(ctx, "secret", []byte("of all keys")); err != nil {
		t.Fatal(err)
	}
	if e, err := gateway.Keys.Get(ctx, "secret"); err != nil || string(e.Value()) != "of all keys" {
		t.Fatalf("%v, %v", e, err)
	}
	if err := store.ReadBucket(ctx, gateway.Keys, ">", func(jetstream.KeyValueEntry) {}); err != nil {
		t.Fatal(err)
	}
	if err := worker.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	for _, sub := range subs {
		if n, _, err := sub.Pending(); err == nil && n > 0 {
			t.Errorf("a worker received %d messages for the gateway on %s", n, sub.Subject)
		}
	}
}
