package proto

import "time"

// Quota limits what an organisation uses in a calendar month of UTC. A number that is 0 is no
// limit.
type Quota struct {
	Soft int64 `json:"soft,omitempty" minimum:"1" maximum:"1000000000000000" doc:"From here on, answers warn; no limit if absent."`
	Hard int64 `json:"hard,omitempty" minimum:"1" maximum:"1000000000000000" doc:"From here on, executions are refused until the month ends; no limit if absent."`
}

// Quotas are the quotas of a plan.
type Quotas struct {
	_ struct{} `doc:"Limits of the organisation's usage in a UTC calendar month. Those of an API key's plan do not apply."`

	CPUSeconds       Quota `json:"cpu_seconds,omitzero" doc:"CPU time of the programs, as usage counts it."`
	MemoryMiBSeconds Quota `json:"memory_mib_seconds,omitzero" doc:"Peak memory multiplied by duration, as usage counts it."`
	SandboxSeconds   Quota `json:"sandbox_seconds,omitzero" doc:"How long live sandboxes have run, counted when they stop. Only starts of sandboxes are refused."`
	StoredBytes      Quota `json:"stored_bytes,omitzero" doc:"Bytes stored by the last hourly sample of usage. New files are refused, too."`
}

// QuotaName names a quota. It is the name of its field.
type QuotaName string

// The quotas.
const (
	QuotaCPU     QuotaName = "cpu_seconds"
	QuotaMemory  QuotaName = "memory_mib_seconds"
	QuotaSandbox QuotaName = "sandbox_seconds"
	QuotaStored  QuotaName = "stored_bytes"
)

// QuotaNames returns the names of all quotas.
func QuotaNames() []QuotaName { return []QuotaName{QuotaCPU, QuotaMemory, QuotaSandbox, QuotaStored} }

// QuotaUse is how much of a monthly quota an organisation has used.
type QuotaUse struct {
	Name QuotaName
	Quota
	Used float64   // in the unit of the quota
	Ends time.Time // when the month ends
}

// Reached reports whether usage has reached a limit; 0 means no limit.
func (u *QuotaUse) Reached(limit int64) bool { return limit > 0 && u.Used >= float64(limit) }

// Uses returns an organisation's use in a month of the quotas that have a limit.
func (q Quotas) Uses(m *UsageMonth) (uses []QuotaUse) {
	for _, use := range []QuotaUse{
		{Name: QuotaCPU, Quota: q.CPUSeconds, Used: float64(m.CPUMS) / 1000},
		{Name: QuotaMemory, Quota: q.MemoryMiBSeconds, Used: float64(m.MemoryMS) / 1000},
		{Name: QuotaSandbox, Quota: q.SandboxSeconds, Used: float64(m.SandboxMS) / 1000},
		{Name: QuotaStored, Quota: q.StoredBytes, Used: float64(m.StoredBytes)},
	} {
		if use.Quota != (Quota{}) {
			use.Ends = m.Ends
			uses = append(uses, use)
		}
	}
	return uses
}

// validate returns a [*FieldError] if the soft limit exceeds the hard one.
func (q Quotas) validate(field string) error {
	for _, use := range q.Uses(&UsageMonth{}) {
		if use.Hard > 0 && use.Soft > use.Hard {
			return FieldErrorf(field+"."+string(use.Name)+".soft", "must not be above hard, which is %d", use.Hard)
		}
	}
	return nil
}

// Crossing is a limit that an organisation has reached in a month.
type Crossing struct {
	Org   string
	Month time.Time // when it ends
	Name  QuotaName
	Level string // soft or hard
	Limit int64
}

// Crossings returns the limits that are reached.
func (u *QuotaUse) Crossings(org string) (list []Crossing) {
	if u.Reached(u.Soft) {
		list = append(list, Crossing{org, u.Ends, u.Name, "soft", u.Soft})
	}
	if u.Reached(u.Hard) {
		list = append(list, Crossing{org, u.Ends, u.Name, "hard", u.Hard})
	}
	return list
}
