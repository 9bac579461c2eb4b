package e2e

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
)

// testConsole uses the console in a browser, behind a proxy with a path prefix.
func testConsole(t *testing.T, p *programs) {
	hooks := startReceiver(t)
	sys := newSystem(t, p, topology{separate: true}, manySlots, append(hooks.flags, "--queue-wait", "1m")...)
	proxy, b := startProxy(t, sys.base), startBrowser(t)
	t.Run("run", func(t *testing.T) { testConsoleRun(t, sys, proxy, b) })
	outer := t
	t.Run("gateway-killed", func(t *testing.T) { testConsoleGatewayKilled(t, outer, sys, proxy, b) })
	t.Run("hostile", func(t *testing.T) { testConsoleHostile(t, sys.in(t), proxy, b) })
	t.Run("tenants", func(t *testing.T) { testConsoleTenants(t, sys.in(t), proxy, b) })
	t.Run("webhook", func(t *testing.T) { testConsoleWebhook(t, sys.in(t), hooks, proxy, b) })
	t.Run("attacks", func(t *testing.T) { testConsoleAttacks(t, sys.in(t), proxy, b) })
	t.Run("agent", func(t *testing.T) { testConsoleAgent(t, sys.in(t), proxy, b) })
	t.Run("reader", func(t *testing.T) { testConsoleReader(t, sys.in(t), proxy, b) })
	t.Run("keyboard", func(t *testing.T) { testConsoleKeyboard(t, sys.in(t), proxy, b) })
	t.Run("budget", func(t *testing.T) { testConsoleBudget(t, sys.in(t), proxy, b) })
	t.Run("work", func(t *testing.T) { testConsoleWork(t, sys.in(t), proxy, b) }) // expects no other batches
	t.Run("long-list", func(t *testing.T) { testConsoleLongList(t, sys.in(t), proxy, b) })
	t.Run("pages", func(t *testing.T) { testConsolePages(t, sys.in(t), proxy, b) })
}

// testConsoleRun signs in with a wrong and a right key, and runs a program.
func testConsoleRun(t *testing.T, sys *system, proxy *front, b *browser) {
	page := b.open(t, proxy.url)
	page.do(chromedp.Navigate(proxy.url)) // leads to the console
	page.fill("#key", newSecret())
	page.press("Sign in")
	page.sees("API key")
	page.fill("#key", sys.key)
	page.press("Sign in")
	page.sees("Sign out")

	h := newHold()
	page.goTo("/run?language=bash")
	page.program("printf '\\033[31mred\\033[0m\\n'\n" + h.code())
	page.press("Run")
	page.sees("red\nheld", "live")
	if got := evaluate[string](page, `document.querySelector(".log .a1").innerText`); got != "red" {
		t.Errorf("in red: %q", got)
	}
	h.reached(t, 1)
	h.release(t)
	page.sees("woken", "ended")
}

// testConsoleGatewayKilled watches output while the gateway is killed and replaced: nothing is lost
// or doubled.
func testConsoleGatewayKilled(t, outer *testing.T, sys *system, proxy *front, b *browser) {
	page := b.open(t, proxy.url)
	page.signIn(sys.key)
	before, after := newHold(), newHold()
	program := "exec 2>/dev/null\necho one\n" + before.code() + "echo two\n" + after.code() + "echo three"
	id := sys.submit(bash(program).and("timeout", 300))
	page.goTo("/executions/" + id)
	page.sees("one\nheld")
	before.reached(t, 1)
	sys.front.kill()
	page.sees("connection lost", "reconnecting")
	before.release(t) // the program goes on while nobody can see it
	after.reached(t, 1)
	sys.startFront(outer) // for the tests after this one, too
	proxy.to(t, sys.base)
	page.sees("one\nheld\nwoken\ntwo\nheld")
	page.gone("reconnecting")
	after.release(t)
	page.sees("one\nheld\nwoken\ntwo\nheld\nwoken\nthree", "success")
	if n := strings.Count(page.text(), "three"); n != 1 {
		t.Errorf("the last line is shown %d times", n)
	}
}

// hostile texts, each with what a browser would do if it interpreted them.
var hostileTexts = []string{
	`<img src=x onerror="window.hacked=1">`, `<script>window.hacked=1</script>`, `"><svg onload=window.hacked=1>`,
	`javascript:window.hacked=1`, "\u202eright to left", `{{constructor.constructor('window.hacked=1')()}}`,
	`</pre><iframe srcdoc="<script>parent.hacked=1</script>">`,
}

// testConsoleHostile shows what hostile programs print and are named.
func testConsoleHostile(t *testing.T, a *api, proxy *front, b *browser) {
	page := b.open(t, proxy.url)
	page.signIn(a.key)
	for _, text := range hostileTexts {
		program := "import sys\nprint(" + quoted(text) + ")\nsys.stderr.write(" + quoted("\x1b]0;"+text+"\x07"+text) + ")"
		id := a.submit(python(program).and("metadata", map[string]string{"name": text}, "thread_id", "hostile"))
		a.ended(id)
		page.goTo("/executions/" + id)
		page.sees("ended", strings.ReplaceAll(text, "\u202e", `\u202e`))
		page.goTo("/executions?metadata.name=" + url.QueryEscape(text))
		page.sees(id)
		const interpreted = `"hacked" in window ||
			!!document.querySelector("main img, main svg[onload], main iframe, main script")`
		if evaluate[bool](page, interpreted) {
			t.Errorf("%q was interpreted", text)
		}
	}
}

// testConsoleTenants has two tenants side by side in one browser: neither sees the other's
// executions.
func testConsoleTenants(t *testing.T, a *api, proxy *front, b *browser) {
	tenants := map[string]*tab{}
	ids := map[string]string{}
	for _, org := range []string{"red", "blue"} {
		if r := a.do(http.MethodPost, "/v1/admin/orgs", request{"name": org}); r.status != http.StatusCreated {
			t.Fatal(r)
		}
		r := a.do(http.MethodPost, "/v1/admin/keys", request{"org": org, "name": org + " key"})
		var key struct{ Key string }
		r.into(t, &key)
		own := a.with(key.Key)
		ids[org] = own.submit(bash("echo " + org + "secret"))
		own.ended(ids[org])
		page := b.open(t, proxy.url)
		page.signIn(key.Key)
		tenants[org] = page
	}
	for org, other := range map[string]string{"red": "blue", "blue": "red"} {
		page := tenants[org]
		page.goTo("/executions")
		page.sees(ids[org])
		if text := page.text(); strings.Contains(text, ids[other]) || strings.Contains(text, "Audit") {
			t.Errorf("%s sees %s", org, text)
		}
		page.goTo("/executions/" + ids[other])
		page.sees("nothing of that id is known")
	}
}
