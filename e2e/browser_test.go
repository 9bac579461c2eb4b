package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"
)

// proxyPrefix is the path under which the proxy of the tests offers the server.
const proxyPrefix = "/tools/bullpen"

// front is a proxy with a path prefix, as a company would have it. It stays when the gateway is
// replaced.
type front struct {
	url    string
	target atomic.Pointer[url.URL]
}

func startProxy(t *testing.T, base string) *front {
	t.Helper()
	f := &front{}
	f.to(t, base)
	proxy := &httputil.ReverseProxy{
		FlushInterval: -1,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Path = strings.TrimPrefix(r.In.URL.Path, proxyPrefix)
			r.Out.URL.RawPath = strings.TrimPrefix(r.In.URL.EscapedPath(), proxyPrefix)
			r.SetURL(f.target.Load())
			r.Out.Host = r.In.Host
		},
		// The gateway is killed while it answers.
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
	}
	mux := http.NewServeMux()
	mux.Handle(proxyPrefix+"/", proxy)
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	f.url = s.URL + proxyPrefix
	return f
}

// to sends requests to another gateway from now on.
func (f *front) to(t *testing.T, base string) {
	t.Helper()
	u, err := url.Parse(base)
	if err != nil {
		t.Fatal(err)
	}
	f.target.Store(u)
}

// browser is Chromium.
type browser struct {
	ctx context.Context
	axe string // the source of axe, the accessibility checker
}

func startBrowser(t *testing.T) *browser {
	t.Helper()
	axe, err := os.ReadFile("../bin/console/node_modules/axe-core/axe.min.js")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := chromedp.NewExecAllocator(t.Context(), chromedp.NoSandbox, chromedp.Headless,
		chromedp.WindowSize(1280, 900), chromedp.UserDataDir(t.TempDir()))
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	if err := chromedp.Do(ctx, chromedp.Navigate("about:blank")); err != nil {
		t.Fatalf("start Chromium (make browser installs it): %v", err)
	}
	return &browser{ctx, string(axe)}
}

// tab is the page of one person, with its own cookies.
type tab struct {
	t    testing.TB
	ctx  context.Context
	b    *browser
	home string // of the console
	// other, if not empty, is the URL of another server that the page may send requests to, such as an
	// identity provider.
	other string

	mu       sync.Mutex
	requests []string
	problems []string // what the browser reported
}

// open opens a tab. Its requests and the errors that the browser reports are recorded.
func (b *browser) open(t testing.TB, base string) *tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(b.ctx, chromedp.WithNewBrowserContext())
	t.Cleanup(cancel)
	ctx, cancel = context.WithTimeout(ctx, 10*patience)
	t.Cleanup(cancel)
	p := &tab{t: t, ctx: ctx, b: b, home: base + "/console/"}
	messages, requests := chromedp.Console(ctx), chromedp.Events(ctx, network.RequestWillBeSent)
	go func() {
		for m, err := range messages {
			if err != nil {
				return
			}
			p.mu.Lock()
			if m.IsException() || strings.Contains(m.Text, "Content Security Policy") || strings.Contains(m.Text, "Trusted") {
				p.problems = append(p.problems, m.String())
			}
			p.mu.Unlock()
		}
	}()
	go func() {
		for r, err := range requests {
			if err != nil {
				return
			}
			p.mu.Lock()
			p.requests = append(p.requests, r.Request.URL)
			p.mu.Unlock()
		}
	}()
	if _, err := chromedp.Call(ctx, network.Enable, network.EnableParams{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.checkQuiet() })
	return p
}

// checkQuiet checks that the tab asked no other server for anything and reported no errors.
func (p *tab) checkQuiet() {
	p.mu.Lock()
	defer p.mu.Unlock()
	own, err := url.Parse(p.home)
	if err != nil {
		p.t.Fatal(err)
	}
	for _, r := range p.requests {
		u, err := url.Parse(r)
		if err != nil || u.Host != own.Host && u.Scheme != "data" && u.Scheme != "blob" &&
			(p.other == "" || !strings.HasPrefix(r, p.other)) {
			p.t.Errorf("the page asked for %s", r)
		}
	}
	for _, m := range p.problems[:min(len(p.problems), 3)] {
		p.t.Errorf("the browser reports: %s", m)
	}
}

func (p *tab) do(steps ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	if err := chromedp.Do(p.ctx, steps...); err != nil {
		p.t.Fatalf("%v\nthe page shows:\n%s", err, p.text())
	}
}

