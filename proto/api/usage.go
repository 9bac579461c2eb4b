package api

import (
	"encoding/csv"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const typeCSV = "text/csv"

// Usage is a report of usage.
type Usage struct {
	From     string             `json:"from" doc:"The first day, of UTC."`
	To       string             `json:"to" doc:"The last day."`
	GroupBy  []proto.UsageGroup `json:"group_by" doc:"What the rows differ in."`
	Complete bool               `json:"complete" doc:"Whether everything that had ended at the time of the request is counted. Otherwise the server did not catch up within 2 s, and the newest executions may be missing."`
	Quotas   []QuotaUse         `json:"quotas" doc:"The organisation's use of its plan's quotas in the current month, independent of the report's days; empty without quotas, and for all organisations together."`
	Rows     []UsageRow         `json:"rows" doc:"One for each group with usage, sorted by organisation, day, key, language."`
}

// QuotaUse is an organisation's use of a quota.
type QuotaUse struct {
	Name proto.QuotaName `json:"name"`
	Used float64         `json:"used" minimum:"0" doc:"In the unit of the name. Of stored_bytes, by the last hourly sample."`
	Soft *int64          `json:"soft" minimum:"1" doc:"From here on, answers have the header X-Quota-Warning; null for no limit."`
	Hard *int64          `json:"hard" minimum:"1" doc:"From here on, executions are refused; null for no limit."`
	Ends Time            `json:"ends" doc:"When the month ends and the use of seconds is reset."`
}

// UsageRow is the usage of a group.
type UsageRow struct {
	Org              *string         `json:"org" doc:"The organisation; null if the rows do not differ in it."`
	Day              *string         `json:"day" doc:"The UTC day on which executions ended and webhook attempts began; null if the rows are not grouped by it."`
	Key              *string         `json:"key" doc:"The id of the API key; null for stored bytes, and if the rows are not grouped by it."`
	Language         *proto.Language `json:"language" doc:"null for stored bytes and webhook attempts, and if the rows are not grouped by it."`
	Executions       UsageExecutions `json:"executions"`
	CPUSeconds       float64         `json:"cpu_seconds" minimum:"0" doc:"CPU time of the programs, user and system."`
	MemoryMiBSeconds float64         `json:"memory_mib_seconds" minimum:"0" doc:"Sum of each execution's peak memory in MiB, multiplied by its duration in seconds."`
	SandboxSeconds   float64         `json:"sandbox_seconds" minimum:"0" doc:"How long live sandboxes ran that have stopped."`
	AgentTurns       int64           `json:"agent_turns" minimum:"0" doc:"Turns of agent sessions that have ended."`
	BytesIn          int64           `json:"bytes_in" minimum:"0" doc:"Received by the programs through their network."`
	BytesOut         int64           `json:"bytes_out" minimum:"0" doc:"Sent by the programs through their network."`
	OutputBytes      int64           `json:"output_bytes" minimum:"0" doc:"Of stdout and stderr in the results."`
	StoredByteDays   int64           `json:"stored_byte_days" minimum:"0" doc:"Sum of the daily maxima of stored bytes, sampled hourly: files in the newest version of threads, uploaded files waiting for an execution, and retained output of results. For one day, the bytes stored."`
	WebhookAttempts  int64           `json:"webhook_attempts" minimum:"0" doc:"Of deliveries that have ended. Tests of a webhook do not count."`
}

// UsageExecutions counts executions by their outcome.
type UsageExecutions struct {
	_ struct{} `doc:"The executions that ended, by their status."`

	Total     int64 `json:"total" minimum:"0"`
	Success   int64 `json:"success" minimum:"0"`
	Failed    int64 `json:"failed" minimum:"0" doc:"Includes those that expired in the queue or whose worker was lost."`
	Timeout   int64 `json:"timeout" minimum:"0"`
	OOM       int64 `json:"oom" minimum:"0"`
	Seccomp   int64 `json:"seccomp" minimum:"0"`
	Cancelled int64 `json:"cancelled" minimum:"0"`
}

// NewUsage returns the form of a report. uses is the organisation's use of its quotas.
func NewUsage(f *proto.UsageFilter, r *proto.UsageReport, uses []proto.QuotaUse) Usage {
	u := Usage{
		From: f.From.Format(proto.UsageDayLayout), To: f.To.Format(proto.UsageDayLayout), GroupBy: f.GroupBy,
		Complete: r.Complete,
		Quotas:   make([]QuotaUse, len(uses)), Rows: make([]UsageRow, len(r.Rows)),
	}
	for i := range uses {
		use := &uses[i]
		u.Quotas[i] = QuotaUse{
			Name: use.Name, Used: use.Used, Soft: limitOf(use.Soft), Hard: limitOf(use.Hard),
			Ends: Time{use.Ends},
		}
	}
	for i := range r.Rows {
		row := &r.Rows[i]
		u.Rows[i] = UsageRow{
			Org: optional(row.Org), Day: optional(row.Day), Key: optional(row.Key), Language: optional(row.Language),
			Executions: newUsageExecutions(row.Executions), CPUSeconds: thousandths(row.CPUMS),
			MemoryMiBSeconds: thousandths(row.MemoryMS), SandboxSeconds: thousandths(row.SandboxMS),
			AgentTurns: row.AgentTurns,
			BytesIn:    row.BytesIn, BytesOut: row.BytesOut, OutputBytes: row.OutputBytes, StoredByteDays: row.StoredByteDays,
			WebhookAttempts: row.WebhookAttempts,
		}
	}
	return u
}

// limitOf returns a limit, or nil for 0, which is none.
func limitOf(n int64) *int64 {
	if n == 0 {
		return nil
	}
	return &n
}

func newUsageExecutions(ended map[proto.Status]int64) UsageExecutions {
	e := UsageExecutions{
		Success: ended[proto.StatusSuccess], Failed: ended[proto.StatusFailed], Timeout: ended[proto.StatusTimeout],
		OOM: ended[proto.StatusOOM], Seccomp: ended[proto.StatusSeccomp], Cancelled: ended[proto.StatusCancelled],
	}
	for _, n := range ended {
		e.Total += n
	}
	return e
}

func thousandths(n int64) float64 { return float64(n) / 1000 }

// WriteCSV writes the rows as CSV with a header: the groups that the rows differ in, then all
// numbers.
func (u *Usage) WriteCSV(w io.Writer) error {
	out := csv.NewWriter(w)
	var head []string
	for _, g := range u.groups() {
		head = append(head, string(g))
	}
	_ = out.Write(append(head, // Flush keeps the error
		"executions", "success", "failed", "timeout", "oom", "seccomp", "cancelled",
		"cpu_seconds", "memory_mib_seconds", "bytes_out", "output_bytes", "stored_byte_days", "webhook_attempts",
		"sandbox_seconds", "agent_turns", "bytes_in"))
	for i := range u.Rows {
		r := &u.Rows[i]
		var line []string
		for _, g := range u.groups() {
			line = append(line, r.group(g))
		}
		e := &r.Executions
		for _, n := range []int64{e.Total, e.Success, e.Failed, e.Timeout, e.OOM, e.Seccomp, e.Cancelled} {
			line = append(line, strconv.FormatInt(n, 10))
		}
		for _, n := range []float64{r.CPUSeconds, r.MemoryMiBSeconds} {
			line = append(line, strconv.FormatFloat(n, 'f', 3, 64))
		}
		for _, n := range []int64{r.BytesOut, r.OutputBytes, r.StoredByteDays, r.WebhookAttempts} {
			line = append(line, strconv.FormatInt(n, 10))
		}
		line = append(line, strconv.FormatFloat(r.SandboxSeconds, 'f', 3, 64), strconv.FormatInt(r.AgentTurns, 10),
			strconv.FormatInt(r.BytesIn, 10))
		_ = out.Write(line)
	}
	out.Flush()
	return out.Error()
}

// groups returns the groups of u in the order of columns.
func (u *Usage) groups() []proto.UsageGroup {
	return slices.DeleteFunc(proto.UsageGroups(), func(g proto.UsageGroup) bool { return !slices.Contains(u.GroupBy, g) })
}

// group returns the value of a group, empty if the row has none.
func (r *UsageRow) group(g proto.UsageGroup) string {
	value := map[proto.UsageGroup]*string{
		proto.UsageByOrg: r.Org, proto.UsageByDay: r.Day, proto.UsageByKey: r.Key,
		proto.UsageByLanguage: (*string)(r.Language),
	}[g]
	if value == nil {
		return ""
	}
	return *value
}

func usageRoutes() []Route {
	from, to := exampleTime().AddDate(0, 0, -1), exampleTime()
	day, key, language := from.Format(proto.UsageDayLayout), "key_1", proto.Python
	filter := &proto.UsageFilter{
		From: from, To: to, GroupBy: []proto.UsageGroup{proto.UsageByDay, proto.UsageByKey, proto.UsageByLanguage},
	}
	example := NewUsage(filter, &proto.UsageReport{Complete: true, Rows: []proto.UsageRow{{
		Day: day, Key: key, Language: language,
		UsageSum: proto.UsageSum{
			Executions: map[proto.Status]int64{proto.StatusSuccess: 119, proto.StatusTimeout: 1}, CPUMS: 30500,
			MemoryMS: 2_400_000, BytesIn: 8 << 20, BytesOut: 1 << 20, OutputBytes: 4 << 10,
		},
	}}}, []proto.QuotaUse{{
		Name: proto.QuotaCPU, Quota: proto.Quota{Soft: 800, Hard: 1000}, Used: 30.5,
		Ends: time.Date(to.Year(), to.Month()+1, 1, 0, 0, 0, 0, time.UTC),
	}})
	params := func(groups ...proto.UsageGroup) []Param {
		return []Param{
			query("from", "The first day. By default the first one of the month of to.",
				object{"type": "string", "format": "date"}),
			query("to", fmt.Sprintf("The last day. By default today, in UTC. From and to are at most %d days.",
				proto.MaxUsageDays), object{"type": "string", "format": "date"}),
			query("group_by", fmt.Sprintf(
				"What the rows differ in, with commas between: some of %v. By default day. If it is empty, there is one row. "+
					"More than %d rows are an error.", groups, proto.MaxUsageRows), text()),
			query("format", "By default json, or csv if the header Accept prefers text/csv.",
				object{"type": "string", "enum": UsageFormats()}),
		}
	}
	responses := []Response{{
		Status: http.StatusOK, Doc: "The usage. CSV has a column for each group and each number.", Body: example,
		Text: map[string]string{typeCSV: "day,executions,success,…\n" + day + ",120,119,…\n"},
	}}
	const doc = "What executions used that ended on these days of UTC, and what was stored. It is counted within " +
		"seconds of the end of an execution, and kept for 3 years. "
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/usage", ID: "getUsage", Tag: tagExecutions, Scope: proto.ScopeRead,
			Summary:   "Show the usage of the organisation",
			Doc:       doc + "An unknown parameter is an error.",
			Params:    params(proto.UsageByDay, proto.UsageByKey, proto.UsageByLanguage),
			Responses: responses, Errors: []int{http.StatusTooManyRequests},
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/usage", ID: "getOrgUsage", Tag: tagAdmin, Scope: proto.ScopeAdmin,
			Summary: "Show the usage of organisations",
			Doc:     doc + "An unknown parameter is an error.",
			Params: append(params(proto.UsageGroups()...),
				query("org", "The organisation. By default all for a global administrator, otherwise that of the API key.",
					text())),
			Responses: responses, Errors: []int{http.StatusNotFound, http.StatusTooManyRequests},
		},
	}
}

// UsageFormats returns the formats of a report.
func UsageFormats() []string { return []string{"json", "csv"} }
