package web

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// The media types of answers.
const (
	TypeJSON   = "application/json"
	TypeNDJSON = "application/x-ndjson"
	TypeSSE    = "text/event-stream"

	PreferAsync = "respond-async"
	PreferWait  = "wait"
)

// PreferenceOf returns the value of the first preference of that name, and whether there is one.
func PreferenceOf(h http.Header, name string) (value string, ok bool) {
	for _, item := range ListItems(h.Values("Prefer")) {
		preference, _, _ := strings.Cut(item, ";")
		token, value, _ := strings.Cut(preference, "=")
		if strings.EqualFold(strings.TrimSpace(token), name) {
			return strings.Trim(strings.TrimSpace(value), `"`), true
		}
	}
	return "", false
}

// Preferred returns the first of the supported types that the client accepts with the highest
// weight. Wildcards match the first type. A client that accepts none of them gets the first one: an
// answer is more useful than a rejection.
func Preferred(h http.Header, supported ...string) string {
	best, bestWeight := supported[0], 0.0
	for _, item := range ListItems(h.Values("Accept")) {
		parts := strings.Split(item, ";")
		name := strings.ToLower(strings.TrimSpace(parts[0]))
		major, _, _ := strings.Cut(supported[0], "/")
		if name == "*/*" || name == major+"/*" {
			name = supported[0]
		}
		if weight := WeightOf(parts[1:]); weight > bestWeight && slices.Contains(supported, name) {
			best, bestWeight = name, weight
		}
	}
	return best
}

// WeightOf returns the q parameter: 1 without one, 0 for an invalid one.
func WeightOf(params []string) float64 {
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

// ListItems splits the lines of a list header at commas outside quotes.
func ListItems(lines []string) []string {
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