// goTo shows the page of a hash.
func (p *tab) goTo(hash string) {
	p.t.Helper()
	p.do(chromedp.Navigate(p.home + "#" + hash))
}

// evaluate returns the result of an expression in a page.
func evaluate[T any](p *tab, expression string) T {
	p.t.Helper()
	v, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		p.t.Fatalf("%s: %v", expression, err)
	}
	return v
}

// text returns what a person reads in the page.
func (p *tab) text() string {
	text, err := chromedp.Run(p.ctx, chromedp.Evaluate[string](`document.body?.innerText ?? ""`))
	if err != nil {
		return err.Error()
	}
	return text
}

// sees waits until the page shows texts.
func (p *tab) sees(texts ...string) {
	p.t.Helper()
	for _, want := range texts {
		eventually(p.t, "the page shows "+want, func() (bool, any) {
			text := p.text()
			return strings.Contains(text, want), text
		})
	}
}

// gone waits until the page no longer shows a text.
func (p *tab) gone(text string) {
	p.t.Helper()
	eventually(p.t, "the page no longer shows "+text, func() (bool, any) {
		now := p.text()
		return !strings.Contains(now, text), now
	})
}

// press waits for an enabled button or link with a text, and clicks it.
func (p *tab) press(text string) {
	p.t.Helper()
	click := fmt.Sprintf(`(() => {
		const at = document.querySelector("dialog[open]") ?? document;
		const list = [...at.querySelectorAll("button"), ...at.querySelectorAll("a")];
		const found = list.find((e) => e.innerText.trim() === %s && !e.disabled && e.checkVisibility());
		found?.click();
		return !!found;
	})()`, quoted(text))
	eventually(p.t, "the page has the button "+text, func() (bool, any) {
		return evaluate[bool](p, click), p.text()
	})
}

// has reports whether a selector matches.
func (p *tab) has(selector string) bool {
	p.t.Helper()
	return evaluate[bool](p, "!!document.querySelector("+quoted(selector)+")")
}

// fill replaces the content of the field of a selector as a person would.
func (p *tab) fill(selector, text string) {
	p.t.Helper()
	p.do(chromedp.WaitVisible(chromedp.CSS(selector)))
	evaluate[any](p, "document.querySelector("+quoted(selector)+").select()")
	p.insert(text)
}

// insert writes at the cursor, like pasting.
func (p *tab) insert(text string) {
	p.t.Helper()
	if _, err := chromedp.Call(p.ctx, input.InsertText, input.InsertTextParams{Text: text}); err != nil {
		p.t.Fatal(err)
	}
}

// program writes into the editor.
func (p *tab) program(text string) {
	p.t.Helper()
	eventually(p.t, "the editor is there", func() (bool, any) {
		return evaluate[bool](p, `(() => {
			const at = document.querySelector(".editor > div")?.shadowRoot?.querySelector(".cm-content");
			at?.focus();
			return !!at;
		})()`), p.text()
	})
	p.insert(text)
}

// signIn signs in with an API key.
func (p *tab) signIn(key string) {
	p.t.Helper()
	p.do(chromedp.Navigate(p.home))
	p.fill("#key", key)
	p.press("Sign in")
	p.sees("Sign out")
}

// colours switches the page to the light or the dark theme.
func (p *tab) colours(theme string) {
	p.t.Helper()
	_, err := chromedp.Call(p.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: theme}},
	})
	if err != nil {
		p.t.Fatal(err)
	}
}

// picture stores a screenshot as an artifact of the test.
func (p *tab) picture(dir, name string) {
	p.t.Helper()
	png, err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot())
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name+".png"), png, 0o600)
	}
	if err != nil {
		p.t.Fatal(err)
	}
}

// checkAccessible checks that the page as it is works with screen readers.
func (p *tab) checkAccessible(what string) {
	p.t.Helper()
	if _, err := chromedp.Run(p.ctx, chromedp.Evaluate[int](p.b.axe+"; 0")); err != nil {
		p.t.Fatal(err)
	}
	found := evaluate[[]string](p, `axe.run().then((r) => r.violations.map((v) =>
		v.id + ": " + v.help + ": " + v.nodes.slice(0, 3).map((n) => n.html.slice(0, 200)).join(" | ")))`)
	for _, violation := range found {
		p.t.Errorf("%s: %s", what, violation)
	}
}

// quoted returns a text as a literal of JavaScript and Python.
func quoted(text string) string {
	b, err := json.Marshal(text)
	if err != nil {
		panic(err) // a string can be encoded
	}
	return string(b)
}
