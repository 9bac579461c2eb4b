package registry_test

import (
	"errors"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestAgentFiles(t *testing.T) {
	ctx, st := storetest.Context(t), storetest.Open(t, storetest.Server(t))
	files, err := registry.OpenAgentFiles(ctx, st, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	add := func(org, name string, at time.Time) proto.AgentFile {
		t.Helper()
		f := *proto.NewAgentFile(name, 1)
		f.Org, f.CreatedAt = org, at
		if err := files.Put(ctx, f); err != nil {
			t.Fatal(err)
		}
		return f
	}
	now := time.Now().UTC()
	old, fresh, others := add("acme", "old", now.Add(-time.Hour)), add("acme", "new", now), add("acme-2", "other", now)
	if err := files.Put(ctx, old); err != nil {
		t.Errorf("the same id again: %v", err)
	}
	list := files.List("acme")
	if len(list) != 2 || list[0].ID != fresh.ID || list[1].ID != old.ID {
		t.Errorf("%+v", list)
	}
	if _, err := files.Get(ctx, "acme", others.ID); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("a file of another organisation: %v", err)
	}
	// of another gateway, which does not follow changes here
	later, err := registry.OpenAgentFiles(ctx, st, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	newest := add("acme", "newest", now.Add(time.Minute))
	if f, err := later.Get(ctx, "acme", newest.ID); err != nil || f.Name != "newest" {
		t.Errorf("a file that another gateway has just made: %+v, %v", f, err)
	}
	if err := files.Remove(ctx, "acme", old.ID); err != nil {
		t.Error(err)
	}
	if err := files.Remove(ctx, "acme", old.ID); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("a removed file: %v", err)
	}
}

// The limit is exact, also for files that are stored at the same time, and a file that is replaced does not
// count twice.
func TestAgentFilesAreLimited(t *testing.T) {
	ctx, st := storetest.Context(t), storetest.Open(t, storetest.Server(t))
	files, err := registry.OpenAgentFiles(ctx, st, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	files.Limit = 12
	last := proto.NewContainerFile("acme", "container_x", "out.png", 1)
	last.Org = "acme"
	for range files.Limit - 4 {
		f, other := *proto.NewAgentFile("a", 1), *proto.NewAgentFile("a", 1)
		if f.Org, other.Org = "acme", "acme-2"; len(files.List("acme")) == 0 {
			f = *last
		}
		if err := errors.Join(files.Put(ctx, f), files.Put(ctx, other)); err != nil {
			t.Fatal(err)
		}
	}
	refused := make(chan bool)
	for range 8 {
		go func() {
			f := *proto.NewAgentFile("a", 1)
			f.Org = "acme"
			err := files.Put(ctx, f)
			quota, full := errors.AsType[*proto.QuotaError](err)
			if err != nil && (!full || quota.Limit != int64(files.Limit)) {
				t.Error(err)
			}
			refused <- full
		}()
	}
	n := 0
	for range 8 {
		if <-refused {
			n++
		}
	}
	if got := len(files.List("acme")); n != 4 || got != files.Limit {
		t.Errorf("%d files, %d of 8 refused", got, n)
	}
	if err := files.Put(ctx, *last); err != nil {
		t.Errorf("in place of a file: %v", err)
	}
}
