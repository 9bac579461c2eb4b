package gateway

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// stall requests a path and reads the status line of the answer only. The rest of a long answer
// waits in the server until close is called.
func (h *harness) stall(path string) (status string, stalled net.Conn) {
	h.t.Helper()
	conn, err := h.dial()
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = conn.Close() })
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n", path,
		h.key); err != nil {
		h.t.Fatal(err)
	}
	line, err := bufio.NewReaderSize(conn, 16).ReadSlice('\n')
	if err != nil && len(line) < len("HTTP/1.1 200") {
		h.t.Fatal(err)
	}
	return strings.Fields(string(line))[1], conn
}

// Results that an organisation's clients do not read take memory of that organisation only.
func TestStalledReadersOfResults(t *testing.T) {
	const size = 2 << 20
	h := newHarness(t, func(s *Server) { s.Memory = 4*size + 1<<20 }) // half of it is room for two
	result := proto.Exited(0)
	result.Stdout = strings.Repeat("x", size)
	large := func(h *harness) (path string) {
		id := h.run()
		h.stub.finish(id, result)
		return "/v1/executions/" + string(id)
	}
	path := large(h)
	other := h.in(t)
	other.key = h.stub.addKey("other", "enterprise", asUser)
	theirs := large(other)

	one, first := h.stall(path)
	two, _ := h.stall(path)
	three, _ := h.stall(path)
	if one != "200" || two != "200" || three != "503" {
		t.Fatalf("three readers got %s, %s and %s", one, two, three)
	}
	h.do(http.MethodGet, path, "").want(http.StatusServiceUnavailable, "service_unavailable", "too many requests")
	if a := other.do(http.MethodGet, theirs, ""); a.status != http.StatusOK {
		t.Errorf("another organisation got %d: %s", a.status, a.body)
	}
	// What needs no outputs needs no memory for them.
	if a := h.do(http.MethodPost, path+"/cancel", ""); a.status != http.StatusOK {
		t.Errorf("cancel: %d %s", a.status, a.body)
	}
	_ = first.Close()
	for deadline := time.Now().Add(time.Minute); ; { // the server notices a moment later
		a := h.do(http.MethodGet, path, "")
		if a.status == http.StatusOK {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after a reader has left: %d %s", a.status, a.body)
		}
	}
}

// The results of a batch are downloaded in parts, as many at a time as there is memory for.
func TestLargeBatchResults(t *testing.T) {
	const size, items = 1 << 20, 9
	h, stub := newBatchHarness(t)
	h.server.Memory = 8 * size // half of it is room for three
	id := h.batch(`{"request":{"code":"x"},"items":[`+strings.Repeat("{},", items-1)+`{}]}`).want(
		http.StatusCreated, "").json()["id"].(string)
	h.stub.finishAtOnce(proto.Exited(0))
	large := proto.Exited(0)
	large.Stdout = strings.Repeat("x", size)
	submit, err := h.admission.OpenBatch(&stub.stored[0].Batch, []byte(stub.uploads[0].shared))
	if err != nil {
		t.Fatal(err)
	}
	for i := range items {
		trace := stub.stored[0].Batch.ItemTrace(i, 0)
		if _, err := submit(t.Context(), []byte("{}"), i, trace); err != nil {
			t.Fatal(err)
		}
		h.stub.finish(trace, large)
		stub.items = append(stub.items, proto.ItemSucceeded)
	}
	a := h.do(http.MethodGet, "/v1/batches/"+id+"/results", "").want(http.StatusOK, "")
	if lines := strings.Count(string(a.body), "\n"); lines != items || len(a.body) < items*size {
		t.Errorf("%d bytes in %d lines", len(a.body), lines)
	}
	h.nothingReserved()
}
