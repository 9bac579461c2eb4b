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

// Warm says what is made before it is asked for.
type Warm struct {
	Spare     int              // jails of a kind, beside those that the rate asks for
	Most      int              // jails, of all kinds
	Zygotes   int              // jails that others are forked from
	Memory    int64            // bytes that they may hold, and what they are forked from
	Languages []proto.Language // that this worker has in sandboxes without an image, and expects
	// Taken is told of each execution how it came to its jail.
	Taken func(language proto.Language, start Start)
}

// keepWarm makes jails ahead until ctx ends, or what it returns is called.
func (w *Worker) keepWarm(ctx context.Context) (stop func()) {
	memory := w.Warm.Memory / 2 // as much for either
	w.pool = pool.New[*box](pool.Config{Cores: runtime.GOMAXPROCS(0), Spare: w.Warm.Spare, Most: w.Warm.Most, Memory: memory, Log: w.Log})
	for _, l := range w.Warm.Languages {
		k := w.kind(proto.DefaultSandbox(), l, false)
		w.pool.Expect(k.name(), k.make)
	}
	ctx, cancel := context.WithCancel(ctx)
	w.zygotes = &zygotePool{most: w.Warm.Zygotes, memory: memory, log: w.Log, ctx: ctx, families: map[string]*family{}}
	over, end := context.WithCancel(context.WithoutCancel(ctx)) // when nobody is left who could ask
	var filling, sweeping sync.WaitGroup
	filling.Go(func() { w.pool.Run(ctx) })
	sweeping.Go(func() { w.zygotes.run(over) })
	return func() {
		cancel()
		filling.Wait()
		end()
		sweeping.Wait()
	}
}

// Start is how an execution came to its jail.
type Start string

// Starts.
const (
	Cold   Start = "cold"   // it was made for the execution
	Ready  Start = "warm"   // it was ready, made for one execution of anybody's
	Forked Start = "forked" // it was forked from a jail of the API key's
)

// ready gives a jail that is there, or can be forked; nil if there is none.
func (w *Worker) ready(ctx context.Context, k kind, key string) (*box, Start) {
	if own := k.of(key); own.forkable() {
		if w.zygotes.ask(own.family()) {
			if b, ok := w.pool.Take(own.name(), own.fork); ok {
				return b, Forked
			}
			b, err := own.fork(ctx)
			if err == nil {
				return b, Forked
			}
			if !errors.Is(err, jail.ErrFull) && ctx.Err() == nil {
				w.Log.WarnContext(ctx, "a jail could not be forked, another way is taken", "error", err)
			}
		}
	}
	if b, ok := w.pool.Take(k.name(), k.make); ok {
		return b, Ready
	}
	return nil, Cold
}

// box is a jail, with the image that it is on.
type box struct {
	jail.Jail
	image   Image
	release func() // of the image; nil where there is none
}

// Close gives both back, what there is of them.
func (b *box) Close() (err error) {
	if b.Jail != nil {
		err = b.Jail.Close()
	}
	b.letGo()
	return err
}

func (b *box) letGo() {
	if b.release != nil {
		b.release()
		b.release = nil
	}
}

// kind is what jails can be made ahead for: executions in the same sandbox, in the same language, all in threads or none, of one API key
// or of all.
type kind struct {
	worker   *Worker
	sandbox  proto.Sandbox
	language proto.Language
	thread   bool
	key      string // empty for all
}

func (w *Worker) kind(s proto.Sandbox, l proto.Language, thread bool) kind {
	s.OutputBytes = 0 // is not the jail's
	return kind{worker: w, sandbox: s, language: l, thread: thread}
}

// of is the kind of an API key alone.
func (k kind) of(key string) kind {
	k.key = key
	return k
}

// family is the kind of all languages: they have one parent.
func (k kind) family() kind {
	k.language = ""
	return k
}

// forkable reports whether jails of the kind may be forked from one another.
func (k kind) forkable() bool { return k.key != "" && k.sandbox.Isolation == "" }

// name is the same for equal kinds, and for no others.
func (k kind) name() string {
	sandbox, err := json.Marshal(k.sandbox)
	if err != nil {
		panic(fmt.Sprintf("a sandbox that came as JSON does not become JSON: %v", err))
	}
	return fmt.Sprintf("%s, thread %t, key %q, %s", k.language, k.thread, k.key, sandbox)
}

