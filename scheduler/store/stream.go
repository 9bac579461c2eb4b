package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	readTimeout  = 5 * time.Second // of a read without a deadline of its own
	getTimeout   = time.Second     // of one request to a leader, which may be missing
	stateTimeout = time.Second     // of one request for the state of a stream
)

// Stream is a stream of a [Store]. [Stream.Last], [Stream.At] and [Stream.Next] read one message,
// [Stream.Read] and [Stream.ReadAll] those that exist, and [Stream.Follow] those that come as well.
type Stream struct {
	jetstream.Stream
	store *Store
}

// ReadOption changes how one message is read.
type ReadOption uint8

const (
	// FromLeader reads from the leader of the stream, which never returns an outdated message. It
	// asks until ctx is done.
	FromLeader ReadOption = iota
	// WithoutBody does not read a body that is stored apart.
	WithoutBody
)

// query selects one message, in the terms of JetStream's API.
type query struct {
	Seq  uint64 `json:"seq,omitempty"` // of the message, or the lowest one if Next is set
	Last string `json:"last_by_subj,omitempty"`
	Next string `json:"next_by_subj,omitempty"`
}

func (q query) String() string {
	if q.Last == "" && q.Next == "" {
		return fmt.Sprintf("message %d", q.Seq)
	}
	return q.Last + q.Next
}

// Last reads the last message on a subject. [IsNotFound] matches its error if there is none.
func (st Stream) Last(ctx context.Context, subject string, opts ...ReadOption) (*Message, error) {
	return st.get(ctx, query{Last: subject}, opts)
}

// At reads the message with sequence number seq. [IsNotFound] matches its error if there is none.
func (st Stream) At(ctx context.Context, seq uint64, opts ...ReadOption) (*Message, error) {
	return st.get(ctx, query{Seq: seq}, opts)
}

// Next reads the first message on a subject whose sequence number is at least from. [IsNotFound]
// matches its error if there is none.
func (st Stream) Next(ctx context.Context, from uint64, subject string, opts ...ReadOption) (*Message, error) {
	return st.get(ctx, query{Seq: from, Next: subject}, opts)
}

func (st Stream) get(ctx context.Context, q query, opts []ReadOption) (*Message, error) {
	m, err := st.read(ctx, q, slices.Contains(opts, FromLeader), slices.Contains(opts, WithoutBody))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", q, err)
	}
	return m, nil
}

// read reads a message and its body. If the body is gone, because the message is just being
// replaced, or does not arrive within some time, both are read again, with more time for the body.
func (st Stream) read(ctx context.Context, q query, fromLeader, withoutBody bool) (*Message, error) {
	if withoutBody {
		return st.fetch(ctx, q, fromLeader)
	}
	end, err := proto.BeginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	missing := uint64(0) // the message whose body was not found
	for timeout := bodyTimeout; ; timeout *= 2 {
		m, err := st.fetch(ctx, q, fromLeader)
		if err != nil {
			return nil, err
		}
		if err := proto.ReserveRead(ctx, len(m.Data)); err != nil {
			return nil, err
		}
		err = st.store.Bodies.load(ctx, m, timeout)
		if err == nil {
			return m, nil
		}
		if IsNotFound(err) && m.Seq != missing {
			missing = m.Seq
			continue
		}
		incomplete := errors.Is(err, errIncompleteBody)
		if ctx.Err() != nil || !incomplete && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, nats.ErrTimeout) {
			if q.Next != "" && IsNotFound(err) { // which would mean that there is no further message
				err = fmt.Errorf("%w: its body is gone: %s", ErrMalformed, err) //nolint:errorlint // the message was found
			}
			return nil, err
		}
		if incomplete {
			select {
			case <-ctx.Done():
				return nil, err
			case <-time.After(retryMaxPause):
			}
		}
	}
}

// fetch reads a message without a body that is stored apart.
func (st Stream) fetch(ctx context.Context, q query, fromLeader bool) (*Message, error) {
	get := func(ctx context.Context) (*jetstream.RawStreamMsg, error) {
		if q.Last != "" {
			return st.GetLastMsgForSubject(ctx, q.Last)
		}
		return st.GetMsg(ctx, q.Seq, jetstream.WithGetMsgSubject(q.Next))
	}
	var raw *jetstream.RawStreamMsg
	var err error
	if fromLeader {
		raw, err = askLeader(ctx, st.store, st.Name(), q)
	} else {
		raw, err = read(ctx, st.store.Leaders.Retry(st.Name(), getTimeout), get)
	}
	if err != nil {
		return nil, err
	}
	return &Message{Subject: raw.Subject, Header: raw.Header, Data: raw.Data, Seq: raw.Sequence, Time: raw.Time}, nil
}

// read retries a request to a stream. On a cluster, requests go unanswered until a lost leader has been
// replaced.
func read[T any](ctx context.Context, policy Retry, get func(context.Context) (T, error)) (T, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, readTimeout)
		defer cancel()
	}
	var answer T
	err := policy.Do(ctx, func(ctx context.Context) (err error) {
		answer, err = get(ctx)
		return err
	})
	return answer, markUnanswered(err)
}

