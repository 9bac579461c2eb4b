package e2e

import (
	"context"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

var ledgerRestores = repeatsFlag("ledger-restores", 1, 1,
	"how often a deployment is lost and restored from a backup in a ledger")

// testBackupLedger runs a ledger while everything in JetStream is lost repeatedly. Each time it is
// restored from a backup that was made while clients submitted.
//
// A restored deployment is in a state from after the backup began, possibly a different one for
// each execution. The ledger is therefore set back, too. Observations from before the backup began
// stay valid through all restores, and later ones are dropped. Executions accepted since may be
// present and must then meet all guarantees. Programs that ran since may run again.
func testBackupLedger(t *testing.T, p *programs, in topology) {
	d := newDeployment(t, p, in)
	d.deploy()
	l := newLedger(t, d)
	l.kinds = slices.Concat(l.kinds, l.kinds) // so that some wait for a slot
	l.report(l.run([]disruption{l.restored()}, ledgerRestores.n()))
}

// restored loses all data and restores a backup.
func (l *ledger) restored() disruption {
	return disruption{"lost and restored", func(_ *ledger, r *rand.Rand) (func(), time.Duration) {
		file := filepath.Join(l.t.TempDir(), "bullpen.backup")
		since := l.log.now()
		l.log.note(disruptionSubject, "a backup is begun")
		l.backUp(file)
		l.log.note(disruptionSubject, "a backup is made; what happens now is lost")
		l.awaitProgress(new([]activeDisruption), r)
		l.destroy()
		l.disconnect()
		l.requests.Lock()
		defer l.requests.Unlock()
		l.close(l.t)
		l.undoSince(since)
		l.open(l.t)
		l.restore(file)
		l.up, l.disconnect = context.WithCancel(l.t.Context())
		return func() {}, 0
	}}
}

// whileUp calls ask with a context that is also done when the deployment's data is lost. It reports
// whether that was the reason.
func (l *ledger) whileUp(ctx context.Context, ask func(context.Context)) (lost bool) {
	l.requests.RLock()
	defer l.requests.RUnlock()
	both, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(l.up, cancel)()
	ask(both)
	return l.up.Err() != nil && ctx.Err() == nil
}

// undoSince removes all observations and effects since a time.
func (l *ledger) undoSince(since time.Duration) {
	l.outside.undoSince(since)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.all {
		s.undoSince(since)
	}
}

func (s *submission) undoSince(since time.Duration) {
	if s.back != 0 && s.back < since { // its client had finished
		return
	}
	s.unknown = true
	for _, x := range s.ids {
		x.undoSince(since)
	}
}

func (x *observation) undoSince(since time.Duration) {
	x.revived = x.revived || x.withdrawn.is() && !x.withdrawn.before(since).is()
	x.accepted, x.withdrawn, x.missing = x.accepted.before(since), x.withdrawn.before(since), false
	x.outcomes = slices.DeleteFunc(x.outcomes, func(e seen) bool { return e.at >= since })
	x.truncated = x.truncated && len(x.outcomes) > 0
	maps.DeleteFunc(x.events, func(_ int64, e piece) bool { return e.at >= since })
	x.last = 0
	for seq := range x.events {
		x.last = max(x.last, seq)
	}
	x.gap = int64(len(x.events)) < x.last
}

// backUp makes a backup while everything keeps running.
func (d *deployment) backUp(file string) {
	d.t.Helper()
	m := d.gateways(rand.New(rand.NewPCG(0, 0)))[0]
	code, output := d.programs.run(d.t, []string{"BULLPEN_URL=" + d.clientOf(m).base, "BULLPEN_API_KEY=" + d.root},
		"backup", file)
	if code != 0 {
		d.t.Fatalf("backup: exit code %d: %s", code, output)
	}
}

// destroy kills all processes and deletes everything that JetStream stored. Workers' local data is
// kept if it is stored elsewhere.
func (d *deployment) destroy() {
	d.t.Helper()
	for _, m := range d.members {
		m.process.kill()
	}
	var err error
	switch {
	case d.cluster != nil:
		for _, n := range d.cluster.nodes {
			n.kill()
			n.wipe(d.t)
		}
	case d.broker != nil:
		d.broker.kill()
		err = os.RemoveAll(d.broker.store)
	default:
		err = os.RemoveAll(d.members[0].data)
	}
	if err != nil {
		d.t.Fatal(err)
	}
}

// restore restores a backup into JetStream and starts all processes on it.
func (d *deployment) restore(file string) {
	d.t.Helper()
	switch {
	case d.cluster != nil:
		d.cluster.start(d.t)
	case d.broker != nil:
		d.broker.restart(d.t, d.programs)
	}
	m := d.members[0]
	code, output := d.programs.run(d.t, slices.Concat(d.env, m.env),
		slices.Concat([]string{"restore", file}, d.args, m.args)...)
	if code != 0 {
		d.t.Fatalf("restore: exit code %d: %s", code, output)
	}
	d.start()
}
