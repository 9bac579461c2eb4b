package agenttest

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// CheckNulls fails the test if an answer or stream event has a null member that is not nullable.
// what names the answer.
func CheckNulls(t *testing.T, what, answer string, nullable []string) {
	t.Helper()
	documents := []string{answer}
	if strings.HasPrefix(answer, "event:") {
		documents = nil
		for line := range strings.Lines(answer) {
			if data, ok := strings.CutPrefix(line, "data: "); ok && data != "[DONE]\n" {
				documents = append(documents, data)
			}
		}
	}
	for _, text := range documents {
		var v any
		if err := json.Unmarshal([]byte(text), &v); err != nil {
			t.Errorf("%s: %v: %s", what, err, text)
		}
		checkNulls(t, what, "", v, nullable)
	}
}

func checkNulls(t *testing.T, what, path string, v any, nullable []string) {
	t.Helper()
	switch v := v.(type) {
	case nil:
		if name := path[strings.LastIndex(path, ".")+1:]; !slices.Contains(nullable, name) {
			t.Errorf("%s: %s is null", what, path)
		}
	case map[string]any:
		for name, member := range v {
			checkNulls(t, what, path+"."+name, member, nullable)
		}
	case []any:
		for _, element := range v {
			checkNulls(t, what, path+"[]", element, nullable)
		}
	}
}