// leaderAnswer is the answer of JetStream's API to a request for a message.
type leaderAnswer struct {
	Error   *jetstream.APIError `json:"error"`
	Message *struct {
		Subject  string    `json:"subject"`
		Sequence uint64    `json:"seq"`
		Header   []byte    `json:"hdrs"`
		Data     []byte    `json:"data"`
		Time     time.Time `json:"time"`
	} `json:"message"`
}

// askLeader requests one message from the leader of a stream, until ctx is done. The library would
// ask any server, if the stream allows that.
func askLeader(ctx context.Context, s *Store, stream string, q query) (m *jetstream.RawStreamMsg, err error) {
	request, err := json.Marshal(q)
	if err != nil {
		return nil, fmt.Errorf("encode %v: %w", q, err)
	}
	subject := "$JS.API.STREAM.MSG.GET." + stream
	err = s.Leaders.Retry(stream, getTimeout).Do(ctx, func(ctx context.Context) error {
		reply, err := s.Conn.RequestWithContext(ctx, subject, request)
		if err != nil {
			return err
		}
		m, err = decodeLeaderAnswer(reply.Data)
		return err
	})
	return m, err
}

func decodeLeaderAnswer(reply []byte) (*jetstream.RawStreamMsg, error) {
	var answer leaderAnswer
	err := json.Unmarshal(reply, &answer)
	switch {
	case err != nil:
		return nil, backoff.Permanent(fmt.Errorf("decode a stored message: %w", err))
	case answer.Error != nil && answer.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return nil, jetstream.ErrMsgNotFound
	case answer.Error != nil:
		return nil, answer.Error
	case answer.Message == nil:
		return nil, backoff.Permanent(jetstream.ErrInvalidJetStreamResponse)
	}
	m := answer.Message
	out := &jetstream.RawStreamMsg{
		Subject: m.Subject, Sequence: m.Sequence, Header: nats.Header{}, Data: m.Data,
		Time: m.Time,
	}
	if len(m.Header) > 0 {
		if out.Header, err = nats.DecodeHeadersMsg(m.Header); err != nil {
			return nil, backoff.Permanent(fmt.Errorf("decode the header of message %d: %w", m.Sequence, err))
		}
	}
	return out, nil
}

// Name returns the name of the stream.
func (st Stream) Name() string { return st.CachedInfo().Config.Name }

// StreamState is what a stream contains.
type StreamState struct {
	Created     time.Time
	First, Last uint64 // sequence numbers
}

// State returns what the stream contains. It retries until ctx is done, and immediately after a change of
// the stream's leader.
func (st Stream) State(ctx context.Context) (StreamState, error) {
	info, err := st.info(ctx, stateTimeout)
	if err != nil {
		return StreamState{}, err
	}
	return StreamState{info.Created, info.State.FirstSeq, info.State.LastSeq}, nil
}

// Subjects returns the number of messages on each subject that matches a filter. It retries as State
// does.
func (st Stream) Subjects(ctx context.Context, filter string) (counts map[string]uint64, err error) {
	info, err := st.info(ctx, readTimeout, jetstream.WithSubjectFilter(filter))
	if err != nil {
		return nil, err
	}
	return info.State.Subjects, nil
}

func (st Stream) info(
	ctx context.Context, timeout time.Duration, opts ...jetstream.StreamInfoOpt,
) (info *jetstream.StreamInfo, err error) {
	err = st.store.Leaders.Retry(st.Name(), timeout).Do(ctx, func(ctx context.Context) error {
		own, err := st.store.JS.Stream(ctx, st.Name()) // a handle of its own: Info replaces what it caches
		if err != nil {
			return err
		}
		if info = own.CachedInfo(); len(opts) > 0 {
			info, err = own.Info(ctx, opts...)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the state of stream %s: %w", st.Name(), err)
	}
	return info, nil
}

// PurgeSubject removes all messages on subjects that match a filter.
func (st Stream) PurgeSubject(ctx context.Context, filter string) error {
	if err := st.Purge(ctx, jetstream.WithPurgeSubject(filter)); err != nil {
		return fmt.Errorf("purge %s: %w", filter, err)
	}
	return nil
}

// EraseSubject removes all messages on subjects that match a filter, and overwrites them in the
// server's files.
func (st Stream) EraseSubject(ctx context.Context, filter string) error {
	for from := uint64(1); ; {
		m, err := st.Next(ctx, from, filter, WithoutBody)
		if IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("erase %s: %w", filter, err)
		}
		if err := st.unlessGone(ctx, m.Seq, st.SecureDeleteMsg(ctx, m.Seq)); err != nil {
			return fmt.Errorf("erase message %d of %s: %w", m.Seq, st.Name(), err)
		}
		from = m.Seq + 1
	}
}

// unlessGone returns the error of a message's removal, or nil if there is no such message, which the
// error itself does not tell.
func (st Stream) unlessGone(ctx context.Context, seq uint64, err error) error {
	if err == nil {
		return nil
	}
	if _, errGet := st.At(ctx, seq, WithoutBody); IsNotFound(errGet) {
		return nil
	}
	return err
}
