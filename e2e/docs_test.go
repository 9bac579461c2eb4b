package e2e

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Fences of the documents, by their info string:
//
//	sh            runs in Bash, in order, one shell for each page
//	sh background is a command in a terminal of its own, which goes on running
//	output        is what the sh block before it prints: each line must appear, in this order
//	KIND NAME     is a file that other blocks use
//
// In an output line "…" stands for any text. Other fences are not run, since they need other
// machines; the commands and flags in them must exist.
var fence = regexp.MustCompile("(?ms)^```([a-z]*) *(\\S*)\n(.*?)^```$")

// slowPages run without -short only: they start many processes.
var slowPages = []string{"docs/tutorials/three-machines"}

// testDocs runs the commands of the README and of the pages in docs.
func testDocs(t *testing.T, p *programs) {
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	pages = append(pages, filepath.Join(root, "README.md"))
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		blocks := fence.FindAllStringSubmatch(string(text), -1)
		if len(blocks) == 0 {
			continue
		}
		name := strings.TrimSuffix(strings.TrimPrefix(page, root+"/"), ".md")
		t.Run(strings.ReplaceAll(name, "/", "-"), func(t *testing.T) {
			t.Parallel()
			for _, b := range blocks {
				if b[1] == "" || b[1] == "sh" {
					checkFlags(t, p, b[3])
				}
			}
			runs := slices.ContainsFunc(blocks, func(b []string) bool { return b[1] == "sh" })
			if runs && (!testing.Short() || !slices.Contains(slowPages, name)) {
				runPage(t, p, root, blocks)
			}
		})
	}
}

// runPage runs the sh blocks of a page and compares what they print with the output blocks. Pages
// that start a server themselves run as they are, in a network of their own. Other pages get a server.
func runPage(t *testing.T, p *programs, root string, blocks [][]string) {
	dir := t.TempDir()
	if err := os.Symlink(p.dir, filepath.Join(dir, "bin")); err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		if b[1] != "sh" && b[2] != "" {
			if err := os.WriteFile(filepath.Join(dir, b[2]), []byte(b[3]), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	on, base := *p, "http://127.0.0.1:8080"
	env := []string{"PATH=" + p.dir + ":" + os.Getenv("PATH"), "BULLPEN_NSJAIL=" + p.nsjail}
	if slices.ContainsFunc(blocks, ownTerminal) {
		on.machine = newMachine(t)
		for _, b := range blocks {
			if ownTerminal(b) {
				on.startProcess(t, "background", env, "bash", "-c", "cd "+dir+" && exec "+b[3])
			}
		}
	} else {
		var key string
		base, key = serveForPage(t, p, dir)
		env = append(env, "BULLPEN_URL="+base, "BULLPEN_API_KEY="+key)
	}
	script := &strings.Builder{}
	fmt.Fprintf(script, `set -euo pipefail
cd %q
make() { # a server runs already, and a test cannot run all tests
	case $1 in
	serve) ;;
	quickstart) bullpen quickstart ;;
	*) command make --dry-run -C %q "$1" >/dev/null ;;
	esac
}
`, dir, root)
	for i, b := range blocks {
		if b[1] == "sh" && !ownTerminal(b) {
			body := strings.ReplaceAll(b[3], "http://127.0.0.1:8080", base)
			fmt.Fprintf(script, "{\n%s} >%s 2>&1\n", body, outputName(dir, i))
		}
	}
	page := on.startProcess(t, "page", env, "bash", "-c", script.String())
	<-page.exited
	failed := page.cmd.ProcessState.ExitCode() != 0
	for i, b := range blocks {
		if b[1] != "sh" || ownTerminal(b) {
			continue
		}
		printed, err := os.ReadFile(outputName(dir, i))
		if err != nil {
			t.Fatalf("not reached, because the block before it failed:\n%s", b[3])
		}
		want := ""
		if i+1 < len(blocks) && blocks[i+1][1] == "output" {
			want = blocks[i+1][3]
		}
		if missing := missingLine(string(printed), want); missing != "" {
			t.Errorf("the commands\n%sprinted\n%s\nand not the documented line\n%s", b[3], printed, missing)
		}
		if failed {
			t.Logf("%s\n%s", b[3], printed)
		}
	}
	if failed {
		t.Errorf("bash: %v", page.cmd.ProcessState)
	}
}

func ownTerminal(block []string) bool { return block[1] == "sh" && block[2] == "background" }

// serveForPage starts a server for a page, with its data in a directory, and returns its URL and a key.
func serveForPage(t *testing.T, p *programs, dir string) (base, key string) {
	t.Helper()
	key = newSecret()
	data := filepath.Join(dir, "bullpen-data")
	_, base = p.startServe(t, "docs", []string{"BULLPEN_BOOTSTRAP_KEY=" + key},
		"--listen", "127.0.0.1:0", "--data", data, "--nsjail", p.nsjail)
	server := &api{t: t, base: base, http: newHTTP(t, nil)}
	eventually(t, "the server is ready", func() (bool, any) {
		reply := server.get("/readyz")
		return reply.status == http.StatusOK, reply
	})
	if err := os.WriteFile(filepath.Join(data, "bootstrap.key"), []byte(key), 0o600); err != nil {
		t.Fatal(err)
	}
	return base, key
}

func outputName(dir string, block int) string {
	return filepath.Join(dir, fmt.Sprintf("output-%d", block))
}

// missingLine returns the first documented line that does not appear in printed after the lines
// before it, or "".
func missingLine(printed, documented string) string {
	for line := range strings.Lines(documented) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		pattern := strings.ReplaceAll(regexp.QuoteMeta(line), "…", `[^\n]*`)
		at := regexp.MustCompile(pattern).FindStringIndex(printed)
		if at == nil {
			return line
		}
		printed = printed[at[1]:]
	}
	return ""
}

var (
	bullpenCommand = regexp.MustCompile(`(?m)(?:^|[|(;] *|\$ )(?:sudo )?bullpen ((?:[a-z]+ ?)+)(.*)`)
	flagName       = regexp.MustCompile(`(?:^| )(--[a-z-]+)`)
)

// checkFlags checks that the bullpen commands of a block, and their flags, exist.
func checkFlags(t *testing.T, p *programs, block string) {
	block = strings.ReplaceAll(block, "\\\n", " ")
	for _, m := range bullpenCommand.FindAllStringSubmatch(block, -1) {
		words := strings.Fields(m[1])
		if len(words) > 3 {
			words = words[:3]
		}
		help, err := exec.CommandContext(t.Context(), p.bullpen, append(words, "--help")...).CombinedOutput()
		for err != nil && len(words) > 1 { // the last word was an argument
			words = words[:len(words)-1]
			help, err = exec.CommandContext(t.Context(), p.bullpen, append(words, "--help")...).CombinedOutput()
		}
		if err != nil {
			t.Errorf("bullpen %s: %v\n%s", strings.Join(words, " "), err, help)
			continue
		}
		comment := strings.Index(m[2], " #")
		if comment >= 0 {
			m[2] = m[2][:comment]
		}
		// --[no-]async in the help stands for both --async and --no-async.
		flags := string(help) + strings.ReplaceAll(string(help), "--[no-]", "--") +
			strings.ReplaceAll(string(help), "--[no-]", "--no-")
		for _, flag := range flagName.FindAllStringSubmatch(m[2], -1) {
			if !strings.Contains(flags, flag[1]) {
				t.Errorf("bullpen %s has no flag %s, which the page uses:\n%s", strings.Join(words, " "), flag[1], m[0])
			}
		}
	}
}
