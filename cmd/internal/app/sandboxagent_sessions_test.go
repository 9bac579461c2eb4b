package app

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

func testSessionLifecycle(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/plain", `{"agent":"mock","unknown":1}`).want(200, `"healthy":true`)
	g.do("GET", "/v1/sessions/plain", "").want(200, `{"sessionId":"plain","agent":"mock","agentMode":"build",`+
		`"permissionMode":"default","model":"mock","variant":null,"nativeSessionId":"mock-plain","ended":false,`+
		`"eventCount":1,`).
		want(200, `"directory":null,"title":null,"pendingQuestions":[],"pendingPermissions":[]}`)
	g.do("POST", "/v1/sessions/edits", `{"agent":"mock","permissionMode":"acceptEdits"}`).want(200, "")
	g.do("GET", "/v1/sessions/edits", "").want(200, `"permissionMode":"default"`)
	g.do("POST", "/v1/sessions/full", `{"agent":"mock","agentMode":"plan","permissionMode":"bypass","model":"m",
		"variant":"v","agentVersion":"1","directory":"work","title":"A title","mcp":{
			"files":{"type":"stdio","command":["npx","files"],"environment":{"A":"1"},"timeout":5},
			"web":{"type":"http","url":"https://example.com","bearer_token_env_var":"T","oauth":false}},
		"skills":{"sources":[{"type":"github","source":"a/b","ref":"main"},{"type":"local","source":"skills"}]}}`).
		want(200, "")
	var list struct {
		Sessions []map[string]any `json:"sessions"`
	}
	g.do("GET", "/v1/sessions", "").want(200, "").into(&list)
	if list.Sessions[0]["sessionId"] != "full" || list.Sessions[1]["sessionId"] != "edits" {
		t.Fatalf("the newest is not the first: %v", list.Sessions)
	}
	full := list.Sessions[0]
	created, ok := full["createdAt"].(float64)
	if !ok || time.Since(time.UnixMilli(int64(created))).Abs() > time.Hour {
		t.Errorf("created at %v", full["createdAt"])
	}
	want := map[string]any{
		"sessionId": "full", "agent": "mock", "agentMode": "plan", "permissionMode": "bypass", "model": "m", "variant": "v",
		"nativeSessionId": "mock-full", "ended": false, "eventCount": 1.0, "directory": "work", "title": "A title",
		"mcp": map[string]any{
			"files": map[string]any{
				"type": "local", "command": []any{"npx", "files"}, "env": map[string]any{"A": "1"}, "timeoutMs": 5.0,
			},
			"web": map[string]any{"type": "remote", "url": "https://example.com", "bearerTokenEnvVar": "T", "oauth": false},
		},
		"skills": map[string]any{"sources": []any{
			map[string]any{"type": "github", "source": "a/b", "ref": "main"},
			map[string]any{"type": "local", "source": "skills"},
		}},
	}
	delete(full, "createdAt")
	delete(full, "updatedAt")
	if fmt.Sprint(full) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", full, want)
	}
	for _, path := range []string{"/v1/sessions", "/v1/sessions/"} {
		var made struct {
			ID      string `json:"sessionId"`
			Healthy bool   `json:"healthy"`
			Native  string `json:"nativeSessionId"`
		}
		g.do("POST", path, `{"agent":"mock"}`).want(200, "").into(&made)
		if made.ID == "" || !made.Healthy || made.Native != "mock-"+made.ID {
			t.Errorf("%+v", made)
		}
		g.do("GET", "/v1/sessions/"+made.ID, "").want(200, made.ID)
	}
	for range 2 {
		g.do("POST", "/v1/sessions/plain/terminate", "").want(204, "")
	}
	g.do("GET", "/v1/sessions/plain", "").want(200, `"ended":true`)
	g.do("GET", "/v1/sessions/plain/events?offset=1", "").want(200,
		`"data":{"reason":"terminated","terminated_by":"daemon"},"raw":null}],"hasMore":false}`)
	g.do("PUT", "/v1/fs/file?session_id=full&path=a.txt", "content").want(200, "")
	g.do("DELETE", "/v1/sessions/full", "").want(204, "")
	g.do("GET", "/v1/sessions/full", "").want(404, "session_not_found")
	g.do("POST", "/v1/sessions/full", `{"agent":"mock"}`).want(200, "") // the id is free, and the home is empty
	g.do("GET", "/v1/fs/entries?session_id=full", "").want(200, "[]")
}

