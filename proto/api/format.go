package api

import "github.com/bullpen-run/bullpen/proto"

// formatOf returns the check of a format tag and the JSON schema that documents it; nil if there is no such format. The
// check's errors are [*proto.FieldError] for the field that it is given.
func formatOf(name string) (check func(field, text string) error, schema map[string]any) {
	switch name {
	case "thread-id":
		return proto.CheckThreadID, map[string]any{"pattern": "^[A-Za-z0-9][A-Za-z0-9_-]*$", "maxLength": proto.MaxThreadIDLen}
	case "webhook-url":
		return proto.CheckWebhookURL, map[string]any{"format": "uri", "maxLength": proto.MaxWebhookURLLen}
	default:
		return nil, nil
	}
}
