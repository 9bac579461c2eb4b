package e2e

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
)

// tenant is an organisation that has something of every kind.
type tenant struct {
	*api
	org, marker string
	hold        hold
	running     string // the execution that holds
	done        string // one that has ended
	sandbox     *liveSandbox
}

// newTenant fills an organisation, with its marker wherever it can be.
func (sys *system) newTenant(t *testing.T, nc *nats.Conn, org string, hooks *receiver) *tenant {
	t.Helper()
	secret, id := sys.newKey(org, "enterprise")
	x := &tenant{api: sys.with(secret), org: org, marker: "marker-of-" + org, hold: newHold()}
	made := func(method, path string, body any, headers ...string) *reply {
		t.Helper()
		r := x.do(method, path, body, headers...)
		if r.status >= http.StatusBadRequest {
			t.Fatalf("%s %s: %s", method, path, r)
		}
		return r
	}
	admin := func(method, path string, body any) {
		t.Helper()
		if r := sys.do(method, path, body); r.status >= http.StatusBadRequest {
			t.Fatalf("%s %s: %s", method, path, r)
		}
	}
	admin(http.MethodPut, "/v1/admin/secrets/"+"TOKEN?org="+org, request{"value": x.marker})
	admin(http.MethodPost, "/v1/admin/connections",
		request{"org": org, "slug": "data", "kind": "directory", "directory": "/srv/data", "description": x.marker})
	admin(http.MethodPut, "/v1/webhook?key="+id, request{"url": hooks.url + "/200?" + x.marker})
	admin(http.MethodPost, "/v1/admin/members", request{"org": org, "email": x.marker + "@example.com", "role": "viewer"})
	made(http.MethodPost, "/v1/session", nil)
	say := bash("echo "+x.marker).and("metadata", map[string]string{"marker": x.marker})
	x.done = x.submit(say, "Idempotency-Key", x.marker)
	x.ended(x.done).succeeded(t, x.marker+"\n")
	for {
		if p := hooks.next(t); p.trace(t) == x.done {
			break
		}
	}
	// a job and a record that are too large for messages
	x.ended(x.submit(bash("echo " + x.marker + "; head -c 1500000 /dev/zero | tr '\\0' x #" +
		strings.Repeat("y", 700<<10))))
	x.ended(x.submit(bash("echo "+x.marker+" > small; head -c 20000000 /dev/urandom > large; echo "+x.marker+" >> large").
		and("thread_id", x.marker)))
	x.upload(t, x.marker, "staged", []byte(x.marker))
	made(http.MethodPost, "/v1/schedules", request{"name": x.marker, "cron": "0 0 1 1 *", "request": say})
	var batch, pipeline struct{ ID string }
	made(http.MethodPost, "/v1/batches", batchOf(t, 2, request{"request": bash("echo $1 " + x.marker)})).into(t, &batch)
	eventually(t, "the batch has ended", func() (bool, any) {
		r := x.get("/v1/batches/" + batch.ID)
		return bytes.Contains(r.body, []byte(`"completed"`)), r
	})
	made(http.MethodPost, "/v1/pipelines", request{"file": "steps:\n  - {name: one, run: \"echo " + x.marker + "\"}\n"}).
		into(t, &pipeline)
	eventually(t, "the pipeline has ended", func() (bool, any) {
		r := x.get("/v1/pipelines/" + pipeline.ID)
		return bytes.Contains(r.body, []byte(`"status":"success"`)), r
	})
	// of an agent
	publish(t, nc, "$KV.bullpen_agent_files."+org+".file_1",
		fmt.Sprintf(`{"org":%q,"id":"file_1","name":%q}`, org, x.marker))
	publish(t, nc, "$KV.bullpen_agent_runs."+org+".run", fmt.Sprintf(`{"org":%q,"id":%q}`, org, x.marker))
	publish(t, nc, "bullpen.agentlog."+org+".run", x.marker)
	publish(t, nc, "$KV.bullpen_agent_sessions."+org+"."+proto.AgentSessionKey(x.marker),
		fmt.Sprintf(`{"org":%q,"id":%q,"updated_at":%q}`, org, x.marker, time.Now().UTC().Format(time.RFC3339)))
	publish(t, nc, "bullpen.job.interactive."+org+".k.x", x.marker, "Bullpen-Meta", "{") // becomes a dead letter
	flush(t, nc)
	x.running = x.submit(bash(x.hold.code()).and("timeout", 3600))
	x.hold.reached(t, 1)
	x.sandbox = x.newSandbox(request{"timeout": 3600, "metadata": request{"marker": x.marker}})
	x.sandbox.check("echo "+x.marker+" >file", "")
	return x
}

// stored returns what is stored of an organisation, by kind, but the last uses of its API keys, which
// gateways store once a minute.
func (sys *system) stored(t *testing.T, org string) map[string]int64 {
	t.Helper()
	var list struct{ Data []proto.StoredData }
	sys.get("/v1/admin/orgs/"+org+"/data").into(t, &list)
	kinds := map[string]int64{}
	for _, kind := range list.Data {
		kinds[kind.Kind] = kind.Count
	}
	delete(kinds, "last uses of API keys")
	return kinds
}

