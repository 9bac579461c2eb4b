package store

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	readTimeout = 5 * time.Second // of a read without a deadline of its own
	getTimeout  = time.Second     // of one question to a leader; where there is none, nobody answers
)

// read repeats a question to a stream. On a cluster, nobody answers until a lost leader has been
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

// readLast reads the last message on a subject of st.
func (s *Store) readLast(ctx context.Context, st jetstream.Stream, subject string) (*jetstream.RawStreamMsg, error) {
	return read(ctx, s.RetryLeader(nameOf(st), getTimeout), func(ctx context.Context) (*jetstream.RawStreamMsg, error) {
		return st.GetLastMsgForSubject(ctx, subject)
	})
}

// readAt reads the message of st with sequence number seq, or the one that opts select.
func (s *Store) readAt(
	ctx context.Context, st jetstream.Stream, seq uint64, opts ...jetstream.GetMsgOpt,
) (*jetstream.RawStreamMsg, error) {
	return read(ctx, s.RetryLeader(nameOf(st), getTimeout), func(ctx context.Context) (*jetstream.RawStreamMsg, error) {
		return st.GetMsg(ctx, seq, opts...)
	})
}

// lastWithoutBody reads the last message on a subject of st, without a body that is stored apart.
func (s *Store) lastWithoutBody(
	ctx context.Context, st jetstream.Stream, subject string,
) (*jetstream.RawStreamMsg, error) {
	end, err := proto.BeginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	return s.readLast(ctx, st, subject)
}

func nameOf(st jetstream.Stream) string { return st.CachedInfo().Config.Name }

// AtWithoutBody reads the message of st with sequence number seq, without a body that is stored
// apart. [IsNotFound] matches its error if there is no such message.
func (s *Store) AtWithoutBody(ctx context.Context, st jetstream.Stream, seq uint64) (*jetstream.RawStreamMsg, error) {
	return s.readAt(ctx, st, seq)
}

// Next reads the first message of st on a subject whose sequence number is at least from.
// [IsNotFound] matches its error if there is none.
func (s *Store) Next(
	ctx context.Context, st jetstream.Stream, from uint64, subject string,
) (*jetstream.RawStreamMsg, error) {
	return s.readAt(ctx, st, from, jetstream.WithGetMsgSubject(subject))
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

// lastFromLeader reads the last message on a subject from the leader of st, until ctx is done. The
// library would ask any server, if the stream allows that.
func (s *Store) lastFromLeader(
	ctx context.Context, st jetstream.Stream, subject string,
) (*jetstream.RawStreamMsg, error) {
	return s.askLeader(ctx, nameOf(st), map[string]any{"last_by_subj": subject})
}

// askLeader requests one message from the leader of a stream, in the terms of JetStream's API.
func (s *Store) askLeader(
	ctx context.Context, stream string, query map[string]any,
) (m *jetstream.RawStreamMsg, err error) {
	request, err := json.Marshal(query)
	if err != nil {
		return nil, fmt.Errorf("encode %v: %w", query, err)
	}
	subject := "$JS.API.STREAM.MSG.GET." + stream
	err = s.RetryLeader(stream, getTimeout).Do(ctx, func(ctx context.Context) error {
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

// Status returns the status of an execution and the worker that had it last. The status is queued
// while only the job exists. Any server may report a terminal status, which is final; anything else
// is read from the leaders. Status returns [proto.ErrNotFound] if there is neither record nor job.
func (s *Store) Status(
	ctx context.Context, org string, id proto.TraceID,
) (status proto.Status, worker string, err error) {
	subject := ExecSubject(org, id)
	parse := func(m *jetstream.RawStreamMsg) (proto.Status, string) {
		return proto.Status(m.Header.Get(HeaderStatus)), m.Header.Get(HeaderWorker)
	}
	anyServer, cancel := context.WithTimeout(ctx, getTimeout)
	m, err := s.Executions.GetLastMsgForSubject(anyServer, subject)
	cancel()
	if err == nil {
		if status, worker = parse(m); status.Terminal() {
			return status, worker, nil
		}
	}
	m, err = s.lastFromLeader(ctx, s.Executions, subject)
	if IsNotFound(err) {
		_, err = s.lastFromLeader(ctx, s.Jobs, JobPattern(org, id))
		if err == nil {
			return proto.StatusQueued, "", nil
		}
		if IsNotFound(err) { // the record is written before the job is removed: it may have appeared between the reads
			m, err = s.lastFromLeader(ctx, s.Executions, subject)
		}
	}
	switch {
	case IsNotFound(err):
		return "", "", fmt.Errorf("execution %s: %w", id, proto.ErrNotFound)
	case err != nil:
		return "", "", fmt.Errorf("read the status of execution %s: %w", id, err)
	}
	status, worker = parse(m)
	return status, worker, nil
}
