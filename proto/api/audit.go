package api

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// AuditStage distinguishes the two records of an administrative act.
type AuditStage string

// The stages.
const (
	AuditIntent  AuditStage = "intent"  // written before the act
	AuditOutcome AuditStage = "outcome" // written after it
)

// AuditRecord is one record of the audit log. The same JSON is stored, hashed, listed, exported and
// sent to sinks.
type AuditRecord struct {
	Sequence  int64           `json:"sequence" minimum:"1" doc:"Consecutive across all organisations."`
	Time      Time            `json:"time"`
	Stage     AuditStage      `json:"stage" doc:"An act has two records: an intent before it, and an outcome after it. An intent without an outcome is an act in progress, or one whose server died: it may or may not have been carried out."`
	Intent    *int64          `json:"intent" minimum:"1" doc:"In an outcome, the sequence number of the intent; null if the key may not use the route, so that there was no attempt."`
	Action    string          `json:"action" doc:"What was done: the kind of the object and a verb, such as key.create."`
	Actor     AuditActor      `json:"actor"`
	Object    AuditObject     `json:"object"`
	Before    json.RawMessage `json:"before" doc:"The object before a change; null if there was none, or if it could not be read. Secrets are omitted, and [redacted] replaces values of variables."`
	After     json.RawMessage `json:"after" doc:"The object after the change, likewise."`
	Status    *int            `json:"status" doc:"The HTTP status of the answer; null in an intent."`
	Error     *Code           `json:"error" doc:"The code of an answer that is an error; null for others."`
	SourceIP  string          `json:"source_ip" doc:"The address of the client, as the trusted proxies report it. Empty for an organisation's administrator if the actor is of another organisation."`
	UserAgent string          `json:"user_agent" doc:"The User-Agent of the client, at most 256 bytes. Empty likewise."`
	RequestID string          `json:"request_id" doc:"The X-Request-Id, which the server's log has, too."`
	TraceID   *proto.TraceID  `json:"trace_id" format:"trace-id" doc:"The execution that the act started; null for none."`
	Previous  string          `json:"previous" pattern:"^[0-9a-f]{64}$" doc:"The hash of the previous record; zeros in the first record, and in the first one after all earlier ones have expired."`
	Hash      string          `json:"hash" pattern:"^[0-9a-f]{64}$" doc:"The SHA-256 of the record without this member, as canonical JSON (RFC 8785)."`
}

// AuditActor is who acted.
type AuditActor struct {
	Type string `json:"type" enum:"key,member" doc:"What identified the actor: an API key, also through a session, or the session of a member."`
	ID   string `json:"id" doc:"The id of the API key or the member."`
	Name string `json:"name" doc:"The name of the API key, or the address of the member."`
	Org  string `json:"org" doc:"The organisation of the API key or the member."`
}

// AuditObject is what an act was about.
type AuditObject struct {
	Kind string  `json:"kind"`
	Name string  `json:"name" doc:"Its id or name; empty if it had none yet, or if only one such object exists."`
	Org  *string `json:"org" doc:"Its organisation; null if it belongs to the server, or if the act ended before the organisation was known."`
}

