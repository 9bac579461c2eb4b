package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// validator is implemented by request types with rules that struct tags cannot express.
type validator interface {
	// Validate returns a [*proto.FieldError] if the request breaks a rule.
	Validate() error
}

// Decode decodes and validates the body of a request. Members that are absent or null leave the
// default of their field. Errors are [*proto.FieldError].
func Decode[T any](body []byte) (*T, error) {
	request := new(T)
	return request, decodeInto(request, body)
}

// decodeInto decodes and validates body, which becomes the struct that request points to.
func decodeInto(request any, body []byte) error {
	err := decodeFields(request, body)
	if v, ok := request.(validator); ok && err == nil {
		err = v.Validate()
	}
	return err
}

// decodeFields decodes body into the struct that request points to. Fields of absent and null
// members keep their values.
func decodeFields(request any, body []byte) error {
	tag := objectTag(reflect.TypeOf(request).Elem())
	return decodeMembers(request, body, tag.Get("additionalProperties") != "true")
}

// decodeMembers is decodeFields. If strict, body must not have members that the struct does not
// name.
func decodeMembers(request any, body []byte, strict bool) error {
	if err := checkBody(body); err != nil {
		return err
	}
	if err := checkText(body, bodyField); err != nil {
		named := eachMember(body, func(key string, value []byte) error { return checkText(value, orQuotes(key)) })
		return cmp.Or(named, err) // err if a name is at fault
	}
	return decodeObject("", body, reflect.ValueOf(request).Elem(), strict)
}

