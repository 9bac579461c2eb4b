package deliveries_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func pending(org string) *proto.Delivery {
	job := storetest.Job(org, "k", proto.ModeAsync)
	job.WebhookURL = "https://Hooks.example.com/a"
	return proto.NewDelivery(&job.Meta, time.Now())
}

func TestDeliveryIsCreatedOnceAndUpdatedByCompareAndSet(t *testing.T) {
	ctx := storetest.Context(t)
	s := &deliveries.Store{Store: storetest.Open(t, storetest.Server(t))}
	d := pending("acme")
	if _, _, err := s.Get(ctx, "acme", d.TraceID); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("before Create: %v", err)
	}
	if err := s.Create(ctx, d); err != nil {
		t.Fatal(err)
	}
	again := *d
	again.URL = "https://elsewhere.example.com/"
	if err := s.Create(ctx, &again); err != nil {
		t.Fatal(err)
	}
	got, revision, err := s.Get(ctx, "acme", d.TraceID)
	if err != nil || got.URL != d.URL || got.Status != proto.DeliveryPending {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, _, err := s.Get(ctx, "other", d.TraceID); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("another organisation's: %v", err)
	}
	if _, err := s.Replay(ctx, "acme", d.TraceID); !errors.Is(err, proto.ErrConflict) {
		t.Errorf("replay while pending: %v", err)
	}
	got.Record(proto.DeliveryAttempt{Status: 500, Error: proto.DeliveryRejected})
	got.Status, got.NextAt = proto.DeliveryFailed, time.Time{}
	if _, err := s.Update(ctx, got, revision); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Update(ctx, got, revision); !errors.Is(err, proto.ErrConflict) {
		t.Errorf("update of an old revision: %v", err)
	}
	replayed, err := s.Replay(ctx, "acme", d.TraceID)
	if err != nil || replayed.Status != proto.DeliveryPending || replayed.ID != d.ID || replayed.Before != 1 ||
		len(replayed.Attempts) != 1 {
		t.Fatalf("%+v, %v", replayed, err)
	}
}

