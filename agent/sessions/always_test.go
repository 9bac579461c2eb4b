package sessions

import (
	"encoding/json"
	"testing"
)

func bash(t *testing.T, command any) *Permission {
	t.Helper()
	metadata, err := json.Marshal(map[string]any{"toolName": "Bash", "input": map[string]any{"command": command}})
	if err != nil {
		t.Fatal(err)
	}
	return &Permission{ID: "p", Action: "Bash", Metadata: metadata}
}

// TestAlways checks which commands a grant of another one for the session covers.
func TestAlways(t *testing.T) {
	for _, c := range []struct {
		granted        any
		covered, asked []any
	}{
		{
			"git status",
			[]any{"git status", " git  status", "git status src", "git status 'a b'", "git status HEAD~1"},
			[]any{
				"git status; rm -rf ~", "git status && rm -rf ~", "git status | sh", "git status & rm x", "git status > ~/.bashrc",
				"git status < x", "git status $(rm x)", "git status `rm x`", "git status $HOME", "git status\nrm x",
				"git status\rrm x",
				"git status (rm x)", "git status {a,b}", "git status *", `git status \; rm x`, "git status #x", "git status !x",
				"git -c core.pager=x log", "git -c core.fsmonitor=x status", "git --exec-path=x status", "git -C / status",
				"git status --porcelain", "git status -s", "GIT_PAGER=x git status", "sudo git status", "env git status",
				"bash -c 'git status'", "xargs git status", "/tmp/git status", "./git status", "Git status", "git Status",
				"git\u00a0status", "git status\u2028rm x", "git", "git stat", "git statusx", "git push", "", " ",
			},
		},
		{"git commit -m x", []any{`git commit -m "fix the bug"`, "git commit a.txt -m y"}, []any{
			"git commit", "git commit --amend -m x", "git commit --amend", `git commit -m "$(rm x)"`,
			`git commit "--amend" -m x`, `git commit -"-am"end -m x`,
		}},
		{"git log", []any{"git log main"}, []any{
			"git log --output=x", "git log '--output=x'", "git log -p", `git log ""--output=x`,
		}},
		{"npm test", []any{"npm test", "npm test unit"}, []any{
			"npm install x", "npm run test", "npm --prefix /x test", "npm test --script-shell=/x", "npm test -- --watch",
		}},
		{"npm test -- --watch", []any{"npm test -- --watch unit"}, []any{"npm test", "npm test --watch"}},
		{"npm run build", []any{"npm run build", "npm run build web"}, []any{
			"npm run deploy", "npm run", "npm run -s build", "npm run build; x", "pnpm run build",
		}},
		{"go test ./...", []any{"go test ./x", "go test"}, []any{"go test -exec x ./...", "go run x", "go vet"}},
		// These are covered alone: the words after them are commands, options or files.
		{"npm exec x", []any{"npm exec x"}, []any{"npm exec y", "npm exec x y"}},
		{"git push origin main", []any{"git push origin main"}, []any{"git push", "git push --force", "git push evil main"}},
		{"git config user.name x", nil, []any{"git config alias.status !rm", "git config core.pager x"}},
		{"rm build", []any{"rm build"}, []any{"rm build x", "rm -rf build", "rm x"}},
		{"sudo apt-get install x", []any{"sudo apt-get install x"}, []any{"sudo apt-get install y", "sudo rm x", "sudo"}},
		{"env A=b npm test", nil, []any{"env A=c npm test", "npm test"}},
		{"bash -c 'npm test'", nil, []any{"bash -c 'npm install'", "npm test"}},
		{"xargs rm", nil, []any{"xargs rm x", "xargs"}},
		{"python3 x.py", nil, []any{"python3 y.py", "python3 -c x", "python3 x.py y"}},
		{"ls; git status", []any{"ls; git status"}, []any{"ls", "git status", "ls; git status; x"}},
		{"git status *", []any{"git status *"}, []any{"git status", "git status x"}},
		{"=git status", []any{"=git status"}, []any{"git status"}},
		{[]any{"npm", "test"}, []any{[]any{"npm", "test"}}, []any{[]any{"npm test"}, []any{"npm", "test", "x"}, "npm test"}},
	} {
		var state State
		state.allow(bash(t, c.granted))
		for _, command := range append(c.covered, c.granted) {
			if !state.allows(bash(t, command), false) {
				t.Errorf("a grant of %q does not cover %q", c.granted, command)
			}
		}
		for _, command := range c.asked {
			if state.allows(bash(t, command), false) {
				t.Errorf("a grant of %q covers %q", c.granted, command)
			}
			if !state.allows(bash(t, command), true) {
				t.Errorf("a wide grant of %q does not cover %q", c.granted, command)
			}
		}
	}
}

// TestAlwaysTools checks what grants without a command cover.
func TestAlwaysTools(t *testing.T) {
	permission := func(action, metadata string) *Permission {
		return &Permission{Action: action, Metadata: json.RawMessage(metadata)}
	}
	page := permission("WebFetch", `{"toolName":"WebFetch","input":{"url":"https://docs.example.com/a"}}`)
	var state State
	state.allow(page)
	state.allow(permission("Write", `{"toolName":"Write","input":{"file_path":"/a"}}`))
	for _, c := range []struct {
		*Permission
		covered bool
	}{
		{permission("WebFetch", `{"toolName":"WebFetch","input":{"url":"https://docs.example.com/b?c"}}`), true},
		{permission("WebFetch", `{"toolName":"WebFetch","input":{"url":"http://docs.example.com/a"}}`), false},
		{permission("WebFetch", `{"toolName":"WebFetch","input":{"url":"https://docs.example.com.evil.example/a"}}`), false},
		{permission("WebFetch", `{"toolName":"WebFetch","input":{"url":"https://docs.example.com@evil.example/a"}}`), false},
		{permission("WebFetch", `{"toolName":"WebFetch","input":{}}`), false},
		{permission("Write", `{"toolName":"Write","input":{"file_path":"/b"}}`), true},
		{permission("Edit", `{"toolName":"Edit","input":{"file_path":"/a"}}`), false},
		{permission("Bash", `{"toolName":"Bash","input":{"command":"ls"}}`), false},
	} {
		if got := state.allows(c.Permission, false); got != c.covered {
			t.Errorf("%s %s: %v, want %v", c.Action, c.Metadata, got, c.covered)
		}
	}
}
