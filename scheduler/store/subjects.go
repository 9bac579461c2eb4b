package store

import (
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// All subjects begin with one word, so that an account can be shared and permissions can be given by role.
const root = "bullpen."

// JobSubject is where a job lies until it is terminal.
func JobSubject(m *proto.Meta) string {
	return root + "job." + string(m.Class()) + "." + m.Org + "." + m.Key + "." + string(m.TraceID)
}

// JobOf is the pattern of the one job of id.
func JobPattern(id proto.TraceID) string { return root + "job.*.*.*." + string(id) }

// Exec is where the one record of an execution lies: its claim and lease while it runs, its result when it has ended.
func ExecSubject(id proto.TraceID) string { return root + "exec." + string(id) }

// Out is where the output of one attempt lies.
func OutputSubject(id proto.TraceID, attempt int) string {
	return root + "out." + string(id) + "." + strconv.Itoa(attempt)
}

// OutOf is the pattern of all output of an execution.
func OutputPattern(id proto.TraceID) string { return root + "out." + string(id) + ".*" }

// Delivery is where the one record of a delivery lies.
func DeliverySubject(org string, id proto.TraceID) string {
	return root + "delivery." + org + "." + string(id)
}

// DeliveriesOf is the pattern of an organisation's deliveries; empty for those of all.
func DeliveryPattern(org string) string {
	if org == "" {
		org = "*"
	}
	return root + "delivery." + org + ".*"
}

// Thread is where the head of a thread lies.
func ThreadSubject(org, id string) string { return root + "thread." + org + "." + id }

// Threads is the pattern of the heads of all threads.
const ThreadPattern = root + "thread.*.*"

// ThreadsOf is the pattern of the heads of an organisation's threads.
func ThreadPatternOf(org string) string { return ThreadSubject(org, "*") }

// ThreadOf gives the organisation and the id of a head's subject.
func ParseThreadSubject(subject string) (org, id string) {
	org, id, _ = strings.Cut(strings.TrimPrefix(subject, root+"thread."), ".")
	return org, id
}

// Done repeats, not stored, what was stored on [ExecSubject], once it is. The server does that itself.
func DoneSubject(id proto.TraceID) string { return root + "done." + string(id) }

// The dispatcher's subjects, answered by the leader only.
const (
	SubmitSubject = root + "ctl.submit" // request: admit and store this job
	SlotsSubject  = root + "ctl.slots"  // a worker tells of itself and its free slots
	StatsSubject  = root + "ctl.stats"  // request: the queue at this moment
)

// WebhookTest is answered by the webhook dispatcher that leads: send a test to the endpoint of this key.
const WebhookTestSubject = root + "ctl.webhook.test"

// RollCall is how a dispatcher that begins to lead asks all workers to announce themselves, and tells who waits for one that there is one.
const AnnounceSubject = root + "ctl.rollcall"

// dead is what subjects of dead letters begin with.
const dead = root + "dead."

// DeadLetter is where the dead letter of that id lies.
func DeadLetterSubject(id string) string { return dead + "letter." + id }

// DeadLetters is the pattern of all of them.
const DeadLetterPattern = dead + "letter.*"

// Ping is answered by an instance while it leads.
func PingSubject(name, instance string) string { return root + "ctl.ping." + name + "." + instance }

// Assign hands a job to a worker.
func AssignSubject(worker string) string { return root + "worker." + worker + ".assign" }

// Cancel tells a worker to look at the record of the execution named in the message.
func CancelSubject(worker string) string { return root + "worker." + worker + ".cancel" }