// An id is any text. It is no path.
func testSessionIDs(t *testing.T, g *gatewayProcess) {
	for _, id := range []string{
		"a/b/../c", "..", ".", "%2F", "a%41", "über straße", "*", ">", "a.b", "?x=1&y#z", "\x00\n", "+", " ",
		strings.Repeat("ü", proto.MaxAgentSessionID/2),
	} {
		path := "/v1/sessions/" + url.PathEscape(id)
		if id == ".." || id == "." { // clients resolve these segments, unless their dots are escaped
			path = "/v1/sessions/" + strings.ReplaceAll(id, ".", "%2E")
		}
		g.do("POST", path, `{"agent":"mock"}`).want(200, "")
		var x struct {
			ID string `json:"sessionId"`
		}
		g.do("GET", path, "").want(200, "").into(&x)
		if x.ID != id {
			t.Errorf("%q is %q", id, x.ID)
		}
		events := g.stream("POST", path+"/messages/stream", okMessage).until(sessions.TurnEnded)
		if events[0].event.Session != id {
			t.Errorf("%q is %q", id, events[0].event.Session)
		}
		g.do("PUT", "/v1/fs/file?path=f&session_id="+url.QueryEscape(id), id+" ").want(200, "")
		g.do("GET", "/v1/fs/file?path=f&session_id="+url.QueryEscape(id), "").want(200, id+" ")
		g.do("DELETE", path, "").want(204, "")
	}
	g.do("POST", "/v1/sessions/%FF", `{"agent":"mock"}`).want(400, "Invalid UTF-8")
}

func testSessionTurns(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/turns", `{"agent":"mock"}`).want(200, "")
	s := g.stream("POST", "/v1/sessions/turns/messages/stream", okMessage)
	if got := typesOf(s.until(sessions.TurnEnded)); got != okTurn {
		t.Errorf("%s", got)
	}
	if _, more := s.next(); more {
		t.Error("the stream of a turn goes on after its end")
	}
	// Messages wait for each other.
	for range 3 {
		g.do("POST", "/v1/sessions/turns/messages", okMessage).want(204, "")
	}
	last := g.stream("POST", "/v1/sessions/turns/messages/stream?include_raw=true", okMessage).until(sessions.TurnEnded)
	if got := typesOf(last); got != okTurn {
		t.Errorf("%s", got)
	}
	var all struct {
		Events []sessions.Event `json:"events"`
		More   bool             `json:"hasMore"`
	}
	g.do("GET", "/v1/sessions/turns/events", "").want(200, "").into(&all)
	turn := strings.Fields(okTurn)
	if len(all.Events) != 1+5*len(turn) || all.More {
		t.Fatalf("%d events, more: %t", len(all.Events), all.More)
	}
	for i, e := range all.Events {
		want := "session.started"
		if i > 0 {
			want = turn[(i-1)%len(turn)]
		}
		if string(e.Type) != want || e.Sequence != int64(i+1) || e.ID != fmt.Sprintf("evt_%d", i+1) ||
			string(e.Raw) != "null" {
			t.Errorf("event %d: %+v", i, e)
		}
	}
	// Pages have all events once.
	offset, pages := int64(0), 0
	for more := true; more; pages++ {
		var page struct {
			Events []sessions.Event `json:"events"`
			More   bool             `json:"hasMore"`
		}
		g.do("GET", fmt.Sprintf("/v1/sessions/turns/events?offset=%d&limit=10", offset), "").want(200, "").into(&page)
		if page.Events[0].Sequence != offset+1 || page.More != (len(page.Events) == 10 && offset+10 < 36) {
			t.Errorf("page %d: %d events after %d, more: %t", pages, len(page.Events), offset, page.More)
		}
		offset, more = page.Events[len(page.Events)-1].Sequence, page.More
	}
	if pages != 4 || offset != 36 {
		t.Errorf("%d pages up to %d", pages, offset)
	}
	g.do("GET", "/v1/sessions/turns/events?limit=0", "").want(200, `{"events":[],"hasMore":true}`)
	g.do("GET", "/v1/sessions/turns/events?offset=36", "").want(200, `{"events":[],"hasMore":false}`)
	g.do("GET", "/v1/sessions/turns/events?offset=99999", "").want(200, `{"events":[],"hasMore":false}`)
	// An interrupt ends the turn in progress, and the next one begins. Without a turn it does nothing.
	asking := g.stream("POST", "/v1/sessions/turns/messages/stream", `{"message":"permission"}`)
	asking.until(sessions.PermissionRequested)
	next := g.stream("POST", "/v1/sessions/turns/messages/stream", okMessage)
	g.do("POST", "/v1/sessions/turns/interrupt", "").want(204, "")
	if got := typesOf(next.until(sessions.TurnEnded)); got != okTurn {
		t.Errorf("%s", got)
	}
	g.do("GET", "/v1/sessions/turns/events?offset=36", "").want(200, `"metadata":{"interrupted":true}`)
	g.do("POST", "/v1/sessions/turns/interrupt", "").want(204, "")
	// A session that ends also ends the streams of its queued messages.
	g.do("POST", "/v1/sessions/turns/messages", `{"message":"permission"}`).want(204, "")
	waiting := g.stream("POST", "/v1/sessions/turns/messages/stream", okMessage)
	g.do("POST", "/v1/sessions/turns/terminate", "").want(204, "")
	if list := waiting.until(sessions.SessionEnded); len(list) != 1 {
		t.Errorf("%s", typesOf(list))
	}
	if _, more := waiting.next(); more {
		t.Error("the stream of a turn goes on after the end of its session")
	}
}

