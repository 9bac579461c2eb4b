package registry

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"
	"sync"

	"github.com/nats-io/nuid"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// fetchAhead is how many parts of an image a worker fetches at once.
	fetchAhead = 4
	// maxPart bounds a part in bytes, since parts are fetched into memory.
	maxPart = 8 << 20
	// maxPartList bounds the stored list of an image's parts, in bytes.
	maxPartList = 32 << 20
)

// storedImage names the blob of an image. If Parts is set, the blob lists the blobs that make up
// the image, and Parts is the list's size and digest.
type storedImage struct {
	proto.Blob
	Parts *proto.ImagePart `json:"parts,omitempty"`
}

// list returns the blob that lists the parts.
func (s *storedImage) list() proto.Blob {
	return proto.Blob{Key: s.Key, Size: s.Parts.Size, Digest: s.Parts.Digest}
}

// readParts returns the parts of an image that has some.
func readParts(ctx context.Context, blobs Blobs, s *storedImage) ([]proto.Blob, error) {
	if s.Parts.Size > maxPartList {
		return nil, fmt.Errorf("the list of parts of image %s has %d bytes, more than %d", s.Digest, s.Parts.Size,
			maxPartList)
	}
	text, err := readBlob(ctx, blobs, s.list())
	if err != nil {
		return nil, fmt.Errorf("read the list of parts of image %s: %w", s.Digest, err)
	}
	var parts []proto.Blob
	if err := json.Unmarshal(text, &parts); err != nil {
		return nil, fmt.Errorf("decode the list of parts of image %s: %w", s.Digest, err)
	}
	for _, p := range parts {
		if p.Size > maxPart {
			return nil, fmt.Errorf("a part of image %s has %d bytes, more than %d", s.Digest, p.Size, maxPart)
		}
	}
	return parts, nil
}

// readBlob reads a blob into memory.
func readBlob(ctx context.Context, blobs Blobs, b proto.Blob) ([]byte, error) {
	r, err := blobs.Get(ctx, b)
	if err != nil {
		return nil, err
	}
	content := bytes.NewBuffer(make([]byte, 0, b.Size+bytes.MinRead))
	_, err = content.ReadFrom(r)
	return content.Bytes(), errors.Join(err, r.Close())
}

// knownPart is a part that the store has.
type knownPart struct {
	proto.Blob
	image string // the key of an image that has it
}

// knownParts returns the parts of stored images by digest, except for those of the image with the
// digest except, and those that the store has lost.
func (i *Images) knownParts(ctx context.Context, except string) (map[string]knownPart, error) {
	c, err := readCatalog(ctx, i.store)
	if err != nil {
		return nil, err
	}
	known, read := map[string]knownPart{}, map[string]bool{}
	for _, b := range c.blobs() {
		if b.Parts == nil || b.Digest == except || read[b.Key] {
			continue
		}
		read[b.Key] = true
		parts, err := readParts(ctx, i.blobs, &b)
		if errors.Is(err, proto.ErrNotFound) {
			continue // lost
		}
		if err != nil {
			return nil, err
		}
		for _, p := range parts {
			known[p.Digest] = knownPart{p, b.Key}
		}
	}
	if len(known) == 0 {
		return known, nil
	}
	present := map[string]bool{}
	for e, err := range i.blobs.List(ctx, imagesPrefix) {
		if err != nil {
			return nil, fmt.Errorf("list the blobs of images: %w", err)
		}
		present[e.Key] = true
	}
	maps.DeleteFunc(known, func(_ string, p knownPart) bool { return !present[p.Key] })
	return known, nil
}

// imageUpload is an image that is in the store and not yet in the catalog.
type imageUpload struct {
	storedImage
	put    []string        // keys of the blobs that were put
	shared map[string]bool // keys of the images whose parts it uses
}

// put stores the content of an image under a new key. Of several parts, it only stores unknown
// ones.
func (i *Images) put(
	ctx context.Context, img *proto.Image, parts []proto.ImagePart, known map[string]knownPart, content io.ReaderAt,
) (*imageUpload, error) {
	key := imagesPrefix + nuid.Next()
	u := &imageUpload{
		storedImage: storedImage{Blob: proto.Blob{Key: key, Size: img.Size, Digest: img.Digest}},
		shared:      map[string]bool{},
	}
	if len(parts) <= 1 {
		u.put = []string{key}
		return u, i.blobs.Put(ctx, u.Blob, content)
	}
	list, offset := make([]proto.Blob, len(parts)), int64(0)
	own := map[string]proto.Blob{}
	for n, p := range parts {
		b, ok := own[p.Digest]
		if k, isKnown := known[p.Digest]; isKnown {
			b, ok = k.Blob, true
			u.shared[k.image] = true
		}
		if !ok {
			b = proto.Blob{Key: key + "/" + strconv.Itoa(n), Size: p.Size, Digest: p.Digest}
			u.put = append(u.put, b.Key)
			if err := i.blobs.Put(ctx, b, io.NewSectionReader(content, offset, p.Size)); err != nil {
				return u, err
			}
			own[p.Digest] = b
		}
		list[n] = b
		offset += p.Size
	}
	text, err := json.Marshal(list)
	if err != nil {
		return u, fmt.Errorf("encode the list of an image's parts: %w", err)
	}
	sum := sha256.Sum256(text)
	u.Key, u.Parts = key+"/parts", &proto.ImagePart{Size: int64(len(text)), Digest: "sha256:" + hex.EncodeToString(sum[:])}
	u.put = append(u.put, u.Key)
	return u, i.blobs.Put(ctx, u.list(), bytes.NewReader(text))
}

// openParts returns a reader of an image's parts that fetches some ahead. ctx must not be done
// before it is closed.
func openParts(ctx context.Context, blobs Blobs, parts []proto.Blob) io.ReadCloser {
	ctx, cancel := context.WithCancel(ctx)
	r := &partsReader{cancel: cancel, fetched: make(chan chan fetchedPart, fetchAhead-1)}
	r.running.Go(func() {
		defer close(r.fetched)
		for _, p := range parts {
			c := make(chan fetchedPart, 1)
			select {
			case r.fetched <- c:
			case <-ctx.Done():
				return
			}
			r.running.Go(func() {
				content, err := readBlob(ctx, blobs, p)
				c <- fetchedPart{content, err}
			})
		}
	})
	return r
}

type fetchedPart struct {
	content []byte
	err     error
}

type partsReader struct {
	cancel  context.CancelFunc
	running sync.WaitGroup
	fetched chan chan fetchedPart
	content []byte
}

func (r *partsReader) Read(b []byte) (int, error) {
	for len(r.content) == 0 {
		next, ok := <-r.fetched
		if !ok {
			return 0, io.EOF
		}
		part := <-next
		if part.err != nil {
			return 0, part.err
		}
		r.content = part.content
	}
	n := copy(b, r.content)
	r.content = r.content[n:]
	return n, nil
}

func (r *partsReader) Close() error {
	r.cancel()
	r.running.Wait()
	return nil
}
