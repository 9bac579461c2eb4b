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

// getTimeout bounds one question to a leader. Where there is none at the moment, nobody answers.
const getTimeout = time.Second

// got is the answer of JetStream's API to the question for a message.
type got struct {
	Error   *jetstream.APIError `json:"error"`
	Message *struct {
		Subject  string    `json:"subject"`
		Sequence uint64    `json:"seq"`
		Header   []byte    `json:"hdrs"`
		Data     []byte    `json:"data"`
		Time     time.Time `json:"time"`
	} `json:"message"`
}

// newest reads the last message on a subject as the leader of st has it: the library would ask any server for it where the stream allows
// that. It asks again until ctx ends.
func (s *Store) lastFromLeader(ctx context.Context, st jetstream.Stream, subject string) (*jetstream.RawStreamMsg, error) {
	return s.askLeader(ctx, st, map[string]any{"last_by_subj": subject})
}

func (s *Store) askLeader(ctx context.Context, st jetstream.Stream, which map[string]any) (*jetstream.RawStreamMsg, error) {
	question, err := json.Marshal(which)
	if err != nil {
		return nil, fmt.Errorf("encode %v: %w", which, err)
	}
	api := "$JS.API.STREAM.MSG.GET." + nameOf(st)
	return again(ctx, s.news, nameOf(st), func(ctx context.Context) (*jetstream.RawStreamMsg, error) {
		answer, err := s.Conn.RequestWithContext(ctx, api, question)
		if err != nil {
			return nil, err
		}
		var m got
		switch err := json.Unmarshal(answer.Data, &m); {
		case err != nil:
			return nil, backoff.Permanent(fmt.Errorf("decode the answer of %s: %w", api, err))
		case m.Error != nil && m.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
			return nil, jetstream.ErrMsgNotFound
		case m.Error != nil:
			return nil, m.Error
		case m.Message == nil:
			return nil, backoff.Permanent(jetstream.ErrInvalidJetStreamResponse)
		}
		out := &jetstream.RawStreamMsg{
			Subject: m.Message.Subject, Sequence: m.Message.Sequence, Header: nats.Header{}, Data: m.Message.Data, Time: m.Message.Time,
		}
		if len(m.Message.Header) > 0 {
			if out.Header, err = nats.DecodeHeadersMsg(m.Message.Header); err != nil {
				return nil, backoff.Permanent(fmt.Errorf("decode the header of %v: %w", which, err))
			}
		}
		return out, nil
	})
}

// Standing tells how an execution stands, and which worker had it last: queued while only its job is there. That it has ended any server
// may say, since that stays; all else is the leaders' word. Its error is [proto.ErrNotFound] where there is neither record nor job.
func (s *Store) Status(ctx context.Context, id proto.TraceID) (status proto.Status, worker string, err error) {
	read := func(m *jetstream.RawStreamMsg) (proto.Status, string) {
		return proto.Status(m.Header.Get(HeaderStatus)), m.Header.Get(HeaderWorker)
	}
	anybody, cancel := context.WithTimeout(ctx, getTimeout)
	m, err := s.Executions.GetLastMsgForSubject(anybody, ExecSubject(id))
	cancel()
	if err == nil {
		if status, worker = read(m); status.Terminal() {
			return status, worker, nil
		}
	}
	m, err = s.lastFromLeader(ctx, s.Executions, ExecSubject(id))
	if IsNotFound(err) {
		_, err = s.lastFromLeader(ctx, s.Jobs, JobPattern(id))
		if err == nil {
			return proto.StatusQueued, "", nil
		}
		if IsNotFound(err) { // the record is written before the job goes: between the two reads it may have appeared
			m, err = s.lastFromLeader(ctx, s.Executions, ExecSubject(id))
		}
	}
	switch {
	case IsNotFound(err):
		return "", "", fmt.Errorf("execution %s: %w", id, proto.ErrNotFound)
	case err != nil:
		return "", "", fmt.Errorf("ask how execution %s stands: %w", id, err)
	}
	status, worker = read(m)
	return status, worker, nil
}