func testSessionApproval(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/ask", `{"agent":"mock"}`).want(200, "")
	// The stream of a turn ends at what the client must answer.
	s := g.stream("POST", "/v1/sessions/ask/messages/stream", `{"message":"permission"}`)
	asked := s.until(sessions.PermissionRequested)
	if _, more := s.next(); more {
		t.Error("the stream goes on after a permission")
	}
	for {
		var x struct {
			Questions   []sessions.Question   `json:"pendingQuestions"`
			Permissions []sessions.Permission `json:"pendingPermissions"`
		}
		g.do("GET", "/v1/sessions/ask", "").want(200, `"pendingQuestions":[]`).into(&x)
		if len(x.Permissions) == 2 && x.Permissions[0].ID == "mock_1_permission" {
			break
		}
	}
	live := g.stream("GET", "/v1/sessions/ask/events/sse?offset="+asked[len(asked)-1].id, "")
	live.until(sessions.PermissionRequested)
	const first = "/v1/sessions/ask/permissions/mock_1_permission/reply"
	g.do("POST", first, `{"reply":"once"}`).want(204, "")
	g.do("POST", first, `{"reply":"once"}`).want(400, "unknown permission id")
	g.do("POST", "/v1/sessions/ask/permissions/mock_1_permission_denied/reply", `{"reply":"reject"}`).want(204, "")
	var resolved []string
	for _, f := range live.until(sessions.TurnEnded) {
		if f.event.Type == sessions.PermissionResolved {
			p, err := sessions.DataOf[sessions.Permission](&f.event)
			if err != nil {
				t.Fatal(err)
			}
			resolved = append(resolved, p.ID+" "+string(p.Status))
		}
	}
	if got := strings.Join(resolved, ", "); got != "mock_1_permission accept, mock_1_permission_denied reject" {
		t.Error(got)
	}
	g.stream("POST", "/v1/sessions/ask/messages/stream", `{"message":"questions"}`).until(sessions.QuestionRequested)
	live.until(sessions.QuestionRequested)
	live.until(sessions.QuestionRequested)
	g.do("GET", "/v1/sessions/ask", "").want(200, `"pendingQuestions":[{"question_id":"mock_2_question",`+
		`"prompt":"Choose a color","options":["Red","Blue"],"response":null,"status":"requested"},`)
	g.do("POST", "/v1/sessions/ask/questions/mock_2_question/reply", `{"answers":[["Blue"]]}`).want(204, "")
	g.do("POST", "/v1/sessions/ask/questions/mock_2_question_reject/reject", "").want(204, "")
	var answers []string
	for _, f := range live.until(sessions.TurnEnded) {
		if f.event.Type == sessions.QuestionResolved {
			q, err := sessions.DataOf[sessions.Question](&f.event)
			if err != nil {
				t.Fatal(err)
			}
			answer := "null"
			if q.Response != nil {
				answer = *q.Response
			}
			answers = append(answers, answer+" "+string(q.Status))
		}
	}
	if got := strings.Join(answers, ", "); got != "Blue answered, null rejected" {
		t.Error(got)
	}
}

