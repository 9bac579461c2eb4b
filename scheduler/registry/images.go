package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	catalogKey    = "catalog"
	sweepInterval = 10 * time.Minute
	// imagesPrefix is the key prefix of blobs that hold images. The rest is unique to an upload.
	imagesPrefix = "images/"
	// cleanTimeout limits the removal of an unneeded blob, which outlives the client's request.
	cleanTimeout = 10 * time.Second
)

// Blobs stores the content of images.
type Blobs interface {
	// Put stores content, which has the size and the digest of b.
	Put(ctx context.Context, b proto.Blob, content io.ReaderAt) error
	// Get opens a blob. It returns [proto.ErrNotFound] if there is none under the key.
	Get(ctx context.Context, b proto.Blob) (io.ReadCloser, error)
	// Delete removes a blob. It is no error if there is none.
	Delete(ctx context.Context, key string) error
	// List returns the blobs whose keys begin with prefix.
	List(ctx context.Context, prefix string) iter.Seq2[proto.BlobEntry, error]
}

// catalog lists all images. It is one value that is changed by compare-and-set, so that an image is
// never named while another process removes its blob.
type catalog struct {
	Images  []catalogEntry `json:"images"` // sorted by name
	Retired []retiredImage `json:"retired,omitempty"`
}

// catalogEntry is an image and the key of its blob. Images with the same digest share the newest
// blob.
type catalogEntry struct {
	proto.Image
	Key   string           `json:"key"`
	Parts *proto.ImagePart `json:"parts,omitempty"` // see storedImage
}

// retiredImage is a blob without a name, kept for jobs accepted while it had one.
type retiredImage struct {
	storedImage
	Until time.Time `json:"until"`
}

// Images is the registry of sandbox images. Their names are in a catalog that every gateway
// watches, their content is in a blob store. Run must be running for changes to be seen and for
// blobs to be removed.
type Images struct {
	store   *store.Store
	blobs   Blobs
	keep    time.Duration
	full    func() bool
	log     *slog.Logger
	inspect func(io.Reader) (*proto.Image, []proto.ImagePart, error)
	cache   *store.Collection[catalog]
	byName  map[string]*proto.Image // guarded by the lock of cache
}

// ImagesConfig configures a registry of images.
type ImagesConfig struct {
	Store *store.Store
	Blobs Blobs
	// Inspect reads an image to its end and describes it, without its name and time, and the parts in
	// which it is stored. Images that it rejects are not stored.
	Inspect func(io.Reader) (*proto.Image, []proto.ImagePart, error)
	// Keep is how long an image without a name is kept for jobs that were accepted when it had one.
	Keep time.Duration
	// Full reports whether the disk is too full for another image; nil for never.
	Full func() bool
	Log  *slog.Logger
}

// OpenImages opens the registry and reads its catalog.
func OpenImages(ctx context.Context, cfg ImagesConfig) (*Images, error) {
	i := &Images{
		store: cfg.Store, blobs: cfg.Blobs, keep: cfg.Keep, full: cfg.Full, inspect: cfg.Inspect, log: cfg.Log,
		byName: map[string]*proto.Image{},
	}
	var err error
	i.cache, err = store.OpenCollection(ctx, store.CollectionConfig[catalog]{
		Store: i.store, Bucket: i.store.Images, Keys: catalogKey, Name: "catalog of images", Decode: decodeCatalog,
		OnChange: i.index, Log: i.log,
	})
	return i, err
}

// readCatalog reads the catalog. It is empty if none is stored.
func readCatalog(ctx context.Context, st *store.Store) (*catalog, error) {
	e, err := st.Images.Get(ctx, catalogKey)
	if store.IsNotFound(err) {
		return &catalog{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the catalog of images: %w", err)
	}
	return decodeCatalog(e)
}

func decodeCatalog(e jetstream.KeyValueEntry) (*catalog, error) {
	c := &catalog{}
	if err := json.Unmarshal(e.Value(), c); err != nil {
		return nil, fmt.Errorf("decode the catalog of images: %w", err)
	}
	return c, nil
}

// index updates byName when the catalog changes.
func (i *Images) index(_ string, _, c *catalog) {
	i.byName = map[string]*proto.Image{}
	if c == nil {
		return
	}
	for _, e := range c.Images {
		i.byName[e.Name] = &e.Image
	}
}

// Run follows the catalog and removes blobs that are no longer needed, until ctx is done.
func (i *Images) Run(ctx context.Context) error {
	var sweeping sync.WaitGroup
	defer sweeping.Wait()
	sweeping.Go(func() { i.runSweeps(ctx) })
	return i.cache.Run(ctx)
}

func (i *Images) runSweeps(ctx context.Context) {
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C: // not at the start, which must not need the store
		}
		if err := i.Sweep(ctx, time.Now()); err != nil && ctx.Err() == nil {
			i.log.Warn("image sweep failed, will retry", "error", err)
		}
	}
}