// messagesWith returns the subjects of all stored messages that contain a text.
func messagesWith(t *testing.T, nc *nats.Conn, text string) (found []string) {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	list := js.ListStreams(t.Context())
	for info := range list.Info() {
		st, err := js.Stream(t.Context(), info.Config.Name)
		if err != nil {
			t.Fatal(err)
		}
		for seq := max(1, info.State.FirstSeq); seq <= info.State.LastSeq; seq++ {
			m, err := st.GetMsg(t.Context(), seq)
			if err == nil && (bytes.Contains(m.Data, []byte(text)) || strings.Contains(m.Subject+fmt.Sprint(m.Header), text)) {
				found = append(found, m.Subject)
			}
		}
	}
	if list.Err() != nil {
		t.Fatal(list.Err())
	}
	return found
}

// testOrgDeleted deletes an organisation that has everything while one of its programs runs, and
// kills the server that deletes it. Nothing of it is left, and another one loses nothing.
func testOrgDeleted(t *testing.T, p *programs) {
	hooks := startReceiver(t)
	sys := newSystem(t, p, topology{separate: true}, 2, append(hooks.flags, "--sandboxes", "2")...)
	nc := connect(t, p, sys.broker)
	doomed, kept := sys.newTenant(t, nc, "doomed", hooks), sys.newTenant(t, nc, "kept", hooks)
	doomed.submit(bash("echo " + doomed.marker)) // waits for a slot
	before := map[string]map[string]int64{}
	for _, x := range []*tenant{doomed, kept} {
		eventually(t, "everything is stored of "+x.org, func() (bool, any) {
			data := sys.stored(t, x.org)
			for _, n := range data {
				if n == 0 {
					return false, data
				}
			}
			before[x.org] = maps.Clone(data)
			// Jobs that have ended are removed a little later, and the index lags behind. The program that holds
			// and the sandbox have not ended.
			return x == doomed || data["executions that have not ended"] == 2 &&
				data["index of executions"] == data["records of executions"], data
		})
	}
	blobs := strings.TrimPrefix(sys.broker.blobStore(), "file://")
	if len(messagesWith(t, nc, doomed.marker)) == 0 || len(filesWith(t, blobs, doomed.marker)) == 0 {
		t.Fatal("the marker is nowhere")
	}

	if out := sys.command(t, sys.key, "org", "delete", "doomed", "--yes"); !strings.Contains(
		out, "doomed is being deleted") {
		t.Fatal(out)
	}
	if r := doomed.get("/v1/executions/" + doomed.done); r.status != http.StatusForbidden ||
		!bytes.Contains(r.body, []byte("organisation_deleted")) {
		t.Errorf("a request of a key of the organisation: %s", r)
	}
	eventually(t, "the deletion is under way", func() (bool, any) {
		data := sys.stored(t, "doomed")
		return data["executions that have not ended"] == 0 && data["schedules"] == 0, data
	})
	sys.front.kill()
	sys.startFront(t)
	sys.ready(t)
	kept.base = sys.base
	if data := sys.stored(t, "doomed"); data["organisation"] != 1 {
		t.Errorf("the organisation was gone before the server was killed, and it proves nothing: %v", data)
	}
	eventually(t, "the organisation is gone", func() (bool, any) {
		r := sys.get("/v1/admin/orgs/doomed")
		return r.status == http.StatusNotFound, r
	})
	if pids := doomed.hold.pids(t); len(pids) > 0 {
		t.Errorf("its program runs still: %v", pids)
	}
	eventually(t, "nothing is left", func() (bool, any) {
		out := sys.command(t, sys.key, "org", "data", "doomed")
		return strings.Contains(out, "\ntotal") && !strings.ContainsAny(out, "123456789"), out
	})
	found := messagesWith(t, nc, doomed.marker)
	// The audit log is kept: it says which member was added.
	if found = slices.DeleteFunc(found, func(subject string) bool { return subject == "bullpen.audit.record" }); len(
		found) > 0 {
		t.Errorf("the marker is in messages on %v", found)
	}
	if found := filesWith(t, blobs, doomed.marker); len(found) > 0 {
		t.Errorf("the marker is in %v", found)
	}
	if found, err := filepath.Glob(filepath.Join(blobs, "*", "doomed")); err != nil || len(found) > 0 {
		t.Errorf("of the organisation remain %v, %v", found, err)
	}

	if data := sys.stored(t, "kept"); !maps.Equal(data, before["kept"]) {
		t.Errorf("the other organisation has %v, had %v", data, before["kept"])
	}
	kept.record(kept.done).succeeded(t, kept.marker+"\n")
	kept.sandbox.check("cat file", kept.marker+"\n")
	kept.hold.release(t)
	kept.ended(kept.running)
	eventually(t, "its thread is free", func() (bool, any) {
		r := kept.do(http.MethodPost, executePath, bash("cat small staged; tail -n 1 large").and("thread_id", kept.marker))
		return r.status == http.StatusOK && bytes.Count(r.body, []byte(kept.marker)) == 3, r
	})
}