// A stream loses nothing: it begins anywhere, and its reader may be slow.
func testSessionStreams(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/flow", `{"agent":"mock"}`).want(200, "")
	// More than the buffers between them have room for is sent before the reader reads.
	const messages, events = 40, 1 + 40*7
	slow := g.stream("GET", "/v1/sessions/flow/events/sse", "")
	text := strings.Repeat("x", 100<<10)
	for range messages {
		g.do("POST", "/v1/sessions/flow/messages", `{"message":"echo `+text+`"}`).want(204, "")
	}
	fast := g.stream("GET", "/v1/sessions/flow/events/sse?offset=1", "")
	for range messages {
		fast.until(sessions.TurnEnded)
	}
	var all []frame
	for len(all) < events {
		f, ok := slow.next()
		if !ok {
			t.Fatal("the stream ended")
		}
		all = append(all, f)
	}
	for i, f := range all {
		if f.event.Sequence != int64(i+1) || f.id != fmt.Sprint(i+1) {
			t.Fatalf("event %d has the number %d and the id %s", i, f.event.Sequence, f.id)
		}
		if f.event.Type == sessions.ItemDelta && !strings.Contains(f.text, text) {
			t.Errorf("event %d is cut", i)
		}
	}
	// A client that comes back sends the id of the last event, and the query of its first request.
	for _, last := range []int{0, 1, 7, 100, len(all) - 1} {
		headers := []string{"Last-Event-ID", fmt.Sprint(last)}
		f, _ := g.stream("GET", "/v1/sessions/flow/events/sse?offset=3", "", headers...).next()
		if f.text != all[last].text {
			t.Errorf("after %d: %s, want %s", last, f.text, all[last].text)
		}
	}
	f, _ := g.stream("GET", "/v1/sessions/flow/events/sse?offset=3", "").next()
	if f.text != all[3].text {
		t.Errorf("after 3: %s", f.text)
	}
	// A removed session ends its streams.
	end := g.stream("GET", fmt.Sprintf("/v1/sessions/flow/events/sse?offset=%d", len(all)), "")
	g.do("DELETE", "/v1/sessions/flow", "").want(204, "")
	for more := true; more; {
		_, more = end.next()
	}
}

func testSessionIdempotency(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/once", `{"agent":"mock"}`).want(200, "")
	key := []string{"Idempotency-Key", "k1"}
	for range 3 {
		g.do("POST", "/v1/sessions/once/messages", okMessage, key...).want(204, "")
	}
	first := g.stream("POST", "/v1/sessions/once/messages/stream", okMessage, key...).until(sessions.TurnEnded)
	again := g.stream("POST", "/v1/sessions/once/messages/stream", okMessage, key...).until(sessions.TurnEnded)
	if len(first) != len(again) || first[0].event.Sequence != 2 {
		t.Fatalf("%s, and again %s", typesOf(first), typesOf(again))
	}
	for i := range first {
		if first[i].text != again[i].text || first[i].id != again[i].id {
			t.Errorf("%s, and again %s", first[i].text, again[i].text)
		}
	}
	g.do("POST", "/v1/sessions/once/messages", `{"message":"other"}`, key...).want(409,
		`"type":"urn:sandbox-agent:error:conflict","title":"Conflict","status":409,"detail":"the idempotency key was used`)
	long := strings.Repeat("k", proto.MaxIdempotencyKeyLen+1)
	g.do("POST", "/v1/sessions/once/messages", okMessage, "Idempotency-Key", long).want(400, "Idempotency-Key")
}

