package proto

import (
	"slices"
	"time"
)

// UsageDayLayout is the format of days in usage. Days are in UTC.
const UsageDayLayout = time.DateOnly

// Limits of a question about usage.
const (
	MaxUsageDays = 366
	MaxUsageRows = 20000
)

// UsageSum is the total usage of a number of executions.
type UsageSum struct {
	Executions map[Status]int64 `json:"executions,omitempty"` // that ended, by their terminal status
	CPUMS      int64            `json:"cpu_ms,omitempty"`
	// MemoryMS is the sum of peak memory multiplied by duration, in MiB times milliseconds.
	MemoryMS        int64 `json:"memory_ms,omitempty"`
	SandboxMS       int64 `json:"sandbox_ms,omitempty"`   // for which live sandboxes ran
	AgentTurns      int64 `json:"agent_turns,omitempty"`  // of agent sessions
	BytesIn         int64 `json:"bytes_in,omitempty"`     // received by the programs through their network
	BytesOut        int64 `json:"bytes_out,omitempty"`    // sent by the programs through their network
	OutputBytes     int64 `json:"output_bytes,omitempty"` // of stdout and stderr in the results
	WebhookAttempts int64 `json:"webhook_attempts,omitempty"`
}

// Add adds other to s.
func (s *UsageSum) Add(other *UsageSum) {
	for status, n := range other.Executions {
		if s.Executions == nil {
			s.Executions = map[Status]int64{}
		}
		s.Executions[status] += n
	}
	s.CPUMS += other.CPUMS
	s.MemoryMS += other.MemoryMS
	s.SandboxMS += other.SandboxMS
	s.AgentTurns += other.AgentTurns
	s.BytesIn += other.BytesIn
	s.BytesOut += other.BytesOut
	s.OutputBytes += other.OutputBytes
	s.WebhookAttempts += other.WebhookAttempts
}

// NewUsageSum returns the usage of a finished execution.
func NewUsageSum(r *Record) UsageSum {
	sum := UsageSum{Executions: map[Status]int64{r.Status: 1}}
	if r.SandboxID != "" && r.Result != nil {
		sum.SandboxMS = r.Result.DurationMS
	}
	if u := r.Usage; u != nil {
		sum.CPUMS, sum.OutputBytes = u.CPUMS, u.OutputBytes
		if u.Network != nil {
			sum.BytesIn, sum.BytesOut = u.Network.BytesIn, u.Network.BytesOut
		}
		if r.Result != nil {
			sum.MemoryMS = (u.MemoryPeak >> 10) * r.Result.DurationMS >> 10 // in two steps, so that it cannot overflow
		}
	}
	return sum
}

// UsageMonth is the usage of an organisation in a month.
type UsageMonth struct {
	Ends time.Time // the beginning of the next month
	UsageSum
	StoredBytes    int64 // by the last sample
	StoredByteDays int64 // the sum of the largest sample of each day
}

// UsageGroup is a field by which a [UsageReport] can be grouped.
type UsageGroup string

// The groups.
const (
	UsageByOrg      UsageGroup = "org"
	UsageByDay      UsageGroup = "day"
	UsageByKey      UsageGroup = "key"
	UsageByLanguage UsageGroup = "language"
)

// UsageGroups returns all groups, in the sort order of rows.
func UsageGroups() []UsageGroup {
	return []UsageGroup{UsageByOrg, UsageByDay, UsageByKey, UsageByLanguage}
}

// UsageFilter selects usage.
type UsageFilter struct {
	Org      string    // empty for all organisations
	From, To time.Time // the first and the last day
	GroupBy  []UsageGroup
}

// By reports whether rows differ in g.
func (f *UsageFilter) By(g UsageGroup) bool { return slices.Contains(f.GroupBy, g) }

// UsageRow is the usage of a group. Fields not grouped by are empty. Key is empty for usage without
// an API key, and Language for usage without a language.
type UsageRow struct {
	Org      string
	Day      string // in the form of [UsageDayLayout]
	Key      string // its id
	Language Language
	UsageSum
	StoredByteDays int64 // the sum of the largest sample of each day
}

// UsageReport is the answer to a [UsageFilter].
type UsageReport struct {
	Rows []UsageRow
	// Complete is whether the report covers everything that had ended at the time of the request.
	Complete bool
}
