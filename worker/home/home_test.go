package home_test

import (
	"bytes"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
)

func TestOwners(t *testing.T) {
	var owners home.Owners
	var wg sync.WaitGroup
	got := make([]*home.Owner, 8)
	for i := range got {
		wg.Go(func() {
			var err error
			if got[i], err = owners.Get(tenant+i%2, tenant); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i, o := range got {
		if o != got[i%2] || o == got[(i+1)%2] {
			t.Errorf("unexpected owner %d", i)
		}
	}
	if _, err := owners.Get(0, tenant); err == nil {
		t.Error("root was accepted as an owner")
	}
	check(t, owners.Close())
	if _, err := owners.Get(tenant, tenant); err == nil {
		t.Error("an owner after Close")
	}
	check(t, owners.Close())
}

// TestOperations changes homes in many ways by programs of the tenant.
func TestOperations(t *testing.T) {
	shared := newThread(t)
	for _, test := range []struct{ name, before, script string }{
		{"nothing", "mkdir -p a/b; echo x > a/b/f", ":"},
		{"files", ":", "echo x > f; mkdir -p d/e; echo y > d/e/f; : > empty; head -c 100000 /dev/urandom > big"},
		{"append", "mkdir d; echo x > d/f", "echo more >> d/f"},
		{"mode", "mkdir d; echo x > d/f", "chmod 750 d; chmod 400 d/f; chmod 1700 ."},
		{"unreadable", "mkdir d; echo x > d/f", "chmod 000 d/f d"},
		{
			"time", "mkdir d; echo x > d/f; ln -s f d/l",
			"touch -h -d '1999-12-31 23:59:59.123456789' d/f d/l d; touch -d '1950-01-01 00:00:00.5' .",
		},
		{"deleted", "mkdir -p a/b c; echo x > a/b/f; echo y > c/f", "rm a/b/f; rm -r c"},
		{"deleted and made again", "mkdir -p a/b; echo x > a/b/f", "rm -r a; mkdir -p a; echo y > a/g"},
		{"made and deleted", "mkdir a", "mkdir a/x; echo x > a/x/f; rm -r a/x"},
		{"empty directories", ":", "mkdir -p a/b/c d"},
		{"renamed file", "mkdir a b; echo x > a/f", "mv a/f b/g"},
		{"renamed directory", "mkdir -p a/b/c; echo x > a/b/f; echo y > a/g", "mv a z"},
		{"renamed deeper", "mkdir -p a/b/c x/y; echo x > a/b/f", "mv a x/y/n"},
		{"renamed up", "mkdir -p a/b/c; echo x > a/b/c/f; echo y > a/g", "mv a/b/c top"},
		{"renamed and back", "mkdir -p a/b; echo x > a/b/f", "mv a z; mv z a"},
		{"renamed within", "mkdir -p p/a/b; echo x > p/a/b/f", "mv p/a p/z; echo y > p/z/b/g; rm p/z/b/f"},
		{"renamed twice", "mkdir -p a/b c; echo x > a/b/f", "mv a c/a; mv c d"},
		{"renamed out of what is renamed", "mkdir -p a/b; echo x > a/b/f; echo y > a/g", "mv a/b z; mv a y; mv z y/in"},
		{"renamed out of what is deleted", "mkdir -p a/b; echo x > a/b/f; echo y > a/g", "mv a/b z; rm -r a"},
		{"renamed into its own name", "mkdir -p a/b; echo x > a/b/f", "mv a x; mkdir a; mv x a/a"},
		{"swapped", "mkdir -p a/1 b/2; echo x > a/1/f; echo y > b/2/f", "mv a t; mv b a; mv t b"},
		{"swapped with a child", "mkdir -p a/b; echo x > a/f; echo y > a/b/g", "mv a/b t; mv a t/b; mv t a"},
		{"renamed onto an empty one", "mkdir -p a/b c; echo x > a/b/f", "mv -T a c"},
		{"renamed onto a file's name", "mkdir -p a/b; echo x > c", "rm c; mv a c"},
		{"renamed and refilled", "mkdir -p a/b; echo x > a/b/f", "mv a z; mkdir -p a/b; echo n > a/b/n"},
		{"from new into old", "mkdir -p old; echo x > old/f", "mkdir new; echo y > new/g; mv new old/new; mv old newer"},
		{"file becomes directory", "echo x > f", "rm f; mkdir f; echo y > f/g"},
		{"directory becomes file", "mkdir -p d/e; echo x > d/e/f", "rm -r d; echo y > d"},
		{"directory becomes symlink", "mkdir -p d/e; echo x > d/e/f", "rm -r d; ln -s /etc d"},
		{"symlink becomes directory", "ln -s /etc l", "rm l; mkdir l; echo x > l/passwd"},
		{"symlinks", ":", "ln -s nowhere a; ln -s /etc/passwd b; ln -s ../../.. c; ln -s . d"},
		{"hard links", ":", "echo x > a; ln a b; mkdir d; ln a d/c; echo y >> b"},
		{"hard links to a symlink", ":", "ln -s x a; ln -P a b; mkdir d; ln -P a d/c"},
		{"hard link to an old file", "echo x > a", "mkdir d; ln a d/b"},
		{"one of two names written to", "echo x > a; mkdir d; ln a d/b", "echo y >> a"},
		{"the other of two names written to", "echo x > a; mkdir -p d/e; ln a d/e/b", "chmod 600 d/e/b"},
		{"one of two names removed", "echo x > a; mkdir d; ln a d/b", "rm a"},
		{"written to and removed", "echo x > a; mkdir d; ln a d/b", "echo y >> a; rm a"},
		{"one of three names removed", "echo x > a; mkdir d; ln a d/b; ln a c", "rm a; echo y > a; ln d/b d/d"},
		{"all names removed", "echo x > a; mkdir d; ln a d/b", "rm a; ln d/b n; rm d/b"},
		{"a name in a renamed directory", "echo x > a; mkdir -p d/e; ln a d/e/b", "mv d z; echo y >> a"},
		{"a name in a deleted directory", "echo x > a; mkdir -p d/e; ln a d/e/b; ln a c", "rm -r d; echo y >> a"},
		{"a name that is hidden", "echo x > a; mkdir -p d; ln a d/b; ln a d/c", "echo y >> a; rm d/b; mkdir d/b"},
		{"a symlink's names", "ln -s x a; ln -P a b; mkdir d; ln -P a d/c", "touch -h -d 2001-01-01 a"},
		{"no longer linked", "echo x > a; ln a b", "cp a c; mv c a"},
		{
			"names of many kinds", ":",
			`mkdir $'new\nline' -- '-rf' ' ' $'\xff\xfe' '.hidden' '...'; echo x > $'new\nline/\xc3\x28'
			echo y > '\'; echo z > $'tab\t'; : > ./-rf/--help
			echo long > $(printf 'n%.0s' {1..255})`,
		},
		{"set-uid", ":", "cp /usr/bin/id id; chmod 6755 id; mkdir d; chmod 2775 d; mkdir t; chmod 1777 t"},
		{"FIFOs and sockets", "echo x > f; mkdir d; echo y > d/g", "mkfifo p; rm f; mkfifo f; rm -r d; mkfifo d"},
		{"directory after FIFO", "mkdir d; echo y > d/g", "rm -r d; mkfifo d; rm d; mkdir d"},
		{
			"sparse", ":",
			`truncate -s 12M hole; truncate -s 12M middle; printf x | dd of=middle bs=1 seek=9M conv=notrunc status=none
			printf x | dd of=end bs=1 seek=6M status=none; head -c 10000 /dev/zero > zeros`,
		},
		{
			"sparse changed", "truncate -s 10M f; printf x | dd of=f bs=1 seek=5M conv=notrunc status=none",
			"printf y | dd of=f bs=1 seek=8M conv=notrunc status=none; truncate -s 20M f",
		},
		{"sparse with attributes removed", `truncate -s 8192 f; printf x | dd of=f conv=notrunc status=none; ln f g
			python3 -c "import os; os.setxattr('f', 'user.large', bytes(3000))"`, "rm f"},
		{
			"tree replaced by a file and by a renamed tree",
			"mkdir -p a/b c d/e; echo x > a/b/f; ln a/b/f d/e/f; echo y > c/f; truncate -s 1M c/hole",
			"rm -r a; echo z > a; rm -r c; mv d c; rm c/e/f",
		},
		{"attributes", "echo x > f; mkdir d", `python3 -c "
import os
os.setxattr('f', 'user.one', b'1'); os.setxattr('f', 'user.empty', b''); os.setxattr('d', 'user.two', bytes(range(256)))
os.setxattr('.', 'user.root', b'r'); os.setxattr('f', 'user.overlay.opaque', b'y'); os.setxattr('d', 'user.overlay.opaque', b'y')"`},
		{"attributes changed", `echo x > f; mkdir d; python3 -c "
import os
for n in 'f', 'd', '.': os.setxattr(n, 'user.one', b'1'); os.setxattr(n, 'user.two', b'2')"`, `python3 -c "
import os
for n in 'f', 'd', '.': os.removexattr(n, 'user.one'); os.setxattr(n, 'user.two', b'22')"`},
		{
			"objects", "head -c 5000000 /dev/zero > a; yes | head -c 4194304 > b",
			"yes | head -c 4194305 > c; cp a d; ln d e; truncate -s 9M a; echo end >> a",
		},
		{"many", ":", "mkdir d; cd d; touch $(seq 1000); cd ..; mkdir e; mv d e"},
		{"deep", "mkdir -p $(printf 'd/%.0s' {1..200})", "mv d/d/d/d/d x; echo x > $(printf 'd/%.0s' {1..4})f"},
		{"the root", "echo x > f", "chmod 700 .; rm f"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			th := &thread{tb: t, owner: shared.owner, volumes: shared.volumes, objects: objects{}, lower: newDir(t)}
			th.run(test.before)
			_, stats := th.run(test.script)
			if unchanged := test.script == ":"; stats.Unchanged != unchanged {
				t.Errorf("unchanged: %t", stats.Unchanged)
			}
			if testing.Short() && test.name != "files" {
				return
			}
			if _, stats = th.run(":"); !stats.Unchanged || stats.Entries != 1 {
				t.Errorf("after an execution without changes: %+v", stats)
			}
			th.run("echo more > more; for d in */; do touch -- \"$d/more\" 2>&1 || :; done")
		})
	}
}

// TestDiskLimit checks that the limit of the volume applies although overlays write as root, for
// which file systems reserve blocks.
func TestDiskLimit(t *testing.T) {
	const limit = 16 * mib
	th := newThread(t)
	v := must[*disk.Volume](t)(th.volumes.Get(t.Context(), disk.Size{Bytes: limit, Inodes: 1000}, tenant, tenant))
	defer func() { check(t, v.Close()) }()
	o := &home.Overlay{Lower: th.lower, Volume: v.Path(), Owner: th.owner}
	mount := must[*os.File](t)(o.Mount())
	defer func() { check(t, mount.Close()) }()
	shell(t, mount, "if head -c 100M /dev/zero > f; then exit 1; fi 2> /dev/null")
	var st unix.Stat_t
	check(t, unix.Stat(pathOf(mount)+"/f", &st))
	if used := st.Blocks * 512; used > limit || used < limit/2 {
		t.Errorf("the program could write %d bytes of %d", used, limit)
	}
	if err := o.Put(mount, "f", limit+1, bytes.NewReader(make([]byte, limit+1)), time.Now()); !errors.Is(
		err, unix.ENOSPC) {
		t.Errorf("put a file that is larger than the volume: %v", err)
	}
}
