package batches

import (
	"bytes"
	"container/list"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"iter"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/s2"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	blobPrefix = "batches/"
	chunkItems = 500
	chunkBytes = 1 << 20 // of a chunk with several items, before compression
	maxChunk   = 64 << 20
	cacheBytes = 64 << 20
	// orphanAfter is the age at which unreferenced blobs are removed: longer than any upload.
	orphanAfter = 24 * time.Hour
	// maxIndex bounds the list of a batch's chunks, in bytes.
	maxIndex = 64 << 20
)

// Blobs stores immutable objects.
type Blobs interface {
	// Put stores b.Size bytes of content with the digest b.Digest under b.Key.
	Put(ctx context.Context, b proto.Blob, content io.ReaderAt) error
	// Get opens an object. Nothing of it may be relied on before [io.EOF].
	Get(ctx context.Context, b proto.Blob) (io.ReadCloser, error)
	// Delete removes an object. It is no error if there is none.
	Delete(ctx context.Context, key string) error
	// List yields the objects whose keys begin with prefix.
	List(ctx context.Context, prefix string) iter.Seq2[proto.BlobEntry, error]
}

// Content stores the items of batches: up to 500 per blob, one JSON object per line, compressed
// with S2. An index lists these blobs. A batch's blobs share a random name prefix, because two
// requests with the same idempotency key may store different items at once.
type Content struct {
	Blobs Blobs

	mu     sync.Mutex
	cached map[string]*list.Element // of order, by blob key
	order  list.List                // of *lines, the most recently used first
	size   int
}

// index lists the blobs of a batch.
type index struct {
	Shared *proto.Blob `json:"shared,omitempty"` // fields that all items share
	Chunks []chunk     `json:"chunks"`
}

type chunk struct {
	proto.Blob
	First int `json:"first"` // index of its first item
}

// lines are the items in a chunk.
type lines struct {
	key  string
	body []byte
	ends []int // of each line
}

// line returns a line without its line break.
func (l *lines) line(n int) ([]byte, error) {
	if n < 0 || n >= len(l.ends) {
		return nil, fmt.Errorf("blob %s has no line %d: %w", l.key, n, proto.ErrCorrupt)
	}
	begin := 0
	if n > 0 {
		begin = l.ends[n-1] + 1
	}
	return l.body[begin:l.ends[n]], nil
}

// Upload stores the items of a new batch. It is for one goroutine.
type Upload struct {
	content *Content
	name    string
	index   index
	chunk   bytes.Buffer
	items   int // stored and in chunk
	first   int // item of chunk
	blobs   int
	left    int64 // bytes that may be stored
	stored  int64
	hash    hash.Hash
}

func (c *Content) upload(org string, left int64) *Upload {
	return &Upload{content: c, name: orgPrefix(org) + strings.ToLower(rand.Text()) + "/", left: left, hash: sha256.New()}
}

// orgPrefix begins the keys of an organisation's blobs. Those of earlier versions do not name it.
func orgPrefix(org string) string { return blobPrefix + org + "/" }

// Shared stores the fields that all items share, in JSON.
func (u *Upload) Shared(ctx context.Context, fields []byte) error {
	u.note("shared", fields)
	b, err := u.put(ctx, fields)
	u.index.Shared = &b
	return err
}

// Note makes a value part of the hash of the content.
func (u *Upload) Note(value []byte) { u.note("note", value) }

func (u *Upload) note(kind string, value []byte) {
	_, _ = fmt.Fprintf(u.hash, "%s %d\n", kind, len(value)) // it never fails
	_, _ = u.hash.Write(value)
}

// Add stores the next item: JSON without line breaks. Its error is a [*proto.QuotaError] if the
// organisation stores too much.
func (u *Upload) Add(ctx context.Context, item []byte) error {
	u.note("item", item)
	if u.items-u.first >= chunkItems || u.chunk.Len() > 0 && u.chunk.Len()+len(item) > chunkBytes {
		if err := u.flush(ctx); err != nil {
			return err
		}
	}
	u.items++
	u.chunk.Write(item)
	u.chunk.WriteByte('\n')
	return nil
}

func (u *Upload) flush(ctx context.Context) error {
	b, err := u.put(ctx, u.chunk.Bytes())
	if err != nil {
		return err
	}
	u.index.Chunks = append(u.index.Chunks, chunk{b, u.first})
	u.first = u.items
	u.chunk.Reset()
	return nil
}

func (u *Upload) put(ctx context.Context, body []byte) (proto.Blob, error) {
	packed := s2.Encode(nil, body)
	sum := sha256.Sum256(packed)
	b := proto.Blob{
		Key: u.name + strconv.Itoa(u.blobs), Size: int64(len(packed)),
		Digest: "sha256:" + hex.EncodeToString(sum[:]),
	}
	if u.left -= b.Size; u.left < 0 {
		return b, &proto.QuotaError{What: "bytes of stored batches", Limit: proto.MaxBatchStored}
	}
	u.blobs++
	u.stored += b.Size
	if err := u.content.Blobs.Put(ctx, b, bytes.NewReader(packed)); err != nil {
		return b, fmt.Errorf("store the items of a batch: %w", err)
	}
	return b, nil
}

