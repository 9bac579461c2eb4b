package history_test

import (
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// server is the PostgreSQL server of all tests of this process.
var server struct {
	once sync.Once
	err  error
	*storagetest.Postgres
}

// postgres returns the URL of a new database. Without PostgreSQL the test fails, except in short
// mode, which skips it.
func postgres(t testing.TB) string {
	t.Helper()
	if testing.Short() {
		t.Skip("starting PostgreSQL takes seconds")
	}
	server.once.Do(func() { server.Postgres, server.err = storagetest.StartPostgres() })
	if server.err != nil {
		t.Fatal(server.err)
	}
	address, err := server.NewDatabase(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return address
}

func stopPostgres() {
	if server.Postgres != nil {
		_ = server.Close()
	}
}
