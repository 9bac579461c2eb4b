package store_test

import (
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// The organisation is a token of every subject of what belongs to one, and the subject matches the
// pattern of all that the organisation has of the kind.
func TestSubjectsHaveTheOrganisation(t *testing.T) {
	const org = "acme"
	id := proto.NewTraceID()
	meta := &proto.Meta{TraceID: id, Org: org, Key: "k", Mode: proto.ModeAsync}
	for name, c := range map[string]struct{ subject, all string }{
		"job":          {store.JobSubject(meta), store.JobPatternOf(org)},
		"any job":      {store.JobPattern(org, id), store.JobPatternOf(org)},
		"record":       {store.ExecSubject(org, id), store.RecordPatternOf(org)},
		"output":       {store.OutputSubject(org, id, 1), store.OutputPatternOf(org)},
		"excess":       {store.ExcessSubject(org, id, 1), store.OutputPatternOf(org)},
		"all output":   {store.OutputPattern(org, id), store.OutputPatternOf(org)},
		"delivery":     {store.DeliverySubject(org, id), store.DeliveryPattern(org)},
		"thread":       {store.ThreadSubject(org, "t"), store.ThreadPatternOf(org)},
		"dead letter":  {store.DeadLetterSubject(org, string(id)), store.DeadLetterPatternOf(org)},
		"log of a run": {store.AgentLogSubject(org, "run"), store.AgentLogPatternOf(org)},
		"end":          {store.DoneSubject(org, id), store.DoneSubject(org, "*")},
		"readers":      {store.ReadersSubject(org, id), store.ReadersSubject(org, "*")},
	} {
		if !strings.Contains(c.subject, "."+org+".") || !matches(c.all, c.subject) {
			t.Errorf("%s: %s and all of them %s", name, c.subject, c.all)
		}
	}
}

// matches reports whether a pattern matches a subject, in which a wildcard stands for any token.
func matches(pattern, subject string) bool {
	patterns, tokens := strings.Split(pattern, "."), strings.Split(subject, ".")
	for i, p := range patterns {
		if p == ">" {
			return len(tokens) > i
		}
		if i >= len(tokens) || p != "*" && p != tokens[i] {
			return false
		}
	}
	return len(patterns) == len(tokens)
}

func TestSubjectsAreParsed(t *testing.T) {
	id := proto.NewTraceID()
	org, parsed, err := store.ParseExecSubject(store.ExecSubject("acme", id))
	if org != "acme" || parsed != id || err != nil {
		t.Errorf("a record: %s, %s, %v", org, parsed, err)
	}
	org, parsed, err = store.ParseDeliverySubject(store.DeliverySubject("acme", id))
	if org != "acme" || parsed != id || err != nil {
		t.Errorf("a delivery: %s, %s, %v", org, parsed, err)
	}
	for _, subject := range []string{"bullpen.exec.acme", "bullpen.exec." + string(id), "bullpen.exec.acme.x", "other"} {
		if org, parsed, err := store.ParseExecSubject(subject); err == nil {
			t.Errorf("%s: %s, %s", subject, org, parsed)
		}
	}
}
