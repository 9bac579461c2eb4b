package filestore_test

import (
	"context"
	"testing"

	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// A person who has signed in has no storage connections, as programs of people have none.
func TestMembersHaveNoConnections(t *testing.T) {
	m := proto.Member{ID: proto.MemberPrefix + "1", Org: "acme", Role: proto.RoleAdministrator}
	key := m.Key()
	opener := &filestore.Opener{Connections: everyConnection{}}
	_, err := opener.Open(t.Context(), &key, proto.SourceVolume, "data")
	if e := api.NewError(err); err == nil || e.Code != api.CodeNotFound ||
		e.Message != "this API key has no storage connection of that name" {
		t.Errorf("%v", err)
	}
}

// everyConnection has a connection of any name.
type everyConnection struct{}

func (everyConnection) Connection(_ context.Context, org, slug string) (proto.Connection, error) {
	return proto.Connection{Org: org, Slug: slug, Kind: proto.MountVolume}, nil
}
