package proto

import (
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTraceID(t *testing.T) {
	form := regexp.MustCompile(`^trc_[a-zA-Z0-9_-]{1,20}$`) // the form that clients accept
	seen := map[TraceID]bool{}
	for range 1000 {
		id := NewTraceID()
		if !form.MatchString(string(id)) || seen[id] {
			t.Fatalf("trace id %s", id)
		}
		seen[id] = true
		otel, err := id.OTel()
		if err != nil || otel[0] == 0 {
			t.Fatalf("OpenTelemetry id %x, %v", otel, err)
		}
		if back, ok := TraceIDFromOTel(otel); !ok || back != id {
			t.Fatalf("%s comes back as %s", id, back)
		}
	}
	if _, ok := TraceIDFromOTel([16]byte{1}); ok {
		t.Error("a foreign OpenTelemetry id is taken for one of ours")
	}
	for _, bad := range []string{
		"", "trc_", "trc_short", "TRC_AbCdEfGhIjKlMnOpQrSt", "trc_AbCdEfGhIjKlMnOpQrS=",
		"trc_AbCdEfGhIjKlMnOpQrStu", "trc_AbCdEfGhIj\nKlMnOpQrS",
	} {
		if _, err := ParseTraceID(bad); !errors.Is(err, ErrBadTraceID) {
			t.Errorf("%q: %v", bad, err)
		}
		if _, err := TraceID(bad).OTel(); !errors.Is(err, ErrBadTraceID) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestTraceIDInContext(t *testing.T) {
	if _, ok := TraceIDFromContext(t.Context()); ok {
		t.Error("a trace id from nowhere")
	}
	if id, ok := TraceIDFromContext(ContextWithTraceID(t.Context(), testTrace)); !ok || id != testTrace {
		t.Errorf("trace id %s", id)
	}
}

func TestResults(t *testing.T) {
	for _, tt := range []struct {
		result Result
		exit   int
		text   string
		status Status
		stream Status
	}{
		{Exited(0), 0, "", StatusSuccess, StatusSuccess},
		{Exited(1), 1, "", StatusFailed, StatusFailed},
		{Signaled(9), 137, "", StatusFailed, StatusFailed},
		{TimedOut(30), -1, "execution timed out after 30s", StatusTimeout, StatusTimeout},
		{Cancelled(), -1, "Cancelled by user", StatusCancelled, StatusCancelled},
		{Failure(CodeMemory, ""), -1, "memory_limit_exceeded", StatusOOM, StatusFailed},
		{Failure(CodeHostMemory, ""), -1, "host_out_of_memory", StatusFailed, StatusFailed},
		{Failure(CodeSeccomp, ""), -1, "security_policy_violation", StatusSeccomp, StatusFailed},
		{Failure(CodeWorkerLost, ""), -1, "worker_lost", StatusFailed, StatusFailed},
		{Failure(CodeExpiredInQueue, ""), -1, "expired_in_queue", StatusFailed, StatusFailed},
	} {
		text := ""
		if tt.result.Error != nil {
			text = *tt.result.Error
		}
		if tt.result.ExitCode != tt.exit || text != tt.text || tt.result.Status() != tt.status ||
			tt.status.Stream() != tt.stream ||
			tt.result.Success != (tt.exit == 0) || !tt.status.Terminal() {
			t.Errorf("%+v: %s", tt, tt.result.Status())
		}
	}
	if StatusQueued.Terminal() || StatusRunning.Terminal() {
		t.Error("a job that has not ended is terminal")
	}
}

func TestResultOfAHomeThatWasNotSaved(t *testing.T) {
	for name, tt := range map[string]struct {
		ended   Result
		code    *int
		message string
	}{
		"success":  {Exited(0), new(0), "No room."},
		"failure":  {Exited(3), new(3), "No room."},
		"signal":   {Signaled(9), new(137), "No room."},
		"timeout":  {TimedOut(2), nil, "The program did not end within its timeout of 2 s and was killed. No room."},
		"platform": {Failure(CodeMemory, "Too much."), nil, "Too much. No room."},
	} {
		tt.ended.Stdout, tt.ended.Stderr, tt.ended.StdoutTruncated, tt.ended.StderrTruncated, tt.ended.DurationMS = "o", "e",
			true, true, 9
		want := Failure(CodeThreadSave, tt.message)
		want.Stdout, want.Stderr, want.StdoutTruncated, want.StderrTruncated, want.DurationMS = "o", "e", true, true, 9
		want.ProgramExitCode = tt.code
		before := tt.ended
		got := tt.ended.Unsaved("No room.")
		if d := cmp.Diff(want, got); d != "" || got.Status() != StatusFailed || got.ExitCode != -1 {
			t.Errorf("%s: %s", name, d)
		}
		if d := cmp.Diff(before, tt.ended); d != "" {
			t.Errorf("%s changed: %s", name, d)
		}
	}
}

func TestClasses(t *testing.T) {
	for mode, class := range map[Mode]Class{
		ModeInline: ClassInteractive, ModeStreaming: ClassInteractive,
		ModeAsync: ClassBackground,
	} {
		if m := (Meta{Mode: mode}); m.Class() != class {
			t.Errorf("class of %s is %s", mode, m.Class())
		}
	}
}

func TestKeyForm(t *testing.T) {
	secret := NewKeySecret("local")
	if err := CheckKeyForm(secret); err != nil {
		t.Error(err)
	}
	if other := KeyFormatE2B.NewSecret("local"); CheckKeyForm(other) != nil || !strings.HasPrefix(other, "e2b_") ||
		len(other) != len("e2b_")+64 || strings.HasPrefix(KeyFormat("").NewSecret("local"), "e2b_") {
		t.Error(other)
	}
	for _, bad := range []string{
		"e2b_" + strings.Repeat("a", 39), "e2b_" + strings.Repeat("A", 40), "e2b_" + strings.Repeat("g", 40),
		"", "sk-local-short", "sk-Local-" + strings.Repeat("a", 20),
		"sk--" + strings.Repeat("a", 20), secret + "\n", secret + strings.Repeat("a", MaxKeyBytes),
	} {
		if err := CheckKeyForm(bad); !errors.Is(err, ErrBadKeyForm) {
			t.Errorf("%.40q: %v", bad, err)
		}
	}
	for _, s := range []string{
		secret, "sk-r-" + strings.Repeat("a", 20), "sk-" + strings.Repeat("r", 40) + "-" + strings.Repeat("a", 20),
	} {
		if hint := KeyHint(s); len(hint) > 20 || !strings.HasPrefix(s, strings.Split(hint, "…")[0]) {
			t.Errorf("hint %s", hint)
		}
	}
}

func TestPresetPlans(t *testing.T) {
	plans := PresetPlans()
	for i, p := range plans {
		got, ok := PresetPlan(p.Name)
		if !ok || got != p {
			t.Errorf("plan %s: %+v", p.Name, got)
		}
		if err := p.Validate(); err != nil {
			t.Errorf("plan %s: %v", p.Name, err)
		}
		if i > 0 && (!plans[i-1].Within(p) || p.Within(plans[i-1]) && p != plans[i-1]) {
			t.Errorf("%s does not allow more than %s", p.Name, plans[i-1].Name)
		}
		if _, ok := PresetPlan(p.Next); p.Next != "" && !ok {
			t.Errorf("after %s comes %q", p.Name, p.Next)
		}
	}
	if _, ok := PresetPlan("gold"); ok {
		t.Error("there is a plan gold")
	}
}

func TestPlanNarrows(t *testing.T) {
	unlimited := Plan{Name: "u", Weight: 2, Streaming: true, Async: true}
	small := Plan{Name: "s", Weight: 1, Concurrent: 5, MaxTimeout: 60, Streaming: true}
	mixed := Plan{Name: "m", Weight: 1, Concurrent: 7, MaxQueued: 3, MaxTimeout: 30, Async: true}
	for _, tt := range []struct{ p, other, want Plan }{
		{unlimited, unlimited, unlimited},
		{unlimited, small, Plan{Name: "u", Weight: 2, Concurrent: 5, MaxTimeout: 60, Streaming: true}},
		{small, unlimited, small},
		{mixed, unlimited, mixed},
		{small, mixed, Plan{Name: "s", Weight: 1, Concurrent: 5, MaxTimeout: 30}},
	} {
		if got := tt.p.Narrow(tt.other); got != tt.want {
			t.Errorf("%s narrowed by %s: %+v, want %+v", tt.p.Name, tt.other.Name, got, tt.want)
		}
		if got, want := tt.p.Within(tt.other), tt.p.Narrow(tt.other) == tt.p; got != want {
			t.Errorf("%s within %s: %t", tt.p.Name, tt.other.Name, got)
		}
	}
}

func TestRejectionHasAReason(t *testing.T) {
	if got := (&Rejection{Reason: RejectedConcurrency, Used: 5, Limit: 5}).Error(); !strings.Contains(
		got, "concurrency") || !strings.Contains(got, "5 of 5") {
		t.Error(got)
	}
}
