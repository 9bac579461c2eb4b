// Package backup writes everything that bullpen stores in JetStream to one file while it runs, and
// restores it into an empty JetStream. The files of threads and images are in the blob store, and a
// backup contains only their names.
//
// A backup contains messages, not the files of a NATS server, so that it can be restored with
// another number of replicas and by another version of NATS. JetStream's own snapshots would not
// work anyway: the server makes one block by block during writes, and a record replaced meanwhile
// may be missing from all blocks.
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

// formatVersion is the version of the file format. A file is a zstd stream, which contains a
// checksum, of JSON lines: a [begin], entries, each followed by its body, and an entry with End. The
// version is also that of the subjects, which had no organisation in version 1.
const formatVersion = 2

const (
	maxLine = 8 << 20 // of JSON, in bytes
	maxBody = 1 << 30 // of an entry, in bytes
)

// ErrDamaged means that a file is not a complete backup.
var ErrDamaged = errors.New("this is not a complete backup")

type begin struct {
	Format  int       `json:"bullpen_backup"`
	MadeAt  time.Time `json:"made_at"`
	Version string    `json:"version"` // of the program that made it
}

// entry is the header of a message. Messages of one stream are in order.
type entry struct {
	Subject string      `json:"subject,omitempty"`
	Header  nats.Header `json:"header,omitempty"`
	Time    time.Time   `json:"time,omitzero"`
	Bytes   int         `json:"bytes,omitempty"`
	// End marks the end of the backup. It is the number of messages.
	End *int64 `json:"end,omitempty"`
}

// Summary describes a backup.
type Summary struct {
	MadeAt   time.Time
	Version  string // of the program that made it
	Messages int64
	// DataKey is the wrapped key of the secrets, nil if they are not encrypted. Only a restore
	// returns it.
	DataKey []byte
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
	return f, f.lines.Encode(begin{Format: formatVersion, MadeAt: at.UTC(), Version: version})
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

// Check reads a backup to its end and describes it. It returns [ErrDamaged] if the backup is not
// complete.
func Check(r io.Reader) (Summary, error) {
	return read(r, func(*entry, []byte) error { return nil })
}

// read calls handle with all messages of a backup. The backup was complete only if read returns no
// error.
func read(r io.Reader, handle func(*entry, []byte) error) (s Summary, err error) {
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
	case first.Format < 1:
		return s, fmt.Errorf("%w: it has no header", ErrDamaged)
	case first.Format != formatVersion:
		return s, fmt.Errorf("this backup has format %d, made by bullpen %s, and this program reads format %d: use that "+
			"version", first.Format, first.Version, formatVersion)
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
				return s, fmt.Errorf("%w: data after its end: %w", ErrDamaged, err)
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
		if err := handle(&e, body.Bytes()); err != nil {
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
			return fmt.Errorf("%w: truncated or too long line: %w", ErrDamaged, err)
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
