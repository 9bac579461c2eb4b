//go:build imagetest

package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// dataModules are the modules of the recipe python-data that a profile may preload.
func dataModules() []string {
	return []string{
		"matplotlib.pyplot", "numpy", "openpyxl", "pandas", "PIL.Image", "pip", "pyarrow.parquet", "scipy.stats",
		"sklearn.linear_model",
		"statsmodels.api", "sympy", "tqdm",
	}
}

// storageProgram tries in a directory what people do with data, and prints a line for each.
const storageProgram = `
import os, subprocess, sys
import duckdb, pandas as pd, pyarrow as pa, pyarrow.dataset as ds, pyarrow.parquet as pq
os.chdir(sys.argv[1] if len(sys.argv) > 1 else DIR)
frame = pd.DataFrame({"n": range(10000), "s": [f"row {i}" for i in range(10000)]})
def attempt(what, f):
    try: print(f"{what}: {f()}")
    except Exception as e: print(f"{what}: {type(e).__name__}: {str(e).splitlines()[0][:200]}")
def csv():
    frame.to_csv("a.csv", index=False)
    return pd.read_csv("a.csv").equals(frame)
def csv_append():
    frame.to_csv("a.csv", index=False, header=False, mode="a")
    return len(pd.read_csv("a.csv"))
def parquet():
    frame.to_parquet("a.parquet")
    return pd.read_parquet("a.parquet").equals(frame)
def arrow():
    pq.write_table(pa.Table.from_pandas(frame), "b.parquet")
    return pq.read_table("b.parquet", columns=["n"]).num_rows
def dataset():
    ds.write_dataset(pa.table({"k": [1, 2, 1], "v": [1, 2, 3]}), "set", format="parquet", partitioning=["k"])
    return ds.dataset("set", partitioning=["k"]).to_table().num_rows
def excel():
    frame[:10].to_excel("a.xlsx", index=False)
    return len(pd.read_excel("a.xlsx"))
def rename():
    os.rename("b.parquet", "c.parquet")
    os.replace("c.parquet", "a.parquet")
    return pq.read_table("a.parquet").num_rows, os.path.exists("b.parquet"), os.path.exists("c.parquet")
def duck_read():
    return duckdb.sql("select count(*), sum(n) from 'a.parquet'").fetchall(), duckdb.sql("select count(*) from 'a.csv'").fetchall()
def duck_copy():
    duckdb.sql("copy (select * from range(1000) t(n)) to 'd.parquet'")
    duckdb.sql("copy (select * from range(1000) t(n)) to 'd.csv'")
    return duckdb.sql("select count(*) from 'd.parquet'").fetchall(), duckdb.sql("select count(*) from 'd.csv'").fetchall()
def duck_file():
    for _ in range(2):
        with duckdb.connect("e.duckdb") as c:
            c.sql("create table if not exists t (n integer)")
            c.sql("insert into t select * from range(1000)")
    with duckdb.connect("e.duckdb", read_only=True) as c:
        return c.sql("select count(*) from t").fetchall()
def duck_rename():
    os.rename("e.duckdb", "f.duckdb")
    with duckdb.connect("f.duckdb", read_only=True) as c:
        return c.sql("select count(*) from t").fetchall()
def git():
    run = lambda *a: subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e@example.com", *a], check=True, capture_output=True, text=True).stdout
    try:
        run("init", "-q", "repo")
        os.makedirs("repo/d", exist_ok=True)
        for i in range(20): open(f"repo/d/{i}", "w").write(f"file {i}")
        os.chdir("repo")
        run("add", "."); run("commit", "-qm", "first")
        open("d/1", "a").write("more")
        run("commit", "-qam", "second"); run("branch", "other"); run("gc", "-q")
        return len(run("log", "--oneline").splitlines()), repr(run("status", "--short"))
    except subprocess.CalledProcessError as e: raise OSError(e.stderr.strip().splitlines()[-1])
    finally: os.chdir(DIR)
for f in (csv, csv_append, parquet, arrow, dataset, excel, rename, duck_read, duck_copy, duck_file, duck_rename, git): attempt(f.__name__, f)
`

