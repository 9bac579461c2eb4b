package orgdata

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"log/slog"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Executions ends executions.
type Executions interface {
	// Cancel stores a request to end an execution.
	Cancel(ctx context.Context, id proto.TraceID) (*proto.Record, error)
}

// Blobs is the blob store.
type Blobs interface {
	// List yields the objects whose keys begin with prefix.
	List(ctx context.Context, prefix string) iter.Seq2[proto.BlobEntry, error]
	// Delete removes an object. It is no error if there is none.
	Delete(ctx context.Context, key string) error
}

// Index is the index of executions.
type Index interface {
	// CountOrg returns the number of executions of an organisation in the index of this process.
	CountOrg(ctx context.Context, org string) (int64, error)
	// RemoveOrg removes the executions of an organisation from the indexes of all processes.
	RemoveOrg(ctx context.Context, org string) error
}

// Sources are where data is that the store does not have, and what ends executions.
type Sources struct {
	Executions Executions
	Blobs      Blobs
	// Threads and Batches return the beginnings of the keys of an organisation's blobs.
	Threads func(org string) []string
	Batches func(ctx context.Context, org string) ([]string, error)
	Index   Index
}

// New returns the data of organisations. The table has a row for each kind of data.
//
// The order of the rows matters twice. Executions end first, so that nothing new is stored. What
// names no organisation itself is removed before what tells whose it is: blobs of batches before
// batches, webhook settings and last uses before API keys, and all that belongs to an execution
// before its record. Usage is counted from records, and removed after them.
func New(st *store.Store, src Sources, log *slog.Logger) *Data {
	threads := func(_ context.Context, org string) ([]string, error) { return src.Threads(org), nil }
	return &Data{Store: st, Log: log, Holders: []Holder{
		{
			"executions that have not ended",
			[]string{"BULLPEN_JOBS"},
			countSubjects(st.Jobs, store.JobPatternOf),
			cancelAll(src.Executions),
		},
		{
			"schedules",
			[]string{"bullpen_schedules"},
			countKeys(st.Schedules, ofOrg("def.%s.*", "run.%s.*")),
			removeKeys(st.Schedules, ofOrg("def.%s.*", "run.%s.*")),
		},
		{"items of batches", nil, countBlobs(src.Blobs, src.Batches), removeBlobs(src.Blobs, src.Batches)},
		{
			"batches",
			[]string{"bullpen_batches"},
			countKeys(st.Batches, ofOrg("def.%s.*", "run.%s.*")),
			removeKeys(st.Batches, ofOrg("def.%s.*", "run.%s.*")),
		},
		{
			"pipelines",
			[]string{"bullpen_pipelines"},
			countKeys(st.Pipelines, pipelineKeys),
			removeKeys(st.Pipelines, pipelineKeys, expiring),
		},
		{
			"webhook settings",
			[]string{"bullpen_webhooks"},
			countKeys(st.Webhooks, webhookKeys),
			removeKeys(st.Webhooks, webhookKeys, expiring),
		},
		{
			"last uses of API keys",
			[]string{"bullpen_key_uses"},
			countKeys(st.KeyUses, lastUses),
			removeKeys(st.KeyUses, lastUses),
		},
		{
			"sessions of browsers",
			[]string{"bullpen_sessions"},
			countKeys(st.Sessions, withOrg),
			removeKeys(st.Sessions, withOrg, expiring),
		},
		{"members", []string{"bullpen_members"}, countKeys(st.Members, withOrg), removeKeys(st.Members, withOrg, expiring)},
		{"API keys", []string{"bullpen_keys"}, countKeys(st.Keys, apiKeys), removeKeys(st.Keys, apiKeys)},
		{
			"storage connections",
			[]string{"bullpen_connections"},
			countKeys(st.Connections, ofOrg("%s.*")),
			removeKeys(st.Connections, ofOrg("%s.*"), expiring),
		},
		{
			"secrets",
			[]string{"bullpen_secrets"},
			countKeys(st.Secrets, ofOrg("secret.%s.*")),
			removeKeys(st.Secrets, ofOrg("secret.%s.*"), expiring),
		},
		{
			"files of agents",
			[]string{"bullpen_agent_files"},
			countKeys(st.AgentFiles, ofOrg("%s.*")),
			removeKeys(st.AgentFiles, ofOrg("%s.*"), expiring),
		},
		{
			"active runs of agents",
			[]string{"bullpen_agent_runs"},
			countKeys(st.AgentRuns, ofOrg("%s.*")),
			removeKeys(st.AgentRuns, ofOrg("%s.*"), expiring),
		},
		{
			"logs of agents",
			[]string{"BULLPEN_AGENT_LOGS"},
			countSubjects(st.AgentLogs, logsOfAgents),
			purgeSubjects(st.AgentLogs, logsOfAgents),
		},
		{
			"threads",
			[]string{"BULLPEN_THREADS"},
			countSubjects(st.Threads, store.ThreadPatternOf),
			purgeSubjects(st.Threads, store.ThreadPatternOf),
		},
		{"files of threads", nil, countBlobs(src.Blobs, threads), removeBlobs(src.Blobs, threads)},
		{"dead letters", []string{"BULLPEN_DEAD"}, countMessages(deadLetters), eraseMessages(st.DeadLetters, deadLetters)},
		{
			"webhook deliveries",
			[]string{"BULLPEN_DELIVERIES"},
			countSubjects(st.Deliveries, store.DeliveryPattern),
			purgeSubjects(st.Deliveries, store.DeliveryPattern),
		},
		{"output", []string{"BULLPEN_OUT"}, countMessages(output), eraseMessages(st.Output, output)},
		{
			"idempotency keys",
			[]string{"bullpen_bindings"},
			countKeys(st.Bindings, bindings),
			removeKeys(st.Bindings, bindings),
		},
		{"large bodies", []string{"bullpen_bodies"}, countBodies, removeBodies},
		{"records of executions", []string{"BULLPEN_EXECS"}, countMessages(records), eraseMessages(st.Executions, records)},
		{"usage", []string{"bullpen_usage"}, countKeys(st.Usage, usageKeys), removeKeys(st.Usage, usageKeys)},
		{"index of executions", nil, countIndex(src.Index), removeIndex(src.Index)},
		{"organisation", []string{"bullpen_orgs"}, countKeys(st.Orgs, ofOrg("%s")), nil}, // the runner removes it
	}}
}

