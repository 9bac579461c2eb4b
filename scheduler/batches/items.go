package batches

import (
	"bytes"
	"compress/flate"
	"fmt"
	"io"

	"github.com/bullpen-run/bullpen/proto"
)

// Items are the statuses of all items of a batch, and their rounds: how often each was resubmitted
// after it had ended.
type Items struct {
	status []byte
	rounds []byte
	counts proto.BatchCounts // without Running: all submitted items are Queued
}

// unpack returns the items of a state; initially all wait.
func unpack(s *proto.BatchState, total int) (*Items, error) {
	i := &Items{counts: proto.BatchCounts{Total: total}}
	var err error
	if i.status, err = inflate(s.Items, total); err != nil {
		return nil, err
	}
	if i.rounds, err = inflate(s.Rounds, total); err != nil {
		return nil, err
	}
	for _, status := range i.status {
		if proto.ItemStatus(status) > proto.ItemCancelled {
			return nil, fmt.Errorf("decode the items of a batch: status %d", status)
		}
		*i.count(proto.ItemStatus(status))++
	}
	return i, nil
}

// pack stores the items in a state.
func (i *Items) pack(s *proto.BatchState) (err error) {
	if s.Items, err = deflate(i.status); err != nil {
		return err
	}
	s.Rounds, err = deflate(i.rounds)
	return err
}

// count returns the counter of a status.
func (i *Items) count(s proto.ItemStatus) *int {
	switch s {
	case proto.ItemWaiting:
		return &i.counts.Waiting
	case proto.ItemSubmitted:
		return &i.counts.Queued
	case proto.ItemSucceeded:
		return &i.counts.Succeeded
	case proto.ItemFailed:
		return &i.counts.Failed
	default:
		return &i.counts.Cancelled
	}
}

// Len returns the number of items.
func (i *Items) Len() int { return len(i.status) }

// Status returns the status of an item.
func (i *Items) Status(index int) proto.ItemStatus { return proto.ItemStatus(i.status[index]) }

// Round returns the round of an item.
func (i *Items) Round(index int) int { return int(i.rounds[index]) }

func (i *Items) set(index int, s proto.ItemStatus) {
	*i.count(i.Status(index))--
	i.status[index] = byte(s)
	*i.count(s)++
}

// maxRound is the last round of an item.
const maxRound = 255

// again makes an item wait for its next round. It reports false if that was the last one.
func (i *Items) again(index int) bool {
	if i.rounds[index] == maxRound {
		return false
	}
	i.rounds[index]++
	i.set(index, proto.ItemWaiting)
	return true
}

// retry makes all failed items wait for their next round, and cancelled ones, too, if that is set.
func (i *Items) retry(cancelled bool) {
	for index := range i.Len() {
		if s := i.Status(index); s == proto.ItemFailed || s == proto.ItemCancelled && cancelled {
			i.again(index)
		}
	}
}

// deflate compresses bytes, most of which equal their neighbours. All zeros become nil.
func deflate(b []byte) ([]byte, error) {
	if len(bytes.TrimLeft(b, "\x00")) == 0 {
		return nil, nil
	}
	var out bytes.Buffer
	w, err := flate.NewWriter(&out, flate.BestSpeed)
	if err == nil {
		_, err = w.Write(b)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return nil, fmt.Errorf("encode the items of a batch: %w", err)
	}
	return out.Bytes(), nil
}

func inflate(b []byte, size int) ([]byte, error) {
	if len(b) == 0 {
		return make([]byte, size), nil
	}
	out, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(b)), int64(size)+1))
	if err == nil && len(out) != size {
		err = fmt.Errorf("%d bytes for %d items", len(out), size)
	}
	if err != nil {
		return nil, fmt.Errorf("decode the items of a batch: %w", err)
	}
	return out, nil
}
