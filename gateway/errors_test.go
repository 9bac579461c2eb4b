package gateway

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func TestToAPI(t *testing.T) {
	const id = proto.TraceID("trc_AbCdEfGhIjKlMnOpQrSt")
	pro, _ := proto.PresetPlan("pro")
	refused := func(r proto.Reason, next ...*proto.Plan) error {
		rejection := &proto.Rejection{Reason: r, Used: 5, Limit: 5}
		for _, plan := range next {
			rejection.Plan = &proto.PlanLimit{Next: plan}
		}
		return rejection
	}
	for _, tt := range []struct {
		err    error
		status int
		code   api.Code
		retry  int
		text   string // empty for any
	}{
		{&proto.FieldError{Field: "code", Message: "code is bad"}, 400, "validation_error", 0, "code is bad"},
		{web.Unauthorized(), 401, "unauthorized", 0, ""},
		{web.ErrNoRoute, 404, "not_found", 0, ""},
		{proto.ErrNotFound, 404, "not_found", 0, ""},
		{web.ThreadError("x", "t", proto.ErrNotFound), 404, "not_found", 0, "there is no thread of that id; see /v1/threads"},
		{proto.ErrConflict, 409, "conflict", 0, "somebody else changed this at the same time; send the request again"},
		{proto.ErrSubmissionPending, 409, "conflict", 0, ""},
		{proto.ErrExists, 409, "conflict", 0, "there is one of that name already; choose another, or replace it"},
		{
			&proto.LastKeyError{Key: "key_1"}, 409, "conflict", 0,
			"API key key_1 is the last one of a global administrator; create another one first",
		},
		{
			&proto.BoundError{Profile: "web", Keys: []string{"key_1"}}, 409, "conflict", 0,
			"profile web has API keys bound to it: key_1; revoke them first, or remove it from their profiles",
		},
		{
			&proto.BusyError{Thread: "t", Holder: id}, 409, "conflict", 0,
			"thread t is in use by execution trc_AbCdEfGhIjKlMnOpQrSt; wait until that has ended, cancel it, or use " +
				"another thread",
		},
		{
			&proto.RemovingError{Thread: "t"}, 409, "conflict", 0,
			"thread t is being removed; try again, or remove it again if that was interrupted",
		},
		{
			&proto.StagedError{Thread: "t", Files: 500}, 409, "conflict", 0,
			"thread t has 500 staged files already; at most 500, whose names and keys take 256KiB, may wait for its next " +
				"execution; run one first",
		},
		{web.BodyTooLarge(8), 413, "payload_too_large", 0, "body must be at most 8 bytes"},
		{
			refused(proto.RejectedConcurrency, &pro), 429, "rate_limited", 1,
			"concurrent execution limit reached (5/5). Upgrade to Pro for 100 concurrent executions.",
		},
		{refused(proto.RejectedConcurrency), 429, "rate_limited", 1, "concurrent execution limit reached (5/5)."},
		{
			refused(proto.RejectedConcurrency, &proto.Plan{Title: "Large"}), 429, "rate_limited", 1,
			"concurrent execution limit reached (5/5). Upgrade to Large for any number of concurrent executions.",
		},
		{
			refused(proto.RejectedKeyConcurrency), 429, "rate_limited", 1,
			"concurrent execution limit of this API key reached (5/5).",
		},
		{
			refused(proto.RejectedQueueFull, &pro), 429, "rate_limited", 5,
			"queued execution limit reached (5/5). Upgrade to Pro for 1000 queued executions.",
		},
		{refused(proto.RejectedUnavailable), 503, "service_unavailable", 2, ""},
		{refused("new"), 503, "service_unavailable", 2, ""},
		{errors.New("disk on fire"), 500, "internal", 0, ""},
		{&proto.Rejection{Reason: proto.RejectedNoProfile, Name: "web"}, 409, "conflict", 0, ""},
		{
			web.NotImplemented("source volume is", "use source thread"), 501, "not_implemented", 0,
			"source volume is not implemented by this server yet; use source thread",
		},
		{web.ErrDraining, 503, "service_unavailable", 2, ""},
		{context.DeadlineExceeded, 503, "service_unavailable", 2, ""},
		{
			web.AfterAcceptance(id, context.DeadlineExceeded), 500, "internal", 0,
			"something failed on our side after the execution was accepted; " +
				"it may run: ask for it at /v1/executions/trc_AbCdEfGhIjKlMnOpQrSt",
		},
	} {
		for _, err := range []error{tt.err, fmt.Errorf("wrapped: %w", tt.err)} {
			got := api.NewError(err)
			if got.Code.Status() != tt.status || got.Code != tt.code || got.RetryAfter != tt.retry || got.Message == "" ||
				(tt.text != "" && got.Message != tt.text) {
				t.Errorf("%v: %+v", err, got)
			}
		}
	}
}
