package registry_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// members opens the list like a gateway.
func members(t *testing.T, s nats.InProcessConnProvider) *registry.Members {
	t.Helper()
	l, err := registry.OpenMembers(storetest.Context(t), storetest.Open(t, s), storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	runUntilEnd(t, l.Run)
	return l
}

// sessions opens the list like a gateway.
func sessions(t *testing.T, s nats.InProcessConnProvider) *registry.Sessions {
	t.Helper()
	l, err := registry.OpenSessions(storetest.Context(t), storetest.Open(t, s), &[32]byte{1}, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	runUntilEnd(t, l.Run)
	return l
}

func TestMemberIsKnownToEveryGatewayUntilRemoved(t *testing.T) {
	s := storetest.Server(t)
	here, there := members(t, s), members(t, s)
	ctx := storetest.Context(t)
	m, err := here.Create(ctx, proto.Member{Org: "acme", Email: "a@example.com", Role: proto.RoleViewer})
	if err != nil {
		t.Fatal(err)
	}
	for _, same := range []proto.Member{{Org: "acme", Email: "a@example.com", Role: proto.RoleOperator}} {
		if _, err := there.Create(ctx, same); !errors.Is(err, proto.ErrExists) {
			t.Errorf("%+v was added twice: %v", same, err)
		}
	}
	if other, err := there.Create(
		ctx, proto.Member{Org: "beta", Email: "a@example.com", Role: proto.RoleOperator}); err != nil || other.ID == m.ID {
		t.Errorf("the same person in another organisation: %+v, %v", other, err)
	}
	if got, err := there.Get(ctx, m.ID); err != nil || got.Role != proto.RoleViewer { // at once, by a read
		t.Errorf("%+v, %v", got, err)
	}
	refused := errors.New("refused")
	if _, err := here.Change(ctx, m.ID, func(*proto.Member) error { return refused }); !errors.Is(err, refused) {
		t.Errorf("refused change: %v", err)
	}
	if _, err := there.Change(ctx, m.ID, func(m *proto.Member) error { m.Subject = "1"; return nil }); err != nil {
		t.Fatal(err)
	}
	eventually(t, "changed elsewhere", func() bool { got, ok := here.Member(m.ID); return ok && got.Subject == "1" })
	if _, err := here.Create(ctx, proto.Member{Org: "acme", Subject: "1", Role: proto.RoleOperator}); !errors.Is(
		err, proto.ErrExists) {
		t.Errorf("the subject was added twice: %v", err)
	}
	if _, err := here.Remove(ctx, m.ID, func(proto.Member) error { return refused }); !errors.Is(err, refused) {
		t.Errorf("refused removal: %v", err)
	}
	if got, err := here.Remove(ctx, m.ID, func(proto.Member) error { return nil }); err != nil || got.ID != m.ID {
		t.Fatalf("%+v, %v", got, err)
	}
	eventually(t, "removed elsewhere", func() bool { _, ok := there.Member(m.ID); return !ok })
	if _, err := there.Get(ctx, m.ID); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("a removed member: %v", err)
	}
	if _, err := there.Change(ctx, m.ID, func(*proto.Member) error { return nil }); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("change of a removed member: %v", err)
	}
}

func TestSessionIsKnownToEveryGatewayUntilItEnds(t *testing.T) {
	s := storetest.Server(t)
	here, there := sessions(t, s), sessions(t, s)
	ctx := storetest.Context(t)
	made, token, err := here.Create(ctx, proto.Session{Org: "acme", KeyID: "mem_1", Name: "a@example.com"})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []*registry.Sessions{here, there} { // at once, by a read
		if got, err := l.Session(ctx, token); err != nil || got.ID != made.ID {
			t.Errorf("%+v, %v", got, err)
		}
	}
	for _, wrong := range []string{
		"", made.ID, token + "A", token[1:], proto.NewSessionToken(&[32]byte{1}),
		proto.NewSessionToken(&[32]byte{2}),
	} {
		if _, err := here.Session(ctx, wrong); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("%.60q was accepted: %v", wrong, err)
		}
	}
	if err := there.End(ctx, made.ID); err != nil {
		t.Fatal(err)
	}
	if err := here.Use(ctx, made.ID); err != nil {
		t.Errorf("use of an ended session: %v", err)
	}
	eventually(t, "ended elsewhere", func() bool {
		_, err := here.Session(ctx, token)
		return errors.Is(err, proto.ErrNotFound)
	})
	if err := there.End(ctx, made.ID); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("ended twice: %v", err)
	}
}

func TestSessionsOfAMemberAreLimited(t *testing.T) {
	l := sessions(t, storetest.Server(t))
	ctx := storetest.Context(t)
	var ids []string
	for i := range proto.MaxSessions + 2 {
		made, _, err := l.Create(ctx, proto.Session{Org: "acme", KeyID: "mem_1", Name: fmt.Sprint(i)})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, made.ID)
	}
	if _, _, err := l.Create(ctx, proto.Session{Org: "acme", KeyID: "mem_2"}); err != nil {
		t.Fatal(err)
	}
	var left []string
	all, _ := l.Page("", "", -1, nil)
	for _, s := range all {
		if s.KeyID == "mem_1" {
			left = append(left, s.ID)
		}
	}
	if !slices.Equal(left, ids[2:]) {
		t.Errorf("%d sessions are left, want the last %d", len(left), proto.MaxSessions)
	}
}
