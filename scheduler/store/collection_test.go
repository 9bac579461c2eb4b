package store_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// label is a value of the tests' collection.
type label struct {
	Name string
	At   time.Time
}

var errFull = errors.New("too many labels")

// labels opens a collection like a gateway: the newest labels first, and most of an organisation.
func labels(t *testing.T, st *store.Store, most int) *store.Collection[label] {
	t.Helper()
	c, err := store.OpenCollection(storetest.Context(t), store.CollectionConfig[label]{
		Store: st, Bucket: st.Connections, Keys: "*.*", Name: "labels", Log: storetest.Log(t),
		Order: func(l *label) string { return store.NewestFirst(l.At) },
		Check: func(_ *label, others []*label) error {
			if len(others) >= most {
				return errFull
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() { _ = c.Run(ctx) })
	t.Cleanup(func() { cancel(); work.Wait() })
	return c
}

// Two gateways that create, change and remove values at the same time never have more than the limit, and
// lose no place: what ends in the middle has written nothing, or all.
func TestLimitOfCollections(t *testing.T) {
	server := storetest.Server(t)
	testLimit(t, storetest.Open(t, server), storetest.Open(t, server))
}

func TestLimitOfCollectionsOnACluster(t *testing.T) {
	st := storetest.Cluster(t)
	testLimit(t, st, st)
}

func testLimit(t *testing.T, one, two *store.Store) {
	const most = 10
	here, there := labels(t, one, most), labels(t, two, most)
	ctx := storetest.Context(t)
	work := func(c *store.Collection[label], n int) func(int) error {
		return func(i int) error {
			key := fmt.Sprintf("acme.%d", i)
			ctx, cancel := ctx, context.CancelFunc(func() {})
			if i%4 == 3 { // a gateway that dies in between
				ctx, cancel = context.WithTimeout(ctx, time.Duration(i)*100*time.Microsecond)
			}
			defer cancel()
			if err := c.Create(ctx, key, &label{Name: key, At: time.Now()}); err != nil {
				return err
			}
			if _, err := c.Change(ctx, key, func(l *label) error { l.Name += " changed"; return nil }); err != nil {
				return err
			}
			if n == 0 {
				_, err := c.Remove(ctx, key, nil)
				return err
			}
			return nil
		}
	}
	refused := func(err error) bool { // a label of a gateway that died in between may be there
		return errors.Is(err, errFull) || errors.Is(err, context.DeadlineExceeded) ||
			errors.Is(err, proto.ErrNotFound) || errors.Is(err, proto.ErrExists)
	}
	stored := func() map[string]*label {
		all, _, err := store.ReadValues(ctx, here.Bucket, "acme.*", here.Decode)
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	watching, stop := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		for watching.Err() == nil {
			if n := len(stored()); n > most {
				t.Errorf("%d labels are stored", n)
				return
			}
		}
	})
	storetest.Race(t, 30, refused, work(here, 0), work(there, 0)) // they come and go
	storetest.Race(t, 30, refused, work(here, 1), work(there, 1)) // they stay
	stop()
	watch.Wait()
	// All places that are not taken can be taken.
	left := most - len(stored())
	create := func(c *store.Collection[label]) func(int) error {
		return func(i int) error { return c.Create(ctx, fmt.Sprintf("acme.new%d", i), &label{At: time.Now()}) }
	}
	if n := storetest.Race(t, most+1, refused, create(here), create(there)); n != left || len(stored()) != most {
		t.Errorf("%d labels were created and %d are stored, %d places were left", n, len(stored()), left)
	}
	if err := create(there)(0); !refused(err) {
		t.Errorf("a label too many: %v", err)
	}
	if err := there.Create(ctx, "other.1", &label{At: time.Now()}); err != nil {
		t.Errorf("a label of another organisation: %v", err)
	}
}

func TestPagesOfCollections(t *testing.T) {
	server, ctx, begin := storetest.Server(t), storetest.Context(t), time.Now()
	here, there := labels(t, storetest.Open(t, server), 1000), labels(t, storetest.Open(t, server), 1000)
	var want []string
	for i := range 25 {
		name := fmt.Sprintf("acme.%02d", i)
		if err := here.Create(ctx, name, &label{name, begin.Add(time.Duration(i/2) * time.Second)}); err != nil {
			t.Fatal(err)
		}
		want = append(want, name)
	}
	if err := here.Create(ctx, "other.1", &label{"other.1", begin.Add(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(want, func(a, b string) int { // pairs have the same time
		return cmp.Or(number(b)/2-number(a)/2, number(a)-number(b))
	})
	for len(there.List("")) != 26 { // the watch delivers them
		if ctx.Err() != nil {
			t.Fatal("labels of the other gateway are not listed")
		}
		<-time.After(time.Millisecond)
	}
	for _, c := range []*store.Collection[label]{here, there} {
		var got []string
		for after := ""; ; {
			page, next := c.Page("acme", after, 10, nil)
			for _, l := range page {
				got = append(got, l.Name)
			}
			if after = next; after == "" {
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("pages have %v, want %v", got, want)
		}
		odd := func(l *label) bool { return number(l.Name)%2 == 1 }
		if page, next := c.Page("acme", "", 12, odd); len(page) != 12 || next != "" {
			t.Errorf("%d of 12 odd labels, next %q", len(page), next)
		}
		if all := c.List(""); len(all) != 26 || all[0].Name != "other.1" {
			t.Errorf("all organisations: %v", all)
		}
	}
	// A page goes on behind a value that was removed meanwhile.
	_, next := here.Page("acme", "", 10, nil)
	if _, err := here.Remove(ctx, want[9], nil); err != nil {
		t.Fatal(err)
	}
	if page, _ := here.Page("acme", next, 10, nil); len(page) != 10 || page[0].Name != want[10] {
		t.Errorf("the page behind a removed label: %v", page)
	}
	v, err := here.Change(ctx, want[3], func(l *label) error { l.At = begin.Add(time.Hour); return nil })
	if err != nil || here.List("acme")[0].Name != v.Name {
		t.Errorf("a label that is the newest now: %v, %v", v, err)
	}
}

func number(name string) (n int) {
	_, _ = fmt.Sscanf(name, "acme.%d", &n)
	return n
}

// A read that ends before all entries have arrived leaves nothing behind (TestMain), however many they are.
func TestReadThatEndsEarly(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	const entries = 600 // more than a watch has room for
	for i := range entries {
		if _, err := st.Connections.Put(t.Context(), fmt.Sprint("acme.", i), nil); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	before := st.Conn.Stats().InMsgs
	err := store.ReadBucket(ctx, st.Connections, "*.*", func(jetstream.KeyValueEntry) {
		for st.Conn.Stats().InMsgs < before+entries {
			runtime.Gosched()
		}
		cancel()
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// A value is found by its id alone where the organisation is not known, also before the watch has
// delivered it.
func TestValuesAreFoundByTheirIDs(t *testing.T) {
	st, ctx := storetest.Open(t, storetest.Server(t)), storetest.Context(t)
	open := func() *store.Collection[label] {
		c, err := store.OpenCollection(ctx, store.CollectionConfig[label]{
			Store: st, Bucket: st.Members, Keys: "*.*", ByID: true, Name: "labels", Log: storetest.Log(t),
		})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	here, there := open(), open() // which do not watch
	if err := here.Create(ctx, "acme.id_1", &label{Name: "first"}); err != nil {
		t.Fatal(err)
	}
	if key := there.KeyOf("id_1"); key != "" {
		t.Errorf("in memory elsewhere: %s", key)
	}
	for _, c := range []*store.Collection[label]{here, there, open()} {
		if key, err := c.FindKey(ctx, "id_1"); key != "acme.id_1" || err != nil {
			t.Errorf("%q, %v", key, err)
		}
	}
	for _, id := range []string{"id_2", "", "*", ">", "acme.id_1", "a b"} {
		if key, err := there.FindKey(ctx, id); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("%q: %q, %v", id, key, err)
		}
	}
	if _, err := here.Remove(ctx, "acme.id_1", nil); err != nil {
		t.Fatal(err)
	}
	if key := here.KeyOf("id_1"); key != "" {
		t.Errorf("after its removal: %s", key)
	}
	if c := open(); c.KeyOf("id_1") != "" {
		t.Error("a removed value is in memory")
	}
}

// Changes of values of a kind are reported once by each process, with the organisation and the id.
func TestCollectionsReportChanges(t *testing.T) {
	server := storetest.Server(t)
	var reports []<-chan proto.Change
	var all []*store.Collection[label]
	for range 2 {
		st, changes := storetest.Open(t, server), make(chan proto.Change, 100)
		st.OnChange = func(c proto.Change) { changes <- c }
		c, err := store.OpenCollection(storetest.Context(t), store.CollectionConfig[label]{
			Store: st, Bucket: st.Connections, Keys: "*.*", Name: "labels", Log: storetest.Log(t),
			Kind: proto.ChangedConnections,
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		work.Go(func() { _ = c.Run(ctx) })
		t.Cleanup(func() { cancel(); work.Wait() })
		reports, all = append(reports, changes), append(all, c)
	}
	ctx := storetest.Context(t)
	want := proto.Change{Kind: proto.ChangedConnections, Org: "acme", ID: "a"}
	for i, act := range []func() error{
		func() error { return all[0].Create(ctx, "acme.a", &label{Name: "a"}) },
		func() error { return all[1].Put(ctx, "acme.a", &label{Name: "b"}) },
		func() error { _, err := all[0].Remove(ctx, "acme.a", nil); return err },
	} {
		if err := act(); err != nil {
			t.Fatal(err)
		}
		for process, changes := range reports {
			select {
			case got := <-changes:
				if got != want {
					t.Errorf("change %d at process %d: %+v", i, process, got)
				}
			case <-ctx.Done():
				t.Fatalf("change %d is not reported at process %d", i, process)
			}
		}
	}
	for process, changes := range reports {
		if n := len(changes); n != 0 {
			t.Errorf("process %d reported %d changes more", process, n)
		}
	}
}
