package sessions

import "strings"

// Problem is the body of an error, in the form of the Sandbox Agent API.
type Problem struct {
	Type    string         `json:"type"`
	Title   string         `json:"title"`
	Status  int            `json:"status"`
	Detail  string         `json:"detail"`
	Agent   string         `json:"agent,omitempty"`
	Session string         `json:"sessionId,omitempty"`
	Details map[string]any `json:"details,omitempty"`
}

// NewProblem returns the problem with a code, such as session_not_found.
func NewProblem(code string, status int, detail string) *Problem {
	words := strings.Split(code, "_")
	for i, word := range words {
		words[i] = strings.ToUpper(word[:1]) + word[1:]
	}
	return &Problem{
		Type: "urn:sandbox-agent:error:" + code, Title: strings.Join(words, " "), Status: status, Detail: detail,
	}
}

// Error implements error.
func (p *Problem) Error() string { return p.Detail }