func TestReplayFailedInPages(t *testing.T) {
	ctx := storetest.Context(t)
	s := &deliveries.Store{Store: storetest.Open(t, storetest.Server(t))}
	since := time.Now()
	create := func(org string, status proto.DeliveryStatus) {
		d := pending(org)
		d.Status, d.NextAt = status, time.Time{}
		if err := s.Create(ctx, d); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		create("acme", proto.DeliveryFailed)
		create("acme", proto.DeliveryDelivered)
		create("other", proto.DeliveryFailed)
	}
	until := time.Now()
	var next string
	for _, want := range []proto.Replayed{{Replayed: 3, Left: 2}, {Replayed: 2}} {
		got, err := s.ReplayFailed(ctx, "acme", since, next, 3)
		if next, got.Next = got.Next, ""; err != nil || got != want {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	if got, err := s.ReplayFailed(ctx, "acme", since, "", 3); next != "" || err != nil || got != (proto.Replayed{}) {
		t.Errorf("afterwards: %+v, %v", got, err)
	}
	if got, err := s.ReplayFailed(ctx, "other", until, "", 3); err != nil || got != (proto.Replayed{}) {
		t.Errorf("since later: %+v, %v", got, err)
	}
}

func TestListInPages(t *testing.T) {
	ctx := storetest.Context(t)
	st := storetest.Open(t, storetest.Server(t))
	s := &deliveries.Store{Store: st}
	var want []proto.TraceID // of acme, those that changed last first
	ofStatus := map[proto.DeliveryStatus][]proto.TraceID{}
	for i := range 9 {
		d := pending("acme")
		d.Status = proto.DeliveryStatuses()[i%3]
		for _, x := range []*proto.Delivery{d, pending("other")} {
			if err := s.Create(ctx, x); err != nil {
				t.Fatal(err)
			}
		}
		want = slices.Insert(want, 0, d.TraceID)
		ofStatus[d.Status] = slices.Insert(ofStatus[d.Status], 0, d.TraceID)
	}
	read := func(org string, status proto.DeliveryStatus, limit int) (all []proto.TraceID) {
		t.Helper()
		for next := ""; ; {
			page, after, err := s.List(ctx, org, status, next, limit)
			if err != nil || len(page) > limit || after != "" && len(page) < limit {
				t.Fatalf("%d deliveries, %q, %v", len(page), after, err)
			}
			for _, d := range page {
				all = append(all, d.TraceID)
			}
			if next = after; next == "" {
				return all
			}
		}
	}
	for _, limit := range []int{1, 2, 8, 9, 10} {
		if got := read("acme", "", limit); !slices.Equal(got, want) {
			t.Errorf("pages of %d: %v, want %v", limit, got, want)
		}
		for status, want := range ofStatus {
			if got := read("acme", status, limit); !slices.Equal(got, want) {
				t.Errorf("pages of %d that are %s: %v, want %v", limit, status, got, want)
			}
		}
	}
	if got := read("third", "", 1); len(got) != 0 {
		t.Errorf("of an organisation without deliveries: %v", got)
	}
	if got := len(read("other", proto.DeliveryPending, 4)); got != 9 {
		t.Errorf("%d of the other organisation", got)
	}
	// A change moves a delivery to the front, and out of the pages that follow.
	first, next, err := s.List(ctx, "acme", "", "", 4)
	if err != nil {
		t.Fatal(err)
	}
	moved := want[8]
	d, revision, err := s.Get(ctx, "acme", moved)
	if err != nil {
		t.Fatal(err)
	}
	d.Status = proto.DeliveryDelivered
	if _, err := s.Update(ctx, d, revision); err != nil {
		t.Fatal(err)
	}
	rest, _, err := s.List(ctx, "acme", "", next, 9)
	if err != nil || len(first) != 4 || len(rest) != 4 || rest[0].TraceID != want[4] {
		t.Errorf("%d and %d deliveries, %v", len(first), len(rest), err)
	}
	if got := read("acme", "", 9); got[0] != moved || len(got) != 9 {
		t.Errorf("afterwards: %v", got)
	}
	var field *proto.FieldError
	if _, _, err := s.List(ctx, "acme", "", "x", 1); !errors.As(err, &field) {
		t.Errorf("a place that is none: %v", err)
	}
}

// A page reads its own deliveries, not all since the time again. What has failed again meanwhile, or newly,
// is not visited.
func TestPagesOfReplaysReadTheirOwn(t *testing.T) {
	ctx := storetest.Context(t)
	st := storetest.Open(t, storetest.Server(t))
	s := &deliveries.Store{Store: st}
	const all, limit = 2000, 100
	since := time.Now()
	fail := func() {
		d := pending("acme")
		d.Status, d.NextAt = proto.DeliveryFailed, time.Time{}
		if err := s.Create(ctx, d); err != nil {
			t.Fatal(err)
		}
	}
	for range all {
		fail()
	}
	next, replayed := "", 0
	for left := all - limit; ; left -= limit {
		before := st.Conn.Stats().InMsgs
		got, err := s.ReplayFailed(ctx, "acme", since, next, limit)
		if err != nil || got.Replayed != limit || got.Left != max(left, 0) {
			t.Fatalf("%+v, %v; want %d left", got, err, left)
		}
		if n := st.Conn.Stats().InMsgs - before; next != "" && n > all/2 {
			t.Errorf("a page of %d deliveries received %d messages", limit, n)
		}
		replayed += got.Replayed
		if next = got.Next; next == "" {
			break
		}
		fail()
	}
	if replayed != all {
		t.Errorf("%d of %d were replayed", replayed, all)
	}
	if _, err := s.ReplayFailed(ctx, "acme", since, "x", limit); err == nil {
		t.Error("a place that is none was accepted")
	}
}

func TestFollow(t *testing.T) {
	ctx := storetest.Context(t)
	server := storetest.Server(t)
	s := &deliveries.Store{Store: storetest.Open(t, server)}
	first := pending("acme")
	if err := s.Create(ctx, first); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Store.JS.Publish(ctx, "bullpen.delivery.acme.nonsense", nil); err != nil {
		t.Fatal(err)
	}
	following, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	changes, current, malformed := make(chan proto.DeliveryChange), make(chan struct{}), make(chan error, 1)
	other := &deliveries.Store{Store: storetest.Open(t, server)}
	wg.Go(func() {
		err := other.Follow(following, func(c proto.DeliveryChange) { changes <- c }, func() { close(current) },
			func(err error) { malformed <- err })
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	if c := <-changes; c.TraceID != first.TraceID || c.Org != "acme" || c.Origin != "https://hooks.example.com:443" ||
		!c.Due.Equal(first.NextAt) {
		t.Fatalf("%+v", c)
	}
	<-current
	if err := <-malformed; !strings.Contains(err.Error(), "bullpen.delivery.acme.nonsense") {
		t.Error(err)
	}
	second := pending("other")
	if err := s.Create(ctx, second); err != nil {
		t.Fatal(err)
	}
	if c := <-changes; c.TraceID != second.TraceID || c.Due.IsZero() {
		t.Fatalf("%+v", c)
	}
	got, revision, err := s.Get(ctx, "other", second.TraceID)
	if err != nil {
		t.Fatal(err)
	}
	got.Status = proto.DeliveryDelivered
	if revision, err = s.Update(ctx, got, revision); err != nil {
		t.Fatal(err)
	}
	if c := <-changes; !c.Due.IsZero() || c.Revision != revision {
		t.Fatalf("%+v", c)
	}
	stop()
	wg.Wait()
}

func TestScanOfAnOrganisation(t *testing.T) {
	ctx := storetest.Context(t)
	s := &deliveries.Store{Store: storetest.Open(t, storetest.Server(t))}
	mine := pending("acme")
	for _, d := range []*proto.Delivery{mine, pending("other")} {
		if err := s.Create(ctx, d); err != nil {
			t.Fatal(err)
		}
	}
	var got []proto.TraceID
	if err := s.Scan(ctx, "acme", func(c proto.DeliveryChange) { got = append(got, c.TraceID) }); err != nil ||
		!slices.Equal(got, []proto.TraceID{mine.TraceID}) {
		t.Errorf("%v, %v", got, err)
	}
}

func TestTestsAreServedByTheLeader(t *testing.T) {
	ctx := storetest.Context(t)
	server := storetest.Server(t)
	s := &deliveries.Store{Store: storetest.Open(t, server)}
	var rejection *proto.Rejection
	if _, err := s.Test(ctx, proto.Key{Org: "acme", ID: "k"}); !errors.As(err, &rejection) {
		t.Fatalf("without a leader: %v", err)
	}
	leader := &deliveries.Store{Store: storetest.Open(t, server)}
	stop, err := leader.ServeTests(ctx, func(_ context.Context, org, key string) (*proto.DeliveryAttempt, error) {
		if org != "acme" || key != "k" {
			return nil, proto.ErrNotFound
		}
		return &proto.DeliveryAttempt{Status: 204}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if err := leader.Store.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	if a, err := s.Test(ctx, proto.Key{Org: "acme", ID: "k"}); err != nil || a.Status != 204 {
		t.Errorf("%+v, %v", a, err)
	}
	if _, err := s.Test(ctx, proto.Key{Org: "acme", ID: "none"}); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
}
