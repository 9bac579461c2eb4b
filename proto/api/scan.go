package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

const bodyField = "body"

// byteOrderMark is what some editors write at the beginning of a file.
const byteOrderMark = "\ufeff"

// TrimMark returns a body without a byte order mark at its beginning.
func TrimMark(body []byte) []byte { return bytes.TrimPrefix(body, []byte(byteOrderMark)) }

// anyJSON accepts every JSON value and keeps none. Decoding into it checks syntax and depth without
// copying.
type anyJSON struct{}

func (*anyJSON) UnmarshalJSON([]byte) error { return nil }

// checkBody returns a [*proto.FieldError] unless body is one JSON object.
func checkBody(body []byte) error {
	if len(bytes.TrimLeft(body, " \t\r\n")) == 0 {
		return proto.FieldErrorf(bodyField, "must be a JSON object, but it is empty")
	}
	if bytes.HasPrefix(body, []byte(byteOrderMark)) {
		return proto.FieldErrorf(bodyField, "must be UTF-8, with a byte order mark at the beginning of the request only")
	}
	if err := json.Unmarshal(body, new(anyJSON)); err != nil {
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			return proto.FieldErrorf(bodyField, "must be one JSON object: %v (at byte %d)", err, syntax.Offset)
		}
		return proto.FieldErrorf(bodyField, "must be one JSON object: %v", err)
	}
	if typeByte(body) != '{' {
		return proto.FieldErrorf(bodyField, "must be a JSON object")
	}
	return nil
}

// typeByte returns the first byte of a JSON value, which determines its type.
func typeByte(value []byte) byte {
	value = value[skipSpace(value, 0):]
	if len(value) == 0 {
		return 0
	}
	return value[0]
}

func decodeString(field string, value []byte) (string, error) {
	if typeByte(value) != '"' {
		return "", proto.FieldErrorf(field, "must be a string")
	}
	var s string
	if err := json.Unmarshal(value, &s); err != nil {
		return "", proto.FieldErrorf(field, "must be a string: %v", err)
	}
	return s, nil
}

var errNotWhole = errors.New("it is not a whole number")

// decodeInt parses a JSON number that is whole, such as 60, 60.0 and 6e1: JSON schemas do not
// distinguish them. A number outside the range of int becomes the largest or smallest int, so that
// the limit of its field reports it.
func decodeInt(raw []byte) (int64, error) {
	if n, err := strconv.ParseInt(string(raw), 10, 64); err == nil {
		return n, nil
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	switch {
	case err != nil && !errors.Is(err, strconv.ErrRange):
		return 0, err
	case f != math.Trunc(f):
		return 0, errNotWhole
	case f >= math.MaxInt64:
		return math.MaxInt64, nil
	case f <= math.MinInt64:
		return math.MinInt64, nil
	default:
		return int64(f), nil
	}
}

// MaxValues is the number of JSON values that a message of a model's client may have.
const MaxValues = 100_000

// CountValues returns the number of values in a JSON text, or a [*proto.FieldError] if there are more
// than [MaxValues]. Clients of models send lists of objects of many forms: the struct of a value can be
// a hundred times larger than its text.
func CountValues(text []byte) (values int, err error) {
	values = 1
	for at := 0; at < len(text); at++ {
		switch text[at] {
		case '"':
			at = stringEnd(text, at)
		case ',', '[', '{':
			values++
		}
	}
	if values > MaxValues {
		return 0, proto.FieldErrorf(
			bodyField, "must have at most %d values: members of objects and items of lists", MaxValues)
	}
	return values, nil
}

// eachMember calls f for each member of a valid JSON object. It does not recurse into nested
// values.
func eachMember(object []byte, f func(key string, value []byte) error) error {
	at := skipSpace(object, skipSpace(object, 0)+1)
	for object[at] != '}' {
		end := valueEnd(object, at)
		key, err := memberName(object[at:end])
		if err != nil {
			return err
		}
		start := skipSpace(object, skipSpace(object, end)+1) // past the colon
		end = valueEnd(object, start)
		if err := f(key, object[start:end]); err != nil {
			return err
		}
		if at = skipSpace(object, end); object[at] == ',' {
			at = skipSpace(object, at+1)
		}
	}
	return nil
}

// memberName decodes the name of a member. Most names need no decoder.
func memberName(quoted []byte) (name string, err error) {
	if bytes.IndexByte(quoted, '\\') < 0 && utf8.Valid(quoted) {
		return string(quoted[1 : len(quoted)-1]), nil
	}
	if err := json.Unmarshal(quoted, &name); err != nil {
		return "", proto.FieldErrorf(bodyField, "has a member whose name is not a string: %v", err)
	}
	return name, nil
}

// eachElement calls f for each element of a valid JSON array.
func eachElement(array []byte, f func(value []byte) error) error {
	at := skipSpace(array, skipSpace(array, 0)+1)
	for array[at] != ']' {
		end := valueEnd(array, at)
		if err := f(array[at:end]); err != nil {
			return err
		}
		if at = skipSpace(array, end); array[at] == ',' {
			at = skipSpace(array, at+1)
		}
	}
	return nil
}

func skipSpace(b []byte, at int) int {
	for at < len(b) && (b[at] == ' ' || b[at] == '\t' || b[at] == '\r' || b[at] == '\n') {
		at++
	}
	return at
}

// valueEnd returns the end of the JSON value that starts at b[at].
func valueEnd(b []byte, at int) int {
	depth := 0
	for i := at; i < len(b); i++ {
		switch b[i] {
		case '"':
			i = stringEnd(b, i)
		case '{', '[':
			depth++
			continue
		case '}', ']':
			depth--
		default:
			if depth == 0 {
				return scalarEnd(b, i)
			}
			continue
		}
		if depth == 0 {
			return i + 1
		}
	}
	return len(b)
}

// stringEnd returns the position of the closing quote of the JSON string that starts at b[at].
func stringEnd(b []byte, at int) int {
	for i := at + 1; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return len(b)
}

func scalarEnd(b []byte, at int) int {
	for ; at < len(b); at++ {
		switch b[at] {
		case ' ', '\t', '\r', '\n', ',', ':', ']', '}':
			return at
		}
	}
	return at
}

// checkText rejects bytes that are not UTF-8 and lone surrogates in a valid JSON value.
// encoding/json would replace both silently, and they may be part of a program.
func checkText(value []byte, field string) error {
	if !utf8.Valid(value) {
		return proto.FieldErrorf(proto.Shorten(field), "must be valid UTF-8")
	}
	for i := 0; i < len(value); {
		next := bytes.IndexByte(value[i:], '\\')
		if next < 0 {
			return nil
		}
		i += next
		if value[i+1] != 'u' {
			i += 2
			continue
		}
		unit := hexUnit(value[i+2:])
		i += 6
		switch {
		case unit < 0xd800 || unit > 0xdfff:
		case unit < 0xdc00 && i+6 <= len(value) && value[i] == '\\' && value[i+1] == 'u' &&
			hexUnit(value[i+2:])>>10 == 0xdc00>>10:
			i += 6
		default:
			return proto.FieldErrorf(proto.Shorten(field), `must not contain a lone surrogate (\u%04x)`, unit)
		}
	}
	return nil
}

// hexUnit parses four hexadecimal digits.
func hexUnit(b []byte) (unit int) {
	for _, c := range b[:4] {
		unit <<= 4
		switch {
		case c <= '9':
			unit |= int(c - '0')
		default:
			unit |= int(c|0x20-'a') + 10
		}
	}
	return unit
}
