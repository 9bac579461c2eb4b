package proto

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxKeyNameLen is how long the name of an API key may be, in characters.
const MaxKeyNameLen = 128

// DecodeKeyRequest reads the body of a request for a new API key: name, org, plan and, if it is to have all of them, rights, the
// sandbox profile it is bound to, and how many executions may run at once with it. What is wrong with it is a [*FieldError].
func DecodeKeyRequest(body []byte) (Key, error) {
	members, err := decodeObject(body, "name", "org", "plan", "rights", "sandbox", "concurrent")
	if err != nil {
		return Key{}, err
	}
	k := Key{Rights: RightsExecute}
	rights := string(k.Rights)
	for _, f := range []struct {
		name string
		to   *string
	}{{"name", &k.Name}, {"org", &k.Org}, {"plan", &k.Plan}, {"rights", &rights}, {"sandbox", &k.Sandbox}} {
		if raw := members[f.name]; raw != nil {
			if *f.to, err = decodeString(f.name, raw); err != nil {
				return Key{}, err
			}
		}
	}
	k.Rights = Rights(rights)
	if raw := members["concurrent"]; raw != nil {
		if err := decodeWhole("concurrent", raw, &k.Concurrent); err != nil {
			return Key{}, err
		}
		if k.Concurrent < 1 {
			return Key{}, FieldErrorf("concurrent", "must be at least 1; leave it out for as many as the plan allows")
		}
	}
	if members["sandbox"] != nil && !validProfileName(k.Sandbox) {
		return Key{}, FieldErrorf("sandbox", sandboxNameMessage)
	}
	if k.Sandbox == DefaultProfileName {
		k.Sandbox = ""
	}
	return k, CheckKey(k)
}

// CheckKey checks what people choose about an API key. Its errors are [*FieldError].
func CheckKey(k Key) error {
	if n := utf8.RuneCountInString(k.Name); n < 1 || n > MaxKeyNameLen || strings.ContainsFunc(k.Name, unicode.IsControl) {
		return FieldErrorf("name", "must be 1 to %d characters without control characters", MaxKeyNameLen)
	}
	if !ValidOrg(k.Org) {
		return FieldErrorf("org", "must be 1 to 63 characters of a-z, 0-9, _ and -, the first a letter or digit")
	}
	plan, ok := PlanByName(k.Plan)
	if !ok {
		var names []string
		for _, p := range Plans() {
			names = append(names, p.Name)
		}
		return FieldErrorf("plan", "must be one of %s", strings.Join(names, ", "))
	}
	if k.Concurrent < 0 || k.Concurrent > plan.Concurrent {
		return FieldErrorf("concurrent", "must be at most %d, which is what the plan %s allows the whole organisation", plan.Concurrent, plan.Name)
	}
	if k.Rights != RightsExecute && k.Rights != RightsAll {
		return FieldErrorf("rights", "must be one of %s, %s", RightsExecute, RightsAll)
	}
	return nil
}
