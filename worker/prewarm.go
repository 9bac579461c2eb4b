package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/pool"
)

// Warm configures prewarmed jails and zygotes.
type Warm struct {
	Spare     int              // jails of a pool key, in addition to those that the rate demands
	Most      int              // limit of prewarmed jails
	Zygotes   int              // limit of zygotes
	Memory    int64            // limit of the memory of prewarmed jails and zygotes, in bytes
	Languages []proto.Language // that can run without an image; each always has a prewarmed jail
	// OnStart is called for each execution with the origin of its jail.
	OnStart func(language proto.Language, start Start)
	// OnZygote, if not nil, is called after each attempt to create a zygote for a sandbox, with the
	// error or nil. The zygote is in use already.
	OnZygote func(ctx context.Context, sandbox proto.Sandbox, err error)
}

// startPrewarming prewarms jails until ctx is done or stop is called.
func (w *Worker) startPrewarming(ctx context.Context) (stop func()) {
	memory := w.Warm.Memory / 2 // half each for jails and zygotes
	w.pool = pool.New[*preparedJail](
		pool.Config{Cores: runtime.GOMAXPROCS(0), Spare: w.Warm.Spare, Most: w.Warm.Most, Memory: memory, Log: w.Log})
	for _, l := range w.Warm.Languages {
		k := w.poolKey(proto.DefaultSandbox(), l, false)
		w.pool.Expect(k.String(), k.prewarm)
	}
	ctx, cancel := context.WithCancel(ctx)
	w.zygotes = &zygotePool{
		most: w.Warm.Zygotes, memory: memory, log: w.Log, onCreate: w.Warm.OnZygote, ctx: ctx,
		slots: map[string]*zygoteSlot{},
	}
	unused, closeZygotes := context.WithCancel(context.WithoutCancel(ctx))
	var filling, evicting sync.WaitGroup
	filling.Go(func() { w.pool.Run(ctx) })
	evicting.Go(func() { w.zygotes.run(unused) })
	return func() {
		cancel()
		filling.Wait()
		closeZygotes() // nothing forks any more
		evicting.Wait()
	}
}

// Start is the origin of an execution's jail.
type Start string

// The origins of jails.
const (
	Cold   Start = "cold"   // created for the execution
	Ready  Start = "warm"   // prewarmed for one execution of any API key
	Forked Start = "forked" // forked from a zygote of the API key
)

// takePrepared returns a prewarmed or forked jail. It returns nil if there is none.
func (w *Worker) takePrepared(ctx context.Context, k poolKey, apiKey string) (*preparedJail, Start) {
	if own := k.forKey(apiKey); own.forkable() && w.zygotes.request(own.anyLanguage()) {
		if j, ok := w.pool.Get(own.String(), own.fork); ok {
			return j, Forked
		}
		j, err := own.fork(ctx)
		if err == nil {
			return j, Forked
		}
		if !errors.Is(err, jail.ErrFull) && ctx.Err() == nil {
			w.Log.WarnContext(ctx, "fork of a jail failed", "error", err)
		}
	}
	if j, ok := w.pool.Get(k.String(), k.prewarm); ok {
		return j, Ready
	}
	return nil, Cold
}

// preparedJail is a jail with the image that it runs on.
type preparedJail struct {
	jail.Jail
	image   Image
	release func() // of the image; nil if there is none
}

// Close closes the jail, if there is one, and releases the image.
func (j *preparedJail) Close() (err error) {
	if j.Jail != nil {
		err = j.Jail.Close()
	}
	j.releaseImage()
	return err
}

func (j *preparedJail) releaseImage() {
	if j.release != nil {
		j.release()
		j.release = nil
	}
}

// poolKey identifies interchangeable jails: for executions in the same sandbox and language, all
// with a thread or all without, of one API key or of any.
type poolKey struct {
	worker   *Worker
	sandbox  proto.Sandbox
	language proto.Language
	thread   bool
	guest    bool   // for the guests of live sandboxes, not for programs
	apiKey   string // empty for all
}

func (w *Worker) poolKey(s proto.Sandbox, l proto.Language, thread bool) poolKey {
	s.OutputBytes = 0 // does not concern the jail
	return poolKey{worker: w, sandbox: s, language: l, thread: thread}
}

// keyOf returns the pool key of a job.
func (w *Worker) keyOf(job *proto.Job) poolKey {
	k := w.poolKey(job.Sandbox, job.Language, job.ThreadID != "")
	k.guest = job.Live != nil
	return k
}

// forKey returns k for one API key alone.
func (k poolKey) forKey(apiKey string) poolKey {
	k.apiKey = apiKey
	return k
}

// anyLanguage returns k for all languages, which share a zygote.
func (k poolKey) anyLanguage() poolKey {
	k.language = ""
	return k
}

// forkable reports whether jails of k may be forked from a zygote.
func (k poolKey) forkable() bool { return k.apiKey != "" && k.sandbox.Isolation == "" && !k.guest }

// String returns a text that is equal only for equal keys.
func (k poolKey) String() string {
	sandbox, err := json.Marshal(k.sandbox)
	if err != nil {
		panic(fmt.Sprintf("encode sandbox: %v", err))
	}
	return fmt.Sprintf("%s, thread %t, guest %t, key %q, %s", k.language, k.thread, k.guest, k.apiKey, sandbox)
}

