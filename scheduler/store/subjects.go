package store

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// root begins all subjects, so that an account can be shared and permissions can be granted by
// role.
const root = "bullpen."

// delayedJobs takes the place of the class in the subject of a job that has a RunAt. Such a job may
// stay for weeks, so the others are removed by their subjects, see [Jobs.Remove].
const delayedJobs = "delayed"

// sandboxJobs does the same for the jobs of live sandboxes, which stay until the sandbox stops.
const sandboxJobs = "sandbox"

// JobSubject is the subject of a job until its execution has ended.
func JobSubject(m *proto.Meta) string {
	kind := string(m.Class())
	switch {
	case m.SandboxID != "":
		kind = sandboxJobs
	case !m.RunAt.IsZero():
		kind = delayedJobs
	}
	return jobPrefix(kind) + m.Org + "." + m.Key + "." + string(m.TraceID)
}

func jobPrefix(kind string) string { return root + "job." + kind + "." }

// JobPattern matches the job of an execution.
func JobPattern(org string, id proto.TraceID) string {
	return root + "job.*." + org + ".*." + string(id)
}

// JobPatternOf matches the jobs of an organisation.
func JobPatternOf(org string) string { return root + "job.*." + org + ".>" }

// ParseJobSubject returns the organisation and the id in the subject of a job, which are empty in
// another subject.
func ParseJobSubject(subject string) (org string, id proto.TraceID) {
	const tokens = 6 // bullpen.job.KIND.ORG.KEY.ID
	parts := strings.Split(subject, ".")
	if len(parts) != tokens {
		return "", ""
	}
	return parts[3], proto.TraceID(parts[5])
}

// AllJobs and AllRecords match the jobs and the records of all executions.
const (
	AllJobs    = root + "job.>"
	AllRecords = root + "exec.*.*"
)

// ExecSubject is the subject of an execution's record: its claim while it runs, then its result.
func ExecSubject(org string, id proto.TraceID) string { return root + "exec." + org + "." + string(id) }

// RecordPatternOf matches the records of an organisation's executions.
func RecordPatternOf(org string) string { return ExecSubject(org, "*") }

// ParseExecSubject returns the organisation and the id in the subject of a record.
func ParseExecSubject(subject string) (org string, id proto.TraceID, err error) {
	return parseExecution(subject, root+"exec.")
}