func logsOfAgents(org string) string { return store.AgentLogSubject(org, "*") }

// keysOf calls found with each entry of a scan's organisation in a bucket, possibly more than once.
type keysOf func(ctx context.Context, s *Scan, bucket jetstream.KeyValue, found func(jetstream.KeyValueEntry)) error

// ofOrg selects the keys that match one of the patterns, in which %s is the organisation.
func ofOrg(patterns ...string) keysOf {
	return func(ctx context.Context, s *Scan, bucket jetstream.KeyValue, found func(jetstream.KeyValueEntry)) error {
		for _, pattern := range patterns {
			if err := store.ReadBucket(ctx, bucket, fmt.Sprintf(pattern, s.Org), found); err != nil {
				return err
			}
		}
		return nil
	}
}

var (
	pipelineKeys = ofOrg("def.%s.*", "run.%s.*")
	lastUses     = ofPrincipals("*")
	usageKeys    = ofOrg("org.%s.*", "key.%s.*.*", "cross.%s.>")
)

// ofField selects the keys that match a pattern and whose value has a field that is owned.
func ofField(pattern, field string, owns func(ctx context.Context, s *Scan) (func(value string) bool, error)) keysOf {
	return func(ctx context.Context, s *Scan, bucket jetstream.KeyValue, found func(jetstream.KeyValueEntry)) error {
		owned, err := owns(ctx, s)
		if err != nil {
			return err
		}
		return store.ReadBucket(ctx, bucket, pattern, func(e jetstream.KeyValueEntry) {
			var fields map[string]json.RawMessage
			var value string
			if json.Unmarshal(e.Value(), &fields) == nil && json.Unmarshal(fields[field], &value) == nil && owned(value) {
				found(e)
			}
		})
	}
}