// storageResults is the output of storageProgram.
const storageResults = `csv: True
csv_append: 20000
parquet: True
arrow: 10000
dataset: 3
excel: 10
rename: (10000, False, False)
duck_read: ([(10000, 49995000)], [(20000,)])
duck_copy: ([(1000,)], [(1000,)])
duck_file: [(2000,)]
duck_rename: [(2000,)]
git: (2, "''")
`

// TestDataImage builds the recipe python-data, with the flags in IMAGE_FLAGS, preloads each of its
// modules, and reads and writes data on storage connections. It needs a network.
func TestDataImage(t *testing.T) {
	p := buildPrograms(t)
	b := p.newBucket(t)
	root := t.TempDir()
	if err := unix.Mount("tmpfs", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,uid=1234,gid=1234"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
	flags := slices.Concat(mountFlags(t, b.Endpoint),
		[]string{"127.0.0.0/8,::1/128", "--mount-roots", root, "--warm-memory", "4GiB"})
	sys := newSystem(t, p, topology{}, 2, flags...)
	more := filepath.Join(t.TempDir(), "requirements.txt")
	if err := os.WriteFile(more, []byte("duckdb\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	build := []string{"build", "--json", "data", "--from", "python-data", "--package", "git", "--pip", more}
	img := sys.imageCommand(t, append(build, strings.Fields(os.Getenv("IMAGE_FLAGS"))...)...)
	t.Logf("built in %s: %d bytes stored, %d unpacked", time.Since(began).Round(time.Second), img.Size, img.UnpackedSize)
	for _, module := range dataModules() {
		t.Run("preload "+module, func(t *testing.T) {
			profile := "preload-" + strings.ToLower(strings.ReplaceAll(module, ".", "-"))
			a := sys.sandboxed(profile, request{"image": "data", "memory": "2GiB", "preload": []string{module}})
			eventually(t, module+" in a fork", func() (bool, any) {
				got := a.inline(python("import sys; print('" + module + "' in sys.modules)"))
				return got.Stdout == "True\n", []any{got, sys.get(profilesPath + "/" + profile + "/preload")}
			})
		})
	}
	testDataOnConnections(t, sys, b, root)
}

// testDataOnConnections reads and writes data on a bucket and on a directory.
func testDataOnConnections(t *testing.T, sys *system, b *bucket, root string) {
	sys.newProfile("data", request{"image": "data", "memory": "4GiB", "pids": 1024})
	id, secret := storagetest.Credentials()
	newKey := func(mounts ...request) *api {
		var made struct{ Key string }
		r := sys.do(http.MethodPost, "/v1/admin/keys",
			request{"name": "n", "org": "acme", "plan": "pro", "profile": "data", "mounts": mounts})
		if r.status != http.StatusCreated {
			t.Fatal(r)
		}
		r.into(t, &made)
		return sys.with(made.Key)
	}
	newKey() // creates the organisation
	for path, body := range map[string]request{
		"/v1/admin/secrets/KEYS?org=acme": {"value": `{"access_key_id":"` + id + `","secret_access_key":"` + secret + `"}`},
	} {
		if r := sys.do(http.MethodPut, path, body); r.status != http.StatusOK {
			t.Fatal(r)
		}
	}
	for _, connection := range []request{
		{
			"org": "acme", "slug": "bucket", "kind": "s3", "endpoint": b.Endpoint, "region": storagetest.Region,
			"bucket": storagetest.Bucket, "path_style": true, "credential": "KEYS", "prefix": b.prefix,
		},
		{"org": "acme", "slug": "shared", "kind": "directory", "directory": root},
	} {
		if r := sys.do(http.MethodPost, connectionsPath, connection); r.status != http.StatusCreated {
			t.Fatal(r)
		}
	}
	user := newKey(request{"connection": "bucket"}, request{"connection": "shared"})
	for _, slug := range []string{"bucket", "shared"} {
		t.Run("data on "+slug, func(t *testing.T) {
			got := user.in(t).inline(python("DIR = '/data/"+slug+"'\n"+storageProgram).and("timeout", 300))
			if got.Stdout != storageResults {
				t.Errorf("got %s%s", got.Stdout, got.Stderr)
			}
		})
	}
}
