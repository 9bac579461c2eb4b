package proto

import "slices"

// Language names the language of a program.
type Language string

// The languages that other code refers to; [Runtimes] has all of them.
const (
	Python Language = "python"
	Node   Language = "node"
	Bash   Language = "bash"
)

// Runtime describes how programs in a language are run.
type Runtime struct {
	Language Language
	Title    string // for people
	// Interpreters are the names of the interpreter's executable, best first. A * matches a number;
	// the highest is best. Programs that run on the host's /usr use the first name.
	Interpreters []string
	Args         []string          // between the interpreter and the program's file
	Install      string            // how it comes to the /usr of a Debian or Ubuntu host
	Version      string            // argument with which the interpreter prints its version
	File         string            // name of the program's file
	OutsideHome  bool              // the file is not in the program's home
	Extensions   []string          // of file names, the first one preferred
	Env          map[string]string // that every program has
	Sample       string            // a program for a first look
}

// Runtimes returns the table of languages in display order.
func Runtimes() []Runtime { return runtimes }

var runtimes = []Runtime{ // read only
	{
		Language: Python, Title: "Python", Interpreters: []string{"python3", "python", "python3.*"},
		Install: "install the package python3", Version: "--version",
		File: "main.py", Extensions: []string{".py"},
		Sample: `import os, platform, socket, time
print(f"Python {platform.python_version()} as user {os.getuid()} in {os.getcwd()}")
try:
    socket.create_connection(("192.0.2.1", 80), timeout=1)
except OSError as e:
    print(f"network: {e.strerror or e}")
for n in (3, 2, 1):
    print(f"live output {n}")
    time.sleep(0.25)
`,
	},
	{
		Language: Node, Title: "Node.js", Interpreters: []string{"node", "nodejs"}, Install: "install the package nodejs",
		Version: "--version",
		File:    "main.js", Extensions: []string{".js", ".mjs", ".cjs"},
		Sample: `console.log("Node " + process.version + " as user " + process.getuid() + " in " + process.cwd());
let n = 3;
const timer = setInterval(() => {
  console.log("live output " + n);
  if (--n === 0) clearInterval(timer);
}, 250);
`,
	},
	{
		// The file is outside the home, so that ls and grep -r find only the user's files there. It
		// is a file rather than standard input, so that a command reading standard input does not
		// read the program.
		Language: Bash, Title: "Bash", Interpreters: []string{"bash"}, Install: "install the package bash",
		Version: "--version",
		File:    "main.sh", OutsideHome: true, Extensions: []string{".sh", ".bash"},
		Env: map[string]string{"PYTHONUNBUFFERED": "1"}, // the output of a python that the script starts streams
		Sample: `echo "Bash $BASH_VERSION as user $UID in $PWD"
ls / | tr '\n' ' '; echo
for n in 3 2 1; do echo "live output $n"; sleep 0.25; done
`,
	},
	{
		Language: "ruby", Title: "Ruby", Interpreters: []string{"ruby", "ruby3.*"}, Install: "install the package ruby",
		Version: "--version",
		File:    "main.rb", Extensions: []string{".rb"},
		Sample: `$stdout.sync = true
puts "Ruby #{RUBY_VERSION} as user #{Process.uid} in #{Dir.pwd}"
3.downto(1) { |n| puts "live output #{n}"; sleep 0.25 }
`,
	},
	{
		Language: "deno", Title: "Deno (TypeScript)", Interpreters: []string{"deno"},
		Install: "put the program deno from deno.com into /usr/local/bin", Args: []string{"run", "--allow-all"},
		Version: "--version",
		File:    "main.ts", Extensions: []string{".ts", ".mts", ".tsx"},
		Env: map[string]string{"DENO_DIR": "/tmp/.cache/deno", "DENO_NO_UPDATE_CHECK": "1"},
		Sample: `console.log("Deno " + Deno.version.deno + " as user " + Deno.uid() + " in " + Deno.cwd());
for (const n of [3, 2, 1]) {
  console.log("live output " + n);
  await new Promise((done) => setTimeout(done, 250));
}
`,
	},
}

// Runtime returns the row of l in the table of languages. It reports whether there is one.
func (l Language) Runtime() (Runtime, bool) {
	i := slices.IndexFunc(runtimes, func(r Runtime) bool { return r.Language == l })
	if i < 0 {
		return Runtime{}, false
	}
	return runtimes[i], true
}

// Languages returns the names of all languages, in the order of [Runtimes].
func Languages() (all []Language) {
	for _, r := range runtimes {
		all = append(all, r.Language)
	}
	return all
}
