package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/google/pprof/driver"
	pprof "github.com/google/pprof/profile"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	profileCallers = 8
	profilesPath   = "/debug/pprof/"
	profileSetting = "BULLPEN_PROFILE_LISTEN="
)

// serverProfiles are the profiles that are taken concurrently while the server works. Each has its
// names in files and on the server, the sample kind that a flame graph shows, and a label for the
// cost per execution.
var serverProfiles = []struct { // read only
	name, path, kind, unit string
	per                    float64
}{
	{"cpu", "profile", "cpu", "ms", 1e6},
	{"allocs", "allocs", "alloc_space", "KiB", kib},
}

// profile sends inline programs to the server for d and writes its profiles to o.profile. Each is
// written for go tool pprof and as an HTML flame graph.
func profile(ctx context.Context, t *target, o options, dir string, out, progress io.Writer) error {
	if err := os.MkdirAll(o.profile, 0o755); err != nil { //nolint:gosec // as the directory of results
		return fmt.Errorf("make the directory for profiles: %w", err)
	}
	programs, missing, err := leastPrograms(dir)
	if err != nil {
		return err
	}
	var runs []runner
	for _, p := range programs {
		if p.language != proto.Node {
			runs = append(runs, p.inline(t.api))
		}
	}
	if len(runs) != len(languages)-1 {
		return fmt.Errorf("python and bash are profiled: %v", missing)
	}
	_, _ = fmt.Fprintf(progress, "python and bash with %d callers, %s …\n", profileCallers, o.duration)
	var done series
	var turn sync.Mutex
	next := 0
	run := func(ctx context.Context) (sample, error) {
		turn.Lock()
		next++
		r := runs[next%len(runs)]
		turn.Unlock()
		return r(ctx)
	}
	done.block(ctx, 0, profileCallers, run) // the first runs make the pool prewarm jails
	done = series{}
	driving, stop := context.WithCancel(ctx)
	defer stop()
	var callers sync.WaitGroup
	callers.Go(func() { done.block(driving, math.MaxInt64, profileCallers, run) })
	before, errBefore := t.cpuMillis()
	made, err := t.profiles(ctx, o.duration)
	after, errAfter := t.cpuMillis()
	stop()
	callers.Wait()
	if err = errors.Join(errBefore, err, errAfter, done.firstErr); err != nil {
		return err
	}
	n := float64(len(done.samples))
	_, _ = fmt.Fprintf(out, "%.0f executions; processor time of the server and its jails: %.2f ms each\n", n,
		(after-before)/n)
	for i, p := range serverProfiles {
		file := filepath.Join(o.profile, p.name)
		if err := replace(file+".pprof", made[i]); err != nil {
			return fmt.Errorf("keep a profile: %w", err)
		}
		total, err := sum(made[i], p.kind)
		if err != nil {
			return err
		}
		page, err := flameGraph(file+".pprof", p.kind)
		if err != nil {
			return err
		}
		if err := replace(file+".html", page); err != nil {
			return fmt.Errorf("keep a flame graph: %w", err)
		}
		_, _ = fmt.Fprintf(out, "%s of the server alone: %.2f %s each; see %s.html, %[4]s.pprof\n", p.kind,
			float64(total)/p.per/n, p.unit, file)
	}
	return nil
}

// profiles takes all of serverProfiles over the same period.
func (t *target) profiles(ctx context.Context, d time.Duration) ([][]byte, error) {
	made, errs := make([][]byte, len(serverProfiles)), make([]error, len(serverProfiles))
	at := apiOf(t.profileURL, "", t.http)
	seconds := strconv.Itoa(max(1, int(d.Round(time.Second)/time.Second)))
	var all sync.WaitGroup
	for i, p := range serverProfiles {
		all.Go(func() { made[i], errs[i] = at.get(ctx, profilesPath+p.path+"?seconds="+seconds) })
	}
	all.Wait()
	return made, errors.Join(errs...)
}

// sum adds up the samples of one kind.
func sum(profile []byte, kind string) (total int64, err error) {
	p, err := pprof.ParseData(profile)
	if err != nil {
		return 0, fmt.Errorf("read a profile: %w", err)
	}
	for i, t := range p.SampleType {
		if t.Type != kind {
			continue
		}
		for _, s := range p.Sample {
			total += s.Value[i]
		}
		return total, nil
	}
	return 0, fmt.Errorf("a profile has no samples of %s", kind)
}

// flameGraph returns the flame graph of go tool pprof -http as a self-contained page.
func flameGraph(file, kind string) (page []byte, err error) {
	failed := &complaints{}
	err = driver.PProf(&driver.Options{
		Flagset: &pprofFlags{
			flag.NewFlagSet("pprof", flag.ContinueOnError),
			[]string{"-http=127.0.0.1:1", "-no_browser", "-sample_index=" + kind, file},
		},
		UI: failed,
		HTTPServer: func(args *driver.HTTPServerArgs) error { // nothing listens: only the page is needed
			r, w := httptest.NewRequest(http.MethodGet, "/flamegraph", nil), httptest.NewRecorder()
			args.Handlers["/flamegraph"].ServeHTTP(w, r)
			page = w.Body.Bytes()
			if w.Code != http.StatusOK {
				return fmt.Errorf("it answers %d: %s", w.Code, bytes.TrimSpace(page))
			}
			return nil
		},
	})
	if err != nil {
		return nil, fmt.Errorf("draw %s: %w%s", file, err, failed)
	}
	return page, nil
}

// pprofFlags implements the command line of pprof.
type pprofFlags struct {
	*flag.FlagSet
	args []string
}

// StringList defines a flag that may be repeated.
func (f *pprofFlags) StringList(name, value, usage string) *[]*string {
	return &[]*string{f.String(name, value, usage)}
}

// ExtraUsage and AddExtraUsage serve a help text that is never shown.
func (*pprofFlags) ExtraUsage() string   { return "" }
func (*pprofFlags) AddExtraUsage(string) {}

// Parse returns the file names.
func (f *pprofFlags) Parse(func()) []string {
	_ = f.FlagSet.Parse(f.args) // the arguments are ours
	return f.Args()
}

// complaints collects pprof's error messages. It never prompts.
type complaints struct{ bytes.Buffer }

func (*complaints) ReadLine(string) (string, error)     { return "", io.EOF }
func (*complaints) Print(...any)                        {}
func (c *complaints) PrintErr(said ...any)              { _, _ = fmt.Fprint(c, said...) }
func (*complaints) IsTerminal() bool                    { return false }
func (*complaints) WantBrowser() bool                   { return false }
func (*complaints) SetAutoComplete(func(string) string) {}
