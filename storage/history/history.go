// Package history stores the index of executions in SQLite or PostgreSQL: which executions there
// are, by time, status and all other filter criteria of lists. The index is a projection of streams
// in JetStream. It can be deleted at any time; package scheduler/history fills it again.
//
// An execution is a row with its summary, and a posting for each of its terms, such as its API key
// or a pair of its metadata. The key of a posting is the term, the class and the place. The class
// stands for the three fields with few values: status, language and mode. So a page filtered by any
// of those and one term is a few ranges of the index, however rare its executions are. Each further
// term is looked up for each posting of the rarest one.
package history

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/bullpen-run/bullpen/proto"
)

// schema is the version of the tables. An index of another version is deleted.
const schema = 1

// places is the number of bits of a place that do not come from the time.
const places = 20

// probes is the number of possible places of an execution: those after the first are for executions
// of the same millisecond with the same first place.
const probes = 32

// ErrReset means that the index is empty or was replaced since it was prepared: the file was
// removed or is corrupt.
var ErrReset = errors.New("the index of executions begins anew")

// DB is an index of executions. It is safe for concurrent use.
type DB struct {
	*dialect
	log *slog.Logger

	mu          sync.RWMutex // locked for reading while the handles are in use
	write, read *sql.DB
	file        os.FileInfo // of SQLite's file when it was opened

	// writing is held by the writing transaction: it prepares statements on a second connection,
	// which another transaction must not have.
	writing    sync.Mutex
	statements map[string]*sql.Stmt // guarded by writing
}

// Check checks the form of an address of [Open] without connecting.
func Check(address string) error {
	if !isPostgres(address) {
		return errors.New("not a PostgreSQL URL: write postgres://USER:PASSWORD@HOST:PORT/DATABASE")
	}
	return checkPostgres(address)
}

func isPostgres(address string) bool {
	return strings.HasPrefix(address, "postgres://") || strings.HasPrefix(address, "postgresql://")
}

// Open opens the index at an address: a PostgreSQL URL, otherwise the path of a file, which is
// created. It does not connect to PostgreSQL.
func Open(address string, log *slog.Logger) (*DB, error) {
	d := &DB{log: log, dialect: sqliteDialect(address)}
	if isPostgres(address) {
		d.dialect = postgresDialect(address)
	}
	err := d.open()
	if err != nil && d.corrupt(err) {
		log.Warn("index of executions corrupt, will rebuild it", "error", err)
		err = d.replace()
	}
	if err != nil {
		return nil, fmt.Errorf("open the index of executions: %w", err)
	}
	return d, nil
}

// open opens the handles. The caller holds the lock, or has the only reference to d.
func (d *DB) open() (err error) {
	d.statements = map[string]*sql.Stmt{}
	if d.write, d.read, err = d.connect(); err != nil {
		return err
	}
	if d.path != "" {
		d.file, err = os.Stat(d.path)
	}
	return err
}

// Close closes the index.
func (d *DB) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.close()
}

func (d *DB) close() error {
	if d.write == d.read {
		return d.write.Close()
	}
	return errors.Join(d.read.Close(), d.write.Close())
}

// fail translates an error of the database. A corrupt file is deleted.
func (d *DB) fail(doing string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, ErrReset), errors.Is(err, proto.ErrConflict):
		return err
	case d.corrupt(err):
		d.log.Warn("index of executions corrupt, will rebuild it", "error", err)
		return errors.Join(ErrReset, d.replace())
	case d.full(err):
		return &proto.HistoryError{Reason: "its disk is full", Err: fmt.Errorf("%s: %w", doing, err)}
	default:
		return &proto.HistoryError{Reason: "its database cannot be used", Err: fmt.Errorf("%s: %w", doing, err)}
	}
}

// replace deletes SQLite's file and opens a new one.
func (d *DB) replace() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_ = d.close() // of a file that goes
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.Remove(d.path + suffix); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("delete the index of executions: %w", err)
		}
	}
	return d.open()
}

// Present returns ErrReset if the file of the index was removed or replaced since it was opened. In
// that case, a new one is now open.
func (d *DB) Present() error {
	if d.path == "" {
		return nil
	}
	now, err := os.Stat(d.path)
	d.mu.RLock()
	same := err == nil && os.SameFile(now, d.file)
	d.mu.RUnlock()
	if same {
		return nil
	}
	d.log.Warn("index of executions removed, will rebuild it", "file", filepath.Base(d.path))
	return errors.Join(ErrReset, d.replace())
}

// version identifies the tables and the numeric codes of the fields with few values.
func version() string {
	return fmt.Sprint(schema, statuses(), proto.Languages(), modes())
}

