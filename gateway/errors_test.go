package gateway

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func TestToAPI(t *testing.T) {
	const id = proto.TraceID("trc_AbCdEfGhIjKlMnOpQrSt")
	pro, _ := proto.PresetPlan("pro")
	free, enterprise := entitlement{next: &pro}, entitlement{}
	refused := func(r proto.Reason) error { return &proto.Rejection{Reason: r, Used: 5, Limit: 5} }
	for _, tt := range []struct {
		err    error
		plan   entitlement
		status int
		code   api.Code
		retry  int
		text   string // empty for any
	}{
		{&proto.FieldError{Field: "code", Message: "code is bad"}, free, 400, "validation_error", 0, "code is bad"},
		{unauthorized(), free, 401, "unauthorized", 0, ""},
		{errNoRoute, free, 404, "not_found", 0, ""},
		{proto.ErrNotFound, free, 404, "not_found", 0, ""},
		{deadLetterError(proto.ErrNotFound), free, 404, "not_found", 0, "there is no dead letter of that id; see /v1/admin/dead-letters"},
		{threadError("x", "t", proto.ErrNotFound), free, 404, "not_found", 0, "there is no thread of that id; see /v1/threads"},
		{
			versionError("x", "t", 2, proto.ErrNotFound), free, 404, "not_found", 0,
			"there is no such thread, or it does not have that version; see /v1/threads/{id}",
		},
		{webhookError(proto.ErrNotFound), free, 404, "not_found", 0, "this API key has no webhook settings; PUT them at /v1/webhook"},
		{proto.ErrConflict, free, 409, "conflict", 0, "somebody else changed this at the same time; send the request again"},
		{proto.ErrSubmissionPending, free, 409, "conflict", 0, ""},
		{proto.ErrExists, free, 409, "conflict", 0, "there is one of that name already; choose another, or replace it"},
		{&proto.LastKeyError{Key: "key_1"}, free, 409, "conflict", 0, "API key key_1 is the last one of a global administrator; create another one first"},
		{&proto.BoundError{Profile: "web", Keys: []string{"key_1"}}, free, 409, "conflict", 0, "sandbox web has API keys bound to it: key_1; revoke them first"},
		{
			imageInUse("py", []string{"a", "b", "c", "d", "e"}), free, 409, "conflict", 0,
			"image py is used by the sandbox a, b, c and 2 more; change its image or remove the sandbox first",
		},
		{
			&proto.BusyError{Thread: "t", Holder: id}, free, 409, "conflict", 0,
			"thread t is in use by execution trc_AbCdEfGhIjKlMnOpQrSt; wait until that has ended, cancel it, or use another thread",
		},
		{
			&proto.RemovingError{Thread: "t"}, free, 409, "conflict", 0,
			"thread t is being removed; try again, or remove it again if that was interrupted",
		},
		{
			&proto.StagedError{Thread: "t", Files: 500}, free, 409, "conflict", 0,
			"thread t has 500 staged files already; at most 500, whose names and keys take 256KiB, may wait for its next execution; run one first",
		},
		{bodyTooLarge(8), free, 413, "payload_too_large", 0, "body must be at most 8 bytes"},
		{refused(proto.RejectedConcurrency), free, 429, "rate_limited", 1, "concurrent execution limit reached (5/5). Upgrade to Pro for 100 concurrent executions."},
		{refused(proto.RejectedConcurrency), enterprise, 429, "rate_limited", 1, "concurrent execution limit reached (5/5)."},
		{refused(proto.RejectedConcurrency), entitlement{next: &proto.Plan{Title: "Large"}}, 429, "rate_limited", 1, "concurrent execution limit reached (5/5). Upgrade to Large for any number of concurrent executions."},
		{refused(proto.RejectedKeyConcurrency), free, 429, "rate_limited", 1, "concurrent execution limit of this API key reached (5/5)."},
		{refused(proto.RejectedQueueFull), free, 429, "rate_limited", 5, "queued execution limit reached (5/5). Upgrade to Pro for 1000 queued executions."},
		{refused(proto.RejectedUnavailable), free, 503, "service_unavailable", 2, ""},
		{refused("new"), free, 503, "service_unavailable", 2, ""},
		{errors.New("disk on fire"), free, 500, "internal", 0, ""},
		{brokenSandbox("the sandbox %q does not exist", "web"), free, 500, "internal", 0, ""},
		{notImplemented("source volume is", "use source thread"), free, 501, "not_implemented", 0, "source volume is not implemented by this server yet; use source thread"},
		{errBadURL, free, 403, "forbidden", 0, ""},
		{errOldURL, free, 403, "forbidden", 0, ""},
		{errDraining, free, 503, "service_unavailable", 2, ""},
		{context.DeadlineExceeded, free, 503, "service_unavailable", 2, ""},
		{afterAcceptance(id, context.DeadlineExceeded), free, 500, "internal", 0, "something failed on our side after the execution was accepted; " +
			"it may run: ask for it at /v1/executions/trc_AbCdEfGhIjKlMnOpQrSt"},
	} {
		for _, err := range []error{tt.err, fmt.Errorf("wrapped: %w", tt.err)} {
			got := toAPI(err, &tt.plan)
			if got.Code.Status() != tt.status || got.Code != tt.code || got.RetryAfter != tt.retry || got.Message == "" ||
				(tt.text != "" && got.Message != tt.text) {
				t.Errorf("%v: %+v", err, got)
			}
		}
	}
}
