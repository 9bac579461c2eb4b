package proto_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// Values stored by a later version may have unknown members, which are ignored. A value that this
// version cannot read at all is rejected.
func TestStoredValuesOfLaterVersions(t *testing.T) {
	const id = proto.TraceID("trc_AAAAAAAAAAAAAAAAAAAA")
	type decoder func(body string) error
	into := func(v any) decoder { return func(body string) error { return json.Unmarshal([]byte(body), v) } }
	for name, c := range map[string]struct {
		decode decoder
		body   string // a value with the required members
		wrong  string // a value that this version cannot read
	}{
		"record": {
			func(body string) error { _, err := proto.DecodeRecord(id, []byte(body)); return err },
			`{"trace_id":"trc_AAAAAAAAAAAAAAAAAAAA","status":"success","result":{"success":true,"new":1}}`,
			`{"trace_id":"trc_AAAAAAAAAAAAAAAAAAAA","state":"success"}`,
		},
		"delivery": {
			func(body string) error { _, err := proto.DecodeDelivery(id, []byte(body)); return err },
			`{"id":"msg_AAAAAAAAAAAAAAAAAAAA","trace_id":"trc_AAAAAAAAAAAAAAAAAAAA","org":"o","key":"k",` +
				`"url":"https://example.com/","made":1,"status":"pending","next_at":"2026-01-01T00:00:00Z",` +
				`"attempts":[{"number":1,"new":1}]}`,
			`{"id":"msg_x","trace_id":"trc_BBBBBBBBBBBBBBBBBBBB"}`,
		},
		"job": {into(&proto.Job{}), `{"trace_id":"trc_AAAAAAAAAAAAAAAAAAAA","sandbox":{"new":1}}`, `{"trace_id":7}`},
		"thread": {
			into(&proto.Thread{}), `{"org":"o","id":"t","fence":1,"version":{"number":1,"new":1}}`,
			`{"fence":"one"}`,
		},
		"key":      {into(&proto.Key{}), `{"id":"key_x"}`, `{"id":7}`},
		"profile":  {into(&proto.Profile{}), `{"name":"small"}`, `{"name":7}`},
		"webhook":  {into(&proto.Webhook{}), `{"url":"https://example.com"}`, `{"url":7}`},
		"binding":  {into(&proto.Binding{}), `{}`, `[]`},
		"manifest": {into(&proto.Manifest{}), `{"form":1}`, `{"form":"1"}`},
	} {
		if err := c.decode(strings.Replace(c.body, "{", `{"what_a_later_version_knows":{"a":[1]}`+map[bool]string{
			true: "", false: ",",
		}[c.body == "{}"], 1)); err != nil {
			t.Errorf("%s with a member more: %v", name, err)
		}
		if err := c.decode(c.wrong); err == nil {
			t.Errorf("%s: %s is read", name, c.wrong)
		}
	}
}
