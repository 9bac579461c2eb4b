package gateway

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// usageStub answers with one row, and keeps the last filter.
type usageStub struct {
	filter proto.UsageFilter
	err    error

	mu      sync.Mutex
	month   proto.UsageMonth // of every organisation
	read    int              // times
	crossed map[proto.Crossing]bool
}

func (u *usageStub) Month(string) proto.UsageMonth {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.read++
	return u.month
}

func (u *usageStub) Cross(_ context.Context, c proto.Crossing) (bool, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.crossed == nil {
		u.crossed = map[proto.Crossing]bool{}
	}
	first := !u.crossed[c]
	u.crossed[c] = true
	return first, nil
}

func (u *usageStub) Report(_ context.Context, f *proto.UsageFilter) (proto.UsageReport, error) {
	u.filter = *f
	row := proto.UsageRow{StoredByteDays: 7, UsageSum: proto.UsageSum{
		Executions: map[proto.Status]int64{proto.StatusSuccess: 2, proto.StatusOOM: 1}, CPUMS: 1234,
		MemoryMS: 5, SandboxMS: 2500, BytesIn: 9, BytesOut: 3,
		OutputBytes: 4, WebhookAttempts: 6, AgentTurns: 8,
	}}
	if f.By(proto.UsageByDay) {
		row.Day = "2026-02-03"
	}
	if f.By(proto.UsageByOrg) {
		row.Org = "acme"
	}
	return proto.UsageReport{Complete: true, Rows: []proto.UsageRow{row}}, u.err
}

func (u *usageStub) asked() string {
	return fmt.Sprint(u.filter.Org, " ", u.filter.From.Format(proto.UsageDayLayout), " ",
		u.filter.To.Format(proto.UsageDayLayout), " ", u.filter.GroupBy)
}

func TestUsageFilters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2026, 3, 5, 23, 59, 0, 0, time.UTC)))
		stub := new(usageStub)
		h := newHarness(t, func(s *Server) { s.Usage = stub })
		user, admin := *h, *h
		user.key, admin.key = h.stub.addKey("acme", "pro", asUser),
			h.stub.addKey("acme", "pro", proto.Key{Scopes: proto.Scopes()})
		for _, c := range []struct {
			h          *harness
			path, want string
		}{
			{&user, "/v1/usage", "acme 2026-03-01 2026-03-05 [day]"},
			{&user, "/v1/usage?to=2026-02-10&group_by=", "acme 2026-02-01 2026-02-10 []"},
			{&user, "/v1/usage?from=2025-03-05&group_by=language,day,key", "acme 2025-03-05 2026-03-05 [language day key]"},
			{h, "/v1/admin/usage?from=2026-03-05&group_by=org,day", " 2026-03-05 2026-03-05 [org day]"},
			{h, "/v1/admin/usage?org=other", "other 2026-03-01 2026-03-05 [day]"},
			{&admin, "/v1/admin/usage", "acme 2026-03-01 2026-03-05 [day]"},
			{&admin, "/v1/admin/usage?org=acme", "acme 2026-03-01 2026-03-05 [day]"},
		} {
			c.h.do("GET", c.path, "").want(200, "")
			if got := stub.asked(); got != c.want {
				t.Errorf("%s asks for %s, want %s", c.path, got, c.want)
			}
		}
		for query, word := range map[string]string{
			"from=2026-3-1": "from", "from=": "from", "to=2026-02-30": "to", "from=2026-03-06": "must not be after to",
			"from=2025-03-04": "at most 366 days", "group_by=hour": "group_by", "group_by=day,day": "group_by",
			"group_by=org":  "group_by",
			"group_by=day,": "group_by", "format=xml": "format", "org=acme": "org is no parameter",
			"form=2026-03-01": "form is no parameter",
		} {
			user.do("GET", "/v1/usage?"+query, "").want(400, "validation_error", word)
		}
		admin.do("GET", "/v1/admin/usage?org=other", "").want(404, "not_found")
		h.do("GET", "/v1/admin/usage?org=A", "").want(400, "validation_error", "org")
		stub.err = proto.FieldErrorf("group_by", "gives too many rows")
		user.do("GET", "/v1/usage", "").want(400, "validation_error", "group_by gives too many rows")
	})
}

func TestUsageForms(t *testing.T) {
	h := newHarness(t)
	row := h.do("GET", "/v1/usage", "").want(200, "").json()["rows"].([]any)[0].(map[string]any)
	if row["day"] != "2026-02-03" || row["org"] != nil || row["cpu_seconds"] != 1.234 ||
		row["executions"].(map[string]any)["total"] != 3.0 {
		t.Errorf("%v", row)
	}
	const want = "org,day,executions,success,failed,timeout,oom,seccomp," +
		"cancelled,cpu_seconds,memory_mib_seconds,bytes_out,output_bytes,stored_byte_days,webhook_attempts," +
		"sandbox_seconds,agent_turns,bytes_in\n" +
		"acme,2026-02-03,3,2,0,0,1,0,0,1.234,0.005,3,4,7,6,2.500,8,9\n"
	for _, a := range []*reply{
		h.do("GET", "/v1/admin/usage?group_by=day,org", "", "Accept", "text/csv"),
		h.do("GET", "/v1/admin/usage?group_by=day,org&format=csv", "", "Accept", "application/json"),
	} {
		if a.want(200, ""); string(a.body) != want || !strings.HasPrefix(a.header.Get("Content-Type"), "text/csv") {
			t.Errorf("%q: %s", a.header.Get("Content-Type"), a.body)
		}
	}
	if a := h.do("GET", "/v1/usage?format=json", "", "Accept", "text/csv").want(200, ""); a.json()["complete"] != true {
		t.Errorf("%s", a.body)
	}
}