// Image returns an image, which the caller must not change. Changes by other processes are seen
// well within a second. It returns [proto.ErrNotFound] if there is no image of that name.
func (i *Images) Image(_ context.Context, name string) (*proto.Image, error) {
	var img *proto.Image
	i.cache.View(func() { img = i.byName[name] })
	if img == nil {
		return nil, fmt.Errorf("image %q: %w", name, proto.ErrNotFound)
	}
	return img, nil
}

// List returns all images sorted by name.
func (i *Images) List(context.Context) ([]proto.Image, error) {
	out := []proto.Image{}
	i.cache.View(func() {
		for _, name := range slices.Sorted(maps.Keys(i.byName)) {
			out = append(out, *i.byName[name])
		}
	})
	return out, nil
}

// Put stores an image under a name, replacing a previous one. The content of body must have the
// digest and pass Inspect. Parts of other images are not stored again. The errors are
// [*proto.FieldError], [*proto.Rejection] if the disk is full, [proto.ErrConflict], and the errors
// of body and of the blob store.
func (i *Images) Put(
	ctx context.Context, name, digest string, body io.Reader,
) (img *proto.Image, replaced bool, err error) {
	spool, img, parts, err := i.spool(digest, body)
	if err != nil {
		return nil, false, fmt.Errorf("store an image: %w", err)
	}
	defer func() { _ = spool.Close() }()
	img.Name, img.CreatedAt = name, time.Now().UTC()
	known, err := i.knownParts(ctx, digest)
	if err != nil {
		return nil, false, fmt.Errorf("store an image: %w", err)
	}
	for {
		upload, err := i.put(ctx, img, parts, known, spool)
		if err != nil {
			return nil, false, fmt.Errorf("store an image: %w", fullError(err))
		}
		replaced, err := i.name(ctx, img, upload)
		if isUnchanged(err) {
			i.discard(ctx, upload.put)
		}
		if !errors.Is(err, errPartsRemoved) {
			return img, replaced, err
		}
		known = nil
	}
}

// errPartsRemoved means that an image whose parts an upload uses was removed meanwhile.
var errPartsRemoved = errors.New("parts of the image were removed")

// name names an upload in the catalog. It returns errPartsRemoved if that must not be done.
func (i *Images) name(ctx context.Context, img *proto.Image, upload *imageUpload) (replaced bool, err error) {
	entry := catalogEntry{*img, upload.Key, upload.Parts}
	_, err = i.change(ctx, func(c *catalog) error {
		kept := keysOf(c.blobs())
		for key := range upload.shared {
			if !kept[key] {
				return errPartsRemoved
			}
		}
		at, known := c.find(img.Name)
		if !known && len(c.Images) >= proto.MaxImages {
			return &proto.FieldError{
				Field: "name", Message: fmt.Sprintf("name is one too many: there are %d images; remove one", proto.MaxImages),
			}
		}
		if replaced = known; known {
			c.Images[at] = entry
		} else {
			c.Images = slices.Insert(c.Images, at, entry)
		}
		// Other images with this digest follow, which repairs them if the store has lost their
		// blob.
		for n := range c.Images {
			if c.Images[n].Digest == img.Digest {
				c.Images[n].Key, c.Images[n].Parts = entry.Key, entry.Parts
			}
		}
		return nil
	})
	return replaced, err
}

var errFull = &proto.Rejection{Reason: proto.RejectedDiskFull, Detail: "the disk is full"}

// isUnchanged reports whether an error of change means that the catalog was not written. After
// other errors the outcome is unknown, and the catalog may name the new blob.
func isUnchanged(err error) bool {
	var field *proto.FieldError
	return errors.As(err, &field) || errors.Is(err, errPartsRemoved) || errors.Is(err, proto.ErrConflict) ||
		store.IsRejected(err)
}

// spool inspects an image and copies it to an unnamed file, so that only valid images reach the
// blob store. The caller must close the file.
func (i *Images) spool(
	digest string, body io.Reader,
) (_ *os.File, img *proto.Image, parts []proto.ImagePart, err error) {
	if i.full != nil && i.full() {
		return nil, nil, nil, errFull
	}
	spool, err := os.CreateTemp("", "bullpen-image-*")
	if err != nil {
		return nil, nil, nil, err
	}
	if err = os.Remove(spool.Name()); err == nil {
		img, parts, err = i.inspect(io.TeeReader(body, spool))
	}
	if err == nil && img.Digest != digest {
		err = &proto.FieldError{Field: "digest", Message: "digest does not fit: what came has " + img.Digest}
	}
	if err != nil {
		_ = spool.Close()
		return nil, nil, nil, fullError(err)
	}
	return spool, img, parts, nil
}

// fullError adds [errFull] to an error that indicates a full disk.
func fullError(err error) error {
	if errors.Is(err, syscall.ENOSPC) {
		return errors.Join(errFull, err)
	}
	return err
}

