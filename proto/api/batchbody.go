package api

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/bullpen-run/bullpen/proto"
)

// BatchBody reads the body of a request for a batch, in memory that does not grow with the number
// of items. There are two forms:
//
//   - A JSON object: the members of [BatchSettings], and last "items", an array of objects.
//   - JSONL: an item in each line. If the first line is an object whose only member is "batch",
//     that has the members of [BatchSettings]. Empty lines are skipped.
type BatchBody struct {
	Lines   bool   // whether it is JSONL
	MaxItem int64  // largest item, and largest settings, in bytes
	Member  string // of the object that has the items
	// Settings is called once, before the first item, with an object of the other members.
	Settings func(object []byte) error
	// Item is called with each item, an object or an invalid value, without line breaks. The bytes
	// are valid until it returns.
	Item func(item []byte) error

	items int
}

// PlaceError is an error that belongs to one item of a batch.
type PlaceError struct {
	Place string // "line 7" or "items[6]"
	Err   error
}

func (e *PlaceError) Error() string { return e.Place + ": " + e.Err.Error() }

// Unwrap returns the error of the item.
func (e *PlaceError) Unwrap() error { return e.Err }

// Read reads a body to its end. A byte order mark at its beginning is left out. It returns a
// [*proto.FieldError] if the body is malformed, a
// [*PlaceError] if an item is, and the errors of from, Settings and Item.
func (b *BatchBody) Read(from io.Reader) error {
	read := b.readObject
	if b.Lines {
		read = b.readLines
	}
	begin := bufio.NewReader(from)
	if first, err := begin.Peek(len(byteOrderMark)); err == nil && string(first) == byteOrderMark {
		_, _ = begin.Discard(len(byteOrderMark)) // it is there
	}
	if err := read(begin); err != nil {
		return err
	}
	if b.items == 0 {
		return proto.FieldErrorf(b.Member, "must have at least one entry")
	}
	return nil
}

// item handles one item at a place.
func (b *BatchBody) item(place string, item []byte) error {
	if b.items++; b.items > proto.MaxBatchItems {
		return proto.FieldErrorf(b.Member, "must have at most %d entries", proto.MaxBatchItems)
	}
	if err := b.Item(item); err != nil {
		return &PlaceError{place, err}
	}
	return nil
}

func (b *BatchBody) readLines(from io.Reader) error {
	lines := bufio.NewReaderSize(from, 64<<10)
	begun := false
	var line []byte
	for number := 1; ; number++ {
		place := fmt.Sprint("line ", number)
		line = line[:0]
		var err error
		for more := true; more; {
			var part []byte
			part, err = lines.ReadSlice('\n')
			more = errors.Is(err, bufio.ErrBufferFull)
			if int64(len(line)+len(part)) > b.MaxItem {
				return &PlaceError{place, tooLarge(b.MaxItem)}
			}
			line = append(line, part...)
		}
		last := errors.Is(err, io.EOF)
		if err != nil && !last {
			return err
		}
		item := bytes.TrimSpace(line)
		if len(item) > 0 {
			object, isSettings := []byte("{}"), false
			if !begun {
				object, isSettings = settingsLine(item, object)
				err = b.Settings(object)
				if isSettings && err != nil {
					err = &PlaceError{place, err}
				}
			} else {
				err = nil
			}
			if err == nil && !isSettings {
				err = b.item(place, item)
			}
			if err != nil {
				return err
			}
			begun = true
		}
		if last {
			return nil
		}
	}
}

// settingsLine returns the settings in a line, or otherwise and false.
func settingsLine(line, otherwise []byte) (object []byte, ok bool) {
	if checkBody(line) != nil {
		return otherwise, false
	}
	members := 0
	_ = eachMember(line, func(key string, value []byte) error { // the line is valid
		members++
		if key == "batch" {
			object, ok = value, true
		}
		return nil
	})
	if !ok || members > 1 {
		return otherwise, false
	}
	return object, true
}

