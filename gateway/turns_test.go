package gateway

import (
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// A large message to a tool takes a turn until the tool begins, and any other until its answer.
func TestToolsTakeTurns(t *testing.T) {
	h := newHarness(t)
	free := func() bool { held, _ := h.server.Turns.Counts(); return held == 0 }
	session := h.modelClient(h.key, "", nil)
	for range web.MaxTurns() {
		if err := h.server.Turns.Begin(t.Context(), "other"); err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan error, 1)
	go func() {
		_, err := session.CallTool(t.Context(),
			&sdk.CallToolParams{Name: "sandbox_execute", Arguments: map[string]any{"code": strings.Repeat("#", web.FreeBody)}})
		ended <- err
	}()
	h.until("the call waits for a turn", func() bool { _, waiting := h.server.Turns.Counts(); return waiting == 1 })
	if len(h.stub.submitted) != 0 {
		t.Error("a tool began before its turn")
	}
	for range web.MaxTurns() {
		h.server.Turns.End()
	}
	id := <-h.stub.submitted
	if !free() {
		t.Error("a tool that runs has a turn")
	}
	h.stub.start(id)
	h.stub.finish(id, proto.Exited(0))
	if err := <-ended; err != nil {
		t.Error(err)
	}
	padding := strings.Repeat(" ", web.FreeBody)
	for _, body := range []string{
		`{"jsonrpc":"2.0","id":1,"method":"ping"}`, `{"jsonrpc":"2.0","id":1,"method":"none"}`,
		`{"jsonrpc":"2.0","id":[],"method":"ping"}`,
		`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`, `[`, `{"x":`, `1`,
	} {
		h.do("POST", "/mcp", padding+body, "Content-Type", "application/json", "Accept",
			"application/json, text/event-stream")
	}
	h.until("no turn is held", free)
}
