package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
)

// Ids come back as they were sent, an id that no request may have is refused, and a cancelled request has
// no response.
func TestMCPPipe(t *testing.T) {
	requests := []string{
		`{"jsonrpc":"2.0","id":1764203000123456789,"method":"ping"}`,
		`{"jsonrpc":"2.0","id":9223372036854775807,"method":"ping"}`, `{"jsonrpc":"2.0","id":"a","method":"ping"}`,
		`{"jsonrpc":"2.0","id":0.5,"method":"ping"}`, `{"jsonrpc":"2.0","id":3,"method":"ping"}`,
		`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":3}}`,
	}
	var out bytes.Buffer
	p := &mcpPipe{in: bufio.NewReader(strings.NewReader(strings.Join(requests, "\n"))), out: &out}
	text, err := io.ReadAll(p)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for line := range strings.Lines(string(text)) {
		var m struct {
			ID     string
			Params struct{ RequestID string }
		}
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if m.ID != "" {
			ids = append(ids, m.ID)
		} else if m.Params.RequestID != ids[3] {
			t.Errorf("%s does not name the request %s", line, ids[3])
		}
	}
	for _, id := range ids {
		_, _ = fmt.Fprintf(p, `{"jsonrpc":"2.0","id":%q,"result":{}}`+"\n", id)
	}
	want := []string{
		`{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"id and progressToken must be a string or an integer"}}`,
		`{"jsonrpc":"2.0","id":1764203000123456789,"result":{}}`,
		`{"jsonrpc":"2.0","id":9223372036854775807,"result":{}}`, `{"jsonrpc":"2.0","id":"a","result":{}}`, "",
	}
	if out.String() != strings.Join(want, "\n") {
		t.Errorf("%s", out.String())
	}
}
