package gateway

import (
	"bufio"
	"fmt"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

var mcpHeaders = []string{"Content-Type", "application/json", "Accept", "application/json, text/event-stream"}

// An answer has the id of its request as it was sent, and progress has its token. An id that is neither a
// text nor an integer is refused.
func TestToolIDs(t *testing.T) {
	h := newHarness(t)
	for _, id := range []string{
		"1", "0", "-1", "1764203000123456789", "9223372036854775807", "-9223372036854775808", "18446744073709551616",
		"123456789012345678901234567890", `"a"`, `""`, `"1764203000123456789"`, `"\u00e9\n"`,
	} {
		for _, version := range []string{"", "2025-11-25"} {
			headers := append([]string{"MCP-Protocol-Version", version}, mcpHeaders...)
			a := h.do("POST", "/mcp", fmt.Sprintf(`{"jsonrpc":"2.0", "id" : %s ,"method":"ping"}`, id), headers...).want(200, "")
			a.has(`"id":` + id)
		}
		body := fmt.Sprintf(`{"jsonrpc":"2.0","id":"x","method":"tools/call","params":{"name":"sandbox_execute",`+
			`"arguments":{"code":"1"},"_meta":{"progressToken":%s}}}`, id)
		runs := make(chan proto.TraceID, 1)
		go func() {
			run := <-h.stub.submitted
			runs <- run
			h.stub.start(run)
			h.stub.output(run, proto.Stdout, "a line\n")
		}()
		resp, err := h.client.Do(h.request("POST", "/mcp", body, mcpHeaders...))
		if err != nil {
			t.Fatal(err)
		}
		var lines []string
		for in := bufio.NewScanner(resp.Body); in.Scan(); {
			if lines = append(lines, in.Text()); strings.Contains(in.Text(), "a line") {
				h.stub.finish(<-runs, proto.Exited(0))
			}
		}
		_ = resp.Body.Close()
		for _, want := range []string{`"progressToken":` + id, `"id":"x"`} {
			if !strings.Contains(strings.Join(lines, "\n"), want) {
				t.Errorf("%s is not in %q", want, lines)
			}
		}
	}
	for _, id := range []string{"0.5", "1.0", "1e3", "true", "[1]", `{"a":1}`} {
		a := h.do("POST", "/mcp", fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"method":"ping"}`, id), mcpHeaders...)
		if a.status != 400 {
			t.Errorf("%s: %d", id, a.status)
		}
		a.has(`"code":-32600`)
	}
}

// A version that this server does not have is refused with those that it has, wherever it is.
func TestToolVersions(t *testing.T) {
	h := newHarness(t)
	for _, meta := range []string{
		"", `"_meta":{"io.modelcontextprotocol/protocolVersion":"2027-03-01",` +
			`"io.modelcontextprotocol/clientInfo":{"name":"x","version":"1"},` +
			`"io.modelcontextprotocol/clientCapabilities":{}},`,
	} {
		for _, method := range []string{"initialize", "ping", "tools/list", "tools/call"} {
			body := fmt.Sprintf(`{"jsonrpc":"2.0","id":7,"method":%q,"params":{%s"protocolVersion":"2027-03-01",`+
				`"capabilities":{},"clientInfo":{"name":"x","version":"1"},"name":"sandbox_execute"}}`, method, meta)
			// A client of an unknown version may lack the headers that later versions require.
			for _, headers := range [][]string{{"Mcp-Method", method, "Mcp-Name", "sandbox_execute"}, nil} {
				a := h.do("POST", "/mcp", body,
					append(append(headers, "MCP-Protocol-Version", "2027-03-01"), mcpHeaders...)...)
				a.has(`"code":-32022`)
				a.has(`"supported":[`)
				a.has(`"id":7`)
			}
		}
	}
}

// A call that its client has cancelled has no response.
func TestToolCancelledWithoutResponse(t *testing.T) {
	for _, cancel := range []bool{true, false} {
		h := newHarness(t)
		headers := append([]string{"Mcp-Session-Id", "s"}, mcpHeaders...)
		answer := h.begin(h.request("POST", "/mcp",
			`{"jsonrpc":"2.0","id":17,"method":"tools/call","params":{"name":"sandbox_execute","arguments":{"code":"1"}}}`,
			headers...))
		id := <-h.stub.submitted
		h.stub.start(id)
		if cancel {
			h.do("POST", "/mcp", `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId": 17}}`,
				headers...).want(202, "")
			h.until("the execution is cancelled", func() bool { return h.stub.record(id).Cancelling })
		}
		h.stub.finish(id, proto.Cancelled())
		if a := <-answer; strings.Contains(string(a.body), `"result"`) == cancel {
			t.Errorf("cancelled %t: %s", cancel, a.body)
		}
	}
}
