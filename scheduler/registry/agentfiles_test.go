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
		if err := files.Create(ctx, f); err != nil {
			t.Fatal(err)
		}
		return f
	}
	now := time.Now().UTC()
	old, fresh, others := add("acme", "old", now.Add(-time.Hour)), add("acme", "new", now), add("acme-2", "other", now)
	if err := files.Create(ctx, old); !errors.Is(err, proto.ErrExists) {
		t.Errorf("the same id again: %v", err)
	}
	list := files.List("acme")
	if len(list) != 2 || list[0].ID != fresh.ID || list[1].ID != old.ID {
		t.Errorf("%+v", list)
	}
	if _, err := files.Get(ctx, "acme", others.ID); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("a file of another organisation: %v", err)
	}
	later, err := registry.OpenAgentFiles(ctx, st, storetest.Log(t)) // of another gateway, which does not follow changes here
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
