package registry_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// webhooks opens the settings like a process.
func webhooks(t *testing.T, s nats.InProcessConnProvider, log *slog.Logger) *registry.Webhooks {
	t.Helper()
	w, err := registry.OpenWebhooks(storetest.Context(t), storetest.Open(t, s), nil, log)
	if err != nil {
		t.Fatal(err)
	}
	runUntilEnd(t, w.Run)
	return w
}

// to returns a change that replaces the settings by s.
func to(s proto.Webhook) func(*proto.Webhook) (proto.Webhook, error) {
	return func(*proto.Webhook) (proto.Webhook, error) { return s, nil }
}

func TestWebhookSettingsAreKnownEverywhereUntilTheyAreRemoved(t *testing.T) {
	s := storetest.Server(t)
	here, there := webhooks(t, s, storetest.Log(t)), webhooks(t, s, storetest.Log(t))
	ctx := storetest.Context(t)
	if d := cmp.Diff(proto.DefaultWebhook(), here.Webhook("acme", "key_1")); d != "" {
		t.Errorf("nothing is set: %s", d)
	}
	if _, err := here.Stored(ctx, "acme", "key_1"); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("nothing is set: %v", err)
	}
	want := proto.Webhook{
		URL: "https://example.com/a", Secret: "0123456789abcdef", OldSecret: "fedcba9876543210",
		OldUntil:    time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
		MaxAttempts: 5, Waits: []proto.Seconds{proto.Seconds(time.Second / 4)}, SignatureHeaders: []string{},
		Timeout: proto.Seconds(time.Second),
	}
	set, err := here.Change(ctx, "acme", "key_1", func(old *proto.Webhook) (proto.Webhook, error) {
		if old != nil {
			t.Errorf("there was %+v", old)
		}
		return want, nil
	})
	if err != nil || set.UpdatedAt.IsZero() {
		t.Fatalf("%+v, %v", set, err)
	}
	want.UpdatedAt = set.UpdatedAt
	same := func(where string, w *registry.Webhooks) {
		t.Helper()
		got := w.Webhook("acme", "key_1")
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", where, d)
		}
		got.Waits[0] = 7 // by a caller that changes the result
		if stored, err := w.Stored(ctx, "acme", "key_1"); err != nil || !cmp.Equal(want, stored) {
			t.Errorf("%s, stored: %+v, %v", where, stored, err)
		}
		if d := cmp.Diff(proto.DefaultWebhook(), w.Webhook("acme", "key_2")); d != "" {
			t.Errorf("%s, another key: %s", where, d)
		}
	}
	eventually(t, "known elsewhere", func() bool { return there.Webhook("acme", "key_1").URL != "" })
	for range 2 {
		same("where it was set", here)
		same("elsewhere", there)
		same("in a process that starts later", webhooks(t, s, storetest.Log(t)))
	}

	no := errors.New("no")
	if _, err := there.Change(ctx, "acme", "key_1", func(*proto.Webhook) (proto.Webhook, error) {
		return proto.Webhook{}, no
	}); !errors.Is(err, no) {
		t.Errorf("a change that was given up: %v", err)
	}
	want, err = there.Change(ctx, "acme", "key_1", func(old *proto.Webhook) (proto.Webhook, error) {
		w := *old
		w.MaxAttempts = 9
		return w, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	same("where it was changed", there)
	eventually(t, "changed elsewhere", func() bool { return here.Webhook("acme", "key_1").MaxAttempts == 9 })

	if err := here.Remove(ctx, "acme", "key_1"); err != nil {
		t.Fatal(err)
	}
	unset := func(w *registry.Webhooks) bool { return cmp.Equal(proto.DefaultWebhook(), w.Webhook("acme", "key_1")) }
	if !unset(here) {
		t.Error("known where it was removed")
	}
	eventually(t, "removed elsewhere", func() bool { return unset(there) })
	if err := here.Remove(ctx, "acme", "key_1"); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("removed twice: %v", err)
	}
	if late := webhooks(t, s, storetest.Log(t)); !unset(late) {
		t.Error("known to a process that starts later")
	}
	if want, err = there.Change(ctx, "acme", "key_1", to(want)); err != nil {
		t.Fatalf("set again: %v", err)
	}
	eventually(t, "set again", func() bool { return !unset(here) })
	same("set again", here)
}