func (b *BatchBody) readObject(from io.Reader) error {
	limited := &limitedReader{from: from, most: b.MaxItem, left: b.MaxItem}
	in := json.NewDecoder(limited)
	if err := expect(in, json.Delim('{')); err != nil {
		return limited.error(bodyField, err)
	}
	settings, hasItems := []byte{'{'}, false
	for in.More() {
		token, err := in.Token()
		key, ok := token.(string)
		if err != nil || !ok {
			return limited.error(bodyField, err)
		}
		if hasItems {
			return proto.FieldErrorf(b.Member, "must be the last member of the object; %s follows", proto.Shorten(key))
		}
		if key == b.Member {
			if err := b.Settings(append(settings, '}')); err != nil {
				return err
			}
			if err := b.readItems(in, limited); err != nil {
				return err
			}
			hasItems = true
			continue
		}
		var value json.RawMessage
		if err := in.Decode(&value); err != nil {
			return limited.error(proto.Shorten(key), err)
		}
		if len(settings) > 1 {
			settings = append(settings, ',')
		}
		settings = append(append(proto.AppendJSONString(settings, key), ':'), value...)
		if int64(len(settings)) > b.MaxItem {
			return proto.FieldErrorf(bodyField, "must have settings of at most %d bytes", b.MaxItem)
		}
		limited.reset()
	}
	if err := expect(in, json.Delim('}')); err != nil {
		return limited.error(bodyField, err)
	}
	if _, err := in.Token(); !errors.Is(err, io.EOF) {
		return limited.error(bodyField, err)
	}
	if !hasItems {
		return proto.FieldErrorf(b.Member, "must be given")
	}
	return nil
}

func (b *BatchBody) readItems(in *json.Decoder, limited *limitedReader) error {
	if err := expect(in, json.Delim('[')); err != nil {
		return limited.error(b.Member, err)
	}
	var item json.RawMessage
	var line bytes.Buffer
	for i := 0; in.More(); i++ {
		place := fmt.Sprintf("%s[%d]", b.Member, i)
		limited.reset()
		if err := in.Decode(&item); err != nil {
			return &PlaceError{place, limited.error(bodyField, err)}
		}
		if int64(len(item)) > b.MaxItem {
			return &PlaceError{place, tooLarge(b.MaxItem)}
		}
		one := []byte(item)
		if slices.Contains(one, '\n') || slices.Contains(one, '\r') {
			line.Reset()
			if err := json.Compact(&line, one); err != nil {
				return &PlaceError{place, proto.FieldErrorf(bodyField, "must be a JSON object: %v", err)}
			}
			one = line.Bytes()
		}
		if err := b.item(place, one); err != nil {
			return err
		}
	}
	if err := expect(in, json.Delim(']')); err != nil {
		return limited.error(b.Member, err)
	}
	limited.reset()
	return nil
}

func tooLarge(most int64) error {
	return proto.FieldErrorf(bodyField, "must be at most %d bytes", most)
}

// expect reads a delimiter.
func expect(in *json.Decoder, want json.Delim) error {
	token, err := in.Token()
	if err == nil && token != want {
		err = fmt.Errorf("%v instead of %v", token, want)
	}
	return err
}

// limitedReader limits how much a decoder reads for one value, which it keeps in memory.
type limitedReader struct {
	from       io.Reader
	most, left int64
	err        error // of from, but for the end
}

var errValueTooLarge = errors.New("the value is too large")

func (l *limitedReader) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errValueTooLarge
	}
	n, err := l.from.Read(p[:min(int64(len(p)), l.left)])
	l.left -= int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		l.err = err
	}
	return n, err
}

// reset begins another value.
func (l *limitedReader) reset() { l.left = l.most }

// error returns the error for a value that could not be read.
func (l *limitedReader) error(field string, err error) error {
	switch {
	case l.err != nil:
		return l.err
	case errors.Is(err, errValueTooLarge):
		return proto.FieldErrorf(field, "must be at most %d bytes", l.most)
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return proto.FieldErrorf(field, "must be valid JSON, but the body ends in it")
	case err == nil:
		return proto.FieldErrorf(field, "must be one JSON object")
	default:
		return proto.FieldErrorf(field, "must be valid JSON: %v", err)
	}
}
