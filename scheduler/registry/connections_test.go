package registry_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// connections opens the list like a gateway.
func connections(t *testing.T, s nats.InProcessConnProvider) *registry.Connections {
	t.Helper()
	l, err := registry.OpenConnections(storetest.Context(t), storetest.Open(t, s), storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	runUntilEnd(t, l.Run)
	return l
}

func connection(org, slug string) proto.Connection {
	at := time.Now().UTC()
	return proto.Connection{
		Org: org, Slug: slug, Kind: proto.MountS3, Prefix: "a/b", ReadOnly: true, Description: "d", TestedAt: &at,
		CreatedAt: at, UpdatedAt: at,
		S3: &proto.S3Mount{
			Endpoint: "https://s3.example.com", Region: "r", Bucket: "bucket", PathStyle: true,
			Credential: "KEYS",
		},
	}
}

func TestConnectionsOfEachOrganisation(t *testing.T) {
	s, ctx := storetest.Server(t), storetest.Context(t)
	here, there := connections(t, s), connections(t, s)
	mine, theirs := connection("acme", "data"), connection("other", "data")
	theirs.S3.Bucket = "theirs"
	for _, c := range []proto.Connection{mine, theirs, connection("acme", "another")} {
		if err := here.Create(ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	if err := there.Create(ctx, mine); !errors.Is(err, proto.ErrExists) {
		t.Errorf("a second one: %v", err)
	}
	got, err := there.Connection(ctx, "acme", "data") // read from the bucket if it is not known yet
	if d := cmp.Diff(mine, got); d != "" || err != nil {
		t.Errorf("%s, %v", d, err)
	}
	got.S3.Bucket = "changed by a caller"
	if got, err = there.Connection(ctx, "other", "data"); err != nil || got.S3.Bucket != "theirs" {
		t.Errorf("%+v, %v", got, err)
	}
	names := func(list []proto.Connection) (names []string) {
		for _, c := range list {
			names = append(names, c.Org+"/"+c.Slug)
		}
		return names
	}
	if got := names(here.List("acme")); !slices.Equal(got, []string{"acme/another", "acme/data"}) {
		t.Errorf("%v", got)
	}
	if got := names(here.List("")); !slices.Equal(got, []string{"acme/another", "acme/data", "other/data"}) {
		t.Errorf("%v", got)
	}
	changed, err := here.Change(ctx, "acme", "data", func(c *proto.Connection) error {
		c.S3.Bucket, c.TestedAt = "new", nil
		return nil
	})
	if err != nil || changed.S3.Bucket != "new" {
		t.Errorf("%+v, %v", changed, err)
	}
	refused := errors.New("refused")
	if _, err := here.Change(ctx, "acme", "data", func(c *proto.Connection) error {
		c.S3.Bucket = "x"
		return refused
	}); !errors.Is(err, refused) {
		t.Errorf("%v", err)
	}
	if c, err := here.Connection(ctx, "acme", "data"); err != nil || c.S3.Bucket != "new" || c.TestedAt != nil {
		t.Errorf("%+v, %v", c, err)
	}
	for _, org := range []string{"none", "acme"} {
		if _, err := here.Change(ctx, org, "none", func(*proto.Connection) error { return nil }); !errors.Is(
			err, proto.ErrNotFound) {
			t.Errorf("%v", err)
		}
		if _, err := here.Remove(ctx, org, "none", allow, allow); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("%v", err)
		}
	}
}

func TestConnectionsAreLimited(t *testing.T) {
	s, ctx := storetest.Server(t), storetest.Context(t)
	here, there := connections(t, s), connections(t, s)
	for i := range proto.MaxConnections - 2 {
		if err := here.Create(ctx, connection("acme", fmt.Sprint("c", i))); err != nil {
			t.Fatal(err)
		}
	}
	var all sync.WaitGroup
	var created atomic.Int32
	for i := range 8 { // at once, at both gateways
		all.Go(func() {
			err := []*registry.Connections{here, there}[i%2].Create(ctx, connection("acme", fmt.Sprint("last", i)))
			field := new(proto.FieldError)
			switch {
			case err == nil:
				created.Add(1)
			case !errors.As(err, &field) && !errors.Is(err, proto.ErrConflict):
				t.Errorf("%v", err)
			}
		})
	}
	all.Wait()
	if n := created.Load(); n > 2 {
		t.Errorf("%d of 2 were created", n)
	}
	if err := here.Create(ctx, connection("other", "data")); err != nil {
		t.Error(err)
	}
}

func allow(proto.Connection) error { return nil }

func TestConnectionOfAKeyIsNotRemoved(t *testing.T) {
	s, ctx := storetest.Server(t), storetest.Context(t)
	l := connections(t, s)
	keys, err := registry.OpenKeys(ctx, storetest.Open(t, s), nil, "local", storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []proto.Connection{connection("acme", "data"), connection("other", "data")} {
		if err := l.Create(ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	mounts := []proto.KeyMount{{Connection: "data", Prefix: "p", ReadOnly: true}}
	key, _, err := keys.Create(ctx, proto.Key{Name: "k", Org: "acme", Mounts: mounts, Scopes: proto.UserScopes()})
	if err != nil {
		t.Fatal(err)
	}
	if rotated, _, err := keys.Rotate(ctx, key.ID, time.Now()); err != nil || !slices.Equal(rotated.Mounts, mounts) {
		t.Errorf("%+v, %v", rotated, err)
	}
	remove := func(org string) error {
		_, err := l.Remove(ctx, org, "data", allow, allow)
		return err
	}
	if bound := new(proto.BoundConnectionError); !errors.As(remove("acme"), &bound) ||
		!slices.Equal(bound.Keys, []string{key.ID}) || !strings.Contains(bound.Error(), key.ID) {
		t.Errorf("%v", bound)
	}
	if err := remove("other"); err != nil {
		t.Errorf("that of another organisation: %v", err)
	}
	if _, err := keys.Revoke(ctx, key.ID); err != nil {
		t.Fatal(err)
	}
	if err := remove("acme"); err != nil {
		t.Errorf("that of a revoked key: %v", err)
	}
	if _, err := l.Connection(context.WithoutCancel(ctx), "acme", "data"); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

// A volume is not used from the moment at which its files may be gone.
func TestRemovalOfVolumeIsContinued(t *testing.T) {
	s, ctx := storetest.Server(t), storetest.Context(t)
	l := connections(t, s)
	volume := proto.Connection{Org: "acme", Slug: "work", Kind: proto.MountVolume, Bytes: 1 << 20}
	if err := l.Create(ctx, volume); err != nil {
		t.Fatal(err)
	}
	broken, emptied := errors.New("broken"), 0
	remove := func(check error, empty error) error {
		_, err := l.Remove(ctx, "acme", "work", func(proto.Connection) error { return check },
			func(c proto.Connection) error {
				if now, err := l.Connection(ctx, "acme", "work"); err != nil || !now.Removing {
					t.Errorf("while it is emptied: %+v, %v", now, err)
				}
				emptied++
				return empty
			})
		return err
	}
	if err := remove(proto.ErrConflict, nil); !errors.Is(err, proto.ErrConflict) || emptied > 0 {
		t.Errorf("%v, emptied %d times", err, emptied)
	}
	if c, err := l.Connection(ctx, "acme", "work"); err != nil || c.Removing {
		t.Errorf("after a refusal: %+v, %v", c, err)
	}
	if err := remove(nil, broken); !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
	c, err := l.Connection(ctx, "acme", "work")
	if removing := new(proto.RemovingConnectionError); err != nil || !c.Removing {
		t.Errorf("after a failure: %+v, %v", c, err)
	} else if _, err := c.Mount(proto.KeyMount{}, ""); !errors.As(err, &removing) {
		t.Errorf("a mount: %v", err)
	}
	if err := remove(nil, nil); err != nil || emptied != 2 {
		t.Errorf("the next removal: %v, emptied %d times", err, emptied)
	}
	if _, err := l.Connection(ctx, "acme", "work"); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("%v", err)
	}
}
