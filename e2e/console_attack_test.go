package e2e

import (
	"net/http"
	"strings"
	"testing"
)

// testConsoleAttacks shows what would lead the console to other routes, run in it, or exhaust it.
func testConsoleAttacks(t *testing.T, a *api, proxy *front, b *browser) {
	if r := a.do(http.MethodPost, "/v1/admin/orgs", request{"name": "attacks"}); r.status != http.StatusCreated {
		t.Fatal(r)
	}
	r := a.do(http.MethodPost, "/v1/admin/keys", request{
		"org": "attacks", "name": "\u202e<img src=x>", "scopes": []string{"execute", "read", "files"},
	})
	var key struct{ Key string }
	r.into(t, &key)
	own := a.with(key.Key)
	open := func(t *testing.T) *tab {
		page := b.open(t, proxy.url)
		page.signIn(key.Key)
		return page
	}
	t.Run("ids", func(t *testing.T) {
		page := open(t)
		settings := request{"url": "https://hooks.example.com"}
		if r := own.do(http.MethodPut, "/v1/webhook", settings); r.status != http.StatusOK {
			t.Fatal(r)
		}
		page.goTo("/webhooks/..") // of which the address would be that of the key's settings
		page.sees("nothing of that id is known")
		page.goTo("/executions/..%2f..%2fadmin%2fkeys")
		page.sees("nothing of that id is known")
		page.goTo("/__proto__")
		page.sees("There is no such page")
	})
	t.Run("colours", func(t *testing.T) {
		page := open(t)
		id := own.submit(python(`print("\033[31mx\033[0my" * 500_000, "end")`))
		own.ended(id)
		page.goTo("/executions/" + id)
		page.sees("Only the end is shown", "ended")
		if n := evaluate[int](page, `document.querySelectorAll(".log *").length`); n == 0 || n > 40_000 {
			t.Errorf("the output has %d elements", n)
		}
	})
	t.Run("files", func(t *testing.T) {
		page := open(t)
		content := `<svg xmlns="http://www.w3.org/2000/svg" onload="parent.hacked=1"><script>parent.hacked=1</script>` +
			`<image href="http://evil.example/"/><a href="javascript:parent.hacked=1" target="_top">x</a></svg>`
		own.ended(own.submit(python(`
for name in ["x.svg", "x.html", "<img src=x onerror=hacked=1>", "a\nb", "..%2f..%2fx", "\u202egpj", "x" * 250, "\udcff"]:
    open(name, "w").write(`+quoted(content)+`)
`).and("thread_id", "attacks")))
		page.goTo("/threads/attacks")
		page.sees("<img src=x onerror=hacked=1>", `a\nb`, "..%2f..%2fx", `\u202egpj`, strings.Repeat("x", 250))
		for _, name := range []string{"x.svg", "x.html"} {
			page.goTo("/threads/attacks?path=" + name)
			page.sees("parent.hacked")
			page.press("Preview")
			page.sees("Show as text")
			if !page.has(`iframe[sandbox=""]`) {
				t.Errorf("the frame of %s is not confined", name)
			}
		}
		at := evaluate[string](page, "location.href")
		if evaluate[bool](page, "'hacked' in window") || !strings.HasPrefix(at, page.home) {
			t.Error("a file was interpreted")
		}
	})
}