// make makes a jail.
func (k kind) make(ctx context.Context) (*box, error) { return k.on(ctx, k.worker.Jails.Prepare) }

// forkTimeout is how long a fork may take on a machine that has much else to do: a parent that takes longer hangs.
const forkTimeout = 10 * time.Second

// fork makes a jail like make's from the parent of the kind.
func (k kind) fork(ctx context.Context) (*box, error) {
	parent, done := k.worker.zygotes.take(k)
	if parent == nil {
		return nil, pool.ErrGone
	}
	ctx, cancel := context.WithTimeout(ctx, forkTimeout)
	defer cancel()
	b, err := k.on(ctx, parent.Fork)
	done(err)
	if errors.Is(err, jail.ErrFull) {
		err = fmt.Errorf("%w: %w", pool.ErrFull, err)
	}
	return b, err
}

// on has a jail made on the image, in which the language's interpreter waits if the image has it.
func (k kind) on(ctx context.Context, prepare func(context.Context, jail.Spec) (jail.Jail, error)) (*box, error) {
	return k.furnish(ctx, func(b *box, spec jail.Spec) (err error) {
		if source, ok := k.source(b.image); ok && jail.CanWait(source.Language) {
			ahead, err := source.Ahead()
			if err != nil {
				return err
			}
			spec.Ahead = &ahead
		}
		b.Jail, err = prepare(ctx, spec)
		return err
	})
}

// furnish gets the image, and has something made on it for a jail of the spec; after an error it gives the image back.
func (k kind) furnish(ctx context.Context, do func(b *box, spec jail.Spec) error) (*box, error) {
	b, err := k.base(ctx)
	if err != nil {
		return nil, err
	}
	spec := Spec(k.sandbox, b.image.Root)
	spec.HomeLater = k.thread
	if err := do(b, spec); err != nil {
		b.letGo()
		return nil, err
	}
	return b, nil
}

// base is a box without a jail.
func (k kind) base(ctx context.Context) (*box, error) {
	b := &box{}
	switch {
	case k.sandbox.ImageDigest != "":
		var err error
		if b.image, b.release, err = k.worker.Images.Get(ctx, k.sandbox.ImageDigest); err != nil {
			return nil, err
		}
	case k.sandbox.Image != "":
		b.image.Root = k.sandbox.Image
	}
	return b, nil
}

// source is what programs of the kind have in common; false if the image does not have the language.
func (k kind) source(img Image) (jail.Source, bool) {
	interpreter, ok := img.Languages[k.language]
	return jail.Source{Language: string(k.language), Home: k.worker.Home, Interpreter: interpreter, ImageEnv: img.Env}, ok || img.Languages == nil
}

var errNoInterpreter = errors.New("the image does not have " + jail.Forkable)

// parent makes a jail to fork from, with an interpreter that can be forked where there is one. Without modules that are to be there before
// it does without.
func (k kind) parent(ctx context.Context) (jail.Zygote, error) {
	var p jail.Zygote
	b, err := k.furnish(ctx, func(b *box, spec jail.Spec) error {
		err := k.interpreted(b.image, &spec)
		if err == nil {
			p, err = k.worker.Jails.Zygote(ctx, spec)
		}
		if err == nil || len(k.sandbox.Preload) > 0 || ctx.Err() != nil {
			return err
		}
		spec.Ahead = nil
		bare, failed := k.worker.Jails.Zygote(ctx, spec)
		if failed != nil {
			return errors.Join(err, failed)
		}
		if p = bare; !errors.Is(err, errNoInterpreter) {
			k.worker.Log.InfoContext(ctx, "programs in "+jail.Forkable+" are not forked, each has an interpreter started for it", "kind", k.name(),
				"error", err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &ownedParent{p, b}, nil
}

// interpreted gives the spec of a parent its interpreter.
func (k kind) interpreted(img Image, spec *jail.Spec) error {
	preload := k.sandbox.Preload
	k.language = jail.Forkable
	source, ok := k.source(img)
	if !ok {
		return errNoInterpreter
	}
	program, err := source.Zygote(preload)
	spec.Ahead = &program
	return err
}

// ownedParent is a parent, with the image that it is on.
type ownedParent struct {
	jail.Zygote
	box *box // without a jail
}

// Close gives both back. The jails that were forked have the image for themselves.
func (p *ownedParent) Close() error {
	err := p.Zygote.Close()
	p.box.letGo()
	return err
}
