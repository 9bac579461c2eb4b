// Package api defines the HTTP API once: the request and response types of every route, their
// validation, the table of routes, the error codes, and the OpenAPI document generated from all of
// them. The gateway and the command line's client use the same types.
//
// Struct tags describe fields. Requests are checked against the tags, and the OpenAPI document
// shows them:
//
//	json           the name; a field without omitempty is documented as required
//	doc            the description
//	required       "true": a request without the field is refused
//	default        the value of a field that the request omits
//	minimum, maximum, maxItems, maxProperties, enum, format
//	               limits that [Decode] checks; formatOf lists the formats
//	minLength, maxLength, pattern, uniqueItems, keyPattern, keyMaxLength, valuePattern, valueMaxLength
//	               limits that are only documented; Validate checks them
//	must           the text of the error for a value beyond the limits, without "must"
//
// The blank field of a struct carries the tags of the object as a whole: doc, partial:"true" for
// requests whose fields are all optional, and additionalProperties:"true" for requests whose
// unknown members are ignored. Other requests with unknown members are refused.
package api
