package worker

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/warm"
)

// Warm says what is made before it is asked for.
type Warm struct {
	Spare     int              // jails of a kind, beside those that the rate asks for
	Most      int              // jails, of all kinds
	Memory    int64            // bytes that they may hold
	Languages []proto.Language // that this worker has in sandboxes without an image, and expects
	// Taken is told of each execution whether its jail was ready.
	Taken func(language proto.Language, ready bool)
}

// keepWarm makes jails ahead until ctx ends, or what it returns is called.
func (w *Worker) keepWarm(ctx context.Context) (stop func()) {
	w.pool = warm.New[*box](warm.Config{Spare: w.Warm.Spare, Most: w.Warm.Most, Memory: w.Warm.Memory, Log: w.Log})
	for _, l := range w.Warm.Languages {
		k := w.kind(proto.DefaultSandbox(), l, false)
		w.pool.Expect(k.name(), k.make)
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.pool.Run(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// box is a jail, with the image that it is on.
type box struct {
	jail.Jail
	image   Image
	release func() // of the image; nil where there is none
}

// Close gives both back.
func (b *box) Close() error {
	err := b.Jail.Close()
	b.letGo()
	return err
}

func (b *box) letGo() {
	if b.release != nil {
		b.release()
		b.release = nil
	}
}

// kind is what jails can be made ahead for: executions in the same sandbox, in the same language, all in threads or none.
type kind struct {
	worker   *Worker
	sandbox  proto.Sandbox
	language proto.Language
	thread   bool
}

func (w *Worker) kind(s proto.Sandbox, l proto.Language, thread bool) kind {
	s.OutputBytes = 0 // is not the jail's
	return kind{w, s, l, thread}
}

// name is the same for equal kinds, and for no others.
func (k kind) name() string {
	sandbox, err := json.Marshal(k.sandbox)
	if err != nil {
		panic(fmt.Sprintf("a sandbox that came as JSON does not become JSON: %v", err))
	}
	return fmt.Sprintf("%s, thread %t, %s", k.language, k.thread, sandbox)
}

// image gets the root file system.
func (k kind) image(ctx context.Context) (img Image, release func(), err error) {
	switch {
	case k.sandbox.ImageDigest != "":
		return k.worker.Images.Get(ctx, k.sandbox.ImageDigest)
	case k.sandbox.Image != "":
		img.Root = k.sandbox.Image
	}
	return img, nil, nil
}

// make makes a jail in which the language's interpreter waits, if the image has it.
func (k kind) make(ctx context.Context) (b *box, err error) {
	b = &box{}
	if b.image, b.release, err = k.image(ctx); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			b.letGo()
		}
	}()
	spec := Spec(k.sandbox, b.image.Root)
	spec.HomeLater = k.thread
	interpreter, ok := b.image.Languages[k.language]
	if ok || b.image.Languages == nil {
		source := jail.Source{Language: string(k.language), Home: k.worker.Home, Interpreter: interpreter, ImageEnv: b.image.Env}
		ahead, err := source.Ahead()
		if err != nil {
			return nil, err
		}
		spec.Ahead = &ahead
	}
	b.Jail, err = k.worker.Jails.Prepare(ctx, spec)
	return b, err
}
