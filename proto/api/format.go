package api

import "github.com/bullpen-run/bullpen/proto"

// webhookURLPattern allows no user name, no empty host, no spaces and no control characters.
const webhookURLPattern = `^[hH][tT][tT][pP][sS]?://` +
	`[^\u0000-\u0020\u007F-\u00A0/?#@:][^\u0000-\u0020\u007F-\u00A0/?#@]*` +
	`([/?#][^\u0000-\u0020\u007F-\u00A0]*)?$`

// formatOf returns the check of a format tag, nil if any string is valid, and the JSON schema that
// documents the format. The check's errors are [*proto.FieldError] for the field that it is called
// with.
func formatOf(name string) (check func(field, text string) error, schema object) {
	switch name {
	case "thread-id":
		return proto.CheckThreadID, object{"pattern": "^[A-Za-z0-9][A-Za-z0-9_-]*$", "maxLength": proto.MaxThreadIDLen}
	case "webhook-url":
		return proto.CheckWebhookURL,
			object{"format": "uri", "maxLength": proto.MaxWebhookURLLen, "pattern": webhookURLPattern}
	case "webhook-secret":
		check = func(_, text string) error { return proto.CheckWebhookSecret(text) }
		return check, object{
			"minLength": proto.MinWebhookSecretLen, "maxLength": proto.MaxWebhookSecretLen,
			"anyOf": []object{
				{"not": object{"type": "string", "pattern": "^whsec_"}},
				{"pattern": "^whsec_[A-Za-z0-9+/]{32,86}={0,2}$"},
			},
		}
	case "path": // [proto.CleanFilePath] checks it
		return nil, object{
			"pattern": `^[^/\u0000]{0,255}(/[^/\u0000]{0,255})*$`,
			"not":     object{"type": "string", "pattern": `(^|/)\.\.(/|$)`},
		}
	case "profile-name":
		return proto.CheckProfileForm, object{"pattern": "^[a-z0-9][a-z0-9._-]{0,62}$"}
	case "plan":
		return proto.CheckPlanName, object{"pattern": "^[a-z0-9][a-z0-9_-]{0,62}$", "examples": []string{"pro"}}
	case "trace-id":
		return nil, object{
			"pattern": "^trc_[A-Za-z0-9_-]{20}$", "examples": []string{exampleTrace},
			"description": "Names one execution.",
		}
	case "error-code":
		return nil, object{"enum": texts(proto.ErrorCodes())}
	default:
		return nil, nil
	}
}
