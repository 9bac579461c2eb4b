package registry

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	catalogKey    = "catalog"
	catalogTries  = 20
	sweepInterval = 10 * time.Minute
	// uploadPause is how long nothing may come of an upload before it counts as broken off.
	uploadPause = time.Hour
	// cleanTimeout bounds the removal of an upload that came to nothing, which goes on when the client is gone.
	cleanTimeout = 10 * time.Second
)

// catalog is all that is known of images. It is one value, changed by compare-and-set, so that a name never leads to an upload that
// somebody else removes at the same moment.
type catalog struct {
	Images  []entry   `json:"images"`
	Retired []retired `json:"retired,omitempty"`
}

// entry is an image and the upload that holds it, which others with the same digest share.
type entry struct {
	proto.Image
	Upload string `json:"upload"`
}

// retired is an upload without a name, which stays for jobs that were accepted when it had one.
type retired struct {
	Digest string    `json:"digest"`
	Upload string    `json:"upload"`
	Until  time.Time `json:"until"`
}

// Images is the registry of sandbox images: their names in a catalog that every gateway watches, and the images themselves in parts of
// a message each. Run must be running for changes to be seen and for room to be freed.
type Images struct {
	store *store.Store
	keep  time.Duration
	full  func() bool
	log   *slog.Logger
	// inspect reads an image to its end and says what it is, but for name and time.
	inspect func(io.Reader) (*proto.Image, error)

	mu       sync.RWMutex
	byName   map[string]*proto.Image
	revision uint64
}

// ImagesConfig says how a registry of images works.
type ImagesConfig struct {
	Store *store.Store
	// Inspect reads an image to its end, and says what it is, but for its name and time. What it refuses is not stored.
	Inspect func(io.Reader) (*proto.Image, error)
	// Keep is how long an image without a name stays for jobs that were accepted when it had one.
	Keep time.Duration
	// Full reports whether there is no room for an image; nil for never.
	Full func() bool
	Log  *slog.Logger
}

// OpenImages reads the catalog there is.
func OpenImages(ctx context.Context, cfg ImagesConfig) (*Images, error) {
	i := &Images{store: cfg.Store, keep: cfg.Keep, full: cfg.Full, inspect: cfg.Inspect, log: cfg.Log}
	have, revision, err := readCatalog(ctx, i.store)
	if err != nil {
		return nil, err
	}
	i.take(have, revision)
	return i, nil
}

// readCatalog reads the catalog and its revision, 0 while there is none.
func readCatalog(ctx context.Context, st *store.Store) (*catalog, uint64, error) {
	e, err := st.Images.Get(ctx, catalogKey)
	if store.IsNotFound(err) {
		return &catalog{}, 0, nil
	}
	if err != nil {
		return nil, 0, fmt.Errorf("read the catalog of images: %w", err)
	}
	have := &catalog{}
	if err := json.Unmarshal(e.Value(), have); err != nil {
		return nil, 0, fmt.Errorf("decode the catalog of images: %w", err)
	}
	return have, e.Revision(), nil
}

// take takes a catalog in unless a newer one is known.
func (i *Images) take(have *catalog, revision uint64) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if revision < i.revision {
		return
	}
	i.revision, i.byName = revision, make(map[string]*proto.Image, len(have.Images))
	for _, e := range have.Images {
		i.byName[e.Name] = &e.Image
	}
}

// Run keeps the list current until ctx ends, and frees the room of what is no longer needed.
func (i *Images) Run(ctx context.Context) error {
	var sweeping sync.WaitGroup
	defer sweeping.Wait()
	sweeping.Go(func() { i.sweepOften(ctx) })
	return backoff.Retry(func() error {
		w, err := i.store.Images.Watch(ctx, catalogKey)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			i.log.Warn("the images are not followed, will retry", "error", err)
			return err
		}
		defer func() { _ = w.Stop() }()
		for {
			select {
			case <-ctx.Done():
				return nil
			case e, open := <-w.Updates():
				if !open {
					return errors.New("the watch ended")
				}
				if e != nil {
					i.follow(e)
				}
			}
		}
	}, backoff.NewConstantBackOff(watchPause))
}

func (i *Images) follow(e jetstream.KeyValueEntry) {
	have := &catalog{}
	if err := json.Unmarshal(e.Value(), have); err != nil {
		i.log.Error("a malformed catalog of images was passed over", "revision", e.Revision(), "error", err)
		return
	}
	i.take(have, e.Revision())
}