// Prepare returns the index's position in the given streams. An index of other streams or of
// another version is deleted.
func (d *DB) Prepare(ctx context.Context, streams string) (proto.HistoryPosition, error) {
	if err := d.Present(); err != nil && !errors.Is(err, ErrReset) {
		return proto.HistoryPosition{}, d.fail("prepare", err)
	}
	at, err := d.prepare(ctx, streams)
	if err = d.fail("prepare", err); errors.Is(err, ErrReset) { // once more with the new file
		at, err = d.prepare(ctx, streams)
		err = d.fail("prepare", err)
	}
	return at, err
}

func (d *DB) prepare(ctx context.Context, streams string) (at proto.HistoryPosition, err error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	at, known, err := d.position(ctx, d.write)
	if err != nil || known && at.Streams == streams {
		return at, err
	}
	tx, err := d.write.BeginTx(ctx, nil)
	if err != nil {
		return at, err
	}
	defer func() { _ = tx.Rollback() }()
	for _, statement := range d.create() {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return at, err
		}
	}
	at = proto.HistoryPosition{Streams: streams}
	if _, err := tx.ExecContext(ctx, "INSERT INTO bullpen_history (version, streams, jobs, records) VALUES ($1, $2, 0, 0)",
		version(), streams); err != nil {
		return at, err
	}
	return at, tx.Commit()
}

// position reads the index's position. known is false if there is no index of this version.
func (d *DB) position(ctx context.Context, on *sql.DB) (at proto.HistoryPosition, known bool, err error) {
	var exists int
	if err := on.QueryRowContext(ctx, d.tableExists).Scan(&exists); err != nil || exists == 0 {
		return at, false, err
	}
	var stored string
	err = on.QueryRowContext(ctx, "SELECT version, streams, jobs, records FROM bullpen_history").Scan(&stored, &at.Streams,
		&at.Jobs, &at.Records)
	if errors.Is(err, sql.ErrNoRows) {
		return at, false, nil
	}
	return at, err == nil && stored == version(), err
}

// Position returns how far the index has read the streams: nowhere if there is no index yet.
func (d *DB) Position(ctx context.Context) (proto.HistoryPosition, error) {
	d.mu.RLock()
	at, known, err := d.position(ctx, d.read)
	d.mu.RUnlock()
	if err == nil && !known {
		at = proto.HistoryPosition{}
	}
	return at, d.fail("read its position", err)
}

// place returns an execution's first choice of place in the order of lists: by time, and within a
// millisecond by its id.
func place(r *proto.Record) int64 {
	sum := sha256.Sum256([]byte(r.TraceID))
	return r.CreatedAt.UnixMilli()<<places | int64(binary.BigEndian.Uint32(sum[:])>>(32-places))
}

// term returns the number of a term of an organisation's executions. Numbers may collide, so
// matches are checked against the filter.
func term(org, name, value string) int64 {
	sum := sha256.Sum256([]byte(org + "\x00" + name + "\x00" + value))
	return int64(binary.BigEndian.Uint64(sum[:]))
}

// all is the name of the term that all executions of an organisation have.
const all = ""

func termsOf(m *proto.Meta) []int64 {
	terms := []int64{term(m.Org, all, "")}
	for _, t := range proto.HistoryTerms(m) {
		terms = append(terms, term(m.Org, t.Name, t.Value))
	}
	return terms
}

// Fields with few values are numbered by their place in these lists. Others count as one past the
// end.

func statuses() []proto.Status {
	return []proto.Status{
		proto.StatusQueued, proto.StatusRunning, proto.StatusSuccess, proto.StatusFailed, proto.StatusTimeout,
		proto.StatusOOM, proto.StatusSeccomp, proto.StatusCancelled,
	}
}

func modes() []proto.Mode {
	return []proto.Mode{proto.ModeInline, proto.ModeStreaming, proto.ModeAsync, proto.ModeSandbox}
}

const (
	languageShift = 8
	statusShift   = 16
	fieldMask     = 0xff
)

func number[T comparable](list []T, value T) int64 {
	if i := slices.Index(list, value); i >= 0 {
		return int64(i)
	}
	return fieldMask
}

func classOf(r *proto.Record) int64 {
	return number(statuses(), r.Status)<<statusShift | number(proto.Languages(), r.Language)<<languageShift | number(
		modes(), r.Mode)
}

// selects reports whether executions of a class may match the filter.
func selects(f *proto.HistoryFilter, class int64) bool {
	return (f.Status == "" || class>>statusShift == number(statuses(), f.Status)) &&
		(f.Language == "" || class>>languageShift&fieldMask == number(proto.Languages(), f.Language)) &&
		(f.Mode == "" || class&fieldMask == number(modes(), f.Mode))
}
