package registry_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/keyring"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// Two gateways that create secrets at the same time do not exceed the limit of an organisation together.
func TestSecretsLimitOfTwoGateways(t *testing.T) {
	ctx, server := storetest.Context(t), storetest.Server(t)
	const left = 5
	st := storetest.Open(t, server)
	storetest.Fill(t, st, st.Secrets, proto.MaxSecrets-left, func(i int) (string, any) {
		name := fmt.Sprint("S", i)
		return "secret.acme." + name, proto.Secret{Org: "acme", Name: name}
	})
	var gateways []*registry.Secrets
	for range 2 {
		st := storetest.Open(t, server)
		ring, err := keyring.Open(ctx, st, reversed{}, true, storetest.Log(t))
		if err != nil {
			t.Fatal(err)
		}
		secrets, err := registry.OpenSecrets(ctx, st, ring, storetest.Log(t))
		if err != nil {
			t.Fatal(err)
		}
		runUntilEnd(t, secrets.Run)
		gateways = append(gateways, secrets)
	}
	put := func(g *registry.Secrets, name string) func(int) error {
		return func(i int) error {
			_, err := g.Put(ctx, "acme", fmt.Sprint(name, i), "a long value", nil)
			return err
		}
	}
	refused := func(err error) bool { _, ok := errors.AsType[*proto.FieldError](err); return ok }
	if n := storetest.Race(t, 20, refused, put(gateways[0], "NEW"), put(gateways[1], "NEW")); n != left {
		t.Errorf("%d secrets were stored, %d were left", n, left)
	}
	// A removed secret makes room for another one, and no more.
	if err := gateways[0].Remove(ctx, "acme", "S0"); err != nil {
		t.Fatal(err)
	}
	if n := storetest.Race(t, 3, refused, put(gateways[0], "NEXT"), put(gateways[1], "NEXT")); n != 1 {
		t.Errorf("%d secrets were stored, one was removed", n)
	}
}

// The same holds for files of agents, and an organisation does not count those of others.
func TestAgentFilesLimitOfTwoGateways(t *testing.T) {
	ctx, server := storetest.Context(t), storetest.Server(t)
	var gateways []*registry.AgentFiles
	for range 2 {
		files, err := registry.OpenAgentFiles(ctx, storetest.Open(t, server), storetest.Log(t))
		if err != nil {
			t.Fatal(err)
		}
		files.Limit = 10
		runUntilEnd(t, files.Run)
		gateways = append(gateways, files)
	}
	put := func(g *registry.AgentFiles, org string) func(int) error {
		return func(i int) error {
			return g.Put(ctx, proto.AgentFile{Org: org, ID: fmt.Sprint("file_", i), CreatedAt: time.Now()})
		}
	}
	refused := func(err error) bool { _, ok := errors.AsType[*proto.QuotaError](err); return ok }
	if n := storetest.Race(t, 20, refused, put(gateways[0], "acme"), put(gateways[1], "acme")); n != 10 {
		t.Errorf("%d files were stored, 10 are possible", n)
	}
	if err := put(gateways[1], "other")(0); err != nil {
		t.Errorf("a file of another organisation: %v", err)
	}
}