// Remove removes a name and returns the image that had it. It returns [proto.ErrNotFound] if there
// is no such name.
func (i *Images) Remove(ctx context.Context, name string) (*proto.Image, error) {
	var removed catalogEntry
	_, err := i.change(ctx, func(c *catalog) error {
		at, ok := c.find(name)
		if !ok {
			return fmt.Errorf("image %q: %w", name, proto.ErrNotFound)
		}
		removed = c.Images[at]
		c.Images = slices.Delete(c.Images, at, at+1)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &removed.Image, nil
}

// find returns the index of a name among the sorted images.
func (c *catalog) find(name string) (at int, ok bool) {
	return slices.BinarySearchFunc(c.Images, name, func(e catalogEntry, name string) int {
		return cmp.Compare(e.Name, name)
	})
}

// named returns the blobs of all images.
func (c *catalog) named() (blobs []storedImage) {
	for _, e := range c.Images {
		blobs = append(blobs, storedImage{proto.Blob{Key: e.Key, Size: e.Size, Digest: e.Digest}, e.Parts})
	}
	return blobs
}

// blobs returns all blobs that must be kept, named ones first.
func (c *catalog) blobs() []storedImage {
	all := c.named()
	for _, r := range c.Retired {
		all = append(all, r.storedImage)
	}
	return all
}

// retire keeps blobs that have lost their last image for a while.
func (i *Images) retire(c *catalog, blobs []storedImage) {
	kept := keysOf(c.blobs())
	for _, b := range blobs {
		if !kept[b.Key] {
			c.Retired = append(c.Retired, retiredImage{b, time.Now().UTC().Add(i.keep)})
			kept[b.Key] = true // images may share a blob
		}
	}
}

func keysOf(blobs []storedImage) map[string]bool {
	keys := map[string]bool{}
	for _, b := range blobs {
		keys[b.Key] = true
	}
	return keys
}

// change applies f to the catalog and stores the result. Blobs that lose their last name are
// retired. It calls f again if another process changed the catalog meanwhile.
func (i *Images) change(ctx context.Context, f func(*catalog) error) (*catalog, error) {
	return i.cache.Update(ctx, catalogKey, func(c *catalog) (*catalog, error) {
		if c == nil {
			c = &catalog{}
		}
		named := c.named()
		if err := f(c); err != nil {
			return nil, err
		}
		i.retire(c, named)
		body, err := json.Marshal(c)
		if err == nil && len(body) > i.store.MaxInline {
			err = &proto.FieldError{Field: "name", Message: "name is one too many: the list of images is full; remove one"}
		}
		return c, err
	})
}

// discard removes blobs that the catalog does not name, even if the client is gone. Sweep retries
// what fails.
func (i *Images) discard(ctx context.Context, keys []string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	for _, key := range keys {
		if err := i.blobs.Delete(ctx, key); err != nil {
			i.log.Warn("image blob not removed, will retry", "key", key, "error", err)
			return
		}
	}
}

// Sweep drops images whose time without a name is over from the catalog, and removes blobs missing
// in the catalog. It spares a blob younger than [proto.MinSafeAge], since its upload may be about
// to name it.
func (i *Images) Sweep(ctx context.Context, now time.Time) error {
	// Keys are never reused and are named soon after Put. So an old blob missing in the catalog,
	// read after the listing, is never named again.
	var old []string
	for e, err := range i.blobs.List(ctx, imagesPrefix) {
		if err != nil {
			return fmt.Errorf("list the blobs of images: %w", err)
		}
		if now.Sub(e.Modified) > proto.MinSafeAge {
			old = append(old, e.Key)
		}
	}
	c, err := readCatalog(ctx, i.store)
	if err != nil {
		return err
	}
	expired := func(r retiredImage) bool { return r.Until.Before(now) }
	if slices.ContainsFunc(c.Retired, expired) {
		if c, err = i.change(ctx, func(c *catalog) error {
			c.Retired = slices.DeleteFunc(c.Retired, expired)
			return nil
		}); err != nil {
			return err
		}
	}
	kept := keysOf(c.blobs())
	for _, b := range c.blobs() {
		if b.Parts == nil {
			continue
		}
		// While a list cannot be read, nothing is removed: its parts are unknown.
		parts, err := readParts(ctx, i.blobs, &b)
		if err != nil {
			return err
		}
		for _, p := range parts {
			kept[p.Key] = true
		}
	}
	for _, key := range old {
		if kept[key] {
			continue
		}
		if err := i.blobs.Delete(ctx, key); err != nil {
			return fmt.Errorf("remove the blob of an image: %w", err)
		}
	}
	return nil
}

// ImageSource opens images for workers, which do not follow the catalog.
type ImageSource struct {
	Store *store.Store
	Blobs Blobs
}

// Fetch opens an image by its digest, even if it has lost its name since the job was accepted. It
// returns [proto.ErrNotFound] if there is no such image.
func (s *ImageSource) Fetch(ctx context.Context, digest string) (io.ReadCloser, error) {
	c, err := readCatalog(ctx, s.Store)
	if err != nil {
		return nil, err
	}
	for _, b := range c.blobs() {
		if b.Digest != digest {
			continue
		}
		if b.Parts == nil {
			return s.Blobs.Get(ctx, b.Blob)
		}
		parts, err := readParts(ctx, s.Blobs, &b)
		if err != nil {
			return nil, err
		}
		return openParts(ctx, s.Blobs, parts), nil
	}
	return nil, fmt.Errorf("image %s: %w", digest, proto.ErrNotFound)
}
