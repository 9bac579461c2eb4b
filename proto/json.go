package proto

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// FieldError says which field of a request is wrong and what it must be.
type FieldError struct {
	Field   string // as the client wrote it; "body" for the request as a whole
	Message string // a sentence that starts with the field's name
}

func (e *FieldError) Error() string { return e.Message }

// FieldErrorf returns a [FieldError] whose message is the field's name and the formatted text.
func FieldErrorf(field, format string, args ...any) *FieldError {
	return &FieldError{Field: field, Message: field + " " + fmt.Sprintf(format, args...)}
}

func errTwice(field string) *FieldError { return FieldErrorf(field, "must be given only once") }

func errUnknown(field string) *FieldError { return FieldErrorf(field, "is not known here") }

// onlyKnown refuses members of an object that are not among names: a limit that was misspelt must not be taken for none.
func onlyKnown(object []byte, names []string) error {
	return eachMember(object, func(key string, _ []byte) error {
		if slices.Contains(names, key) {
			return nil
		}
		if key == "" {
			key = `""`
		}
		return errUnknown(Shorten(key))
	})
}

const bodyField = "body"

// decodeInt reads a JSON number that is written as an integer. One that is too large for an int is the largest or smallest,
// so that it meets the limit of its field and not another error.
func decodeInt(raw []byte) (int, error) {
	n, err := strconv.Atoi(string(raw))
	if errors.Is(err, strconv.ErrRange) {
		if strings.HasPrefix(string(raw), "-") {
			return math.MinInt, nil
		}
		return math.MaxInt, nil
	}
	return n, err
}

// anyJSON accepts every JSON value and keeps nothing of it: decoding into it checks syntax and depth without copying.
type anyJSON struct{}

func (*anyJSON) UnmarshalJSON([]byte) error { return nil }

// decodeObject reads body as one JSON object and gives the raw values of the named members. A member that is missing, or
// null, is missing in the result; one that is there twice is an error, because readers differ in which they take; others are
// skipped. Text that encoding/json would alter silently (bytes that are not UTF-8, lone surrogates) is an error, because it may be
// part of a program. Errors are [*FieldError].
func decodeObject(body []byte, names ...string) (map[string][]byte, error) {
	if len(bytes.TrimLeft(body, " \t\r\n")) == 0 {
		return nil, FieldErrorf(bodyField, "must be a JSON object, but it is empty")
	}
	if err := json.Unmarshal(body, new(anyJSON)); err != nil {
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			return nil, FieldErrorf(bodyField, "must be one JSON object: %v (at byte %d)", err, syntax.Offset)
		}
		return nil, FieldErrorf(bodyField, "must be one JSON object: %v", err)
	}
	if kindOf(body) != '{' {
		return nil, FieldErrorf(bodyField, "must be a JSON object")
	}
	members := make(map[string][]byte, len(names))
	err := eachMember(body, func(key string, value []byte) error {
		for _, name := range names {
			if key != name {
				continue
			}
			if members[name] != nil {
				return errTwice(name)
			}
			members[name] = value
		}
		if key == "" {
			key = `""`
		}
		return checkText(value, key)
	})
	if err != nil {
		return nil, err
	}
	if err := checkText(body, bodyField); err != nil { // names of members too
		return nil, err
	}
	for name, value := range members {
		if kindOf(value) == 'n' {
			delete(members, name)
		}
	}
	return members, nil
}

// memberDecoder reads members of an object one after the other, until one is wrong.
type memberDecoder struct {
	members map[string][]byte
	err     error
}

// read calls f with a member that is there.
func (d *memberDecoder) read(field string, f func(raw []byte) error) {
	if raw := d.members[field]; raw != nil && d.err == nil {
		d.err = f(raw)
	}
}

// need calls f with a member that must be there.
func (d *memberDecoder) need(field string, f func(raw []byte) error) {
	if d.members[field] == nil && d.err == nil {
		d.err = FieldErrorf(field, "must be given")
	}
	d.read(field, f)
}

// kindOf gives the first byte of a JSON value, which tells its type.
func kindOf(value []byte) byte {
	value = value[skipSpace(value, 0):]
	if len(value) == 0 {
		return 0
	}
	return value[0]
}

func decodeString(field string, value []byte) (string, error) {
	if kindOf(value) != '"' {
		return "", FieldErrorf(field, "must be a string")
	}
	var s string
	if err := json.Unmarshal(value, &s); err != nil {
		return "", FieldErrorf(field, "must be a string: %v", err)
	}
	return s, nil
}

// decodeStrings reads an object whose values are strings, of at most limit members.
func decodeStrings(field string, value []byte, limit int, check func(key, value string) error) (map[string]string, error) {
	if kindOf(value) != '{' {
		return nil, FieldErrorf(field, "must be an object of strings")
	}
	m := make(map[string]string)
	err := eachMember(value, func(key string, raw []byte) error {
		text, err := decodeString(field+"."+Shorten(key), raw)
		if err != nil {
			return err
		}
		if err := check(key, text); err != nil {
			return err
		}
		if _, twice := m[key]; twice {
			return errTwice(field + "." + key)
		}
		m[key] = text
		if len(m) > limit {
			return FieldErrorf(field, "must have at most %d entries", limit)
		}
		return nil
	})
	return m, err
}

// Shorten cuts a name that a client chose to a length that fits into a message.
func Shorten(name string) string {
	const most = 64
	if len(name) <= most {
		return name
	}
	cut := most
	for cut > 0 && !utf8.RuneStart(name[cut]) {
		cut--
	}
	return name[:cut] + "…"
}

// eachMember calls f for each member of an object that is known to be valid JSON. It does not recurse: nesting costs a
// counter, not stack.
func eachMember(object []byte, f func(key string, value []byte) error) error {
	at := skipSpace(object, skipSpace(object, 0)+1)
	for object[at] != '}' {
		end := valueEnd(object, at)
		var key string
		if err := json.Unmarshal(object[at:end], &key); err != nil {
			return FieldErrorf(bodyField, "has a member whose name is not a string: %v", err)
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

// eachElement calls f for each element of an array that is known to be valid JSON.
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

// valueEnd gives the end of the value that starts at b[at].
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

// stringEnd gives the position of the quote that ends the string which starts at b[at].
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
	for at < len(b) && !bytes.ContainsRune([]byte(" \t\r\n,:]}"), rune(b[at])) {
		at++
	}
	return at
}

// checkText refuses bytes that are not UTF-8 and lone surrogates in a value that is valid JSON otherwise.
func checkText(value []byte, field string) error {
	if !utf8.Valid(value) {
		return FieldErrorf(Shorten(field), "must be valid UTF-8")
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
		case unit < 0xdc00 && i+6 <= len(value) && value[i] == '\\' && value[i+1] == 'u' && hexUnit(value[i+2:])>>10 == 0xdc00>>10:
			i += 6
		default:
			return FieldErrorf(Shorten(field), `must not contain a lone surrogate (\u%04x)`, unit)
		}
	}
	return nil
}

// hexUnit reads four hexadecimal digits.
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
