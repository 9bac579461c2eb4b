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
	w := newWorld(t, p, in, 2, append(hook.flags, "--store", store, "--queue-wait", "1m")...)
	key, _ := w.newKey("other", "enterprise")
	other := w.with(key)
	hook.answer(slices.Repeat([]int{500}, proto.MaxWebhookAttempts)...)
	w.settings(http.MethodPut, "/v1/webhook", request{"url": hook.url + "/200", "waits": []float64{10}, "max_attempts": proto.MaxWebhookAttempts})

	ended := map[string]string{}
	tell := func(id string) string {
		return string(w.get(execution(id)).body) + string(w.get(execution(id, "output")).body)
	}
	for _, r := range []request{bash("echo one; echo two >&2; exit 3"), python("print('x' * 1_400_000)"), bash("echo version one >> notes").of("notebook")} {
		id := w.submit(r)
		w.ended(id)
		w.delivered(id).is(t, proto.DeliveryDelivered, 1)
		ended[id] = tell(id)
	}
	theirs := other.submit(bash("echo theirs"))
	other.ended(theirs).succeeded(t, "theirs\n")
	owed := w.submit(bash("echo owed").and("webhook_url", hook.url+"/next")) // the receiver responds with 500
	w.ended(owed)
	h := newHold()
	running := []string{w.submit(bash(h.code())), w.submit(bash(h.code()).of("notebook"))}
	h.reached(t, 2)
	queued := []string{w.submit(bash("echo queued")), w.submit(bash("echo queued").of("second")), w.submit(bash("cat notes; exit 0"))}

	// Executions that arrive during the backup may or may not be in it.
	var all sync.WaitGroup
	enough := make(chan struct{})
	for n := range 4 {
		all.Go(func() {
			for i := 0; ; i++ {
				w.try(t.Context(), http.MethodPost, executePath, bash(fmt.Sprintf("echo late %d %d", n, i)), "Prefer", "respond-async") //nolint:errcheck // nobody waits
				select {
				case <-enough:
					return
				default:
				}
			}
		})
	}
	file := filepath.Join(t.TempDir(), "bullpen.backup")
	client := []string{"BULLPEN_URL=" + w.base, "BULLPEN_API_KEY=" + w.key}
	code, said := p.run(t, client, "backup", file)
	close(enough)
	all.Wait()
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, said)
	}
	if info, err := os.Stat(file); err != nil || info.Mode() != 0o600 {
		t.Errorf("the backup: %v %v", info.Mode(), err)
	}
	if code, said := p.run(t, []string{"BULLPEN_URL=" + w.base, "BULLPEN_API_KEY=" + key}, "backup", file+".theirs"); code != 1 || !strings.Contains(said, "all rights") {
		t.Errorf("by a key without all rights: %d %s", code, said)
	}
	w.worker.kill()
	w.front.kill()
	if in.apart {
		w.broker.kill()
	}
	h.reached(t, 0)

	// An incomplete backup must leave no data directory that a server would start on.
	w.data = filepath.Join(t.TempDir(), "restored")
	to := []string{"--data", w.data}
	if in.apart {
		w.broker = p.startBroker(t)
		to = w.broker.flags(p)
		w.env = append(storagetest.Env(), append(w.broker.env(), "BULLPEN_BOOTSTRAP_KEY="+w.key)...)
		w.args = append(append(slices.Clone(hook.flags), "--store", store, "--slots", "2"), to...)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	half := file + ".half"
	if err := os.WriteFile(half, raw[:len(raw)*2/3], 0o600); err != nil {
		t.Fatal(err)
	}
	if code, said := p.run(t, w.env, append([]string{"restore", half}, to...)...); code != 1 || !strings.Contains(said, "not a complete backup") {
		t.Errorf("half a backup: %d %s", code, said)
	}
	front := p.startProcess(t, "front on half a backup", w.env, p.bullpen,
		append([]string{"serve", "--nsjail", p.nsjail, "--listen", "127.0.0.1:0", "--data", w.data, "--log-format", "json"}, w.args...)...)
	if code := front.exitCode(t); code != 1 || !strings.Contains(front.text(t), "run bullpen restore again") {
		t.Errorf("a server on half a backup: %d %s", code, front.tail())
	}
	code, said = p.run(t, w.env, append([]string{"restore", file}, to...)...)
	if code != 0 || !strings.Contains(said, "restored: ") {
		t.Fatalf("exit code %d: %s", code, said)
	}
	if code, said := p.run(t, w.env, append([]string{"restore", file}, to...)...); code != 1 || !strings.Contains(said, "already") {
		t.Errorf("restored over what is there: %d %s", code, said)
	}

	hook.answer(slices.Repeat([]int{200}, proto.MaxWebhookAttempts)...)
	w.startFront(t)
	if in.apart {
		w.startWorker(t)
	}
	w.ready(t)
	for id, was := range ended {
		if now := tell(id); now != was {
			t.Errorf("told before as\n%s\nnow\n%s", short(was), short(now))
		}
	}
	other = w.with(key)
	if r := other.get(execution(theirs)); !strings.Contains(string(r.body), "theirs") {
		t.Errorf("with a key made before: %s", r)
	}
	for _, id := range queued {
		if rec := w.ended(id); rec.Attempt != 1 || rec.ErrorCode != nil {
			t.Errorf("queued before: %s", rec)
		}
		w.delivered(id).is(t, proto.DeliveryDelivered, 1)
	}
	for _, id := range running {
		w.ended(id).failed(t, "failed", "worker_lost", "lost")
	}
	if d := w.delivered(owed); d.Status != string(proto.DeliveryDelivered) || d.AttemptsMade < 2 {
		t.Errorf("what was not delivered before: %+v", d)
	}
	eventually(t, "the thread goes on", func() (bool, any) {
		r := w.execute(bash("echo version two >> notes; cat notes").of("notebook"))
		return r.status == http.StatusOK && strings.Contains(string(r.body), `version one\nversion two\n`), r
	})
}