// decodeObject decodes the members of object into the fields of a struct. The names of fields in
// errors begin with prefix. A strict object must not have members that the struct does not name.
func decodeObject(prefix string, object []byte, to reflect.Value, strict bool) error {
	fields := jsonFields(to.Type())
	members := make([][]byte, len(fields)) // by field
	err := eachMember(object, func(key string, value []byte) error {
		at := slices.IndexFunc(fields, func(f jsonField) bool { return f.name == key })
		switch {
		case at < 0 && strict:
			return proto.FieldErrorf(orQuotes(prefix+proto.Shorten(key)), "is not known here")
		case at < 0:
			return nil // not kept: a body may have any number of them
		case members[at] != nil:
			return proto.FieldErrorf(orQuotes(prefix+proto.Shorten(key)), "must be given only once")
		}
		members[at] = value
		return nil
	})
	if err != nil {
		return err
	}
	for at, f := range fields {
		field, raw, value := prefix+f.name, members[at], to.FieldByIndex(f.Index)
		if raw == nil || typeByte(raw) == 'n' {
			err = setDefault(field, value, f.Tag)
		} else {
			err = decodeValue(field, raw, value, f.Tag)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// orQuotes returns name, or two quotes if it is empty.
func orQuotes(name string) string {
	if name == "" {
		return `""`
	}
	return name
}

// setDefault applies the tags of a field that the request does not give.
func setDefault(field string, to reflect.Value, tag reflect.StructTag) error {
	if tag.Get("required") == "true" {
		return proto.FieldErrorf(field, "must be given")
	}
	text, ok := tag.Lookup("default")
	if !ok || !to.IsZero() || to.Kind() == reflect.Pointer {
		return nil
	}
	if to.Kind() == reflect.String {
		to.SetString(text)
		return nil
	}
	return json.Unmarshal([]byte(text), to.Addr().Interface())
}

// decodeValue decodes a JSON value that is not null into a field, and checks it against the field's
// tags.
func decodeValue(field string, raw []byte, to reflect.Value, tag reflect.StructTag) (err error) {
	switch to := to.Addr().Interface().(type) {
	case *proto.Bytes:
		if *to, err = decodeBytes(field, raw); err != nil {
			return err
		}
		return checkRange(field, float64(*to), tag, func(limit string) (b proto.Bytes, err error) {
			return b, b.UnmarshalText([]byte(limit))
		})
	case *proto.Seconds:
		*to, err = decodeSeconds(field, raw, tag)
		return err
	case *Time:
		*to, err = decodeTime(field, raw)
		return err
	case *[]netip.Prefix:
		*to, err = decodeNetworks(field, raw, tag)
		return err
	case *Waits:
		return to.decode(field, raw, tag)
	}
	must := func(otherwise string) error {
		if text := tag.Get("must"); strings.HasPrefix(text, otherwise) {
			otherwise = text
		}
		return proto.FieldErrorf(field, "must %s", otherwise)
	}
	switch to.Kind() {
	case reflect.Pointer:
		to.Set(reflect.New(to.Type().Elem()))
		return decodeValue(field, raw, to.Elem(), tag)
	case reflect.String:
		text, err := decodeString(field, raw)
		if err != nil {
			return err
		}
		to.SetString(text)
		if check, _ := formatOf(tag.Get("format")); check != nil {
			return check(field, text)
		}
		return checkEnum(field, text, to.Type(), tag)
	case reflect.Int, reflect.Int64:
		n, err := decodeInt(raw)
		if err != nil {
			return must("be a whole number")
		}
		to.SetInt(n)
		return checkRange(field, float64(n), tag, strconv.Atoi)
	case reflect.Float64:
		if json.Unmarshal(raw, to.Addr().Interface()) != nil {
			return must("be a number")
		}
		return checkRange(field, to.Float(), tag, func(limit string) (float64, error) {
			return strconv.ParseFloat(limit, 64)
		})
	case reflect.Bool:
		if json.Unmarshal(raw, to.Addr().Interface()) != nil {
			return must("be true or false")
		}
		return nil
	case reflect.Map:
		if typeByte(raw) != '{' {
			return must("be an object of strings")
		}
		return decodeStrings(field, raw, to, tag)
	case reflect.Slice:
		objects := to.Type().Elem().Kind() == reflect.Struct
		switch {
		case typeByte(raw) == '[' && objects:
			return decodeObjects(field, raw, to, tag)
		case objects:
			return must("be an array of objects")
		case typeByte(raw) != '[':
			return must("be an array of strings")
		}
		return decodeList(field, raw, to, tag)
	default:
		if typeByte(raw) != '{' {
			return must("be an object")
		}
		return decodeObject(field+".", raw, to, true)
	}
}

// decodeStrings decodes an object whose values are strings.
func decodeStrings(field string, raw []byte, to reflect.Value, tag reflect.StructTag) error {
	texts := make(map[string]string)
	err := eachMember(raw, func(key string, raw []byte) error {
		name := field + "." + proto.Shorten(key)
		text, err := decodeString(name, raw)
		if err != nil {
			return err
		}
		if _, twice := texts[key]; twice {
			return proto.FieldErrorf(name, "must be given only once")
		}
		texts[key] = text
		return checkCount(field, len(texts), "maxProperties", tag)
	})
	to.Set(reflect.ValueOf(texts))
	return err
}

// decodeList decodes an array of strings, or of a type of strings. An empty array becomes a nil
// slice.
func decodeList(field string, raw []byte, to reflect.Value, tag reflect.StructTag) error {
	list := reflect.MakeSlice(to.Type(), 0, 0)
	element := to.Type().Elem()
	err := eachElement(raw, func(raw []byte) error {
		entry, err := decodeString(field, raw)
		if err != nil {
			return proto.FieldErrorf(field, "must be an array of strings")
		}
		if err := checkEnum(field, entry, element, ""); err != nil {
			return err
		}
		list = reflect.Append(list, reflect.ValueOf(entry).Convert(element))
		return checkCount(field, list.Len(), "maxItems", tag)
	})
	if list.Len() > 0 {
		to.Set(list)
	} else {
		to.SetZero()
	}
	return err
}

// decodeNetworks decodes an array of networks. An empty array becomes a nil slice.
func decodeNetworks(field string, raw []byte, tag reflect.StructTag) (list []netip.Prefix, err error) {
	if typeByte(raw) != '[' {
		return nil, proto.FieldErrorf(field, "must be an array of strings")
	}
	err = eachElement(raw, func(raw []byte) error {
		name := fmt.Sprintf("%s[%d]", field, len(list))
		text, err := decodeString(name, raw)
		if err != nil {
			return err
		}
		network, err := proto.ParseNetwork(text)
		if err != nil {
			return proto.FieldErrorf(name, "must %v", err)
		}
		list = append(list, network)
		return checkCount(field, len(list), "maxItems", tag)
	})
	return list, err
}

// decodeObjects decodes an array of objects. An empty array becomes a nil slice.
func decodeObjects(field string, raw []byte, to reflect.Value, tag reflect.StructTag) error {
	to.SetZero()
	return eachElement(raw, func(raw []byte) error {
		if typeByte(raw) != '{' {
			return proto.FieldErrorf(field, "must be an array of objects")
		}
		element := reflect.New(to.Type().Elem()).Elem()
		if err := decodeObject(field+".", raw, element, true); err != nil {
			return err
		}
		to.Set(reflect.Append(to, element))
		return checkCount(field, to.Len(), "maxItems", tag)
	})
}

// decodeBytes decodes a number of bytes, or a string with a unit.
func decodeBytes(field string, raw []byte) (b proto.Bytes, err error) {
	text := string(raw)
	if typeByte(raw) == '"' {
		if text, err = decodeString(field, raw); err != nil {
			return 0, err
		}
	} else if n, err := decodeInt(raw); err == nil {
		return proto.Bytes(n), nil
	}
	if typeByte(raw) != '"' || b.UnmarshalText([]byte(text)) != nil {
		return 0, proto.FieldErrorf(
			field, "must be a number of bytes, or a string such as 512MiB or 2GiB (units: KiB, MiB, GiB)")
	}
	return b, nil
}

// decodeSeconds decodes a number of seconds within the minimum and the maximum of the tag.
func decodeSeconds(field string, raw []byte, tag reflect.StructTag) (s proto.Seconds, err error) {
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil {
		return 0, proto.FieldErrorf(field, "must be a number of seconds")
	}
	least, most := tag.Get("minimum"), tag.Get("maximum")
	from, _ := strconv.ParseFloat(least, 64)
	to, _ := strconv.ParseFloat(most, 64)
	if f < from || f > to {
		return 0, proto.FieldErrorf(field, "must be %s to %s seconds", least, most)
	}
	return proto.Seconds(time.Duration(math.Round(f*1000)) * time.Millisecond), nil
}

// decodeTime decodes a time in RFC 3339.
func decodeTime(field string, raw []byte) (Time, error) {
	text, err := decodeString(field, raw)
	if err != nil {
		return Time{}, err
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return Time{}, proto.FieldErrorf(field, "must be a time in RFC 3339, such as 2026-01-31T12:00:00Z")
	}
	return Time{t}, nil
}

// checkCount checks the number of entries of a list or map against the tag named limit.
func checkCount(field string, n int, limit string, tag reflect.StructTag) error {
	text, ok := tag.Lookup(limit)
	most, _ := strconv.Atoi(text)
	if !ok || n <= most {
		return nil
	}
	if must := tag.Get("must"); must != "" {
		return proto.FieldErrorf(field, "must %s", must)
	}
	return proto.FieldErrorf(field, "must have at most %d entries", most)
}

// checkRange checks a number against the minimum and the maximum of the tag, which parse reads.
func checkRange[N ~int | ~int64 | ~float64](
	field string, n float64, tag reflect.StructTag, parse func(string) (N, error),
) error {
	least, hasLeast := tag.Lookup("minimum")
	most, hasMost := tag.Lookup("maximum")
	from, to := N(0), N(0)
	var err error
	if hasLeast {
		from, err = parse(least)
	}
	if hasMost && err == nil {
		to, err = parse(most)
	}
	switch {
	case err != nil:
		panic(fmt.Sprintf("the limits of %s: %v", field, err)) // a mistake in a struct tag
	case (!hasLeast || n >= float64(from)) && (!hasMost || n <= float64(to)):
		return nil
	case tag.Get("must") != "":
		return proto.FieldErrorf(field, "must %s", tag.Get("must"))
	default:
		return proto.FieldErrorf(field, "must be from %v to %v", from, to)
	}
}

// checkEnum checks a string against the values of its type.
func checkEnum(field, text string, t reflect.Type, tag reflect.StructTag) error {
	values := enumOf(t, tag)
	if values == nil || slices.Contains(values, text) {
		return nil
	}
	if must := tag.Get("must"); must != "" {
		return proto.FieldErrorf(field, "must %s", must)
	}
	return proto.FieldErrorf(field, "must be one of %s", strings.Join(values, ", "))
}

// jsonField is a field of a struct with its name in JSON.
type jsonField struct {
	reflect.StructField
	name      string
	omitEmpty bool
}

// fieldsByType are the results of [findFields].
var fieldsByType sync.Map

// jsonFields returns the fields that encoding/json encodes, including those of embedded structs. It
// omits an embedded struct's field with the name of an outer field.
func jsonFields(t reflect.Type) []jsonField {
	fields, ok := fieldsByType.Load(t)
	if !ok {
		fields, _ = fieldsByType.LoadOrStore(t, findFields(t))
	}
	return fields.([]jsonField)
}

// findFields is jsonFields without its cache: an array may have any number of objects.
func findFields(t reflect.Type) []jsonField {
	var fields []jsonField
	for _, f := range reflect.VisibleFields(t) {
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" || name == "-" || !f.IsExported() {
			continue
		}
		added := jsonField{f, name, strings.HasPrefix(options, "omit")}
		at := slices.IndexFunc(fields, func(other jsonField) bool { return other.name == name })
		switch {
		case at < 0:
			fields = append(fields, added)
		case len(f.Index) < len(fields[at].Index):
			fields[at] = added
		}
	}
	return fields
}

// objectTag returns the tags of a struct's blank field, which describe the object as a whole.
func objectTag(t reflect.Type) reflect.StructTag {
	f, _ := t.FieldByName("_")
	return f.Tag
}

// sortedKeys returns the keys of m in order, so that the same one of several mistakes is always
// reported.
func sortedKeys(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }
