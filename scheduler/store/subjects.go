package store

import (
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// root begins all subjects, so that an account can be shared and permissions can be granted by
// role.
const root = "bullpen."

// JobSubject is the subject of a job until its execution has ended.
func JobSubject(m *proto.Meta) string {
	return root + "job." + string(m.Class()) + "." + m.Org + "." + m.Key + "." + string(m.TraceID)
}

// JobPattern matches the job of execution id.
func JobPattern(id proto.TraceID) string { return root + "job.*.*.*." + string(id) }

// ExecSubject is the subject of an execution's record: its claim and lease while it runs, then its
// result.
func ExecSubject(id proto.TraceID) string { return root + "exec." + string(id) }

// OutputSubject is the subject of the output of one attempt.
func OutputSubject(id proto.TraceID, attempt int) string {
	return root + "out." + string(id) + "." + strconv.Itoa(attempt)
}

// OutputPattern matches all output of an execution.
func OutputPattern(id proto.TraceID) string { return root + "out." + string(id) + ".*" }

// DeliverySubject is the subject of a delivery.
func DeliverySubject(org string, id proto.TraceID) string {
	return root + "delivery." + org + "." + string(id)
}

// DeliveryPattern matches the deliveries of an organisation, or of all if org is empty.
func DeliveryPattern(org string) string {
	if org == "" {
		org = "*"
	}
	return root + "delivery." + org + ".*"
}

// ThreadSubject is the subject of the head of a thread.
func ThreadSubject(org, id string) string { return root + "thread." + org + "." + id }

// ThreadPattern matches the heads of all threads.
const ThreadPattern = root + "thread.*.*"

// ThreadPatternOf matches the heads of an organisation's threads.
func ThreadPatternOf(org string) string { return ThreadSubject(org, "*") }

// ParseThreadSubject returns the organisation and the id in the subject of a head.
func ParseThreadSubject(subject string) (org, id string) {
	org, id, _ = strings.Cut(strings.TrimPrefix(subject, root+"thread."), ".")
	return org, id
}

// DoneSubject is the subject on which the server repeats a record that it has stored. The repeated
// message is not stored.
func DoneSubject(id proto.TraceID) string { return root + "done." + string(id) }

// The dispatcher's subjects, answered by the leader only.
const (
	SubmitSubject = root + "ctl.submit" // request: admit and store this job
	SlotsSubject  = root + "ctl.slots"  // a worker announces itself and its free slots
	StatsSubject  = root + "ctl.stats"  // request: the queue at this moment
)

// WebhookTestSubject is a request to the leading webhook dispatcher: send a test to the endpoint of
// this key.
const WebhookTestSubject = root + "ctl.webhook.test"

// AnnounceSubject is a worker announcement request: a new dispatcher asks all workers to announce
// themselves. Processes that wait for a dispatcher learn that there is one.
const AnnounceSubject = root + "ctl.rollcall"

// deadRoot begins the subjects of dead letters.
const deadRoot = root + "dead."

// DeadLetterSubject is the subject of a dead letter.
func DeadLetterSubject(id string) string { return deadRoot + "letter." + id }

// DeadLetterPattern matches all dead letters.
const DeadLetterPattern = deadRoot + "letter.*"

// PingSubject is answered by an instance while it leads the named work.
func PingSubject(name, instance string) string { return root + "ctl.ping." + name + "." + instance }

// AssignSubject assigns a job to a worker.
func AssignSubject(worker string) string { return root + "worker." + worker + ".assign" }

// CancelSubject asks a worker to read the record of the execution named in the message.
func CancelSubject(worker string) string { return root + "worker." + worker + ".cancel" }
