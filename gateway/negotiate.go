package gateway

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	typeJSON   = "application/json"
	typeNDJSON = "application/x-ndjson"
	typeSSE    = "text/event-stream"

	preferAsync = "respond-async"
	preferWait  = "wait"
)

// modeOf returns the mode that the client asks for. Async has precedence over the accepted types.
func modeOf(h http.Header) proto.Mode {
	if _, async := preferenceOf(h, preferAsync); async {
		return proto.ModeAsync
	}
	if preferred(h, typeJSON, typeNDJSON, typeSSE) != typeJSON {
		return proto.ModeStreaming
	}
	return proto.ModeInline
}

// preferenceOf returns the value of the first preference of that name, and whether there is one.
func preferenceOf(h http.Header, name string) (value string, ok bool) {
	for _, item := range listItems(h.Values("Prefer")) {
		preference, _, _ := strings.Cut(item, ";")
		token, value, _ := strings.Cut(preference, "=")
		if strings.EqualFold(strings.TrimSpace(token), name) {
			return strings.Trim(strings.TrimSpace(value), `"`), true
		}
	}
	return "", false
}

// waitOf returns how long the client wants its execution to wait for a worker, 0 if it does not
// say.
func waitOf(h http.Header) (time.Duration, error) {
	value, ok := preferenceOf(h, preferWait)
	if !ok {
		return 0, nil
	}
	seconds, err := strconv.Atoi(value)
	if err != nil || seconds < 1 || seconds > api.MaxQueueWait {
		return 0, api.Errorf(api.CodeValidation, "Prefer: wait must be a whole number of seconds from 1 to %d", api.MaxQueueWait)
	}
	return time.Duration(seconds) * time.Second, nil
}

// preferred returns the first of the supported types that the client accepts with the highest
// weight. Wildcards match the first type. A client that accepts none of the types gets the first
// one: an answer is of more use than a rejection.
func preferred(h http.Header, supported ...string) string {
	best, bestWeight := supported[0], 0.0
	for _, item := range listItems(h.Values("Accept")) {
		parts := strings.Split(item, ";")
		name := strings.ToLower(strings.TrimSpace(parts[0]))
		major, _, _ := strings.Cut(supported[0], "/")
		if name == "*/*" || name == major+"/*" {
			name = supported[0]
		}
		if weight := weightOf(parts[1:]); weight > bestWeight && slices.Contains(supported, name) {
			best, bestWeight = name, weight
		}
	}
	return best
}

// weightOf returns the q parameter: 1 without one, 0 for an invalid one.
func weightOf(params []string) float64 {
	for _, param := range params {
		name, value, _ := strings.Cut(param, "=")
		if !strings.EqualFold(strings.TrimSpace(name), "q") {
			continue
		}
		q, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil || !(q >= 0 && q <= 1) {
			return 0
		}
		return q
	}
	return 1
}

// listItems splits the lines of a list header at commas outside quotes.
func listItems(lines []string) []string {
	var items []string
	for _, line := range lines {
		start, quoted := 0, false
		for i := 0; i < len(line); i++ {
			switch {
			case line[i] == '"':
				quoted = !quoted
			case line[i] == '\\' && quoted:
				i++
			case line[i] == ',' && !quoted:
				items = append(items, strings.TrimSpace(line[start:i]))
				start = i + 1
			}
		}
		items = append(items, strings.TrimSpace(line[start:]))
	}
	return items
}
