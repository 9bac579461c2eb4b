package e2e

import (
	"net/http"
	"strings"
	"testing"
)

// testConsoleWork uses the pages of batches, schedules, pipelines and usage as a person does.
func testConsoleWork(t *testing.T, a *api, proxy *front, b *browser) {
	page := b.open(t, proxy.url)
	page.signIn(a.key)

	page.goTo("/batches/new")
	page.fill(`textarea[aria-label="items"]`, `{"language": "bash", "code": "echo fine"}
{"language": "bash", "code": "echo 'row <b>two</b> is wrong' >&2; exit 3", "metadata": {"row": "two"}}
{"language": "bash", "codo": "echo lost"}`)
	page.press("Create")
	page.sees("line 3: codo is not known here")
	page.fill(`textarea[aria-label="items"]`, `[{"language": "bash", "code": "echo fine"},
{"language": "bash", "code": "echo 'row <b>two</b> is wrong' >&2; exit 3", "metadata": {"row": "two"}}]`)
	page.press("Create")
	page.sees("2 of 2 items have ended", "1 succeeded", "1 failed", "row <b>two</b> is wrong", "row=two")
	page.press("Retry failed")
	page.sees("Retrying the failed items.", "Retries", "2 of 2 items have ended")
	page.press("Delete")
	page.sees("Delete this batch?")
	page.press("Delete")
	page.sees("No batches yet.")

	page.goTo("/schedules/new")
	page.fill(`input[name="name"]`, "poll the shop")
	page.fill(`input[name="cron"]`, "99 * * * *")
	page.sees(`cron has a wrong minute "99"`)
	page.fill(`input[name="cron"]`, "0 0 1 1 *")
	page.gone("wrong minute")
	page.sees("-01-01 ")
	page.program("print('polled')")
	page.press("Create")
	page.sees("active", "No ticks yet.")
	page.press("Run now")
	page.sees("Started trc_", "success")
	page.press("Pause")
	page.sees("None while paused.")

	page.goTo("/pipelines/new")
	page.sees("The pipeline in YAML.") // an example is in the editor
	page.press("Run")
	page.sees("build and test", "3 success")
	at, _, _ := strings.Cut(evaluate[string](page, "location.hash.slice(1)"), "?")
	page.goTo(at + "?cell=test+level%3D2")
	page.sees("Step test level=2", "building")
	page.goTo(at + "?cell=build")
	page.sees("out.tar")
	download := `fetch(document.querySelector("a[href*='artifacts?']").href).then((r) => r.status)`
	if status := evaluate[int](page, download); status != http.StatusOK {
		t.Errorf("the artifact answers %d", status)
	}

	page.goTo("/usage?group=language")
	page.sees("executions", "bash", "python")
}
