// Package apitest has what tests of decoders of requests need.
package apitest

import (
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
)

// HostileBodies returns JSON objects of about size bytes that a decoder may take long for, by what is
// in them. Some have their content in a member, of each of these names.
func HostileBodies(size int, members ...string) map[string]string {
	repeat := func(one string) string { return strings.Repeat(one, max(1, size/len(one))) }
	numbered := func(format string) string {
		var b strings.Builder
		for i := 0; b.Len() < size; i++ {
			fmt.Fprintf(&b, format, i)
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	values := map[string]string{
		"escapes":          `"` + repeat(`\u00e9`) + `"`,
		"surrogates":       `"` + repeat(`\ud83d\ude00`) + `"`,
		"quotes":           `"` + repeat(`\"`) + `"`,
		"a huge number":    repeat("9"),
		"a long fraction":  "0." + repeat("9"),
		"deep nesting":     strings.Repeat("[", 9000) + strings.Repeat("]", 9000),
		"deep objects":     strings.Repeat(`{"a":`, 9000) + "1" + strings.Repeat("}", 9000),
		"small objects":    "[" + strings.TrimSuffix(repeat("{},"), ",") + "]",
		"small arrays":     "[" + strings.TrimSuffix(repeat("[],"), ",") + "]",
		"small numbers":    "[" + strings.TrimSuffix(repeat("1,"), ",") + "]",
		"small strings":    "[" + strings.TrimSuffix(repeat(`"",`), ",") + "]",
		"networks":         "[" + strings.TrimSuffix(repeat(`"10.0.0.0/8",`), ",") + "]",
		"different names":  "{" + numbered(`"A%d":"",`) + "}",
		"unknown names":    "{" + numbered(`"a%d":[],`) + "}",
		"the same name":    "{" + strings.TrimSuffix(repeat(`"a":1,`), ",") + "}",
		"escaped names":    "{" + numbered(`"\u0061%d":1,`) + "}",
		"spaces":           repeat(" ") + "1",
		"objects of names": "[" + strings.TrimSuffix(repeat(`{"name":"","code":""},`), ",") + "]",
	}
	bodies := map[string]string{
		"unknown members":     "{" + numbered(`"%d":1,`) + "}",
		"repeated members":    "{" + strings.TrimSuffix(repeat(`"x":1,`), ",") + "}",
		"escaped members":     "{" + numbered(`"\u0061%d":1,`) + "}",
		"members of a name":   `{"` + repeat("n") + `":1}`,
		"spaces":              "{" + repeat(" ") + "}",
		"not closed":          "{" + numbered(`"%d":1,`),
		"the wrong surrogate": `{"x":"` + repeat("a") + `\ud800"}`,
	}
	for kind, value := range values {
		bodies["unknown: "+kind] = `{"x":` + value + "}"
		for _, name := range members {
			bodies[name+": "+kind] = `{"` + name + `":` + value + "}"
		}
	}
	return bodies
}

// CheckCost checks that decode takes no more than a few times what encoding/json needs to check that
// body is JSON. what names the decoder and the body.
func CheckCost(t *testing.T, what, body string, decode func(body []byte)) {
	t.Helper()
	const most, tries = 16, 30
	took := func(f func()) time.Duration {
		start := time.Now()
		f()
		return time.Since(start)
	}
	raw := []byte(body)
	plain, ours := time.Hour, time.Hour
	for range 2 { // the fastest of each, because other programs run, too
		plain = min(plain, took(func() { json.Valid(raw) }))
		ours = min(ours, took(func() { decode(raw) }))
	}
	// On a busy machine what takes longer is interrupted more often. Both sides take as long here.
	for try := 0; ours > most*plain && try < tries; try++ {
		plain = took(func() {
			for range most {
				json.Valid(raw)
			}
		}) / most
		ours = took(func() { decode(raw) })
	}
	if ours > most*plain {
		t.Errorf("%s, in %d bytes, takes %.1f times as long as the check that it is JSON", what, len(raw),
			float64(ours)/float64(plain))
	}
}

// CheckMessages checks that handling a hostile message of a model's client allocates no more memory than
// a number of copies of it, and what its values may take. Each message has the members of a valid one.
// Hostile members come after them, in each of the places: a text with members of the message, which
// has * where the hostile ones are; or an empty text. The names are those of each place.
func CheckMessages(t *testing.T, what, valid string, places map[string][]string, handle func(body []byte)) {
	t.Helper()
	const copies, ofValues = 64, 192 << 20
	sizes := []int{150 << 10, 4 << 20}
	if testing.Short() {
		sizes = sizes[:1] // one body for each name
	}
	var before, after runtime.MemStats
	for place, names := range places {
		for _, size := range sizes { // many of the small bodies have as many values as a message may
			bodies := map[string]string{}
			if testing.Short() {
				for _, name := range names {
					bodies[name] = `{"` + name + `":[` + strings.Repeat("1,", 1<<19) + "1]}"
				}
			} else {
				bodies = HostileBodies(size, names...)
			}
			for kind, body := range bodies {
				members := strings.TrimSuffix(strings.TrimPrefix(body, "{"), "}")
				if place != "" {
					members = strings.Replace(place, "*", members, 1)
				}
				raw := []byte("{" + valid + "," + members + "}")
				runtime.ReadMemStats(&before)
				handle(raw)
				runtime.ReadMemStats(&after)
				if n := after.TotalAlloc - before.TotalAlloc; n > copies*uint64(len(raw))+ofValues {
					t.Errorf("%s: %s with %s, in %d bytes, takes %d MiB", what, place, kind, len(raw), n>>20)
				}
			}
		}
	}
}