var (
	apiKeys      = ofField("key.*", "org", isOwn)
	withOrg      = ofField("*", "org", isOwn)
	otherKeys    = ofField("key.*", "org", isOther)
	otherMembers = ofField("*", "org", isOther)
	bindings     = ofField("*", "trace", func(ctx context.Context, s *Scan) (func(string) bool, error) {
		return s.Executes(ctx)
	})
)

func isOwn(_ context.Context, s *Scan) (func(string) bool, error) {
	return func(org string) bool { return org == s.Org }, nil
}

func isOther(_ context.Context, s *Scan) (func(string) bool, error) {
	return func(org string) bool { return org != s.Org }, nil
}

// webhookKeys selects the settings of the organisation's API keys and members, and its failing
// endpoints.
func webhookKeys(ctx context.Context, s *Scan, bucket jetstream.KeyValue, found func(jetstream.KeyValueEntry)) error {
	if err := ofPrincipals("key.*")(ctx, s, bucket, found); err != nil {
		return err
	}
	return ofOrg("url.%s.*")(ctx, s, bucket, found)
}

// ofPrincipals selects the keys that match a pattern and end with the id of an API key or a member
// that is not another organisation's: also of one that is gone, as gateways store last uses a while
// after them.
func ofPrincipals(pattern string) keysOf {
	const prefix = "key."
	return func(ctx context.Context, s *Scan, bucket jetstream.KeyValue, found func(jetstream.KeyValueEntry)) error {
		entries := map[string]jetstream.KeyValueEntry{} // by id
		err := store.ReadBucket(ctx, bucket, pattern, func(e jetstream.KeyValueEntry) {
			entries[strings.TrimPrefix(e.Key(), prefix)] = e
		})
		if err != nil {
			return err
		}
		isOthers := func(e jetstream.KeyValueEntry) { delete(entries, strings.TrimPrefix(e.Key(), prefix)) }
		if err := otherKeys(ctx, s, s.store.Keys, isOthers); err != nil {
			return err
		}
		if err := otherMembers(ctx, s, s.store.Members, isOthers); err != nil {
			return err
		}
		for _, e := range entries {
			found(e)
		}
		return nil
	}
}