func testLegacyEvents(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/old", `{"agent":"mock"}`).want(200, "")
	g.stream("POST", "/v1/sessions/old/messages/stream", okMessage).until(sessions.TurnEnded)
	g.stream("POST", "/v1/sessions/old/messages/stream", `{"message":"tool"}`).until(sessions.TurnEnded)
	g.stream("POST", "/v1/sessions/old/messages/stream", `{"message":"error"}`).until(sessions.ErrorEvent)
	g.stream("POST", "/v1/sessions/old/messages/stream", `{"message":"permission"}`).until(sessions.PermissionRequested)
	var list struct {
		Events []map[string]any `json:"events"`
		More   bool             `json:"hasMore"`
	}
	g.do("GET", "/v1/sessions/old/events?schema=legacy", "").
		want(200, `"agentSessionId":"mock-old","nativeSessionId":"mock-old"`).into(&list)
	var kinds []string
	for _, e := range list.Events {
		data, _ := e["data"].(map[string]any)
		kinds = append(kinds, slices.Sorted(maps.Keys(data))...)
		delete(e, "timestamp")
	}
	if got := strings.Join(kinds, " "); !strings.HasPrefix(got,
		"started message message message message message message error raw message permissionAsked") {
		t.Error(got)
	}
	text := func(i int) string {
		b, err := json.Marshal(list.Events[i])
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for i, want := range map[int]string{
		0: `"data":{"started":{"details":{"agent":"mock","agentMode":"build","model":"mock","permissionMode":"default",`,
		2: `"parts":[{"text":"OK","type":"text"}],"role":"assistant"`,
		4: `"parts":[{"id":"mock_2_call","input":{"query":"example"},"name":"mock.search","type":"tool_call"}]`,
		5: `{"id":"mock_2_call","is_error":true,"output":"mock search results","type":"tool_result"},` +
			`{"source":{"path":"mock_2/readme.md","type":"path"},"type":"file"}`,
		7: `"data":{"error":{"details":{"mock":true},"kind":"mock_error","message":"Mock error event."}}`,
		10: `"data":{"permissionAsked":{"always":[],"id":"mock_4_permission",` +
			`"metadata":{"codexRequestKind":"commandExecution","command":"echo mock"},` +
			`"patterns":[],"permission":"command_execution","sessionId":"old"}}`,
	} {
		if !strings.Contains(text(i), want) {
			t.Errorf("event %d: %s, want %s", i, text(i), want)
		}
	}
	// Offsets stand for the same place in both forms.
	second := list.Events[1]["id"].(float64)
	g.do("GET", fmt.Sprintf("/v1/sessions/old/events?schema=legacy&offset=%v&limit=1", second-1), "").
		want(200, fmt.Sprintf(`{"events":[{"id":%v,`, second)).want(200, `"hasMore":true`)
	g.do("GET", "/v1/sessions/old/events?schema=older", "").want(400, "schema")
	resp := g.open("GET", "/v1/sessions/old/events/sse?schema=legacy", "")
	defer func() { _ = resp.Body.Close() }()
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	if err != nil || line != "id: 1\n" {
		t.Errorf("%q %v", line, err)
	}
}

// A gateway that stops ends its streams cleanly, and another one goes on.
func testSessionRestart(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/durable", `{"agent":"mock"}`).want(200, "")
	live := g.stream("GET", "/v1/sessions/durable/events/sse", "")
	g.do("POST", "/v1/sessions/durable/messages", `{"message":"questions"}`).want(204, "")
	live.until(sessions.QuestionRequested)
	last := live.until(sessions.QuestionRequested)
	turn := g.stream("POST", "/v1/sessions/durable/messages/stream", okMessage)
	g.stop()
	for _, s := range []*stream{live, turn} {
		if f, more := s.next(); more {
			t.Errorf("the gateway sent %s when it stopped", f.text)
		}
	}
	g.client.CloseIdleConnections()
	g.start()
	g.do("GET", "/v1/sessions/durable", "").want(200, `"pendingQuestions":[{"question_id":"mock_1_question",`)
	live = g.stream("GET", "/v1/sessions/durable/events/sse", "", "Last-Event-ID", last[len(last)-1].id)
	g.do("POST", "/v1/sessions/durable/questions/mock_1_question/reply", `{"answers":[["Red"]]}`).want(204, "")
	g.do("POST", "/v1/sessions/durable/questions/mock_1_question_reject/reject", "").want(204, "")
	if got := typesOf(live.until(sessions.TurnEnded)); got != "question.resolved question.resolved turn.ended" {
		t.Error(got)
	}
	if got := typesOf(live.until(sessions.TurnEnded)); got != okTurn {
		t.Error(got)
	}
}