// Finish stores the rest and returns the reference to the content, and the number of items.
func (u *Upload) Finish(ctx context.Context) (c proto.BatchContent, items int, err error) {
	if u.items > u.first {
		if err := u.flush(ctx); err != nil {
			return c, 0, err
		}
	}
	body, err := json.Marshal(&u.index)
	if err != nil {
		return c, 0, fmt.Errorf("encode the index of a batch: %w", err)
	}
	if c.Index, err = u.put(ctx, body); err != nil {
		return c, 0, err
	}
	c.Stored, c.Hash = u.stored, hex.EncodeToString(u.hash.Sum(nil))
	return c, u.items, nil
}

// Discard removes what was stored. What cannot be removed now is removed after a day.
func (u *Upload) Discard(ctx context.Context) {
	for n := range u.blobs {
		if u.content.Blobs.Delete(ctx, u.name+strconv.Itoa(n)) != nil {
			return
		}
	}
}

// uploadOf returns the name prefix under which a blob's batch was stored.
func uploadOf(key string) string { return key[:strings.LastIndexByte(key, '/')+1] }

// remove removes the blobs of a batch.
func (c *Content) remove(ctx context.Context, content *proto.BatchContent) error {
	last, err := strconv.Atoi(content.Index.Key[strings.LastIndexByte(content.Index.Key, '/')+1:])
	if err != nil {
		return fmt.Errorf("remove the items of a batch: %w", err)
	}
	for n := range last + 1 { // the index is stored last, and removed last
		if err := c.Blobs.Delete(ctx, uploadOf(content.Index.Key)+strconv.Itoa(n)); err != nil {
			return fmt.Errorf("remove the items of a batch: %w", err)
		}
	}
	return nil
}

// removeOrphans removes old blobs that belong to none of the batches.
func (c *Content) removeOrphans(ctx context.Context, batches []*proto.Batch, now time.Time) (removed int, err error) {
	known := make(map[string]bool, len(batches))
	for _, b := range batches {
		known[uploadOf(b.Content.Index.Key)] = true
	}
	for e, err := range c.Blobs.List(ctx, blobPrefix) {
		if err != nil {
			return removed, fmt.Errorf("list the items of batches: %w", err)
		}
		if known[uploadOf(e.Key)] || now.Sub(e.Modified) < orphanAfter {
			continue
		}
		if err := c.Blobs.Delete(ctx, e.Key); err != nil {
			return removed, fmt.Errorf("remove items without a batch: %w", err)
		}
		removed++
	}
	return removed, nil
}

// get reads and decompresses a blob of at most most bytes.
func (c *Content) get(ctx context.Context, b proto.Blob, most int) ([]byte, error) {
	r, err := c.Blobs.Get(ctx, b)
	if err != nil {
		return nil, fmt.Errorf("read the items of a batch: %w", err)
	}
	packed, err := io.ReadAll(io.LimitReader(r, int64(most)))
	_ = r.Close() // it was read
	if err != nil {
		return nil, fmt.Errorf("read the items of a batch: %w", err)
	}
	if size, err := s2.DecodedLen(packed); err != nil || size > most {
		return nil, fmt.Errorf("blob %s of %d bytes: %w", b.Key, size, proto.ErrCorrupt)
	}
	body, err := s2.Decode(nil, packed)
	if err != nil {
		return nil, fmt.Errorf("blob %s: %w: %w", b.Key, proto.ErrCorrupt, err)
	}
	return body, nil
}

// reader reads the items of one batch.
type reader struct {
	content *Content
	index   index
	shared  []byte // nil for none
}

func (c *Content) open(ctx context.Context, content *proto.BatchContent) (*reader, error) {
	r := &reader{content: c}
	body, err := c.get(ctx, content.Index, maxIndex)
	if err == nil {
		err = json.Unmarshal(body, &r.index)
	}
	if err == nil && r.index.Shared != nil {
		r.shared, err = c.get(ctx, *r.index.Shared, maxChunk)
	}
	if err != nil {
		return nil, fmt.Errorf("open the items of a batch: %w", err)
	}
	return r, nil
}

// item returns the JSON of an item.
func (r *reader) item(ctx context.Context, number int) ([]byte, error) {
	at := sort.Search(len(r.index.Chunks), func(i int) bool { return r.index.Chunks[i].First > number }) - 1
	if at < 0 {
		return nil, fmt.Errorf("no chunk has item %d: %w", number, proto.ErrCorrupt)
	}
	l, err := r.content.lines(ctx, r.index.Chunks[at].Blob)
	if err != nil {
		return nil, err
	}
	return l.line(number - r.index.Chunks[at].First)
}

// lines returns the items in a chunk, from memory if they were read lately.
func (c *Content) lines(ctx context.Context, b proto.Blob) (*lines, error) {
	if l := c.cacheGet(b.Key); l != nil {
		return l, nil
	}
	body, err := c.get(ctx, b, maxChunk)
	if err != nil {
		return nil, err
	}
	l := &lines{key: b.Key, body: body}
	for at, char := range body {
		if char == '\n' {
			l.ends = append(l.ends, at)
		}
	}
	c.cachePut(l)
	return l, nil
}

func (c *Content) cacheGet(key string) *lines {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.cached[key]
	if e == nil {
		return nil
	}
	c.order.MoveToFront(e)
	return e.Value.(*lines)
}

func (c *Content) cachePut(l *lines) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cached[l.key] != nil {
		return // read by two
	}
	if c.cached == nil {
		c.cached = map[string]*list.Element{}
	}
	c.cached[l.key] = c.order.PushFront(l)
	c.size += len(l.body)
	for c.size > cacheBytes && c.order.Len() > 1 {
		old := c.order.Remove(c.order.Back()).(*lines)
		delete(c.cached, old.key)
		c.size -= len(old.body)
	}
}