// stored returns the entries that are not removed, by key.
func stored(
	ctx context.Context, s *Scan, bucket jetstream.KeyValue, keys keysOf,
) (map[string]jetstream.KeyValueEntry, error) {
	entries := map[string]jetstream.KeyValueEntry{}
	err := keys(ctx, s, bucket, func(e jetstream.KeyValueEntry) {
		if entries[e.Key()] = e; e.Operation() != jetstream.KeyValuePut {
			delete(entries, e.Key())
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read the bucket %s: %w", bucket.Bucket(), err)
	}
	return entries, nil
}

func countKeys(bucket jetstream.KeyValue, keys keysOf) func(context.Context, *Scan) (Amount, error) {
	return func(ctx context.Context, s *Scan) (n Amount, err error) {
		entries, err := stored(ctx, s, bucket, keys)
		for _, e := range entries {
			n.Count++
			n.Bytes += int64(len(e.Value()))
		}
		return n, err
	}
}

// expiring makes the markers of removed keys expire, in buckets that allow it.
var expiring = jetstream.PurgeTTL(store.WebhookMarkerTTL)

// removeKeys leaves markers, from which other processes learn of the removal.
func removeKeys(
	bucket jetstream.KeyValue, keys keysOf, opts ...jetstream.KVDeleteOpt,
) func(context.Context, *Scan) error {
	return func(ctx context.Context, s *Scan) error {
		entries, err := stored(ctx, s, bucket, keys)
		if err != nil {
			return err
		}
		for key := range entries {
			if err := bucket.Purge(ctx, key, opts...); err != nil {
				return fmt.Errorf("remove %s from the bucket %s: %w", key, bucket.Bucket(), err)
			}
		}
		return nil
	}
}

func countSubjects(st jetstream.Stream, pattern func(org string) string) func(context.Context, *Scan) (Amount, error) {
	return func(ctx context.Context, s *Scan) (n Amount, err error) {
		subjects, err := s.store.Subjects(ctx, st, pattern(s.Org))
		for _, messages := range subjects {
			n.Count += int64(messages)
		}
		return n, err
	}
}

func purgeSubjects(st jetstream.Stream, pattern func(org string) string) func(context.Context, *Scan) error {
	return func(ctx context.Context, s *Scan) error { return s.store.PurgeSubject(ctx, st, pattern(s.Org)) }
}

// cancelAll cancels executions, which ends running ones a moment later. The dispatcher removes
// their jobs then.
func cancelAll(executions Executions) func(context.Context, *Scan) error {
	return func(ctx context.Context, s *Scan) error {
		jobs, err := s.store.Subjects(ctx, s.store.Jobs, store.JobPatternOf(s.Org))
		if err != nil {
			return err
		}
		for subject := range jobs {
			_, id := store.ParseJobSubject(subject)
			if _, err := executions.Cancel(ctx, proto.TraceID(id)); err != nil && !errors.Is(err, proto.ErrNotFound) {
				return fmt.Errorf("cancel execution %s: %w", id, err)
			}
		}
		return nil
	}
}

type prefixesOf func(ctx context.Context, org string) ([]string, error)

// eachBlob calls f with each blob of the organisation.
func eachBlob(ctx context.Context, s *Scan, blobs Blobs, prefixes prefixesOf, f func(proto.BlobEntry) error) error {
	list, err := prefixes(ctx, s.Org)
	if err != nil {
		return err
	}
	for _, prefix := range list {
		for e, err := range blobs.List(ctx, prefix) {
			if err != nil {
				return fmt.Errorf("list the blobs of %s: %w", prefix, err)
			}
			if err := f(e); err != nil {
				return err
			}
		}
	}
	return nil
}

func countBlobs(blobs Blobs, prefixes prefixesOf) func(context.Context, *Scan) (Amount, error) {
	return func(ctx context.Context, s *Scan) (n Amount, err error) {
		err = eachBlob(ctx, s, blobs, prefixes, func(e proto.BlobEntry) error {
			n.Count++
			n.Bytes += e.Size
			return nil
		})
		return n, err
	}
}

func removeBlobs(blobs Blobs, prefixes prefixesOf) func(context.Context, *Scan) error {
	return func(ctx context.Context, s *Scan) error {
		return eachBlob(ctx, s, blobs, prefixes, func(e proto.BlobEntry) error { return blobs.Delete(ctx, e.Key) })
	}
}

// messagesOf returns the sequence numbers of the organisation's messages in a stream.
type messagesOf func(ctx context.Context, s *Scan) ([]uint64, error)

func countMessages(messages messagesOf) func(context.Context, *Scan) (Amount, error) {
	return func(ctx context.Context, s *Scan) (Amount, error) {
		found, err := messages(ctx, s)
		return Amount{Count: int64(len(found))}, err
	}
}

func eraseMessages(st jetstream.Stream, messages messagesOf) func(context.Context, *Scan) error {
	return func(ctx context.Context, s *Scan) error {
		found, err := messages(ctx, s)
		for _, seq := range found {
			if err := s.store.Erase(ctx, st, seq); err != nil {
				return err
			}
		}
		return err
	}
}

func records(ctx context.Context, s *Scan) ([]uint64, error) {
	x, err := s.readExecutions(ctx)
	if err != nil {
		return nil, err
	}
	return x.records, nil
}

// output returns the output of the organisation's executions, and output whose execution is gone,
// of whatever organisation: a worker that was cut off may publish some after the record of the
// execution was removed.
func output(ctx context.Context, s *Scan) (own []uint64, err error) {
	own, unknown, err := readOutput(ctx, s)
	if err != nil {
		return nil, err
	}
	for id, list := range unknown {
		// The executions may have been read before this output was written.
		_, _, err := s.store.Status(ctx, proto.TraceID(id))
		switch {
		case errors.Is(err, proto.ErrNotFound):
			own = append(own, list...)
		case err != nil:
			return nil, err
		}
	}
	return own, nil
}

// readOutput returns the output of the organisation's executions, and by execution that of executions
// which are not known. It keeps nothing of others: there may be hundreds of millions of messages.
func readOutput(ctx context.Context, s *Scan) (own []uint64, unknown map[string][]uint64, err error) {
	x, err := s.readExecutions(ctx)
	if err != nil {
		return nil, nil, err
	}
	unknown = map[string][]uint64{}
	err = s.store.Read(ctx, s.store.Output, all(store.AllOutput), func(m jetstream.Msg, at *jetstream.MsgMetadata) {
		id := store.OutputTrace(m.Subject())
		_, known := x.known[hash(id)]
		switch {
		case x.own[id]:
			own = append(own, at.Sequence.Stream)
		case !known:
			unknown[id] = append(unknown[id], at.Sequence.Stream)
		}
	})
	if err != nil {
		return nil, nil, fmt.Errorf("read the output of executions: %w", err)
	}
	return own, unknown, nil
}

// deadLetters returns the dead letters of the organisation's jobs, and the markers of removed ones.
func deadLetters(ctx context.Context, s *Scan) (own []uint64, err error) {
	executes, err := s.Executes(ctx)
	if err != nil {
		return nil, err
	}
	var malformed []uint64
	err = s.store.Read(ctx, s.store.DeadLetters, all(store.DeadLetterPattern),
		func(m jetstream.Msg, at *jetstream.MsgMetadata) {
			var letter proto.DeadLetter
			_ = json.Unmarshal([]byte(m.Headers().Get(store.HeaderDead)), &letter) // of a marker it is empty
			switch {
			case letter.Meta != nil && letter.Meta.Org == s.Org, letter.Meta == nil && executes(store.LastToken(m.Subject())):
				own = append(own, at.Sequence.Stream)
			case letter.Meta == nil && letter.ID != "":
				malformed = append(malformed, at.Sequence.Stream)
			}
		})
	if err != nil {
		return nil, fmt.Errorf("read the dead letters: %w", err)
	}
	for _, seq := range malformed {
		m, err := s.store.At(ctx, s.store.DeadLetters, seq)
		if store.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var content proto.DeadMessage
		if err := json.Unmarshal(m.Data, &content); err != nil {
			s.log.Warn("malformed dead letter belongs to no organisation", "sequence", seq, "error", err)
			continue
		}
		if org, _ := store.ParseJobSubject(content.Subject); org == s.Org {
			own = append(own, seq)
		}
	}
	return own, nil
}

func (s *Scan) bodies(ctx context.Context) ([]string, error) {
	executes, err := s.Executes(ctx)
	if err != nil {
		return nil, err
	}
	return s.store.BodiesOf(ctx, s.Org, executes)
}

func countBodies(ctx context.Context, s *Scan) (Amount, error) {
	names, err := s.bodies(ctx)
	return Amount{Count: int64(len(names))}, err
}

func removeBodies(ctx context.Context, s *Scan) error {
	names, err := s.bodies(ctx)
	for _, name := range names {
		if err := s.store.EraseBody(ctx, name); err != nil {
			return err
		}
	}
	return err
}

func countIndex(index Index) func(context.Context, *Scan) (Amount, error) {
	return func(ctx context.Context, s *Scan) (n Amount, err error) {
		n.Count, err = index.CountOrg(ctx, s.Org)
		return n, err
	}
}

func removeIndex(index Index) func(context.Context, *Scan) error {
	return func(ctx context.Context, s *Scan) error { return index.RemoveOrg(ctx, s.Org) }
}

var seed = maphash.MakeSeed()

func hash(id string) uint64 { return maphash.String(seed, id) }
