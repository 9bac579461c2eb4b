package e2e

import (
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

var (
	ledgerSeed   = flag.Uint64("ledger-seed", 0, "what ledgers are drawn with; 0 draws it")
	ledgerPoints = flag.Bool("ledger-points", false,
		"whether processes in ledgers die at named points, too; their bullpen is built for it")
	ledgerCycles = repeatsFlag("ledger-cycles", 3, 6, "how often something goes wrong in a ledger, in each deployment")
)

// ledger checks the guarantees of bullpen. Clients of all kinds submit and record all responses,
// while the deployment's processes are killed, frozen and cut off. At the end it compares the
// responses with the guarantees.
type ledger struct {
	*deployment
	*outside
	t    *testing.T
	seed uint64
	log  *eventLog

	mu         sync.Mutex
	all        []*submission
	violations []violation
	ends       outcomes
	stops      outcomes // reasons for which sandboxes stopped
	batches    []string // ids of those that were accepted
	sandboxes  []*ledgerSandbox
	sessions   int         // agent sessions
	messages   int         // of sessions, whose turns were checked
	schedule   *tickLedger // nil for none
	done       int         // submissions whose outcome is known to their clients
	progressed chan struct{}
	outages    []outage
	injected   outcomes // faults by name
	kinds      []kind   // kinds of its clients
	// longest is how long accepted executions and webhooks may take to end without further faults.
	longest time.Duration

	// Clients hold it for reading during a request. A restore of the deployment holds it for
	// writing.
	requests   sync.RWMutex
	up         context.Context    // done when the deployment's data is lost
	disconnect context.CancelFunc // cancels up
}

// outage is a period in which the deployment had a fault.
type outage struct{ from, to time.Duration }

const ledgerThreads = 3

func newLedger(t *testing.T, d *deployment) *ledger {
	t.Helper()
	l := &ledger{
		deployment: d, t: t, seed: *ledgerSeed, log: newEventLog(t), progressed: make(chan struct{}, 1),
		kinds: clientKinds(), longest: patience,
	}
	l.up, l.disconnect = context.WithCancel(t.Context())
	if l.seed == 0 {
		var b [8]byte
		_, _ = crand.Read(b[:])
		l.seed = binary.NativeEndian.Uint64(b[:])
	}
	t.Logf("ledger seed %d", l.seed)
	l.outside = newOutside(t, d.programs.machine, l.log)
	d.setUp()
	return l
}

// setUp allows programs network access and makes webhooks retry soon.
func (d *deployment) setUp() {
	d.t.Helper()
	a := d.clientOf(d.gateways(rand.New(rand.NewPCG(0, 0)))[0])
	a.newProfile("ledger", request{"network": request{"policy": "unrestricted"}, "memory": "256MiB"})
	secret, id := a.boundKey("ledger")
	d.key = secret
	a.settings(http.MethodPut, "/v1/webhook?key="+id,
		request{"url": hookURL, "waits": []float64{0.2, 1, maxWebhookWait}, "max_attempts": 20})
}

// testLedger runs a ledger while single processes of a deployment fail.
func testLedger(t *testing.T, p *programs, in topology) {
	if *ledgerPoints {
		p = p.faulty(t)
	}
	d := newDeployment(t, p, in)
	d.deploy()
	l := newLedger(t, d)
	l.kinds = append(l.kinds, kindBatch)
	l.kinds = append(l.kinds, slices.Repeat([]kind{kindSandbox}, ledgerSandboxes)...)
	l.longest += time.Minute // the loss of a sandbox is declared after a minute
	l.newSchedule()
	wrong := l.singleDisruptions()
	if *ledgerPoints {
		wrong = append(wrong, l.crashes()...)
	}
	l.report(l.run(wrong, ledgerCycles.n()))
}

// clientKinds returns the usual clients of a ledger.
func clientKinds() []kind {
	return []kind{
		kindInline, kindStreaming, kindSSE, kindPolling, kindWebhook, kindThread, kindThread, kindThread, kindCancel,
		kindLeaving,
	}
}

// run lets clients submit while it injects one fault after another. It returns all violations.
func (l *ledger) run(wrong []disruption, cycles int) []violation {
	l.t.Helper()
	over, finish := context.WithCancel(l.t.Context())
	hard, stop := context.WithCancel(l.t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer stop()
	defer finish()
	for i, k := range l.kinds {
		clients.Go(func() { l.client(over, hard, rand.New(rand.NewPCG(l.seed, uint64(i)+1)), k) })
	}
	if l.schedule != nil {
		clients.Go(func() { l.watchSchedule(over, hard, rand.New(rand.NewPCG(l.seed, 994))) })
	}
	l.disrupt(rand.New(rand.NewPCG(l.seed, 0)), wrong, cycles)
	finish()
	l.log.note(disruptionSubject, "all is well, and nothing is submitted any more")
	defer time.AfterFunc(l.longest, stop).Stop()
	clients.Wait()
	l.settle(hard)
	l.check()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.t.Logf("%d submissions, %d sandboxes and %d messages to %d agent sessions in %s; went wrong: %s; "+
		"executions ended: %s; sandboxes stopped: %s",
		len(l.all), len(l.sandboxes), l.messages, l.sessions, l.log.now().Round(time.Second), &l.injected, &l.ends, &l.stops)
	return slices.Concat(l.violations, l.impossible)
}

// violate records a broken guarantee.
func (l *ledger) violate(subject, format string, args ...any) {
	v := violation{subject, fmt.Sprintf(format, args...)}
	l.log.note(subject, "VIOLATION %s", v.text)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.violations = append(l.violations, v)
}

// progress records that a client knows the outcome of its submission.
func (l *ledger) progress() {
	l.mu.Lock()
	l.done++
	l.mu.Unlock()
	select {
	case l.progressed <- struct{}{}:
	default:
	}
}

// report fails the test with the violations.
func (l *ledger) report(violations []violation) {
	l.t.Helper()
	const most = 5 // subjects whose entries are printed
	subjects := map[string][]string{}
	for _, v := range violations {
		subjects[v.subject] = append(subjects[v.subject], v.text)
	}
	for i, subject := range slices.Sorted(maps.Keys(subjects)) {
		if i == most {
			l.t.Errorf("and %d more, see the event log", len(subjects)-most)
			break
		}
		l.t.Errorf("%s: %s\n%s", subject, strings.Join(subjects[subject], "\n\t"), l.log.of(subject))
	}
	if len(violations) > 0 {
		l.t.Errorf("run it again with -ledger-seed %d -ledger-cycles %d; the event log is %s", l.seed, ledgerCycles.n(),
			l.log.file.Name())
	}
}
