package api

import "github.com/bullpen-run/bullpen/proto"

// formatOf returns the check of a format tag, nil if any string is valid, and the JSON schema that
// documents the format. The check's errors are [*proto.FieldError] for the field that it is called
// with.
func formatOf(name string) (check func(field, text string) error, schema object) {
	switch name {
	case "thread-id":
		return proto.CheckThreadID, object{"pattern": "^[A-Za-z0-9][A-Za-z0-9_-]*$", "maxLength": proto.MaxThreadIDLen}
	case "webhook-url":
		return proto.CheckWebhookURL, object{"format": "uri", "maxLength": proto.MaxWebhookURLLen}
	case "webhook-secret":
		check = func(_, text string) error { return proto.CheckWebhookSecret(text) }
		return check, object{"minLength": proto.MinWebhookSecretLen, "maxLength": proto.MaxWebhookSecretLen}
	case "profile-name":
		return proto.CheckProfileForm, object{"pattern": "^[a-z0-9][a-z0-9._-]{0,62}$"}
	case "plan":
		return nil, object{"enum": planNames()}
	case "trace-id":
		return nil, object{"pattern": "^trc_[A-Za-z0-9_-]{20}$", "examples": []string{exampleTrace}, "description": "Names one execution."}
	case "error-code":
		return nil, object{"enum": texts(proto.ErrorCodes())}
	default:
		return nil, nil
	}
}

func planNames() []string {
	var names []string
	for _, p := range proto.Plans() {
		names = append(names, p.Name)
	}
	return names
}
