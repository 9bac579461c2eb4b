//go:build imagetest

package e2e

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// TestImageBuild builds the default image from packages, with the flags in IMAGE_FLAGS, and runs
// programs in it. It needs a network.
func TestImageBuild(t *testing.T) {
	sys := newSystem(t, buildPrograms(t), topology{separate: true}, noSlots)
	began := time.Now()
	img := sys.imageCommand(t,
		append([]string{"build", "--json", "default"}, strings.Fields(os.Getenv("IMAGE_FLAGS"))...)...)
	t.Logf("built in %s: %d bytes stored, %d unpacked, %s", time.Since(began).Round(time.Second), img.Size,
		img.UnpackedSize, img.Digest)
	began = time.Now()
	root := sys.unpackImage(t, img.Digest)
	t.Logf("fetched and unpacked in %s", time.Since(began).Round(time.Millisecond))
	const modules = "asyncio, bz2, ctypes, curses, dbm, decimal, email, hashlib, json, lzma, multiprocessing, " +
		"readline, sqlite3, ssl, unittest, uuid, " +
		"xml.etree.ElementTree, zlib, zoneinfo"
	for _, tt := range []struct {
		language proto.Language
		code     string
		want     string
	}{
		{
			proto.Python, "-c import sys, " + modules +
				"; print(sys.version_info[:2], json.dumps({'a': 1}), hashlib.sha256(b'').hexdigest()[:8])",
			"(3, 14) {\"a\": 1} e3b0c442\n",
		},
		{proto.Node, "-e console.log(process.versions.node.split('.')[0], " +
			"require('crypto').createHash('sha256').digest('hex').slice(0, 8))", "25 e3b0c442\n"},
		{proto.Bash, "-c printf 'b\\na\\n' | grep -n a | tr ':' ' ' | cat | head -1 | tail -1", "2 a\n"},
		{proto.Bash, "-c test $(wc -c < /etc/os-release) -gt 9 && dirname /a/b; test -d /usr && type -t mkdir rm; grep " +
			"--version | head -1", "/a\nfile\nfile\ngrep (GNU grep) "},
		{proto.Bash, "-c python3 -c 'print(1)'; node -p 1; echo $LANG", "1\n1\nC.UTF-8\n"},
	} {
		flag, code, _ := strings.Cut(tt.code, " ")
		if out := runIn(t, root, tt.language, flag, code); !strings.HasPrefix(out, tt.want) {
			t.Errorf("%s %s: %q", tt.language, tt.code, out)
		}
	}
}
