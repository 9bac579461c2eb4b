package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/events"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/home/cache"
	"github.com/bullpen-run/bullpen/worker/inject"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
)

// openPause is the pause between attempts to set up a worker.
const openPause = 5 * time.Second

// workerRole is a worker that accepts jobs once it can create jails.
type workerRole struct {
	*system
	ready      chan struct{} // closed when the fields below are set
	slots      *queue.Slots
	live       *liveWorker // nil if this worker runs no live sandboxes
	runner     *worker.Worker
	imageCache *imageCache
	journal    *os.File          // the journal of assignments
	logged     map[string]string // reasons why this worker does not have a capability, by capability
	missing    map[string]string // the same, of the last attempt to set the worker up
}

// work runs jobs until ctx is done and the running ones have ended. After the drain time they are
// aborted.
func (r *workerRole) work(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-r.ready:
	}
	cut, kill := context.WithCancelCause(context.WithoutCancel(ctx))
	defer kill(nil)
	stop := afterDrain(ctx, r.cfg.Drain, func() { kill(worker.ErrShutdown) })
	defer stop()
	return r.runner.Run(ctx, cut)
}

// hold keeps the worker registered with the dispatcher, and holds the resources that jails need. If
// one is missing, hold reports it and retries, since the machine may be repaired meanwhile.
func (r *workerRole) hold(ctx context.Context) error {
	for {
		r.missing = map[string]string{}
		closers, err := r.open(ctx)
		r.health.setMissing(r.missing)
		if ctx.Err() == nil {
			r.health.set(err)
		}
		if err == nil {
			r.metrics.Slots(r.slots.Total, r.slots.Used)
			r.metrics.ImageCache(r.imageCache.stats)
			close(r.ready)
			return errors.Join(r.runSlots(ctx), closers.close())
		}
		if err := closers.close(); err != nil {
			r.log.Error("a worker that could not be set up could not be cleared away", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(openPause):
		}
	}
}

// runSlots holds the leases of the worker until ctx is done.
func (r *workerRole) runSlots(ctx context.Context) error {
	if r.live == nil {
		return r.slots.Run(ctx)
	}
	var serving sync.WaitGroup
	var errLive error
	serving.Go(func() { errLive = r.live.run(ctx, r) })
	err := r.slots.Run(ctx)
	serving.Wait()
	return errors.Join(err, errLive)
}

// closers are closed in reverse order.
type closers []func() error

func (c closers) close() error {
	var errs []error
	for _, f := range slices.Backward(c) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// open opens the resources that jails need, and finds the capabilities of this worker.
func (r *workerRole) open(ctx context.Context) (c closers, err error) {
	network, noNetwork := openNetwork(ctx, r.cfg, r.log)
	if network != nil {
		c = append(c, network.Close)
	}
	maker, err := openJails(r.cfg,
		nsjail.Config{Network: network, Programs: r.cfg.SlotCount(), Forks: r.cfg.forks(), Log: r.log})
	if err != nil {
		return c, err
	}
	c = append(c, maker.Close)
	languages, err := probe(ctx, maker)
	if err != nil {
		return c, err
	}
	homes, noHomes, err := r.openHomes(ctx, maker, &c)
	if err != nil {
		return c, err
	}
	images := &imageCache{dir: r.cfg.ImageDir, source: &registry.ImageSource{Store: r.store, Blobs: r.blobs}, log: r.log}
	r.imageCache = images
	c = append(c, images.close)
	_, noImages := usableImages(r.cfg.ImageDir)
	warm := r.cfg.warm()
	warm.OnStart, warm.OnZygote = r.metrics.JailAcquired, r.zygoteCreated
	roots, noRoots := inject.SystemRoots()
	mounts, noMounts := openMounts(r.cfg, maker)
	capabilities := []string{queue.CapabilitySecrets, queue.CapabilityRich, queue.CapabilityArchitecture(runtime.GOARCH)}
	for _, can := range []struct {
		capability string
		err        error
	}{
		{queue.CapabilityNetwork, noNetwork},
		{queue.CapabilityNetworkExtended, noNetwork},
		{queue.CapabilityInjections, cmp.Or(noNetwork, noRoots)},
		{queue.CapabilityDisk, maker.TryDisk(ctx, jailSpec())},
		{queue.CapabilityImages, noImages},
		{queue.CapabilityThreads, noHomes},
		{queue.CapabilityMounts, noMounts},
		{queue.CapabilityVolumes, cmp.Or(noHomes, noMounts)},
	} {
		if can.err == nil {
			capabilities = append(capabilities, can.capability)
		} else {
			r.logMissing(can.capability, can.err)
		}
	}
	for _, known := range proto.Runtimes() {
		l := known.Language
		if v, ok := languages[l]; ok {
			capabilities = append(capabilities, queue.CapabilityLanguage(l))
			warm.Languages = append(warm.Languages, l)
			r.log.Info("runtime found", "language", l, "version", v)
			continue
		}
		level := slog.LevelInfo
		if l == proto.Python { // what most executions need
			level = slog.LevelWarn
		}
		r.log.Log(ctx, level, "runtime not found, this worker runs its programs in images only", "language", l, "remedy",
			known.Install)
	}
	programs := r.openAgents(languages[proto.Node] != "")
	for agent, versions := range programs.Versions() {
		capabilities = append(capabilities, queue.CapabilityAgent(agent, ""))
		for _, version := range versions {
			capabilities = append(capabilities, queue.CapabilityAgent(agent, version))
		}
	}
	r.metrics.CgroupVersion(maker.CgroupVersion())
	r.slots = &queue.Slots{
		Store: r.store, Worker: r.instance, Pool: r.cfg.Pool, Total: r.cfg.SlotCount(), Capabilities: capabilities,
		Ended: r.executionEnded, Started: r.metrics.ExecutionStarted, Log: r.log, Journal: r.journal,
		Full: r.dataDiskFull,
		Info: r.describe(languages, images, homes),
	}
	r.runner = &worker.Worker{
		Jobs: jobs{r.slots}, Jails: maker, Images: images, Homes: homes, Home: r.cfg.Home, Slots: r.slots.Total, Warm: warm,
		SaveTimeout: r.cfg.SaveTimeout, Log: r.log,
		Done: r.metrics.ExecutionDone, OnHealth: r.health.set, Roots: roots, Mounts: mounts, Agents: programs,
		Open: func(ctx context.Context, job *proto.Job, attempt int, baseSeq int64) worker.Output {
			w := events.NewWriter(
				ctx, r.store, job.Org, job.TraceID, attempt, baseSeq, int64(job.Sandbox.OutputBytes))
			w.FlushPartial, w.Budget = job.StreamPartial, r.queue
			return output{w}
		},
	}
	if r.live, err = r.openLive(capabilities, &c); err != nil {
		return c, err
	}
	if r.live != nil {
		r.runner.Live, r.runner.LiveJobs, r.runner.LiveSlots = r.live.sandboxes, jobs{r.live.slots}, r.live.slots.Total
	}
	return c, nil
}

// describe returns the function that describes this worker to administrators.
func (r *workerRole) describe(
	languages map[proto.Language]string, images *imageCache, homes homes,
) func() proto.Worker {
	started, load := time.Now(), new(machineLoad)
	return func() proto.Worker {
		return proto.Worker{
			Version: Version(), StartedAt: started, Languages: languages, Images: images.count(), Threads: homes.cache.Len(),
			Machine: load.read(),
		}
	}
}

// openHomes opens the homes of threads. unusable is the reason why this worker cannot create
// homes, or nil.
func (r *workerRole) openHomes(ctx context.Context, maker *nsjail.Maker, c *closers) (_ homes, unusable, err error) {
	dir, err := filepath.Abs(filepath.Join(r.cfg.Data, "homes"))
	if err != nil {
		return homes{}, nil, fmt.Errorf("find the data directory: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return homes{}, nil, fmt.Errorf("make the directory of homes: %w", err)
	}
	number, lock, err := lockNumber(dir)
	if err != nil {
		return homes{}, nil, err
	}
	*c = append(*c, lock.Close)
	r.journal = lock // only this process has it; the next owner of the number finds it
	owners := &home.Owners{}
	*c = append(*c, owners.Close)
	homeCache, err := cache.Open(cache.Config{
		Dir: filepath.Join(dir, strconv.Itoa(number)), Limit: int64(r.cfg.HomeCache), Versions: r.versions(),
		Heads: r.threads, Owners: owners, Log: r.log,
	})
	if err != nil {
		return homes{}, nil, err
	}
	*c = append(*c, homeCache.Close)
	return homes{homeCache}, maker.TryHome(ctx, jailSpec()), nil
}

// homes adapts a cache of homes to [worker.Homes].
type homes struct{ cache *cache.Cache }

func (h homes) CheckOut(ctx context.Context, req proto.CheckoutRequest) (worker.Home, error) {
	home, err := h.cache.CheckOut(ctx, req)
	if err != nil {
		return nil, err
	}
	return home, nil
}

func (h homes) Read(ctx context.Context, org, thread string) (worker.VolumeVersion, error) {
	version, err := h.cache.Read(ctx, org, thread)
	if err != nil {
		return nil, err
	}
	return version, nil
}

// logMissing logs why this worker does not have a capability. Sandboxes that need it run on other
// workers.
func (r *workerRole) logMissing(capability string, err error) {
	r.missing[capability] = err.Error()
	if r.logged[capability] == err.Error() || errors.Is(err, context.Canceled) {
		return
	}
	r.logged[capability] = err.Error()
	r.log.Warn("capability missing, this worker does not run sandboxes that need it", "capability", capability,
		"error", err)
}

// preloadTimeout limits the storing of a preload failure.
const preloadTimeout = 10 * time.Second

// zygoteCreated counts a zygote's creation or its failure err, and stores whether the modules of
// its sandbox can be preloaded.
func (r *workerRole) zygoteCreated(ctx context.Context, sandbox proto.Sandbox, err error) {
	r.metrics.ZygoteCreated(len(sandbox.Preload) > 0, err)
	if len(sandbox.Preload) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, preloadTimeout)
	defer cancel()
	if err := (&registry.PreloadFailures{Store: r.store}).Set(ctx, sandbox, r.instance, err); err != nil {
		r.log.Error("preload failure not stored", "error", err)
	}
}

// openNetwork opens outbound networking for sandboxes. Programs cannot reach the hosts of the
// control plane, such as NATS.
func openNetwork(ctx context.Context, cfg *Config, log *slog.Logger) (*egress.Network, error) {
	own, err := cfg.controlPlane()
	if err != nil {
		return nil, err
	}
	return egress.Open(ctx, egress.Config{ControlPlane: own, Log: log})
}

// controlPlane returns the hosts that this process connects to.
func (c *Config) controlPlane() (hosts []string, err error) {
	if c.Embedded() || strings.HasPrefix(c.URL, unixScheme) {
		return nil, nil
	}
	for server := range strings.SplitSeq(c.URL, ",") {
		server = strings.TrimSpace(server)
		if !strings.Contains(server, "://") {
			server = "nats://" + server
		}
		u, err := url.Parse(server)
		if err != nil {
			return nil, fmt.Errorf("read --nats: %w", err)
		}
		hosts = append(hosts, u.Host)
	}
	return hosts, nil
}

// openJails returns a maker of jails with the settings of cfg.
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

// probe returns the runtimes that work inside a jail.
func probe(ctx context.Context, maker *nsjail.Maker) (map[proto.Language]string, error) {
	found, err := maker.Probe(ctx, jailSpec())
	if err != nil {
		return nil, fmt.Errorf("probe the runtimes: %w", err)
	}
	languages := map[proto.Language]string{}
	for _, r := range found {
		if r.Available {
			languages[r.Language] = r.Found
		}
	}
	return languages, nil
}

func jailSpec() jail.Spec { return worker.Spec(proto.DefaultSandbox(), "") }

// jobs adapts the queue's slots to the interfaces of the worker.
type jobs struct{ slots *queue.Slots }

func (j jobs) Take(ctx context.Context) (worker.Lease, error) {
	l, err := j.slots.Take(ctx)
	if err != nil {
		return nil, err
	}
	return lease{l}, nil
}

type lease struct{ *queue.Lease }

func (l lease) Finish(ctx context.Context, e worker.Outcome) (*proto.Record, error) {
	return l.Lease.Finish(ctx, queue.Outcome(e))
}

type output struct{ *events.Writer }

func (o output) Stream(s proto.Stream) worker.Stream { return o.Writer.Stream(s) }