// prewarm creates a jail.
func (k poolKey) prewarm(ctx context.Context) (*preparedJail, error) {
	return k.create(ctx, k.worker.Jails.Prepare)
}

// forkTimeout limits a fork on a busy machine: a zygote that takes longer hangs.
const forkTimeout = 10 * time.Second

// fork creates a jail from the zygote of k.
func (k poolKey) fork(ctx context.Context) (*preparedJail, error) {
	zygote, done := k.worker.zygotes.acquire(k)
	if zygote == nil {
		return nil, pool.ErrGone
	}
	ctx, cancel := context.WithTimeout(ctx, forkTimeout)
	defer cancel()
	j, err := k.create(ctx, zygote.Fork)
	done(err)
	if errors.Is(err, jail.ErrFull) {
		err = fmt.Errorf("%w: %w", pool.ErrFull, err)
	}
	return j, err
}

// create creates a jail with prepare. In the jail, a guest waits for its sandbox. An interpreter
// waits for its program, if the language allows it.
func (k poolKey) create(
	ctx context.Context, prepare func(context.Context, jail.Spec) (jail.Jail, error),
) (*preparedJail, error) {
	return k.withImage(ctx, func(j *preparedJail, spec jail.Spec) (err error) {
		source, ok := k.source(j.image)
		switch {
		case k.guest:
			prewarmed := jail.PrewarmGuest(guestProgram())
			spec.Prewarm = &prewarmed
		case ok && jail.CanWait(source.Language):
			prewarmed, err := source.Prewarm()
			if err != nil {
				return err
			}
			spec.Prewarm = &prewarmed
		}
		j.Jail, err = prepare(ctx, spec)
		return err
	})
}

// withImage calls create with the image of k and the spec of a jail on it. It releases the image if
// create fails.
func (k poolKey) withImage(
	ctx context.Context, create func(j *preparedJail, spec jail.Spec) error,
) (*preparedJail, error) {
	j, err := k.openImage(ctx)
	if err != nil {
		return nil, err
	}
	spec := k.spec(j.image.Root)
	spec.MountHomeLater = k.thread
	if err := create(j, spec); err != nil {
		j.releaseImage()
		return nil, err
	}
	return j, nil
}

// spec returns the spec of a jail on an image, without a home. Only guests have a root that can be
// written.
func (k poolKey) spec(image string) jail.Spec {
	spec := Spec(k.sandbox, image)
	if k.guest {
		spec.Guest, spec.RootBytes = true, k.sandbox.RootBytes
	}
	return spec
}

// openImage returns a preparedJail with its image, but without a jail.
func (k poolKey) openImage(ctx context.Context) (*preparedJail, error) {
	j := &preparedJail{}
	switch {
	case k.sandbox.ImageDigest != "":
		var err error
		if j.image, j.release, err = k.worker.Images.Get(ctx, k.sandbox.ImageDigest); err != nil {
			return nil, err
		}
	case k.sandbox.Image != "":
		j.image.Root = k.sandbox.Image
	}
	return j, nil
}

// source returns the common part of all programs of k. It returns false if the image lacks the
// language.
func (k poolKey) source(img Image) (jail.Source, bool) {
	interpreter, ok := img.Languages[k.language]
	return jail.Source{Language: string(k.language), Home: k.worker.Home, Interpreter: interpreter, ImageEnv: img.Env},
		ok || img.Languages == nil
}

var errNoInterpreter = errors.New("the image does not have " + jail.Forkable)

// createZygote creates a zygote for k, with an interpreter to fork from if possible. Without
// modules to preload, a zygote without an interpreter is enough.
func (k poolKey) createZygote(ctx context.Context) (jail.Zygote, error) {
	var z jail.Zygote
	j, err := k.withImage(ctx, func(j *preparedJail, spec jail.Spec) error {
		err := k.addInterpreter(j.image, &spec)
		if err == nil {
			z, err = k.worker.Jails.Zygote(ctx, spec)
		}
		if err == nil || len(k.sandbox.Preload) > 0 || ctx.Err() != nil {
			return err
		}
		spec.Prewarm = nil
		bare, bareErr := k.worker.Jails.Zygote(ctx, spec)
		if bareErr != nil {
			return errors.Join(err, bareErr)
		}
		if z = bare; !errors.Is(err, errNoInterpreter) {
			k.worker.Log.InfoContext(ctx, "zygote has no interpreter to fork", "language", jail.Forkable, "key", k.String(),
				"error", err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &imageZygote{z, j}, nil
}

// addInterpreter adds the interpreter to fork from to the spec of a zygote.
func (k poolKey) addInterpreter(img Image, spec *jail.Spec) error {
	preload := k.sandbox.Preload
	k.language = jail.Forkable
	source, ok := k.source(img)
	if !ok {
		return errNoInterpreter
	}
	program, err := source.Zygote(preload)
	spec.Prewarm = &program
	return err
}

// imageZygote is a zygote with the image that it runs on.
type imageZygote struct {
	jail.Zygote
	image *preparedJail // without a jail
}

// Close closes the zygote and releases its hold on the image. Forked jails hold the image
// themselves.
func (z *imageZygote) Close() error {
	err := z.Zygote.Close()
	z.image.releaseImage()
	return err
}
