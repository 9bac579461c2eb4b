package history

import (
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"runtime"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// dialect captures the differences between the databases. Both number parameters as $1.
type dialect struct {
	path        string // of SQLite's file; empty for PostgreSQL
	connect     func() (write, read *sql.DB, err error)
	tableExists string // returns whether there is an index, as a number
	integer     string // the type of 64-bit numbers
	bytes       string // the type of bytes
	withoutRows string // of a table whose rows are in the index of its primary key
	full        func(error) bool
	corrupt     func(error) bool
}

const (
	sqliteOptions = "?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)" +
		"&_pragma=cache_size(-16000)&_pragma=temp_store(MEMORY)&_txlock=immediate"
	maxReaders = 4
)

func sqliteDialect(path string) *dialect {
	code := func(err error) int {
		if e, ok := errors.AsType[*sqlite.Error](err); ok {
			return e.Code() & fieldMask // without the extension
		}
		return 0
	}
	return &dialect{
		path: path,
		connect: func() (write, read *sql.DB, err error) {
			address := "file:" + (&url.URL{Path: path}).EscapedPath() + sqliteOptions
			if write, err = sql.Open("sqlite", address); err != nil {
				return nil, nil, err
			}
			write.SetMaxOpenConns(2) // a statement is prepared during a transaction
			if read, err = sql.Open("sqlite", address+"&_pragma=query_only(1)"); err != nil {
				return nil, nil, err
			}
			read.SetMaxOpenConns(min(maxReaders, max(2, runtime.GOMAXPROCS(0))))
			read.SetMaxIdleConns(maxReaders)
			return write, read, write.Ping() // creates the file
		},
		tableExists: "SELECT count(*) FROM sqlite_master WHERE name = 'bullpen_history'",
		integer:     "INTEGER", bytes: "BLOB", withoutRows: " WITHOUT ROWID",
		full:    func(err error) bool { return code(err) == sqlite3.SQLITE_FULL },
		corrupt: func(err error) bool { c := code(err); return c == sqlite3.SQLITE_CORRUPT || c == sqlite3.SQLITE_NOTADB },
	}
}

const (
	postgresDiskFull = "53100"
	maxConnections   = 8
)

func checkPostgres(address string) error {
	if _, err := pgx.ParseConfig(address); err != nil {
		return errors.New("not a PostgreSQL URL that can be used") // the error of the library may repeat the password
	}
	return nil
}

func postgresDialect(address string) *dialect {
	return &dialect{
		connect: func() (write, read *sql.DB, err error) {
			db, err := sql.Open("pgx", address)
			if err != nil {
				return nil, nil, errors.New("the URL of PostgreSQL cannot be used")
			}
			db.SetMaxOpenConns(maxConnections)
			db.SetMaxIdleConns(2)
			return db, db, nil
		},
		tableExists: "SELECT count(*) FROM pg_catalog.pg_class WHERE oid = to_regclass('bullpen_history')",
		integer:     "BIGINT", bytes: "BYTEA",
		full: func(err error) bool {
			e, ok := errors.AsType[*pgconn.PgError](err)
			return ok && e.Code == postgresDiskFull
		},
		corrupt: func(error) bool { return false },
	}
}

// create returns the statements that replace all tables by empty ones.
func (d *dialect) create() []string {
	return []string{
		"DROP TABLE IF EXISTS bullpen_history",
		"DROP TABLE IF EXISTS bullpen_executions",
		"DROP TABLE IF EXISTS bullpen_postings",
		// One row. A writer names the position that it replaces.
		fmt.Sprintf("CREATE TABLE bullpen_history (version TEXT NOT NULL, streams TEXT NOT NULL, jobs %s NOT NULL, "+
			"records %s NOT NULL)", d.integer, d.integer),
		// seq is the record's sequence number, or 0; job is the job's.
		fmt.Sprintf("CREATE TABLE bullpen_executions (place %s PRIMARY KEY, trace TEXT NOT NULL, seq %s NOT NULL, job %s "+
			"NOT NULL, class %s NOT NULL, summary %s NOT NULL)",
			d.integer, d.integer, d.integer, d.integer, d.bytes),
		"CREATE INDEX bullpen_executions_seq ON bullpen_executions (seq) WHERE seq > 0",
		"CREATE INDEX bullpen_executions_job ON bullpen_executions (job) WHERE seq = 0",
		fmt.Sprintf("CREATE TABLE bullpen_postings (term %s NOT NULL, class %s NOT NULL, place %s NOT NULL, PRIMARY KEY "+
			"(term, class, place))%s",
			d.integer, d.integer, d.integer, d.withoutRows),
	}
}
