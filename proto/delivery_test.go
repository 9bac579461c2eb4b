package proto

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func ended(r Result) *Record {
	at := time.Date(2026, 1, 2, 4, 4, 5, 678_900_000, time.FixedZone("x", 3600))
	return &Record{
		Meta: Meta{
			TraceID: "trc_AbCdEfGhIjKlMnOpQrSt", Org: "acme", Key: "key_1", Mode: ModeAsync,
			WebhookURL: "https://example.com/",
		},
		Status: r.Status(), CompletedAt: &at, Result: &r,
	}
}

func TestDeliveryOfAnExecution(t *testing.T) {
	rec := ended(Exited(0))
	at := time.Date(2026, 1, 2, 4, 4, 5, 0, time.FixedZone("x", 3600))
	got := NewDelivery(&rec.Meta, at)
	want := &Delivery{
		ID: "msg_AbCdEfGhIjKlMnOpQrSt", TraceID: rec.TraceID, Org: "acme", Key: "key_1", URL: "https://example.com/",
		Status:    DeliveryPending,
		CreatedAt: at.UTC(), NextAt: at.UTC(), Attempts: []DeliveryAttempt{},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for name, change := range map[string]func(*Meta){
		"inline":    func(m *Meta) { m.Mode = ModeInline },
		"streaming": func(m *Meta) { m.Mode = ModeStreaming },
		"no URL":    func(m *Meta) { m.WebhookURL = "" },
	} {
		m := rec.Meta
		change(&m)
		if d := NewDelivery(&m, at); d != nil {
			t.Errorf("%s: %+v", name, d)
		}
	}
}

func TestDeliveryKeepsItsLastAttempts(t *testing.T) {
	d := NewDelivery(&ended(Exited(0)).Meta, time.Unix(1, 0))
	for range 30 {
		d.Record(DeliveryAttempt{Status: 500})
	}
	if len(d.Attempts) != MaxKeptAttempts || d.Made != 30 || d.Attempts[0].Number != 11 ||
		d.Attempts[MaxKeptAttempts-1].Number != 30 {
		t.Errorf("%d of %d attempts, from %d", len(d.Attempts), d.Made, d.Attempts[0].Number)
	}
	d.Status, d.Reason, d.NextAt = DeliveryFailed, "gone", time.Time{}
	d.Replay(time.Unix(2, 0))
	if d.ID != "msg_AbCdEfGhIjKlMnOpQrSt" || d.Status != DeliveryPending || d.Reason != "" || d.Before != 30 ||
		!d.NextAt.Equal(time.Unix(2, 0)) {
		t.Errorf("replayed: %+v", d)
	}
	body, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	back, err := DecodeDelivery(d.TraceID, body)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(d, back); diff != "" {
		t.Error(diff)
	}
}

func TestMalformedDeliveries(t *testing.T) {
	const id = TraceID("trc_AbCdEfGhIjKlMnOpQrSt")
	const whole = `{"id":"msg_AbCdEfGhIjKlMnOpQrSt","trace_id":"trc_AbCdEfGhIjKlMnOpQrSt","org":"acme","key":"k",` +
		`"url":"https://e.com/","status":"failed",` +
		`"created_at":"2026-01-02T03:04:05Z","made":1,"before":1,"attempts":[{"number":1}]}`
	if _, err := DecodeDelivery(id, []byte(whole)); err != nil {
		t.Fatal(err)
	}
	if _, err := DecodeDelivery("x",
		[]byte(`{"id":"msg_x","trace_id":"x","org":"acme","key":"k","url":"u","status":"failed","made":0}`)); err != nil {
		t.Error(err)
	}
	for _, change := range [][2]string{
		{`}`, ``},
		{`"trace_id":"trc_A`, `"trace_id":"trc_B`},
		{`"msg_A`, `"msg_B`},
		{`"acme"`, `""`},
		{`"key":"k"`, `"key":""`},
		{`"https://e.com/"`, `""`},
		{`"status":"failed"`, `"status":""`},
		{`"status":"failed"`, `"status":"lost"`},
		{`"made":1`, `"made":0`},
		{`"made":1`, `"made":-1`},
		{`"before":1`, `"before":2`},
		{`"before":1`, `"before":-1`},
		{`"made":1`, `"made":"1"`},
		{`{"number":1}`, strings.Repeat(`{},`, 20) + `{}`},
	} {
		body := strings.ReplaceAll(whole, change[0], change[1])
		if d, err := DecodeDelivery(id, []byte(body)); err == nil || !strings.Contains(err.Error(), string(id)) {
			t.Errorf("%s: %+v, %v", body, d, err)
		}
	}
}

func TestWebhookBody(t *testing.T) {
	r := Exited(0)
	r.Stdout, r.Stderr, r.DurationMS = "<a>&\x00\u2028\"", "é", 5
	rec := ended(r)
	rec.OutputTruncated, rec.Metadata = true, map[string]string{"k": "v"}
	body, err := WebhookBody(rec, "https://bullpen.example/v1/executions/x", 1<<20)
	const want = `{"event":"execution.completed","trace_id":"trc_AbCdEfGhIjKlMnOpQrSt",` +
		`"timestamp":"2026-01-02T03:04:05.678Z","status":"success",` +
		`"result":{"success":true,"stdout":"<a>&\u0000\u2028\"","stderr":"é","exit_code":0,"error":null,"error_code":null,` +
		`"error_message":null,` +
		`"duration_ms":5,"stdout_truncated":false,"stderr_truncated":false},"output_truncated":true,"metadata":{"k":"v"}}`
	if err != nil || string(body) != want {
		t.Errorf("%v\n%s, want\n%s", err, body, want)
	}
	for event, result := range map[string]Result{
		EventCompleted: TimedOut(5), EventCancelled: Cancelled(),
	} {
		var got struct{ Event string }
		body, err := WebhookBody(ended(result), "", 1<<20)
		if err != nil || json.Unmarshal(body, &got) != nil || got.Event != event {
			t.Errorf("%v: %s, want %s", err, body, event)
		}
	}
	for name, change := range map[string]func(*Record){
		"running": func(r *Record) { r.Result = nil }, "without its end": func(r *Record) { r.CompletedAt = nil },
	} {
		rec := ended(r)
		change(rec)
		if _, err := WebhookBody(rec, "", 1<<20); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// The body of a webhook is small, however much a program prints. It contains as much of the output
// as fits.
// The last results are left out before an output is truncated.
func TestWebhookBodyLosesResultsFirst(t *testing.T) {
	r := Exited(0)
	r.Stdout = strings.Repeat("o", 1000)
	for range 3 {
		r.Results = append(r.Results, Display{Data: map[string]json.RawMessage{
			"text/plain": json.RawMessage(`"` + strings.Repeat("r", 1000) + `"`),
		}})
	}
	for most, want := range map[int]struct{ results, stdout int }{
		10_000: {3, 1000}, webhookRest + 3200: {2, 1000}, webhookRest + 1500: {0, 1000}, webhookRest + 500: {0, 500},
	} {
		text, err := WebhookBody(ended(r), "u", most)
		if err != nil {
			t.Fatal(err)
		}
		var body struct {
			Result    Result
			ResultURL string `json:"result_url"`
		}
		if err := json.Unmarshal(text, &body); err != nil {
			t.Fatal(err)
		}
		if n, cut := len(body.Result.Results), want.results < 3; n != want.results || body.Result.ResultsTruncated != cut ||
			(body.ResultURL != "") != cut || len(text) > most {
			t.Errorf("most %d: %d results, truncated %t, URL %q, %d bytes", most, n, body.Result.ResultsTruncated,
				body.ResultURL,
				len(text))
		}
		if n := len(body.Result.Stdout); n < want.stdout-10 || body.Result.StdoutTruncated != (want.stdout < 1000) {
			t.Errorf("most %d: %d bytes of stdout", most, n)
		}
	}
}

func TestWebhookBodyIsCut(t *testing.T) {
	const resultURL = "https://bullpen.example/v1/executions/trc_AbCdEfGhIjKlMnOpQrSt"
	huge := func(s string) string { return strings.Repeat(s, (512<<10)/len(s)) }
	metadata := map[string]string{}
	for _, name := range "abcdefghij" {
		metadata[strings.Repeat(string(name), 40)] = strings.Repeat("\x01", 256)
	}
	texts := map[string]string{
		"controls": huge("\x00"), "quotes": huge(`"\`), "bytes that are not UTF-8": huge("\xff"),
		"separators": huge("\u2028"), "emoji": huge("😀"),
		"letters": huge("a"), "html": huge("<&>"), "delete": huge("\x7f"), "short": "short", "none": "",
	}
	for out, stdout := range texts {
		for err, stderr := range texts {
			for _, most := range []int{32 << 10, 256 << 10} {
				r := Failure(CodeSandboxStart, strings.Repeat("\x01", 500))
				r.Stdout, r.Stderr = stdout, stderr
				rec := ended(r)
				rec.Metadata = metadata
				body, encodeErr := WebhookBody(rec, resultURL, most)
				if encodeErr != nil || len(body) > most {
					t.Fatalf("%s and %s: %d bytes, %v", out, err, len(body), encodeErr)
				}
				var got struct {
					Result    Result
					ResultURL string `json:"result_url"`
				}
				if json.Unmarshal(body, &got) != nil {
					t.Fatalf("%.300s", body)
				}
				cut := len(stdout)+len(stderr) > 100
				if got.ResultURL != map[bool]string{true: resultURL}[cut] || !cut && got.Result.Stdout != stdout {
					t.Errorf("%s and %s: result_url %q", out, err, got.ResultURL)
				}
				if cut && len(body) < most*4/10 { // characters may be escaped or not
					t.Errorf("%s and %s: %d bytes, want at most %d", out, err, len(body), most)
				}
				for _, s := range []struct {
					whole, part string
					truncated   bool
				}{
					{stdout, got.Result.Stdout, got.Result.StdoutTruncated},
					{stderr, got.Result.Stderr, got.Result.StderrTruncated},
				} {
					if utf8.ValidString(s.whole) && (!strings.HasPrefix(s.whole, s.part) || s.truncated != (s.part != s.whole)) {
						t.Errorf("%s and %s: %d of %d bytes, truncated %v", out, err, len(s.part), len(s.whole), s.truncated)
					}
					if s.truncated && s.part == "" && most > 64<<10 {
						t.Errorf("%s and %s: nothing is left", out, err)
					}
				}
			}
		}
	}
	// If even the other fields do not fit, the body has no output.
	r := Exited(0)
	r.Stdout, r.StderrTruncated = "some", true
	body, err := WebhookBody(ended(r), resultURL, 0)
	if err != nil || !strings.Contains(string(body), `"stdout":"","stderr":""`) ||
		!strings.Contains(string(body), `"stdout_truncated":true,"stderr_truncated":true`) {
		t.Errorf("%s, %v", body, err)
	}
}

func FuzzDecodeDelivery(f *testing.F) {
	f.Add("trc_AbCdEfGhIjKlMnOpQrSt",
		[]byte(`{"id":"msg_AbCdEfGhIjKlMnOpQrSt","trace_id":"trc_AbCdEfGhIjKlMnOpQrSt","org":"a","key":"k","url":"u",`+
			`"status":"pending",`+
			`"created_at":"2026-01-02T03:04:05Z","next_at":"2026-01-02T03:04:05Z","made":1,"attempts":[{"number":1,`+
			`"at":"2026-01-02T03:04:05Z","status":500,"error":"status"}]}`))
	f.Add("", []byte(`{}`))
	f.Add("trc_", []byte(`null`))
	f.Fuzz(func(t *testing.T, id string, body []byte) {
		d, err := DecodeDelivery(TraceID(id), body)
		if err != nil {
			return
		}
		again, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		second, err := DecodeDelivery(TraceID(id), again)
		if err != nil {
			t.Fatalf("%s: %v", again, err)
		}
		if diff := cmp.Diff(d, second); diff != "" {
			t.Fatalf("%s is read as something else: %s", again, diff)
		}
		d.Record(DeliveryAttempt{})
		if len(d.Attempts) > MaxKeptAttempts || d.Attempts[len(d.Attempts)-1].Number != d.Made {
			t.Fatalf("%+v", d)
		}
	})
}

func TestDeliveryOfAFailedTick(t *testing.T) {
	s := Schedule{ID: "sch_a", Org: "acme", Key: "k", Name: "report"}
	at := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	run := ScheduleRun{Tick: at, At: at.Add(time.Second), Outcome: RunFailed, Reason: "its key is revoked"}
	d, err := s.NewDelivery("https://example.com/", run)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"event":"schedule.failed","schedule_id":"sch_a","name":"report","tick":"2026-11-20T12:00:00.000Z",` +
		`"timestamp":"2026-11-20T12:00:01.000Z","reason":"its key is revoked"}`
	if string(d.Body) != want || d.Org != "acme" || d.Key != "k" || !d.NextAt.Equal(run.At) {
		t.Errorf("%+v: %s", d, d.Body)
	}
	body, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := DecodeDelivery(d.TraceID, body); err != nil || string(got.Body) != want {
		t.Errorf("%+v, %v", got, err)
	}
	run.At = run.At.Add(time.Minute)
	again, err := s.NewDelivery("https://example.com/", run)
	if err != nil || again.ID != d.ID {
		t.Errorf("the same tick: %s and %s, %v", d.ID, again.ID, err)
	}
	run.Tick = run.Tick.Add(time.Second)
	if other, err := s.NewDelivery("https://example.com/", run); err != nil || other.ID == d.ID {
		t.Errorf("another tick: %s, %v", other.ID, err)
	}
}
