package app

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/events"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
)

// worker puts the worker role together: front runs jobs, base keeps it known to the dispatcher and holds the jails.
func (s *system) worker(ctx context.Context) (front part, base []part, err error) {
	maker, err := openJails(s.cfg, nsjail.Config{Log: s.log})
	if err != nil {
		return part{}, nil, err
	}
	defer func() {
		if err != nil {
			_ = maker.Close()
		}
	}()
	languages, err := probe(ctx, maker)
	if err != nil {
		return part{}, nil, err
	}
	var offers []string
	for _, l := range proto.Languages() {
		if v, ok := languages[l]; ok {
			offers = append(offers, queue.OfferLanguage(l))
			s.log.Info("runtime found", "language", l, "version", v)
		} else {
			s.log.Warn("runtime not found, its programs are left to other workers", "language", l)
		}
	}
	s.metrics.CgroupVersion(maker.CgroupVersion())
	slots := &queue.Slots{Set: s.set, Worker: s.instance, Total: s.cfg.SlotCount(), Offers: offers, Log: s.log}
	w := &worker.Worker{
		Jobs:  jobs{slots},
		Jails: maker, Home: s.cfg.Home, Slots: slots.Total, Log: s.log, Done: s.metrics.ExecutionDone,
		Open: func(ctx context.Context, id proto.TraceID, attempt int, baseSeq int64) worker.Output {
			return output{events.NewWriter(ctx, s.set, id, attempt, baseSeq)}
		},
	}
	run := func(ctx context.Context) error {
		cut, kill := context.WithCancelCause(context.WithoutCancel(ctx))
		defer kill(nil)
		stop := afterDrain(ctx, s.cfg.Drain, func() { kill(worker.ErrShutdown) })
		defer stop()
		return w.Run(ctx, cut)
	}
	hold := func(ctx context.Context) error {
		<-ctx.Done()
		return maker.Close()
	}
	return part{"worker", run}, []part{{"slots", slots.Run}, {"jails", hold}}, nil
}

// openJails opens the maker of jails with the settings of cfg.
func openJails(cfg *Config, jails nsjail.Config) (*nsjail.Maker, error) {
	path, err := findNsjail(cfg.NsjailPath)
	if err != nil {
		return nil, err
	}
	data, err := filepath.Abs(cfg.Data)
	if err != nil {
		return nil, fmt.Errorf("find the data directory: %w", err)
	}
	jails.NsjailPath, jails.Home, jails.VolumeDir = path, cfg.Home, filepath.Join(data, "volumes")
	jails.UIDs = nsjail.UIDs{First: cfg.UIDRange.First, Count: cfg.UIDRange.Count}
	return nsjail.Open(jails)
}

// findNsjail finds the nsjail program: the one that was set, the one beside this executable, the one on the PATH.
func findNsjail(set string) (string, error) {
	if set != "" {
		return set, nil
	}
	if exe, err := os.Executable(); err == nil {
		if exe, err = filepath.EvalSymlinks(exe); err == nil {
			beside := filepath.Join(filepath.Dir(exe), "nsjail", "nsjail", "bin", "nsjail")
			if _, err := os.Stat(beside); err == nil {
				return beside, nil
			}
		}
	}
	path, err := exec.LookPath("nsjail")
	if err != nil {
		return "", fmt.Errorf("find nsjail: %w: run `make build`, or name it with --nsjail", err)
	}
	return path, nil
}

// probe finds which runtimes work inside a jail.
func probe(ctx context.Context, maker *nsjail.Maker) (map[proto.Language]string, error) {
	found, err := maker.Probe(ctx, jailSpec())
	if err != nil {
		return nil, fmt.Errorf("probe the runtimes: %w", err)
	}
	languages := map[proto.Language]string{}
	for _, r := range found {
		if r.Available {
			languages[proto.Language(r.Language)] = r.Version
		}
	}
	return languages, nil
}

func jailSpec() jail.Spec { return worker.Spec(proto.DefaultSandbox()) }

// jobs gives the worker the queue's slots under its own interfaces.
type jobs struct{ slots *queue.Slots }

func (j jobs) Take(ctx context.Context) (worker.Lease, error) {
	l, err := j.slots.Take(ctx)
	if err != nil {
		return nil, err
	}
	return lease{l}, nil
}

type lease struct{ *queue.Lease }

func (l lease) Finish(ctx context.Context, e worker.Ending) (*proto.Record, error) {
	return l.Lease.Finish(ctx, queue.Ending(e))
}

type output struct{ *events.Writer }

func (o output) Stream(s proto.Stream) io.Writer { return o.Writer.Stream(s) }
