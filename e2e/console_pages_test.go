package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/bullpen-run/bullpen/gateway/login/logintest"
)

// testConsoleWebhook replays a webhook.
func testConsoleWebhook(t *testing.T, a *api, hooks *receiver, proxy *front, b *browser) {
	page := b.open(t, proxy.url)
	page.signIn(a.key)
	id := a.submit(bash("echo sent").and("webhook_url", hooks.url+"/200"))
	hooks.next(t)
	page.goTo("/webhooks")
	page.sees("msg_"+strings.TrimPrefix(id, "trc_"), "delivered")
	page.goTo("/executions/" + id)
	page.sees("delivered")
	page.press("Replay")
	if again := hooks.next(t); !strings.Contains(string(again.body), id) {
		t.Errorf("the replayed webhook is %s", again.body)
	}
}

// testConsoleAgent approves what an agent asks for, and answers its question.
func testConsoleAgent(t *testing.T, a *api, proxy *front, b *browser) {
	const sessions = "/sandbox-agent/v1/sessions/console"
	post := func(path string, body request) {
		t.Helper()
		if r := a.do(http.MethodPost, path, body, "Content-Type", "application/json"); r.status >= http.StatusBadRequest {
			t.Fatal(r)
		}
	}
	post(sessions, request{"agent": "mock"})
	page := b.open(t, proxy.url)
	page.signIn(a.key)
	page.goTo("/agent-sessions/console")
	post(sessions+"/messages", request{"message": "permission"})
	page.sees("the agent is waiting for an answer")
	page.press("Allow once")
	page.gone("the agent is waiting for an answer")
	events := string(a.get(sessions + "/events").body)
	if !strings.Contains(events, `"permission.resolved"`) || !strings.Contains(events, `"accept"`) {
		t.Errorf("the events are %s", events)
	}

	post(sessions+"-asks", request{"agent": "mock"})
	post(sessions+"-asks/messages", request{"message": "question"})
	page.goTo("/agent-sessions/console-asks")
	page.sees("Choose a color")
	page.fill(`input[aria-label="Another answer"]`, "green")
	page.do(chromedp.KeyEvent("\r")) // chooses none of the options
	page.press("Answer")
	eventually(t, "the question is answered", func() (bool, any) {
		events := a.get(sessions + "-asks/events").String()
		return strings.Contains(events, `"response":"green"`), events
	})
}

// testConsoleReader signs in with a key that may only read: the pages have no buttons for more, and
// the API refuses it.
func testConsoleReader(t *testing.T, a *api, proxy *front, b *browser) {
	id := a.submit(bash("echo read me"))
	a.ended(id)
	r := a.do(http.MethodPost, "/v1/admin/keys", request{"org": "default", "name": "reader", "scopes": []string{"read"}})
	var key struct{ Key string }
	r.into(t, &key)
	page := b.open(t, proxy.url)
	page.signIn(key.Key)
	page.goTo("/executions/" + id)
	page.sees("read me", "ended")
	for _, text := range []string{"Edit and run again", "Cancel", "Administration", "Audit"} {
		if strings.Contains(page.text(), text) {
			t.Errorf("a reader sees %q", text)
		}
	}
	for _, hash := range []string{"/run", "/admin/keys", "/admin/audit"} {
		page.goTo(hash)
		page.sees("There is no such page, or you have no access to it.")
	}
	status := evaluate[int](page, `fetch("../v1/sandbox/execute", {
		method: "POST", headers: {"X-Bullpen-Org": "default", "Content-Type": "application/json"}, body: '{"code": "1"}',
	}).then((r) => r.status)`)
	if status != http.StatusForbidden {
		t.Errorf("the API answers a reader's submission with %d", status)
	}
}

// testConsoleKeyboard moves through the console without a mouse.
func testConsoleKeyboard(t *testing.T, a *api, proxy *front, b *browser) {
	id := a.submit(bash("echo found").and("metadata", map[string]string{"order": "4711"}))
	a.ended(id)
	page := b.open(t, proxy.url)
	page.signIn(a.key)
	page.sees("Arrivals")
	page.do(chromedp.KeyEvent("g"), chromedp.KeyEvent("e"))
	page.sees(id)
	page.do(chromedp.KeyEvent("?"))
	page.sees("Keyboard shortcuts", "g e")
	page.do(chromedp.KeyEvent("\u001b"))
	eventually(t, "the list of keys is closed", func() (bool, any) { return !page.has("dialog[open]"), page.text() })
	page.do(chromedp.KeyEvent("/"))
	evaluate[any](page, "document.activeElement.select()") // the tool also types the key that was handled
	page.insert("order=4711 success")
	page.do(chromedp.KeyEvent("\r"))
	page.sees("metadata.order=4711", id)
	if at := evaluate[string](page, "location.hash"); at != "#/executions?metadata.order=4711&status=success" {
		t.Errorf("the address is %s", at)
	}
}

