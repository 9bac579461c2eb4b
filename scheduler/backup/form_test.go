package backup_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/backup"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// aBackup returns a backup of one queued job and one API key.
func aBackup(t testing.TB) []byte {
	t.Helper()
	st := storetest.Open(t, storetest.Server(t))
	if err := storetest.PutJob(t.Context(), st, storetest.Job("acme", "k", proto.ModeAsync)); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Keys.Put(t.Context(), "key.k", []byte("{}")); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Keys.Put(t.Context(), "key.gone", []byte("{}")); err != nil {
		t.Fatal(err)
	}
	if err := st.Keys.Delete(t.Context(), "key.gone"); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Control.Put(t.Context(), "dispatcher", []byte("somebody")); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := (&backup.Maker{Store: st, Version: "1.2.3"}).Backup(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func compressed(t testing.TB, text string) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll([]byte(text), nil)
}

func content(t testing.TB, packed []byte) []byte {
	t.Helper()
	r, err := zstd.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var out bytes.Buffer
	if _, err := out.ReadFrom(r); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestCheckOfACompleteBackup(t *testing.T) {
	s, err := backup.Check(bytes.NewReader(aBackup(t)))
	if err != nil || s.Messages != 2 || s.Version != "1.2.3" || s.MadeAt.IsZero() {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestCheckRejectsDamagedBackups(t *testing.T) {
	whole := aBackup(t)
	for n := range whole {
		if _, err := backup.Check(bytes.NewReader(whole[:n])); err == nil {
			t.Fatalf("the first %d of %d bytes pass for a backup", n, len(whole))
		}
		broken := bytes.Clone(whole)
		broken[n] ^= 1
		if _, err := backup.Check(bytes.NewReader(broken)); err == nil &&
			!bytes.Equal(content(t, broken), content(t, whole)) {
			t.Fatalf("with another bit in byte %d of %d it passes for a backup", n, len(whole))
		}
	}
	for name, text := range map[string]string{
		"empty": "", "no end": `{"bullpen_backup":2}` + "\n", "something else": "{}\n",
		"wrong number": `{"bullpen_backup":2}` + "\n" + `{"end":1}` + "\n", "negative": `{"bullpen_backup":2}` + "\n" +
			`{"bytes":-1}` + "\n",
		"more after the end": `{"bullpen_backup":2}` + "\n" + `{"end":0}` + "\n\n", "a long line": strings.Repeat("x", 9<<20),
	} {
		if _, err := backup.Check(bytes.NewReader(compressed(t, text))); !errors.Is(err, backup.ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A later version may write fields that this one does not know, and increments the format version
// if this one cannot read the backup.
func TestBackupsOfOtherVersions(t *testing.T) {
	more := `{"bullpen_backup":2,"new":true}` + "\n" + `{"subject":"bullpen.dead.x","bytes":1,"new":2}` + "\nx" +
		`{"end":1}` + "\n"
	if s, err := backup.Check(bytes.NewReader(compressed(t, more))); err != nil || s.Messages != 1 {
		t.Errorf("%+v, %v", s, err)
	}
	_, err := backup.Check(bytes.NewReader(compressed(t, `{"bullpen_backup":3,"version":"9.0"}`+"\n")))
	if err == nil || errors.Is(err, backup.ErrDamaged) || !strings.Contains(err.Error(), "made by bullpen 9.0") {
		t.Errorf("of another format: %v", err)
	}
}

func TestRestoreNeedsAnEmptyJetStream(t *testing.T) {
	file := aBackup(t)
	server := storetest.Server(t)
	access := store.Access{InProcess: server}
	restore := func(raw []byte) error {
		_, err := backup.Restore(t.Context(), access, config, bytes.NewReader(raw), storetest.Log(t))
		return err
	}
	strange := compressed(t, `{"bullpen_backup":2}`+"\n"+`{"subject":"$JS.API.STREAM.PURGE.BULLPEN_JOBS"}`+"\n"+
		`{"end":1}`+"\n")
	if err := restore(strange); !errors.Is(err, backup.ErrDamaged) {
		t.Errorf("a message on a subject of somebody else: %v", err)
	}
	if err := restore(file[:len(file)-1]); !errors.Is(err, backup.ErrDamaged) {
		t.Errorf("half a backup: %v", err)
	}
	if _, err := store.Connect(t.Context(), access, config, storetest.Log(t)); err == nil ||
		!strings.Contains(err.Error(), "run bullpen restore again") {
		t.Errorf("a server starts on half a backup: %v", err)
	}
	if err := restore(file); err != nil {
		t.Error(err)
	}
	st := storetest.Open(t, server)
	if _, err := st.Keys.Get(t.Context(), "key.k"); err != nil {
		t.Error(err)
	}
	if _, err := st.Keys.Get(t.Context(), "key.gone"); !store.IsNotFound(err) {
		t.Errorf("what was removed: %v", err)
	}
	if _, err := st.Control.Get(t.Context(), "dispatcher"); !store.IsNotFound(err) {
		t.Errorf("who led: %v", err)
	}
	if err := restore(file); !errors.Is(err, backup.ErrUsed) || !strings.Contains(err.Error(), "BULLPEN_JOBS") {
		t.Errorf("over what is there: %v", err)
	}
}

// A new cluster's servers may not have met yet.
func TestRestoreOnAFormingCluster(t *testing.T) {
	file := aBackup(t)
	start := storetest.Servers(t)
	urls := start() + "," + start() + "," + start()
	cfg := config
	cfg.Replicas = storetest.Replicas
	if _, err := backup.Restore(storetest.Context(t), store.Access{URL: urls}, cfg, bytes.NewReader(file),
		storetest.Log(t)); err != nil {
		t.Error(err)
	}
}

// Every stream is declared as part of a backup or not.
func TestEveryStreamIsDeclared(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	without := map[string]bool{
		"BULLPEN_LEASES":      true, // what workers hold
		"KV_bullpen_control":  true, // who leads
		"KV_bullpen_preload":  true, // what workers find out again
		"KV_bullpen_sessions": true, // one that was ended since would work again
		"BULLPEN_BODIES":      true, // bodies, which go with their messages
	}
	for info := range st.JS.ListStreams(t.Context()).Info() {
		for _, subject := range info.Config.Subjects {
			if kept := store.InBackup(
				strings.NewReplacer("*", "x", ">", "x").Replace(subject)); kept == without[info.Config.Name] {
				t.Errorf("stream %s: in a backup is %t", info.Config.Name, kept)
			}
		}
	}
}

// A state that is newer than the records would name executions and webhooks that the backup lacks.
func TestStatesAreReadBeforeWhatTheyName(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	streams, err := store.BackupStreams(t.Context(), st)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]int{}
	for i, s := range streams {
		names[s.CachedInfo().Config.Name] = i + 1
	}
	for _, state := range []string{"KV_bullpen_schedules", "KV_bullpen_batches", "KV_bullpen_pipelines"} {
		for _, named := range []string{"BULLPEN_JOBS", "BULLPEN_DELIVERIES", "BULLPEN_EXECS", "KV_bullpen_bindings"} {
			if names[state] == 0 || names[state] >= names[named] {
				t.Errorf("%s is read as number %d, %s as number %d", state, names[state], named, names[named])
			}
		}
	}
}

func FuzzCheck(f *testing.F) {
	f.Add(compressed(f, `{"bullpen_backup":2}`+"\n"+`{"subject":"bullpen.dead.x","bytes":1}`+"\nx"+`{"end":1}`+"\n"))
	f.Add([]byte("x"))
	f.Fuzz(func(_ *testing.T, raw []byte) {
		_, _ = backup.Check(bytes.NewReader(raw)) // it neither panics nor hangs
	})
}
