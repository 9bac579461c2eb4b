package proto

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestTimeline(t *testing.T) {
	at := func(ms int64) time.Time { return time.UnixMilli(1_700_000_000_000 + ms).UTC() }
	pointer := func(ms int64) *time.Time { return new(at(ms)) }
	steps := &Steps{AssignedAt: at(10), Start: "warm"}
	steps.Jail, steps.Home = steps.Interval(at(10), at(13)), steps.Interval(at(11), at(12))
	steps.Program, steps.Commit = steps.Interval(at(20), at(50)), steps.Interval(at(60), at(60))
	meta := Meta{CreatedAt: at(0)}
	late := Meta{CreatedAt: at(0), RunAt: at(5)}
	const ms = time.Millisecond
	worked := []Step{
		{StepJail, "", at(10), 3 * ms},
		{StepHome, StepJail, at(11), ms},
		{StepProgram, "", at(20), 30 * ms},
		{StepCommit, "", at(60), time.Microsecond},
	}
	for name, test := range map[string]struct {
		record Record
		want   []Step
	}{
		"queued": {Record{Meta: meta}, nil},
		"runs": {
			Record{Meta: meta, Attempt: 1, StartedAt: pointer(12)},
			[]Step{{Name: StepQueue, At: at(0), Took: 12 * ms}},
		},
		"expired": {
			Record{Meta: meta, CompletedAt: pointer(30)},
			[]Step{{Name: StepQueue, At: at(0), Took: 30 * ms}},
		},
		"ended": {
			Record{Meta: meta, Attempt: 1, Steps: steps},
			append([]Step{{Name: StepQueue, At: at(0), Took: 10 * ms}}, worked...),
		},
		"second attempt":  {Record{Meta: meta, Attempt: 2, Steps: steps}, worked},
		"worker was lost": {Record{Meta: meta, Attempt: 2, StartedAt: pointer(40), CompletedAt: pointer(90)}, nil},
		"delayed": {
			Record{Meta: late, Attempt: 1, StartedAt: pointer(8)},
			[]Step{{Name: StepDelay, At: at(0), Took: 5 * ms}, {Name: StepQueue, At: at(5), Took: 3 * ms}},
		},
		"a clock is behind": {
			Record{Meta: Meta{CreatedAt: at(15)}, Attempt: 1, Steps: steps},
			append([]Step{{Name: StepQueue, At: at(15)}}, worked...),
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, test.record.Timeline()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
	stored, err := json.Marshal(steps)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"assigned_at":"2023-11-14T22:13:20.01Z","start":"warm","jail":[0,3000],"home":[1000,1000],` +
		`"program":[10000,30000],"commit":[50000,1]}`
	if string(stored) != want {
		t.Errorf("stored as %s", stored)
	}
}