func (i *Images) sweepOften(ctx context.Context) {
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for {
		if err := i.Sweep(ctx, time.Now()); err != nil && ctx.Err() == nil {
			i.log.Warn("the room of images that are gone was not freed, will retry", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Image gives an image, which nobody may change, as it is known here: changes made elsewhere are seen well within a second. Its error is [proto.ErrNotFound]
// where there is none of that name.
func (i *Images) Image(_ context.Context, name string) (*proto.Image, error) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	img, ok := i.byName[name]
	if !ok {
		return nil, fmt.Errorf("image %q: %w", name, proto.ErrNotFound)
	}
	return img, nil
}

// List gives all images in the order of their names.
func (i *Images) List(context.Context) ([]proto.Image, error) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	out := make([]proto.Image, 0, len(i.byName))
	for _, name := range slices.Sorted(maps.Keys(i.byName)) {
		out = append(out, *i.byName[name])
	}
	return out, nil
}

// Put stores an image under a name, in place of the one that had it. What is read from body must have the digest and be what Inspect
// takes; otherwise nothing of it stays. Its errors are [*proto.FieldError], [*proto.Refusal] where there is no room, those of body, and
// [proto.ErrConflict].
func (i *Images) Put(ctx context.Context, name, digest string, body io.Reader) (img *proto.Image, replaced bool, err error) {
	upload := nuid.Next()
	if img, err = i.upload(ctx, upload, body); err == nil && img.Digest != digest {
		err = &proto.FieldError{Field: "digest", Message: "digest does not fit: what came has " + img.Digest}
	}
	if err != nil {
		i.discard(ctx, upload)
		return nil, false, err
	}
	img.Name, img.CreatedAt = name, time.Now().UTC()
	e := entry{*img, upload}
	err = i.change(ctx, func(have *catalog) error {
		at, known := have.find(name)
		if !known && len(have.Images) >= proto.MaxImages {
			return &proto.FieldError{Field: "name", Message: fmt.Sprintf("name is one too many: there are %d images; remove one", proto.MaxImages)}
		}
		replaced = known
		e.Upload = have.uploadOf(digest, upload)
		if known {
			old := have.Images[at]
			have.Images[at] = e
			i.retire(have, old)
		} else {
			have.Images = slices.Insert(have.Images, at, e)
		}
		have.revive(e.Upload)
		return nil
	})
	if err == nil && e.Upload != upload || unchanged(err) { // the same is there already, or none is wanted
		i.discard(ctx, upload)
	}
	if err != nil {
		return nil, false, err
	}
	return img, replaced, nil
}

// unchanged reports whether an error says that the catalog is as it was. After another one, it may name what it was to name.
func unchanged(err error) bool {
	var field *proto.FieldError
	return errors.As(err, &field) || errors.Is(err, proto.ErrConflict) || store.IsRejected(err)
}

// Remove takes a name away and gives the image that had it. The error is [proto.ErrNotFound] where nothing has.
func (i *Images) Remove(ctx context.Context, name string) (*proto.Image, error) {
	var removed entry
	err := i.change(ctx, func(have *catalog) error {
		at, ok := have.find(name)
		if !ok {
			return fmt.Errorf("image %q: %w", name, proto.ErrNotFound)
		}
		removed = have.Images[at]
		have.Images = slices.Delete(have.Images, at, at+1)
		i.retire(have, removed)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &removed.Image, nil
}

// find gives the place of a name among the images, which are in the order of their names.
func (c *catalog) find(name string) (at int, ok bool) {
	return slices.BinarySearchFunc(c.Images, name, func(e entry, name string) int { return cmp.Compare(e.Name, name) })
}

// uploadOf gives the upload that holds a digest; other where none does.
func (c *catalog) uploadOf(digest, other string) string {
	for _, e := range c.Images {
		if e.Digest == digest {
			return e.Upload
		}
	}
	for _, r := range c.Retired {
		if r.Digest == digest {
			return r.Upload
		}
	}
	return other
}

func (c *catalog) named(upload string) bool {
	return slices.ContainsFunc(c.Images, func(e entry) bool { return e.Upload == upload })
}

// retire keeps the upload of an image that lost its name, for a while, if nobody else names it.
func (i *Images) retire(have *catalog, e entry) {
	if !have.named(e.Upload) {
		have.Retired = append(have.Retired, retired{e.Digest, e.Upload, time.Now().UTC().Add(i.keep)})
	}
}

func (c *catalog) revive(upload string) {
	c.Retired = slices.DeleteFunc(c.Retired, func(r retired) bool { return r.Upload == upload })
}

// change changes the catalog by f, which may be called several times.
func (i *Images) change(ctx context.Context, f func(have *catalog) error) error {
	for range catalogTries {
		have, revision, err := readCatalog(ctx, i.store)
		if err != nil {
			return err
		}
		if err := f(have); err != nil {
			return err
		}
		body, err := json.Marshal(have)
		if err != nil {
			return fmt.Errorf("encode the catalog of images: %w", err)
		}
		if len(body) > i.store.MaxInline() {
			return &proto.FieldError{Field: "name", Message: "name is one too many: the list of images is full; remove one"}
		}
		revision, err = i.store.Images.Update(ctx, catalogKey, body, revision)
		if store.IsConflict(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("store the catalog of images: %w", err)
		}
		i.take(have, revision)
		return nil
	}
	return fmt.Errorf("store the catalog of images: %w", proto.ErrConflict)
}

// upload stores what is read from body under an upload's name while it is inspected.
func (i *Images) upload(ctx context.Context, upload string, body io.Reader) (img *proto.Image, err error) {
	out, in := io.Pipe()
	inspected := make(chan error, 1)
	go func() {
		var err error
		img, err = i.inspect(out)
		_ = out.CloseWithError(errInspected)
		inspected <- err
	}()
	err = i.writeParts(ctx, upload, io.TeeReader(body, in))
	_ = in.CloseWithError(err) // nil is the end
	wrong := <-inspected
	if err == nil || errors.Is(err, errInspected) {
		err = wrong
	}
	if err != nil {
		return nil, fmt.Errorf("store an image: %w", err)
	}
	return img, nil
}

var errInspected = errors.New("the image was read to its end")

// store stores what is read in parts.
func (i *Images) writeParts(ctx context.Context, upload string, r io.Reader) error {
	part := make([]byte, i.store.MaxInline())
	for n := 0; ; n++ {
		size, err := io.ReadFull(r, part)
		if errors.Is(err, io.EOF) {
			return nil
		}
		last := errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return err
		}
		if i.full != nil && i.full() {
			return &proto.Refusal{Reason: proto.RefusedUnavailable, Detail: "no room for images"}
		}
		if _, err := i.store.JS.Publish(ctx, store.ImagePartSubject(upload, n), part[:size]); err != nil {
			return fmt.Errorf("store part %d: %w", n, err)
		}
		if last {
			return nil
		}
	}
}

// discard removes an upload, also when the client is gone. One that stays is swept later.
func (i *Images) discard(ctx context.Context, upload string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	if err := i.purge(ctx, upload); err != nil {
		i.log.Warn("an image that is not needed was not removed, will retry", "error", err)
	}
}

func (i *Images) purge(ctx context.Context, upload string) error {
	if err := i.store.ImageParts.Purge(ctx, jetstream.WithPurgeSubject(store.ImagePartPattern(upload))); err != nil {
		return fmt.Errorf("remove the upload %s: %w", upload, err)
	}
	return nil
}

// Sweep removes, as of now, the images whose time without a name is over, and uploads that were broken off.
func (i *Images) Sweep(ctx context.Context, now time.Time) error {
	// Before the catalog is read: what is named in between is in it.
	uploads, err := i.uploads(ctx)
	if err != nil {
		return err
	}
	over := func(r retired) bool { return r.Until.Before(now) }
	have, _, err := readCatalog(ctx, i.store)
	if err == nil && slices.ContainsFunc(have.Retired, over) {
		err = i.change(ctx, func(c *catalog) error {
			c.Retired = slices.DeleteFunc(c.Retired, over)
			have = c
			return nil
		})
	}
	if err != nil {
		return err
	}
	for _, upload := range uploads {
		if have.named(upload) || slices.ContainsFunc(have.Retired, func(r retired) bool { return r.Upload == upload }) {
			continue
		}
		if err := i.sweepUpload(ctx, upload, now); err != nil {
			return err
		}
	}
	return nil
}

// uploads lists what is stored.
func (i *Images) uploads(ctx context.Context) ([]string, error) {
	info, err := i.store.ImageParts.Info(ctx, jetstream.WithSubjectFilter(store.ImagePartSubject("*", 0)))
	if err != nil {
		return nil, fmt.Errorf("list the uploads of images: %w", err)
	}
	var uploads []string
	for subject := range info.State.Subjects {
		uploads = append(uploads, store.ParseImagePartSubject(subject))
	}
	return uploads, nil
}

// sweepUpload removes an upload that nothing names, unless it may be going on.
func (i *Images) sweepUpload(ctx context.Context, upload string, now time.Time) error {
	m, err := i.store.ImageParts.GetLastMsgForSubject(ctx, store.ImagePartPattern(upload))
	switch {
	case store.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("read the upload %s: %w", upload, err)
	case now.Sub(m.Time) < uploadPause:
		return nil
	}
	return i.purge(ctx, upload)
}

// ImageSource gives images to workers, which do not follow the catalog.
type ImageSource struct{ Store *store.Store }

// Fetch opens an image by its digest, also one that lost its name lately. What is read is not checked. The error is
// [proto.ErrNotFound] where there is none.
func (s *ImageSource) Fetch(ctx context.Context, digest string) (io.ReadCloser, error) {
	have, _, err := readCatalog(ctx, s.Store)
	if err != nil {
		return nil, err
	}
	upload := have.uploadOf(digest, "")
	if upload == "" {
		return nil, fmt.Errorf("image %s: %w", digest, proto.ErrNotFound)
	}
	return &partReader{ctx: ctx, store: s.Store, upload: upload}, nil
}

// partReader reads the parts of an upload one after the other, until there is no more.
type partReader struct {
	ctx    context.Context //nolint:containedctx // of the one call that this is the answer to
	store  *store.Store
	upload string
	n      int
	part   bytes.Reader
}

func (p *partReader) Read(b []byte) (int, error) {
	for p.part.Len() == 0 {
		m, err := p.store.ImageParts.GetLastMsgForSubject(p.ctx, store.ImagePartSubject(p.upload, p.n))
		if store.IsNotFound(err) && p.n > 0 {
			return 0, io.EOF
		}
		if err != nil {
			return 0, fmt.Errorf("read part %d of image: %w", p.n, err)
		}
		p.part.Reset(m.Data)
		p.n++
	}
	return p.part.Read(b)
}

func (p *partReader) Close() error { return nil }
