package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// testBatches kills the only gateway at points of a batch. Each item must run once all the same,
// and the webhook of the batch must be sent. With -short, it is killed at the points of the engine
// that are passed while items run.
func testBatches(t *testing.T, p *programs) {
	const items = 100
	hooks := startReceiver(t)
	sys := &crashSystem{died: map[fault.Point]bool{}}
	sys.system = newSystem(t, p.faulty(t), topology{separate: true}, 4, hooks.flags...)
	seen := map[string]bool{}
	for _, at := range fault.BatchPoints() {
		engine := at == fault.AfterItemBeforeState || at == fault.AfterReserveBeforeItem
		if testing.Short() && !engine {
			continue
		}
		point := at
		if engine {
			point += ":2" // not the first one
		}
		sys.front.kill()
		sys.startDying(t, point, sys.startFront)
		whole := batchOf(t, items, request{
			"metadata": map[string]string{"point": string(at)}, "webhook_url": hooks.url + "/200", "item_webhooks": true,
			"request": bash("echo $1").and("webhook_url", hooks.url+"/200"),
		})
		id := ""
		submit := func() (bool, any) {
			r, err := sys.try(t.Context(), http.MethodPost, "/v1/batches", whole, "Idempotency-Key", string(at))
			if err != nil || r.status != http.StatusCreated {
				return err != nil, r
			}
			var b struct{ ID string }
			r.into(t, &b)
			if id != "" && id != b.ID {
				t.Errorf("%s: created as %s, then as %s", at, id, b.ID)
			}
			id = b.ID
			return true, r
		}
		eventually(t, "the batch is sent", submit)
		sys.awaitCrash(t, point, sys.front)
		sys.startFront(t)
		eventually(t, "the batch is accepted", func() (bool, any) { done, r := submit(); return done && id != "", r })
		path := "/v1/batches/" + id
		var b struct {
			Status string
			Counts proto.BatchCounts
		}
		eventually(t, "the batch has ended", func() (bool, any) {
			r := sys.get(path)
			r.into(t, &b)
			return b.Status == "completed", r
		})
		if b.Counts.Succeeded != items {
			t.Errorf("%s: %+v", at, b.Counts)
		}
		checkBatchResults(t, sys.get(path+"/results").body, items)
		checkBatchWebhooks(t, hooks, seen, id, items)
	}
}

// batchOf returns the body of a batch of items whose argument is their index.
func batchOf(t *testing.T, items int, fields request) json.RawMessage {
	t.Helper()
	var list []request
	for i := range items {
		list = append(list, request{"args": []string{fmt.Sprint(i)}})
	}
	return listLast(t, fields, list)
}

// listLast returns the body of a batch. The member with the items comes last, as the server needs
// it.
func listLast(t *testing.T, fields request, list []request) json.RawMessage {
	t.Helper()
	rest, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	head, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	return slices.Concat(head[:len(head)-1], []byte(`,"items":`), rest, []byte("}"))
}

// checkBatchResults checks that there is one line for each item, with its own output.
func checkBatchResults(t *testing.T, body []byte, items int) {
	t.Helper()
	lines := bufio.NewScanner(bytes.NewReader(body))
	n := 0
	for ; lines.Scan(); n++ {
		var line struct {
			Index          int
			Status, Stdout string
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		if line.Index != n || line.Status != "success" || line.Stdout != fmt.Sprintln(n) {
			t.Errorf("line %d: %s", n, lines.Bytes())
		}
	}
	if n != items {
		t.Errorf("%d lines, want %d", n, items)
	}
}

// checkBatchWebhooks checks that one webhook was sent for each item and one for the batch. An item
// that ran twice would have sent two, with different ids. seen has the ids of webhooks of earlier
// batches, which may come again.
func checkBatchWebhooks(t *testing.T, hooks *receiver, seen map[string]bool, batch string, items int) {
	t.Helper()
	ids := map[string]bool{}
	ended := false
	for len(ids) < items+1 || !ended {
		p := hooks.next(t)
		if seen[p.id] && !ids[p.id] {
			continue
		}
		ids[p.id], seen[p.id] = true, true
		if bytes.Contains(p.body, []byte(`"event":"batch.completed"`)) {
			ended = bytes.Contains(p.body, []byte(batch))
		}
	}
	if len(ids) > items+1 {
		t.Errorf("%d webhooks of %d items and the batch", len(ids), items)
	}
}