// parseExecution returns the organisation and the id of an execution, which follow a prefix of a subject.
func parseExecution(subject, prefix string) (org string, id proto.TraceID, err error) {
	org, token, _ := strings.Cut(strings.TrimPrefix(subject, prefix), ".")
	if id, err = proto.ParseTraceID(token); err != nil {
		return "", "", fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return org, id, nil
}

// LeaseSubject is the subject of a worker's lease in one epoch.
func LeaseSubject(epoch string) string { return root + "lease." + epoch }

// ParseLeaseSubject returns the epoch in the subject of a lease.
func ParseLeaseSubject(subject string) (epoch string) {
	return strings.TrimPrefix(subject, LeaseSubject(""))
}

// OutputSubject is the subject of the output of one attempt.
func OutputSubject(org string, id proto.TraceID, attempt int) string {
	return root + "out." + org + "." + string(id) + "." + strconv.Itoa(attempt)
}

// excessSuffix ends the subject of output that the result does not hold.
const excessSuffix = "-excess"

// ExcessSubject is the subject for an attempt's output beyond what the result keeps. It is evicted first.
func ExcessSubject(org string, id proto.TraceID, attempt int) string {
	return OutputSubject(org, id, attempt) + excessSuffix
}

// OutputAttempt returns the attempt in the subject of an output message.
func OutputAttempt(subject string) (int, error) {
	attempt, err := strconv.Atoi(strings.TrimSuffix(subject[strings.LastIndexByte(subject, '.')+1:], excessSuffix))
	if err != nil || attempt < 1 {
		return 0, fmt.Errorf("attempt of %q: %w", subject, errors.Join(err, ErrMalformed))
	}
	return attempt, nil
}

// ReadersSubject is a request that is answered while a client reads the output of an execution that
// was running when it began to.
func ReadersSubject(org string, id proto.TraceID) string {
	return root + "ctl.readers." + org + "." + string(id)
}

// OutputPattern matches all output of an execution.
func OutputPattern(org string, id proto.TraceID) string {
	return root + "out." + org + "." + string(id) + ".*"
}

// OutputPatternOf matches the output of an organisation's executions.
func OutputPatternOf(org string) string { return OutputPattern(org, "*") }

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

// ParseDeliverySubject returns the organisation and the execution in the subject of a delivery.
func ParseDeliverySubject(subject string) (org string, id proto.TraceID, err error) {
	return parseExecution(subject, root+"delivery.")
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
func DoneSubject(org string, id proto.TraceID) string { return root + "done." + org + "." + string(id) }

// The dispatcher's subjects, answered by the leader only.
const (
	SubmitSubject = root + "ctl.submit" // request: admit and store this job
	SlotsSubject  = root + "ctl.slots"  // a worker announces itself and its free slots
	StatsSubject  = root + "ctl.stats"  // request: the queue at this moment
	// WorkersSubject is a request for the live workers whose names are above that in the message.
	WorkersSubject = root + "ctl.workers"
	PoolsSubject   = root + "ctl.pools" // request: the pools of workers, and the demand for them
	// QueueSubject is a request for the queue of an API key.
	QueueSubject = root + "ctl.queue"
	// OutputBudgetSubject is a request to reserve bytes of an organisation's output budget.
	OutputBudgetSubject = root + "ctl.output-budget"
	// JobSecretsSubject is a request for the secrets of an execution by the worker that has it.
	JobSecretsSubject = root + "ctl.secrets"
)

// WebhookTestSubject is a request to the leading webhook dispatcher: send a test to the endpoint of
// this key.
const WebhookTestSubject = root + "ctl.webhook.test"

// AnnounceSubject is a worker announcement request: a new dispatcher asks all workers to announce
// themselves. Processes that wait for a dispatcher learn that there is one.
const AnnounceSubject = root + "ctl.rollcall"

// ProcessesSubject asks all processes to describe themselves, which they do on ProcessSubject.
const (
	ProcessesSubject = root + "ctl.processes"
	ProcessSubject   = root + "ctl.process"
)

// noOrg takes the place of the organisation in the subject of a dead letter whose message names none,
// and of its body. It is the name of no organisation.
const noOrg = "-"

// DeadLetterSubject is the subject of a dead letter. org is empty if its message names none.
func DeadLetterSubject(org, id string) string {
	return root + "dead.letter." + cmp.Or(org, noOrg) + "." + id
}

// DeadLetterPattern matches all dead letters.
const DeadLetterPattern = root + "dead.letter.*.*"

// DeadLetterPatternOf matches the dead letters of an organisation.
func DeadLetterPatternOf(org string) string { return DeadLetterSubject(org, "*") }

// bodySubject is the subject of the chunks of a body, of which [bodyRef] has the name.
func bodySubject(name string) string { return root + "body." + name }

// BodyPatternOf matches the bodies of an organisation's messages.
func BodyPatternOf(org string) string { return bodySubject(org + ".*") }

// orgOf returns the organisation in the subject of a message of a stream, noOrg if there is none.
func orgOf(subject string) string {
	tokens := strings.Split(strings.TrimPrefix(subject, root), ".")
	at := map[string]int{"job": 2, "dead": 2, "exec": 1, "delivery": 1, "thread": 1, "agentlog": 1}[tokens[0]]
	if at == 0 || at >= len(tokens) || !proto.ValidOrg(tokens[at]) {
		return noOrg
	}
	return tokens[at]
}

// AgentLogSubject is the subject of all messages of a log of an agent.
func AgentLogSubject(org, id string) string { return root + "agentlog." + org + "." + id }

// ParseAgentLogSubject returns the organisation and the id in the subject of a log.
func ParseAgentLogSubject(subject string) (org, id string) {
	org, id, _ = strings.Cut(strings.TrimPrefix(subject, root+"agentlog."), ".")
	return org, id
}

// AgentLoggedSubject is the subject on which the server repeats a message of a log once it is stored.
// The repeated message is not stored.
func AgentLoggedSubject(org, id string) string { return root + "agentlogged." + org + "." + id }

// AgentLogPatternOf matches the logs of an organisation's agents.
func AgentLogPatternOf(org string) string { return AgentLogSubject(org, "*") }

// AuditSubject is the subject of all records of the audit log.
const AuditSubject = root + "audit.record"

// PingSubject is answered by an instance while it leads the named work.
func PingSubject(name, instance string) string { return root + "ctl.ping." + name + "." + instance }

// Inbox precedes the subjects of answers to requests of a role.
func Inbox(role string) string { return "_INBOX." + role }

// AssignSubject assigns a job to a worker.
func AssignSubject(worker string) string { return root + "worker." + worker + ".assign" }

// DrainSubject starts or stops the draining of a worker.
func DrainSubject(worker string) string { return root + "worker." + worker + ".drain" }

// EndpointSubject is answered by a worker with the address at which it serves gateways.
func EndpointSubject(worker string) string { return root + "worker." + worker + ".endpoint" }

// CancelSubject asks a worker to read the record of the execution named in the message.
func CancelSubject(worker string) string { return root + "worker." + worker + ".cancel" }

// SecretsSubject is the subject of a key in the bucket of secrets.
func SecretsSubject(key string) string { return "$KV." + secretsName + "." + key }
