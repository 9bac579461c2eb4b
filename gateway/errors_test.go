package gateway

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

func TestAnswerTo(t *testing.T) {
	free, _ := proto.PlanByName("free")
	enterprise, _ := proto.PlanByName("enterprise")
	refused := func(r proto.Reason) error { return &proto.Refusal{Reason: r, Used: 5, Limit: 5} }
	for _, tt := range []struct {
		err    error
		plan   proto.Plan
		status int
		code   string
		retry  int
		text   string // empty for any
	}{
		{&proto.FieldError{Field: "code", Message: "code is bad"}, free, 400, "validation_error", 0, "code is bad"},
		{errUnauthorized, free, 401, "unauthorized", 0, ""},
		{errForbidden, free, 403, "forbidden", 0, ""},
		{errNoRoute, free, 404, "not_found", 0, ""},
		{proto.ErrNotFound, free, 404, "not_found", 0, ""},
		{errMethod, free, 405, "method_not_allowed", 0, ""},
		{proto.ErrConflict, free, 409, "conflict", 0, ""},
		{proto.ErrExists, free, 409, "conflict", 0, ""},
		{&proto.BoundError{Profile: "web", Keys: []string{"key_1"}}, free, 409, "conflict", 0, "sandbox web has API keys bound to it: key_1; revoke them first"},
		{
			&usedImageError{"py", []string{"a", "b", "c", "d", "e"}}, free, 409, "conflict", 0,
			"image py is that of the sandbox a, b, c and 2 more; give that another image or remove it first",
		},
		{&bodyTooLargeError{8}, free, 413, "payload_too_large", 0, "body must be at most 8 bytes"},
		{errEncoded, free, 415, "unsupported_media_type", 0, ""},
		{errIdempotency, free, 422, "idempotency_mismatch", 0, ""},
		{&planError{"no"}, free, 429, "rate_limited", 0, "no"},
		{refused(proto.RefusedConcurrency), free, 429, "rate_limited", 1, "concurrent execution limit reached (5/5). Upgrade to Pro for 100 concurrent executions."},
		{refused(proto.RefusedConcurrency), enterprise, 429, "rate_limited", 1, "concurrent execution limit reached (5/5)."},
		{refused(proto.RefusedKeyConcurrency), free, 429, "rate_limited", 1, "concurrent execution limit of this API key reached (5/5)."},
		{refused(proto.RefusedQueueFull), free, 429, "rate_limited", 5, "queued execution limit reached (5/5). Upgrade to Pro for 1000 queued executions."},
		{refused(proto.RefusedUnavailable), free, 503, "service_unavailable", 2, ""},
		{refused("new"), free, 503, "service_unavailable", 2, ""},
		{errors.New("disk on fire"), free, 500, "internal", 0, ""},
		{errNoWebhook, free, 404, "not_found", 0, errNoWebhook.Error()},
		{errNoSettings, free, 404, "not_found", 0, errNoSettings.Error()},
		{errNoEndpoint, free, 404, "not_found", 0, errNoEndpoint.Error()},
		{errPending, free, 409, "conflict", 0, errPending.Error()},
		{
			&disabledURLError{"https://a.example/"}, free, 409, "conflict", 0,
			"deliveries to https://a.example/ are disabled; once it answers again, POST its URL to /v1/webhook/endpoints/enable",
		},
		{&brokenSandboxError{"the sandbox \"web\" does not exist"}, free, 500, "internal", 0, ""},
		{&unimplementedError{"sub_paths is", "leave it out"}, free, 501, "not_implemented", 0, "sub_paths is not implemented by this server yet; leave it out"},
		{
			&proto.BusyError{Thread: "t", Holder: "trc_AbCdEfGhIjKlMnOpQrSt"}, free, 409, "conflict", 0,
			"thread t is in use by execution trc_AbCdEfGhIjKlMnOpQrSt; wait until that has ended, cancel it, or use another thread",
		},
		{&proto.StagedError{Thread: "t", Files: 500}, free, 409, "conflict", 0, ""},
		{errThreadExists, free, 409, "conflict", 0, errThreadExists.Error()},
		{errNoThread, free, 404, "not_found", 0, errNoThread.Error()},
		{errBadURL, free, 403, "forbidden", 0, errBadURL.Error()},
		{errOldURL, free, 403, "forbidden", 0, errOldURL.Error()},
		{errTransfers, free, 429, "rate_limited", 1, errTransfers.Error()},
		{errLength, free, 411, "length_required", 0, errLength.Error()},
		{errRange, free, 416, "range_not_satisfiable", 0, errRange.Error()},
		{errDraining, free, 503, "service_unavailable", 2, ""},
		{errExpired, free, 503, "service_unavailable", 1, ""},
		{errNoDispatcher, free, 503, "service_unavailable", 1, ""},
		{errUnknownState, free, 503, "service_unavailable", 2, ""},
		{context.DeadlineExceeded, free, 503, "service_unavailable", 2, ""},
		{&acceptedError{context.DeadlineExceeded}, free, 500, "internal", 0, "something failed on our side after the execution was accepted; " +
			"it may run: ask for it at /v1/executions/trc_AbCdEfGhIjKlMnOpQrSt"},
		{errNoAnswerInTime, free, 504, "gateway_timeout", 0, "the execution did not end in time for an answer; it is recorded: " +
			"ask for it at /v1/executions/trc_AbCdEfGhIjKlMnOpQrSt"},
	} {
		for _, err := range []error{tt.err, fmt.Errorf("wrapped: %w", tt.err)} {
			got := answerTo(err, tt.plan, "trc_AbCdEfGhIjKlMnOpQrSt")
			if got.status != tt.status || got.code != tt.code || got.retryAfter != tt.retry || got.message == "" ||
				(tt.text != "" && got.message != tt.text) {
				t.Errorf("%v: %+v", err, got)
			}
		}
	}
}
