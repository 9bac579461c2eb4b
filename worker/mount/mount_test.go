package mount_test

import "testing"

func TestReadS3(t *testing.T) {
	inEachMode(t, func(w *world, mode string) {
		w.put(map[string]string{"team/a.txt": "hello", "team/sub/b.txt": "deep", "other/c.txt": "secret"})
		w.want(w.run(mode, `
import os
print(sorted(os.listdir("/data")), sorted(os.listdir("/data/files")))
print(open("/data/files/a.txt").read(), open("/data/files/sub/b.txt").read())
print(os.stat("/data/files/a.txt").st_size, oct(os.stat("/data/files/a.txt").st_mode), os.stat("/data/files/sub").st_uid == os.getuid())
`, w.s3("files", "team")), "['files'] ['a.txt', 'sub']\nhello deep\n5 0o100644 True\n")
	})
}

func TestDirectory(t *testing.T) {
	inEachMode(t, func(w *world, mode string) {
		m, path := w.directory(unique("shared", mode))
		m.Slug = "shared"
		m.Prefix = "team/a"
		w.want(w.run(mode, `
import os
open("/data/shared/x", "w").write("written")
os.makedirs("/data/shared/d/e")
print(open("/data/shared/x").read(), os.stat("/data/shared/x").st_uid == os.getuid(), os.listdir("/data/shared"))
`, m), "written True ['d', 'x']\n")
		w.wantFile(path+"/team/a/x", "written", 1234)
	})
}
