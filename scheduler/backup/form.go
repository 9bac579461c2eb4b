// Package backup writes all that bullpen keeps in JetStream into one file while it runs, and makes an empty JetStream hold it again. Of the
// files of threads it has the names only: they are in the blob store.
//
// A backup is what JetStream's messages are and not how a server stores them, so that it can be restored with another number of replicas
// and by another release of NATS. JetStream's own snapshots would not do besides: the server makes one block by block while writes go on,
// and a record that is replaced meanwhile may be in none of them.
package backup

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/nats-io/nats.go"
)

// form is the version of the form of backups that is written here. It is a zstd stream, which has a checksum, of lines of JSON: a [begin],
// entries, each followed by as many bytes as it says, and an [end].
const form = 1

const (
	maxLine = 8 << 20 // of JSON, in bytes
	maxBody = 1 << 30 // of an entry, in bytes
)

// ErrDamaged says that a file is not a whole backup.
var ErrDamaged = errors.New("this is no whole backup")

type begin struct {
	Form    int       `json:"bullpen_backup"`
	MadeAt  time.Time `json:"made_at"`
	Version string    `json:"version"` // of the program that made it
}

// entry is a message. Those of one stream are in their order.
type entry struct {
	Subject string      `json:"subject,omitempty"`
	Header  nats.Header `json:"header,omitempty"`
	Time    time.Time   `json:"time,omitzero"`
	Bytes   int         `json:"bytes,omitempty"`
	// End says that this is none, and how many were before it.
	End *int64 `json:"end,omitempty"`
}

// Summary tells of a backup.
type Summary struct {
	MadeAt   time.Time
	Version  string // of the program that made it
	Messages int64
}

// file writes a backup.
type file struct {
	out   *zstd.Encoder
	lines *json.Encoder
	n     int64
}

func create(w io.Writer, version string, at time.Time) (*file, error) {
	out, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, fmt.Errorf("write a backup: %w", err)
	}
	f := &file{out: out, lines: json.NewEncoder(out)}
	return f, f.lines.Encode(begin{Form: form, MadeAt: at.UTC(), Version: version})
}

func (f *file) add(subject string, h nats.Header, at time.Time, body []byte) error {
	if err := f.lines.Encode(entry{Subject: subject, Header: h, Time: at.UTC(), Bytes: len(body)}); err != nil {
		return fmt.Errorf("write a backup: %w", err)
	}
	if _, err := f.out.Write(body); err != nil {
		return fmt.Errorf("write a backup: %w", err)
	}
	f.n++
	return nil
}

func (f *file) end() error {
	if err := f.lines.Encode(entry{End: &f.n}); err != nil {
		return fmt.Errorf("write a backup: %w", err)
	}
	if err := f.out.Close(); err != nil {
		return fmt.Errorf("write a backup: %w", err)
	}
	return nil
}

// Check reads a backup to its end, and tells of it. Its error is [ErrDamaged] where it is not whole.
func Check(r io.Reader) (Summary, error) {
	return read(r, func(*entry, []byte) error { return nil })
}

// read hands every message of a backup to take. Only when it returns without an error was it a whole one.
func read(r io.Reader, take func(*entry, []byte) error) (s Summary, err error) {
	in, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1))
	if err != nil {
		return s, fmt.Errorf("read a backup: %w", err)
	}
	defer in.Close()
	lines := bufio.NewReader(in)
	var first begin
	if err := readLine(lines, &first); err != nil {
		return s, err
	}
	switch {
	case first.Form < 1:
		return s, fmt.Errorf("%w: it does not begin as one", ErrDamaged)
	case first.Form > form:
		return s, fmt.Errorf("this backup has form %d, made by bullpen %s, and this program knows none after %d: take a newer one", first.Form, first.Version, form)
	}
	s.MadeAt, s.Version = first.MadeAt, first.Version
	for {
		var e entry
		if err := readLine(lines, &e); err != nil {
			return s, err
		}
		if e.End != nil {
			if *e.End != s.Messages {
				return s, fmt.Errorf("%w: it has %d messages and should have %d", ErrDamaged, s.Messages, *e.End)
			}
			if _, err := lines.ReadByte(); !errors.Is(err, io.EOF) { // the checksum comes after the last byte
				return s, fmt.Errorf("%w: there is more after its end: %w", ErrDamaged, err)
			}
			return s, nil
		}
		if e.Bytes < 0 || e.Bytes > maxBody {
			return s, fmt.Errorf("%w: a message of %d bytes", ErrDamaged, e.Bytes)
		}
		var body bytes.Buffer
		if _, err := io.CopyN(&body, lines, int64(e.Bytes)); err != nil {
			return s, fmt.Errorf("%w: %w", ErrDamaged, err)
		}
		s.Messages++
		if err := take(&e, body.Bytes()); err != nil {
			return s, err
		}
	}
}

func readLine(r *bufio.Reader, v any) error {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		if len(line) > maxLine || err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return fmt.Errorf("%w: it ends within a line, or has one that is too long: %w", ErrDamaged, err)
		}
		if err == nil {
			break
		}
	}
	if err := json.Unmarshal(line, v); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}