// testConsolePeople signs in at an identity provider, from a page that was open before.
func testConsolePeople(t *testing.T, p *programs) {
	provider, b := logintest.New(t), startBrowser(t)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte(logintest.Secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	proxy := startProxy(t, "http://127.0.0.1:1") // its address is a setting of the server
	sys := newSystem(t, p, topology{}, 2, "--public-url", proxy.url, "--oidc-issuer", provider.URL, "--oidc-client-id",
		logintest.ClientID, "--oidc-secret-file", secret)
	proxy.to(t, sys.base)
	if r := sys.do(http.MethodPost, "/v1/admin/orgs", request{"name": "acme"}); r.status != http.StatusCreated {
		t.Fatal(r)
	}
	member := request{"org": "acme", "email": "ann@example.com", "role": "operator"}
	if r := sys.do(http.MethodPost, "/v1/admin/members", member); r.status != http.StatusCreated {
		t.Fatal(r)
	}
	provider.SignIn(logintest.Person("1", "ann@example.com"))
	page := b.open(t, proxy.url)
	page.other = provider.URL
	page.goTo("/executions?status=failed")
	page.press("Sign in with your organisation")
	page.sees("ann@example.com · acme", "No matching executions.")
	if at := evaluate[string](page, "location.href"); at != proxy.url+"/console/#/executions?status=failed" {
		t.Errorf("back at %s", at)
	}
	page.press("Sign out")
	page.sees("API key")
}

// Limits of what a browser loads. The editor is loaded at its first use.
const (
	maxFirstBytes    = 100_000
	maxFirstRequests = 10
	maxAllBytes      = 300_000
)

// testConsoleBudget measures what the browser loads for the first page, and for the editor.
func testConsoleBudget(t *testing.T, a *api, proxy *front, b *browser) {
	page := b.open(t, proxy.url)
	page.signIn(a.key)
	page.do(chromedp.Reload())
	page.sees("Arrivals")
	type loaded struct {
		Name  string
		Bytes int
	}
	measure := func() (list []loaded, sum int) {
		list = evaluate[[]loaded](page, `["navigation", "resource"].flatMap((type) => performance.getEntriesByType(type))
			.map((e) => ({Name: e.name, Bytes: e.encodedBodySize}))`)
		for _, l := range list {
			sum += l.Bytes
		}
		return list, sum
	}
	list, first := measure()
	t.Logf("the first page: %d bytes in %d requests", first, len(list))
	if first > maxFirstBytes || len(list) > maxFirstRequests {
		t.Errorf("the first page needs %d bytes in %d requests, more than %d in %d: %v", first, len(list), maxFirstBytes,
			maxFirstRequests, list)
	}
	page.goTo("/run")
	page.program("x")
	list, all := measure()
	t.Logf("with the editor: %d bytes in %d requests", all, len(list))
	if all > maxAllBytes {
		t.Errorf("with the editor %d bytes are loaded, more than %d: %v", all, maxAllBytes, list)
	}
}

// testConsoleLongList scrolls through a long list: the page has few of its rows, and reads on at the end.
func testConsoleLongList(t *testing.T, a *api, proxy *front, b *browser) {
	const executions, maxRows = 230, 120
	items := make([]request, executions)
	for i := range items {
		items[i] = bash("true")
	}
	var batch struct{ ID string }
	a.do(http.MethodPost, "/v1/batches", request{"items": items}).into(t, &batch)
	eventually(t, "the batch has ended", func() (bool, any) {
		text := a.get("/v1/batches/" + batch.ID).String()
		return strings.Contains(text, `"completed"`), text
	})
	page := b.open(t, proxy.url)
	page.signIn(a.key)
	page.goTo("/executions?batch=" + batch.ID)
	page.sees("trc_")
	seen := map[string]bool{}
	eventually(t, "all rows were seen", func() (bool, any) {
		rows := evaluate[[]string](page, `(() => {
			const box = document.querySelector(".rows");
			box.scrollTop += box.clientHeight / 2;
			return [...box.querySelectorAll("tbody tr:not(.space)")].map((row) => row.innerText.slice(0, 24));
		})()`)
		if len(rows) > maxRows {
			t.Fatalf("the page has %d rows", len(rows))
		}
		for _, id := range rows {
			seen[id] = true
		}
		return len(seen) == executions, len(seen)
	})
}

// testConsolePages checks that every page is accessible and fits narrow screens. It stores a
// screenshot of each in light and dark as an artifact.
func testConsolePages(t *testing.T, a *api, proxy *front, b *browser) {
	ids := fillConsole(t, a)
	page := b.open(t, proxy.url)
	page.signIn(a.key)
	hashes := evaluate[[]string](page, `[...document.querySelectorAll("nav a[href^='#']")].map((a) => a.hash.slice(1))`)
	if len(hashes) < 20 {
		t.Fatalf("the navigation has %d pages: %v", len(hashes), hashes)
	}
	hashes = append(hashes, ids...)
	dir := t.ArtifactDir()
	for _, theme := range []string{"light", "dark"} {
		page.colours(theme)
		for _, hash := range hashes {
			page.goTo(hash)
			eventually(t, hash+" stands", func() (bool, any) {
				return page.has("main h1") && !page.has("main [aria-busy=true]"), page.text()
			})
			page.checkAccessible(hash + ", " + theme)
			if page.has("main [role=alert]") {
				t.Errorf("%s shows an error:\n%s", hash, page.text())
			}
			page.picture(dir, theme+strings.NewReplacer("/", "-", "?", "-").Replace(hash))
		}
	}
	for _, width := range []int64{360, 1280} {
		page.do(chromedp.EmulateViewport(width, 800))
		for _, hash := range hashes {
			page.goTo(hash)
			page.sees("bullpen")
			if over := evaluate[int64](page, "document.documentElement.scrollWidth"); over > width {
				t.Errorf("%s is %d wide on a screen of %d", hash, over, width)
			}
		}
	}
}

// fillConsole creates an object of each kind, and returns the hashes of their pages.
func fillConsole(t *testing.T, a *api) []string {
	t.Helper()
	create := func(path string, body request, field string) string {
		t.Helper()
		r := a.do(http.MethodPost, path, body, "Content-Type", "application/json")
		if r.status >= http.StatusBadRequest {
			t.Fatalf("POST %s: %s", path, r)
		}
		var all map[string]any
		if err := json.Unmarshal(r.body, &all); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(all[field])
	}
	run := a.submit(bash("echo kept >notes.txt; printf '\\033[32mgreen\\033[0m\\n'; echo wrong >&2; exit 3").
		and("thread_id", "notebook", "metadata", map[string]string{"order": "4711"}))
	a.ended(run)
	batch := create("/v1/batches", request{"items": []request{bash("echo 1"), bash("exit 1")}}, "id")
	schedule := create("/v1/schedules", request{"name": "nightly", "cron": "@daily", "request": bash("echo tick")}, "id")
	pipeline := create("/v1/pipelines", request{"file": "steps:\n- {name: build, run: echo built}\n" +
		"- {name: test, needs: [build], run: exit 1}\n"}, "id")
	sandbox := create("/v1/sandboxes", request{"name": "workbench"}, "id")
	create("/sandbox-agent/v1/sessions/pictures", request{"agent": "mock"}, "healthy")
	messages := "/sandbox-agent/v1/sessions/pictures/messages"
	r := a.do(http.MethodPost, messages, request{"message": "demo"}, "Content-Type", "application/json")
	if r.status >= http.StatusBadRequest {
		t.Fatal(r)
	}
	key := create("/v1/admin/keys", request{"org": "default", "name": "ci"}, "id")
	create("/v1/admin/plans", request{"name": "small", "concurrent": 2}, "name")
	create("/v1/admin/profiles", request{"name": "tiny", "memory": "64MiB"}, "name")
	eventually(t, "batch and pipeline have ended", func() (bool, any) {
		done := a.get("/v1/batches/"+batch).String() + a.get("/v1/pipelines/"+pipeline).String()
		return strings.Contains(done, `"completed"`) && strings.Contains(done, `"status":"failed"`), done
	})
	return []string{
		"/executions/" + run, "/run?from=" + run, "/batches/" + batch, "/schedules/" + schedule, "/pipelines/" + pipeline,
		"/sandboxes/" + sandbox, "/agent-sessions/pictures", "/threads/notebook", "/admin/keys/" + key, "/admin/plans/small",
		"/admin/profiles/tiny", "/admin/orgs/default",
	}
}