func TestWebhookSettingsAreFollowedAfterTheServerWasRestarted(t *testing.T) {
	s := storetest.NewRestartable(t)
	here, there := webhooks(t, s, storetest.Log(t)), webhooks(t, s, storetest.Log(t))
	ctx := storetest.Context(t)
	w := proto.DefaultWebhook()
	w.URL = "https://example.com/"
	if _, err := here.Change(ctx, "acme", "key_1", to(w)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "known elsewhere", func() bool { return there.Webhook("acme", "key_1").URL != "" })
	s.Restart()
	eventually(t, "removed", func() bool {
		once, cancel := context.WithTimeout(ctx, time.Second) // requests sent to the old server are never answered
		defer cancel()
		err := here.Remove(once, "acme", "key_1")
		return err == nil || errors.Is(err, proto.ErrNotFound)
	})
	eventually(t, "removed elsewhere", func() bool { return there.Webhook("acme", "key_1").URL == "" })
}

// No concurrent change undoes another.
func TestWebhookSettingsAreChangedConcurrently(t *testing.T) {
	s := storetest.Server(t)
	processes := []*registry.Webhooks{
		webhooks(t, s, storetest.Log(t)), webhooks(t, s, storetest.Log(t)),
		webhooks(t, s, storetest.Log(t)),
	}
	ctx := storetest.Context(t)
	const each = 20
	var group sync.WaitGroup
	for _, w := range processes {
		group.Go(func() {
			for range each {
				if _, err := w.Change(ctx, "acme", "key_1", func(old *proto.Webhook) (proto.Webhook, error) {
					if old == nil {
						old = &proto.Webhook{MaxAttempts: 1, Waits: []proto.Seconds{0}, Timeout: proto.Seconds(time.Second)}
					}
					next := *old
					next.Waits = append(next.Waits, proto.Seconds(time.Second))
					return next, nil
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	for i, w := range processes {
		eventually(t, fmt.Sprintf("all changes are known to process %d", i), func() bool {
			return len(w.Webhook("acme", "key_1").Waits) == 1+3*each
		})
	}

	// One of the concurrent removals succeeds.
	removed := make(chan error, len(processes))
	for _, w := range processes {
		group.Go(func() { removed <- w.Remove(ctx, "acme", "key_1") })
	}
	group.Wait()
	close(removed)
	n := 0
	for err := range removed {
		if err == nil {
			n++
		} else if !errors.Is(err, proto.ErrNotFound) {
			t.Error(err)
		}
	}
	if n != 1 {
		t.Errorf("removed %d times", n)
	}
}

// A malformed entry changes no known settings, and can be removed.
func TestMalformedWebhookSettings(t *testing.T) {
	s := storetest.Server(t)
	w := webhooks(t, s, storetest.Log(t))
	st := storetest.Open(t, s)
	ctx := storetest.Context(t)
	good := proto.DefaultWebhook()
	good.URL = "https://example.com/"
	for _, body := range []string{`{`, `{"waits":[]}`, `{"max_attempts":0}`, `{"timeout":-1}`, `{"timeout":1e300}`} {
		if _, err := w.Change(ctx, "acme", "key_1", to(good)); err != nil {
			t.Fatal(err)
		}
		if _, err := st.Webhooks.Put(ctx, "key.acme.key_1", []byte(body)); err != nil {
			t.Fatal(err)
		}
		marker := proto.DefaultWebhook()
		marker.URL = "https://example.com/" + fmt.Sprintf("%x", body)
		other := webhooks(t, s, storetest.Log(t))
		if _, err := other.Change(ctx, "acme", "key_2", to(marker)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "what comes after it", func() bool { return w.Webhook("acme", "key_2").URL == marker.URL })
		if got := w.Webhook("acme", "key_1"); got.URL != good.URL {
			t.Errorf("%s: %+v", body, got)
		}
		if _, err := w.Change(ctx, "acme", "key_1", to(good)); err == nil || !strings.Contains(err.Error(), "remove them") {
			t.Errorf("%s: changed: %v", body, err)
		}
		if err := w.Remove(ctx, "acme", "key_1"); err != nil {
			t.Errorf("%s: removed: %v", body, err)
		}
	}
}

func TestEndpoints(t *testing.T) {
	s := storetest.Server(t)
	log := new(syncBuffer)
	here, there := webhooks(t, s, slog.New(slog.NewTextHandler(log, nil))), webhooks(t, s, storetest.Log(t))
	ctx := storetest.Context(t)
	const target, other = "https://example.com/hook?token=secret", "https://example.com/hook?token=other"
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	everywhere := func(what string, want ...proto.Endpoint) {
		t.Helper()
		for _, w := range []*registry.Webhooks{here, there, webhooks(t, s, storetest.Log(t))} {
			eventually(t, what, func() bool { return cmp.Equal(append([]proto.Endpoint{}, want...), w.Endpoints("acme")) })
			for _, e := range want {
				if got, ok := w.Endpoint("acme", e.URL); !ok || !cmp.Equal(e, got) {
					t.Errorf("%s: %+v, %v", what, got, ok)
				}
				if got, ok := w.Endpoint("other", e.URL); ok {
					t.Errorf("%s: another organisation has %+v", what, got)
				}
			}
		}
	}
	everywhere("nothing failed")
	for i, w := range []*registry.Webhooks{here, there, here} { // the first failure counts
		if err := w.Failing(ctx, "acme", target, at.Add(time.Duration(i)*time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	if err := there.Failing(ctx, "acme", other, at.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	failing, alsoFailing := proto.Endpoint{URL: target, FailingSince: at},
		proto.Endpoint{URL: other, FailingSince: at.Add(time.Minute)}
	everywhere("failing", failing, alsoFailing)

	if err := here.Disable(ctx, "acme", target, "gone", at.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if err := there.Disable(ctx, "acme", target, "again", at.Add(2*time.Hour)); err != nil {
		t.Fatal(err)
	}
	failing.DisabledAt, failing.Reason = at.Add(time.Hour), "gone"
	if !failing.Disabled() || alsoFailing.Disabled() {
		t.Error("which of them is disabled?")
	}
	everywhere("one is disabled", failing, alsoFailing)

	if err := there.Enable(ctx, "acme", target); err != nil {
		t.Fatal(err)
	}
	if got, ok := there.Endpoint("acme", target); ok {
		t.Errorf("enabled here, and still %+v", got)
	}
	everywhere("enabled", alsoFailing)
	for _, org := range []string{"acme", "other"} {
		if err := here.Enable(ctx, org, target); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("%s: enabled twice: %v", org, err)
		}
	}
	if err := here.Enable(ctx, "acme", other); err != nil {
		t.Fatal(err)
	}
	if err := here.Disable(ctx, "acme", target, "gone", at); err != nil { // that had not failed before
		t.Fatal(err)
	}
	everywhere("disabled at its first failure",
		proto.Endpoint{URL: target, FailingSince: at, DisabledAt: at, Reason: "gone"})
	if text := log.String(); strings.Count(text, "webhook URL disabled") != 2 ||
		!strings.Contains(text, "host=example.com") || strings.Contains(text, "secret") {
		t.Errorf("the log is:\n%s", text)
	}
}

// A client that names another failing URL in every execution must not fill the bucket.
func TestFailingEndpointsAreBounded(t *testing.T) {
	s := storetest.Server(t)
	w := webhooks(t, s, slog.New(slog.DiscardHandler))
	ctx := storetest.Context(t)
	const most, more = 1000, 20
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	target := func(i int) string { return fmt.Sprintf("https://example.com/%d", i) }
	if err := w.Disable(ctx, "acme", target(0), "gone", at); err != nil {
		t.Fatal(err)
	}
	if err := w.Failing(ctx, "other", target(0), at.Add(-time.Hour)); err != nil {
		t.Fatal(err)
	}
	for i := 1; i < most+more; i++ {
		if err := w.Failing(ctx, "acme", target(i), at.Add(time.Duration(i)*time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	list := w.Endpoints("acme")
	if len(list) != most || !list[0].Disabled() || list[1].URL != target(more+1) ||
		list[most-1].URL != target(most+more-1) {
		t.Errorf("%d: %+v, %+v … %+v", len(list), list[0], list[1], list[len(list)-1])
	}
	if len(w.Endpoints("other")) != 1 {
		t.Error("another organisation's is gone")
	}
	keys, err := storetest.Open(t, s).Webhooks.Keys(ctx)
	if err != nil || len(keys) != most+1 {
		t.Errorf("%d are stored, %v", len(keys), err)
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
