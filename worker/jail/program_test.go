package jail

import (
	"slices"
	"strings"
	"testing"
)

func TestSourceProgram(t *testing.T) {
	for language, want := range map[string]struct {
		argv  string
		path  string
		owner Owner
	}{
		"python": {"python3 /home/x/main.py", "/home/x/main.py", OwnerProgram},
		"node":   {"node /home/x/main.js", "/home/x/main.js", OwnerProgram},
		"bash":   {"bash /run/bullpen/job/main.sh", "/run/bullpen/job/main.sh", OwnerInit},
	} {
		s := Source{
			Language: language, Code: "a\x00b", TraceID: "trc_1", Home: "/home/x",
			Env: map[string]string{"A": "1\n=2", "PIP_CACHE_DIR": "/mine"},
		}
		p, err := s.Program()
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(p.Argv, " "); got != want.argv {
			t.Errorf("%s: argv %q", language, got)
		}
		if len(p.Files) != 1 || p.Files[0].Path != want.path || p.Files[0].Owner != want.owner ||
			string(p.Files[0].Content) != s.Code {
			t.Errorf("%s: files %+v", language, p.Files)
		}
		wantEnv := []string{
			"A=1\n=2", "BULLPEN_TRACE_ID=trc_1", "HOME=/home/x", "LANG=C.UTF-8",
			"NPM_CONFIG_CACHE=/tmp/.cache/npm", "NPM_CONFIG_PREFIX=/home/x/.local",
			"PATH=/home/x/.local/bin:/home/x/node_modules/.bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			"PIP_BREAK_SYSTEM_PACKAGES=1", "PIP_CACHE_DIR=/mine", "TERM=dumb", "TMPDIR=/tmp", "USER=x",
		}
		if language == "python" {
			wantEnv = append(wantEnv, "PYTHONPATH="+PythonDir)
			slices.Sort(wantEnv)
		}
		if language == "bash" {
			wantEnv = append(wantEnv, "PYTHONUNBUFFERED=1")
			slices.Sort(wantEnv)
		}
		if !slices.Equal(p.Env, wantEnv) || p.Dir != "/home/x" {
			t.Errorf("%s: env %q", language, p.Env)
		}
	}
	if _, err := (Source{Language: "perl"}).Program(); err == nil {
		t.Error("perl accepted")
	}
}

func TestSourceFile(t *testing.T) {
	for language, want := range map[string]string{
		"python": "/home/x/.main.py", "node": "/home/x/.main.py", "bash": "/run/bullpen/job/main.sh",
	} {
		p, err := Source{Language: language, Code: "1", Home: "/home/x", File: ".main.py"}.Program()
		if err != nil {
			t.Fatal(err)
		}
		if p.Argv[1] != want || p.Files[0].Path != want {
			t.Errorf("%s: runs %q, writes %q", language, p.Argv[1], p.Files[0].Path)
		}
	}
}

func TestSourceOfAnImage(t *testing.T) {
	s := Source{
		Language: "python", Code: "1", TraceID: "trc_1", Home: "/home/x", Interpreter: "/opt/conda/bin/python3",
		ImageEnv: map[string]string{
			"PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "de_DE.UTF-8", "A": "image",
			"B": "image",
		},
		Env: map[string]string{"A": "caller"},
	}
	p, err := s.Program()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(p.Argv, " "); got != "/opt/conda/bin/python3 /home/x/main.py" {
		t.Errorf("argv %q", got)
	}
	for _, want := range []string{
		"A=caller", "B=image", "HOME=/home/x", "LANG=de_DE.UTF-8", "PYTHONPATH=" + PythonDir,
		"PATH=/home/x/.local/bin:/home/x/node_modules/.bin:/opt/conda/bin:/usr/bin:/bin",
	} {
		if !slices.Contains(p.Env, want) {
			t.Errorf("no %q in %q", want, p.Env)
		}
	}
}

func TestFileContent(t *testing.T) {
	for _, c := range []struct{ language, code, want string }{
		{"python", "\ufeffprint(1)\r\n", "print(1)\r\n"},
		{"node", "\ufeff\ufeff1", "\ufeff1"},
		{"bash", "\ufeffecho b", "echo b"},
		{"bash", "if true; then\r\n  echo b\r\nfi\r\n", "if true; then\n  echo b\nfi\n"},
		{"bash", "\ufeffecho a\r\necho b", "echo a\necho b"},
		{"bash", "echo a\r\necho b\n", "echo a\r\necho b\n"},
		{"bash", "printf 'a\rb'", "printf 'a\rb'"},
		{"bash", "", ""},
	} {
		if got := string(FileContent(c.language, c.code)); got != c.want {
			t.Errorf("%s: the file of %q holds %q, want %q", c.language, c.code, got, c.want)
		}
	}
}
