package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// testBackup backs up a running deployment, destroys it, and restores it elsewhere.
func testBackup(t *testing.T, p *programs, in topology) {
	hook := startReceiver(t)
	store := "file://" + filepath.Join(t.TempDir(), "store")
	sys := newSystem(t, p, in, 2, append(hook.flags, "--store", store, "--queue-wait", "1m", "--reserved-slots", "0")...)
	key, _ := sys.newKey("other", "enterprise")
	other := sys.with(key)
	hook.answer(slices.Repeat([]int{500}, proto.MaxWebhookAttempts)...)
	sys.settings(http.MethodPut, "/v1/webhook",
		request{"url": hook.url + "/200", "waits": []float64{10}, "max_attempts": proto.MaxWebhookAttempts})

	ended := map[string]string{}
	describeExecution := func(id string) string {
		return string(sys.get(execution(id)).body) + string(sys.get(execution(id, "output")).body)
	}
	for _, r := range []request{
		bash("echo one; echo two >&2; exit 3"), python("print('x' * 1_400_000)"),
		bash("echo version one >> notes").of("notebook"),
	} {
		id := sys.submit(r)
		sys.ended(id)
		sys.delivered(id).check(t, proto.DeliveryDelivered, 1)
		ended[id] = describeExecution(id)
	}
	theirs := other.submit(bash("echo theirs"))
	other.ended(theirs).succeeded(t, "theirs\n")
	owed := sys.submit(bash("echo owed").and("webhook_url", hook.url+"/next")) // the receiver responds with 500
	sys.ended(owed)
	h := newHold()
	running := []string{sys.submit(bash(h.code())), sys.submit(bash(h.code()).of("notebook"))}
	h.reached(t, 2)
	const items = 30
	var batch struct{ ID, Status string }
	sys.do(http.MethodPost, "/v1/batches", batchOf(t, items, request{
		"metadata": map[string]string{"of": "backup"}, "webhook_url": hook.url + "/200", "request": bash("echo $1"),
	})).into(t, &batch)
	kept := sys.keptSchedule(t, 2)
	queued := []string{
		sys.submit(bash("echo queued")), sys.submit(bash("echo queued").of("second")),
		sys.submit(bash("cat notes; exit 0")),
	}

	// Executions that arrive during the backup may or may not be in it.
	var all sync.WaitGroup
	enough := make(chan struct{})
	for n := range 4 {
		all.Go(func() {
			for i := 0; ; i++ {
				program := bash(fmt.Sprintf("echo late %d %d", n, i))
				sys.try(t.Context(), http.MethodPost, executePath, program, //nolint:errcheck // nobody waits
					"Prefer", "respond-async")
				select {
				case <-enough:
					return
				default:
				}
			}
		})
	}
	file := filepath.Join(t.TempDir(), "bullpen.backup")
	client := []string{"BULLPEN_URL=" + sys.base, "BULLPEN_API_KEY=" + sys.key}
	code, output := p.run(t, client, "backup", file)
	close(enough)
	all.Wait()
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, output)
	}
	if info, err := os.Stat(file); err != nil || info.Mode() != 0o600 {
		t.Errorf("the backup: %v %v", info.Mode(), err)
	}
	if code, output := p.run(t, []string{"BULLPEN_URL=" + sys.base, "BULLPEN_API_KEY=" + key}, "backup",
		file+".theirs"); code != 1 || !strings.Contains(output, "global administrator") {
		t.Errorf("by a key that is not a global administrator's: %d %s", code, output)
	}
	sys.worker.kill()
	sys.front.kill()
	if in.separate {
		sys.broker.kill()
	}
	h.reached(t, 0)

	// An incomplete backup must leave no data directory that a server would start on.
	data := sys.data
	sys.data = filepath.Join(t.TempDir(), "restored")
	to := []string{"--data", sys.data}
	if in.separate {
		sys.broker = p.startBroker(t)
		to = sys.broker.flags(p)
		sys.env = append(storagetest.Env(), append(sys.broker.env(), "BULLPEN_BOOTSTRAP_KEY="+sys.key)...)
		sys.args = append(append(slices.Clone(hook.flags), "--store", store, "--slots", "2"), to...)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	half := file + ".half"
	if err := os.WriteFile(half, raw[:len(raw)*2/3], 0o600); err != nil {
		t.Fatal(err)
	}
	if code, output := p.run(t, sys.env, append([]string{"restore", half}, to...)...); code != 1 ||
		!strings.Contains(output, "not a complete backup") {
		t.Errorf("half a backup: %d %s", code, output)
	}
	front := p.startProcess(t, "front on half a backup", sys.env, p.bullpen,
		append([]string{"serve", "--nsjail", p.nsjail, "--listen", "127.0.0.1:0", "--data", sys.data, "--log-format", "json"},
			sys.args...)...)
	if code := front.exitCode(t); code != 1 || !strings.Contains(front.text(t), "run bullpen restore again") {
		t.Errorf("a server on half a backup: %d %s", code, front.tail())
	}
	code, output = p.run(t, sys.env, append([]string{"restore", file}, to...)...)
	if code != 0 || !strings.Contains(output, "restored: ") {
		t.Fatalf("exit code %d: %s", code, output)
	}
	if warned := strings.Contains(output, "key of secrets missing"); warned == in.separate {
		t.Errorf("the restore warned that the key of secrets is missing: %v: %s", warned, output)
	}
	if !in.separate {
		front := p.startProcess(t, "front without its key of secrets", sys.env, p.bullpen,
			append([]string{
				"serve", "--nsjail", p.nsjail, "--listen", "127.0.0.1:0", "--data", sys.data, "--log-format",
				"json",
			}, sys.args...)...)
		if code := front.exitCode(t); code != 1 || !strings.Contains(front.text(t), "encrypted for age1") {
			t.Errorf("a server without the key of secrets: %d %s", code, front.tail())
		}
		secrets, err := os.ReadFile(filepath.Join(data, "secrets.key"))
		if err == nil {
			err = os.WriteFile(filepath.Join(sys.data, "secrets.key"), secrets, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if code, output := p.run(t, sys.env, append([]string{"restore", file}, to...)...); code != 1 ||
		!strings.Contains(output, "already") {
		t.Errorf("restored over what is there: %d %s", code, output)
	}

	hook.answer(slices.Repeat([]int{200}, proto.MaxWebhookAttempts)...)
	sys.startFront(t)
	if in.separate {
		sys.startWorker(t)
	}
	sys.ready(t)
	for id, was := range ended {
		if now := describeExecution(id); now != was {
			t.Errorf("before the restore\n%s\nafter it\n%s", short(was), short(now))
		}
	}
	other = sys.with(key)
	if r := other.get(execution(theirs)); !strings.Contains(string(r.body), "theirs") {
		t.Errorf("with a key made before: %s", r)
	}
	eventually(t, "the batch goes on and ends", func() (bool, any) {
		r := sys.get("/v1/batches/" + batch.ID)
		r.into(t, &batch)
		return batch.Status == "completed", r
	})
	checkBatchResults(t, sys.get("/v1/batches/"+batch.ID+"/results").body, items)
	kept.finish(t, sys.api)
	for _, id := range queued {
		if rec := sys.ended(id); rec.Attempt != 1 || rec.ErrorCode != nil {
			t.Errorf("queued before: %s", rec)
		}
		sys.delivered(id).check(t, proto.DeliveryDelivered, 1)
	}
	for _, id := range running {
		sys.ended(id).failed(t, "failed", "worker_lost", "lost")
	}
	if d := sys.delivered(owed); d.Status != string(proto.DeliveryDelivered) || d.AttemptsMade < 2 {
		t.Errorf("what was not delivered before: %+v", d)
	}
	eventually(t, "the thread goes on", func() (bool, any) {
		r := sys.execute(bash("echo version two >> notes; cat notes").of("notebook"))
		return r.status == http.StatusOK && strings.Contains(string(r.body), `version one\nversion two\n`), r
	})
}