// AuditRecords is a page of the audit log.
type AuditRecords struct {
	Records    []AuditRecord `json:"records" doc:"Newest first. A page may have fewer than the limit, even none, without being the last one: a search with a rarely matching filter takes several requests."`
	NextCursor *string       `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// AuditFilter selects records. Its zero value selects all.
type AuditFilter struct {
	Org          string // of the actor or of the object
	Actor        string // the id of an API key or a member
	Action       string
	From, Before Time // zero for no bound
}

// Matches reports whether the filter selects a record.
func (f *AuditFilter) Matches(r *AuditRecord) bool {
	return (f.Org == "" || r.Actor.Org == f.Org || r.Object.Org != nil && *r.Object.Org == f.Org) &&
		(f.Actor == "" || r.Actor.ID == f.Actor) &&
		(f.Action == "" || r.Action == f.Action) &&
		!r.Time.Before(f.From.Time) && (f.Before.IsZero() || r.Time.Before(f.Before.Time))
}

// VisibleTo returns the record as an administrator of an organisation sees it: where an operator of
// the server sits is not a tenant's business.
func (r AuditRecord) VisibleTo(org string) AuditRecord {
	if r.Actor.Org != org {
		r.SourceIP, r.UserAgent = "", ""
	}
	return r
}

// firstPrevious is the previous hash of the first record.
var firstPrevious = strings.Repeat("0", 2*sha256.Size)

// Seal makes r the record after previous, and returns its line in the log. previous is nil for the
// first record of all. It has no hash if it is gone, so that the chain begins anew.
func (r *AuditRecord) Seal(previous *AuditRecord) (line []byte, err error) {
	r.Sequence, r.Previous, r.Hash = 1, firstPrevious, ""
	if previous != nil {
		r.Sequence, r.Previous = previous.Sequence+1, cmp.Or(previous.Hash, firstPrevious)
	}
	members, err := r.members()
	if err != nil {
		return nil, err
	}
	delete(members, "hash")
	unsealed, err := canonical(members)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(unsealed)
	r.Hash = hex.EncodeToString(sum[:])
	members["hash"] = r.Hash
	return canonical(members)
}

// Line returns the line of a record in an export.
func (r *AuditRecord) Line() ([]byte, error) {
	members, err := r.members()
	if err != nil {
		return nil, err
	}
	return canonical(members)
}

func (r *AuditRecord) members() (members map[string]any, err error) {
	text, err := json.Marshal(r)
	if err == nil {
		err = json.Unmarshal(text, &members)
	}
	if err != nil {
		return nil, fmt.Errorf("encode audit record: %w", err)
	}
	return members, nil
}

// AuditVerifyRequest asks to verify the whole audit log.
type AuditVerifyRequest struct {
	Expect string `json:"expect,omitempty" pattern:"^[0-9a-f]{64}$" doc:"The head_hash of an earlier verification. If no record has it, the end of the log was removed, or the log was replaced."`
}

// Validate checks the form of the hash.
func (r *AuditVerifyRequest) Validate() error {
	if sum, err := hex.DecodeString(r.Expect); r.Expect != "" &&
		(err != nil || len(sum) != sha256.Size || strings.ToLower(r.Expect) != r.Expect) {
		return proto.FieldErrorf("expect", "must be the hash of a record: 64 of 0-9 and a-f")
	}
	return nil
}

// AuditVerification is the result of a verification of the whole audit log.
type AuditVerification struct {
	Records    int     `json:"records" minimum:"0" doc:"The records that were checked, up to the first problem."`
	First      int64   `json:"first" minimum:"0" doc:"The sequence number of the first record; 0 if there is none."`
	Last       int64   `json:"last" minimum:"0" doc:"That of the last record that was checked."`
	Valid      bool    `json:"valid"`
	HeadHash   string  `json:"head_hash" doc:"The hash of the last record that was checked; empty if there is none. Keep it outside of this server."`
	Problem    *string `json:"problem" doc:"The first record that was altered, removed or inserted, and how; null if the log is valid."`
	Unfinished []int64 `json:"unfinished" doc:"The first 100 intents without an outcome: acts in progress, or whose server died."`
}

// AuditChain checks the lines of an audit log, in their order. Its zero value is ready to use.
type AuditChain struct {
	Expect string // if not empty, a record must have this hash

	Records int
	First   int64  // the sequence number of the first record
	Last    int64  // that of the last one
	Head    string // the hash of the last one

	intents map[int64]bool // without an outcome so far
	found   bool           // a record has the expected hash
}

// Add checks the next line. Its error says what is wrong with which record.
func (c *AuditChain) Add(line []byte) (*AuditRecord, error) {
	expected := c.Last + 1
	var r AuditRecord
	if err := json.Unmarshal(line, &r); err != nil {
		return nil, fmt.Errorf("record %d is no JSON of a record: %w", max(expected, 1), err)
	}
	var members map[string]any
	if err := json.Unmarshal(line, &members); err != nil {
		return nil, fmt.Errorf("record %d: %w", r.Sequence, err)
	}
	whole, err := canonical(members)
	if err != nil {
		return nil, fmt.Errorf("record %d: %w", r.Sequence, err)
	}
	delete(members, "hash")
	unsealed, err := canonical(members)
	if err != nil {
		return nil, fmt.Errorf("record %d: %w", r.Sequence, err)
	}
	sum := sha256.Sum256(unsealed)
	switch {
	case c.Records > 0 && r.Sequence != expected:
		return nil, fmt.Errorf("record %d is missing: the one after record %d has the number %d", expected,
			c.Last, r.Sequence)
	case r.Hash != hex.EncodeToString(sum[:]):
		return nil, fmt.Errorf("record %d was altered: its hash is not that of its content", r.Sequence)
	case !bytes.Equal(whole, bytes.TrimSpace(line)):
		// Otherwise a member given twice could show one value to a reader and another to the hash.
		return nil, fmt.Errorf("record %d was altered: it is not in canonical form", r.Sequence)
	case c.Records > 0 && r.Previous != c.Head, c.Records == 0 && r.Sequence == 1 && r.Previous != firstPrevious:
		return nil, fmt.Errorf("record %d does not follow the record before it: that was altered or replaced", r.Sequence)
	}
	if c.Records == 0 {
		c.First, c.intents = r.Sequence, map[int64]bool{}
	}
	c.Records, c.Last, c.Head = c.Records+1, r.Sequence, r.Hash
	c.found = c.found || r.Hash == c.Expect
	switch {
	case r.Stage == AuditIntent:
		c.intents[r.Sequence] = true
	case r.Intent != nil:
		delete(c.intents, *r.Intent)
	}
	return &r, nil
}

// End checks the log after its last line.
func (c *AuditChain) End() error {
	if c.Expect != "" && !c.found {
		return fmt.Errorf("no record has the hash %s: the end of the log was removed, or the log was replaced", c.Expect)
	}
	return nil
}

// Unfinished returns the sequence numbers of the intents without an outcome.
func (c *AuditChain) Unfinished() []int64 { return slices.Sorted(maps.Keys(c.intents)) }

// canonical returns the canonical JSON (RFC 8785) of a value that was decoded from JSON. The names
// of members must be below U+10000, which audit records keep to.
func canonical(v any) ([]byte, error) { return appendCanonical(nil, v) }

func appendCanonical(dst []byte, v any) (_ []byte, err error) {
	switch v := v.(type) {
	case map[string]any:
		dst = append(dst, '{')
		for i, name := range slices.Sorted(maps.Keys(v)) {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(appendCanonicalString(dst, name), ':')
			if dst, err = appendCanonical(dst, v[name]); err != nil {
				return nil, err
			}
		}
		return append(dst, '}'), nil
	case []any:
		dst = append(dst, '[')
		for i, entry := range v {
			if i > 0 {
				dst = append(dst, ',')
			}
			if dst, err = appendCanonical(dst, entry); err != nil {
				return nil, err
			}
		}
		return append(dst, ']'), nil
	case string:
		return appendCanonicalString(dst, v), nil
	case nil, bool, float64: // encoding/json writes numbers as ECMAScript does
		text, err := json.Marshal(v)
		return append(dst, text...), err
	default:
		return nil, errors.New("value is not from JSON")
	}
}

// appendCanonicalString appends a string that escapes only what it must. [proto.AppendJSONString]
// escapes more.
func appendCanonicalString(dst []byte, s string) []byte {
	const short = "\b\t\n\f\r"
	dst = append(dst, '"')
	for _, r := range s {
		switch at := strings.IndexRune(short, r); {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case at >= 0:
			dst = append(dst, '\\', "btnfr"[at])
		case r < 0x20:
			dst = fmt.Appendf(dst, `\u%04x`, r)
		default:
			dst = append(dst, string(r)...)
		}
	}
	return append(dst, '"')
}
