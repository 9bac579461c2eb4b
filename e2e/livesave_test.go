package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	schema "github.com/bullpen-run/bullpen/proto/api"
)

var savesUnderLoad = repeatsFlag("live-saves", 5, 20, "saves of a sandbox whose database is written to")

// trySave saves the home of the running sandbox, and returns the version and the answer.
func (s *liveSandbox) trySave() (version int64, r *reply) {
	s.t.Helper()
	var saved schema.SandboxSave
	r = s.do(http.MethodPost, s.path("/save"), nil)
	if r.status == http.StatusOK {
		r.into(s.t, &saved)
	}
	return saved.Version, r
}

// save saves the home of the running sandbox as a version.
func (s *liveSandbox) save(want int64) {
	s.t.Helper()
	if version, r := s.trySave(); r.status != http.StatusOK || version != want {
		s.t.Errorf("save version %d: %s", want, r)
	}
}

// testLiveSaves is what tenants see of saves of running sandboxes.
func testLiveSaves(t *testing.T, sys *system) {
	t.Run("cycles", func(t *testing.T) {
		s := sys.in(t).newSandbox(request{"on_timeout": "pause"})
		s.save(0)
		s.check("sleep 1000 >/dev/null 2>&1 </dev/null & echo a >a; echo b >b", "")
		s.save(1)
		s.save(1)
		s.check("rm a; echo c >c", "")
		s.save(2)
		s.check("rm c; pgrep -c sleep", "1\n") // it runs on
		s.change(http.MethodPost, "/pause")
		s.change(http.MethodPost, "/resume")
		s.check("ls; pgrep -c sleep || true", "b\n0\n")
		s.check("rm b; echo a >a", "")
		s.save(4)
		s.change(http.MethodPost, "/pause")
		if _, r := s.trySave(); r.status != http.StatusConflict || !bytes.Contains(r.body, []byte("only a running one")) {
			t.Errorf("of a paused sandbox: %s", r)
		}
		s.change(http.MethodPost, "/resume")
		s.check("ls", "a\n")
		s.change(http.MethodDelete, "")
		other, _ := s.newKey("other-saves", "pro")
		if r := s.with(other).do(http.MethodPost, s.path("/save"), nil); r.status != http.StatusNotFound {
			t.Errorf("another organisation saves the sandbox: %s", r)
		}
	})
	t.Run("limits", func(t *testing.T) {
		s := sys.in(t).newSandbox(request{"on_timeout": "pause"})
		s.check("echo kept >f", "")
		s.save(1)
		s.check(`python3 -c 'import os
for i in range(600): os.mkdir("d"); os.chdir("d")'`, "")
		for range 2 {
			if _, r := s.trySave(); r.status != http.StatusConflict || !bytes.Contains(r.body, []byte("512 directories")) {
				t.Errorf("%s", r)
			}
		}
		s.check("rm -r d; cat f; echo 2 >f", "kept\n")
		s.save(2)
		s.change(http.MethodDelete, "")
	})
	t.Run("at once", func(t *testing.T) { // saves, and a stop
		s := sys.in(t).newSandbox(request{"on_timeout": "pause"})
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				for range 5 {
					s.check(fmt.Sprintf("echo x >>f%d", i), "")
					if _, r := s.trySave(); r.status != http.StatusOK {
						t.Errorf("%s", r)
					}
				}
			})
		}
		all.Wait()
		want, _, err := s.run("user", "md5sum f*")
		if err != nil {
			t.Fatal(err)
		}
		saving := s.begin(http.MethodPost, s.path("/save"), nil)
		s.check("echo last >last", "")
		s.change(http.MethodPost, "/pause")
		if r := saving.answer(t); r.status != http.StatusOK && r.status != http.StatusConflict {
			t.Errorf("%s", r)
		}
		s.change(http.MethodPost, "/resume")
		s.check("cat last; md5sum f*", "last\n"+want)
		s.change(http.MethodDelete, "")
	})
	t.Run("database", func(t *testing.T) { testSavesOfDatabase(t, sys.in(t)) })
}

// bank is a program that moves money between accounts for ever, in several files of one database, and appends
// to a file beside it.
const bank = `
import os, random, sqlite3
db = sqlite3.connect("bank.db", isolation_level=None)
db.execute("PRAGMA journal_mode=WAL")
db.execute("PRAGMA wal_autocheckpoint=50")
db.execute("CREATE TABLE accounts (id INTEGER PRIMARY KEY, amount INTEGER, padding TEXT)")
db.execute("CREATE TABLE moves (n INTEGER)")
db.execute("INSERT INTO moves VALUES (0)")
for i in range(100):
    db.execute("INSERT INTO accounts VALUES (?, 1000, ?)", (i, "x" * 1000))
log = open("log", "ab", buffering=0)
while True:
    a, b = random.sample(range(100), 2)
    db.execute("BEGIN")
    db.execute("UPDATE accounts SET amount = amount - 1, padding = ? WHERE id = ?", (str(random.random()) * 50, a))
    db.execute("UPDATE accounts SET amount = amount + 1 WHERE id = ?", (b,))
    db.execute("UPDATE moves SET n = n + 1")
    db.execute("COMMIT")
    log.write(b"moved\n")
`

// audit is a program that checks the database, and prints the number of moves.
const audit = `
import sqlite3
db = sqlite3.connect("bank.db")
(ok,), = db.execute("PRAGMA integrity_check")
(total,), = db.execute("SELECT sum(amount) FROM accounts")
(moves,), = db.execute("SELECT n FROM moves")
lines = open("log", "rb").read()
assert (ok, total) == ("ok", 100_000), (ok, total)
# The program stood still after a commit, or between a commit and its line.
assert 0 <= moves - lines.count(b"moved\n") <= 1 and not lines.replace(b"moved\n", b""), (moves, len(lines))
print(moves)
`

// testSavesOfDatabase saves a sandbox in which a program writes to a database all the time. Each version has the
// files as they were at one time.
func testSavesOfDatabase(t *testing.T, a *api) {
	const id = "saved-database"
	s := a.newSandbox(request{"thread_id": id})
	s.check("cat >bank.py <<'END'"+bank+"END\nsetsid python3 bank.py >/dev/null 2>errors </dev/null &", "")
	eventually(t, "moves", func() (bool, any) {
		out, _, err := s.run("user", "wc -l <log; cat errors")
		n, _ := strconv.Atoi(strings.TrimSpace(out))
		return n > 10, fmt.Sprint(out, err)
	})
	for i := range int64(savesUnderLoad.n()) {
		s.check("n=$(wc -l <log); until [ $(wc -l <log) -gt $n ]; do :; done", "")
		s.save(i + 1)
	}
	last, newest := 0, int64(savesUnderLoad.n())
	for number := max(1, newest-proto.KeptVersions+1); number <= newest; number++ {
		fork := fmt.Sprint(id, "-", number)
		r := a.do(http.MethodPost, "/v1/threads/"+id+"/fork", request{"id": fork, "version": number})
		if r.status != http.StatusCreated {
			t.Fatalf("fork version %d: %s", number, r)
		}
		program := python(audit)
		program["thread_id"] = fork
		got := a.ended(a.submit(program))
		moves, err := strconv.Atoi(strings.TrimSpace(*got.Stdout))
		if err != nil || moves < last {
			t.Errorf("version %d after %d moves: %q, %q", number, last, *got.Stdout, *got.Stderr)
		}
		last = moves
	}
	s.change(http.MethodDelete, "")
}
