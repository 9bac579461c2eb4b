package objectfs

import (
	"context"
	"io"
	"sync"
	"syscall"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// chunkBytes is the unit of the cache.
	chunkBytes = 1 << 20
	// cacheChunks is the number of chunks in memory, of all files together.
	cacheChunks = 16
	// runChunks is the number of chunks per request when a file is read sequentially, and aheadRuns
	// the number of such requests in flight.
	runChunks = 4
	aheadRuns = 3
)

// chunk is a part of an object.
type chunk struct {
	key   chunkKey
	buf   []byte // of chunkBytes, once it was used
	n     int    // bytes of the object in buf, when ready is closed without an error
	err   error
	ready chan struct{} // closed when the chunk was fetched, or was not because of err
	users int           // readers and the fetch
	used  int64         // time of the last use, as a count
}

type chunkKey struct {
	name, tag string
	index     int64
}

// cache holds chunks that were read from the store. Its memory is bounded.
type cache struct {
	objects Objects

	mu     sync.Mutex
	freed  sync.Cond
	clock  int64
	chunks [cacheChunks]*chunk
}

func newCache(o Objects) *cache {
	c := &cache{objects: o}
	c.freed.L = &c.mu
	for i := range c.chunks {
		c.chunks[i] = &chunk{}
	}
	return c
}

// readAt reads from an object. If ordered, it also reads ahead.
func (c *cache) readAt(o proto.StoredObject, p []byte, off int64, ordered bool) (int, error) {
	if off >= o.Size {
		return 0, nil
	}
	p = p[:min(int64(len(p)), o.Size-off)]
	for done := 0; done < len(p); {
		at := off + int64(done)
		index := at / chunkBytes
		if ordered {
			for run := index / runChunks; run < index/runChunks+aheadRuns; run++ {
				c.prefetch(o, run)
			}
		}
		ch := c.get(o, index)
		<-ch.ready
		n, err := 0, ch.err
		if err == nil && int(at%chunkBytes) < ch.n {
			n = copy(p[done:], ch.buf[at%chunkBytes:ch.n])
		}
		c.put(ch)
		if err != nil {
			return done, err
		}
		if n == 0 {
			return done, syscall.EIO
		}
		done += n
	}
	return len(p), nil
}

// get returns a chunk, which the caller must put back, and starts to fetch it if necessary. If all
// chunks are in use, get waits for one.
func (c *cache) get(o proto.StoredObject, index int64) *chunk {
	key := chunkKey{o.Name, o.Tag, index}
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		if ch := c.find(key); ch != nil {
			c.clock++
			ch.used = c.clock
			ch.users++
			return ch
		}
		if ch := c.claim(key); ch != nil {
			ch.users++
			go c.fetch(o, []*chunk{ch})
			return ch
		}
		c.freed.Wait()
	}
}

// prefetch starts to fetch a run, unless part of it is cached or memory is short.
func (c *cache) prefetch(o proto.StoredObject, run int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var claimed []*chunk
	for i := run * runChunks; i < (run+1)*runChunks && i*chunkBytes < o.Size; i++ {
		key := chunkKey{o.Name, o.Tag, i}
		if c.find(key) != nil {
			if len(claimed) > 0 {
				break
			}
			continue
		}
		ch := c.claim(key)
		if ch == nil {
			break
		}
		claimed = append(claimed, ch)
	}
	if len(claimed) > 0 {
		go c.fetch(o, claimed)
	}
}

func (c *cache) find(key chunkKey) *chunk {
	for _, ch := range c.chunks {
		if ch.key == key && ch.ready != nil {
			return ch
		}
	}
	return nil
}

// claim reuses the least recently used chunk for a fetch. It returns nil if all are in use.
func (c *cache) claim(key chunkKey) *chunk {
	var oldest *chunk
	for _, ch := range c.chunks {
		if ch.users == 0 && (oldest == nil || ch.used < oldest.used) {
			oldest = ch
		}
	}
	if oldest == nil {
		return nil
	}
	c.clock++
	oldest.key, oldest.used, oldest.err, oldest.n = key, c.clock, nil, 0
	oldest.ready, oldest.users = make(chan struct{}), 1
	return oldest
}

func (c *cache) put(ch *chunk) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch.users--
	c.freed.Signal()
}

// fetch fills successive chunks with one request.
func (c *cache) fetch(o proto.StoredObject, chunks []*chunk) {
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	offset := chunks[0].key.index * chunkBytes
	r, err := c.objects.Open(ctx, o, offset, min(int64(len(chunks))*chunkBytes, o.Size-offset))
	for _, ch := range chunks {
		if ch.buf == nil {
			ch.buf = make([]byte, chunkBytes)
		}
		if err == nil {
			ch.n, err = io.ReadFull(r, ch.buf[:min(chunkBytes, o.Size-ch.key.index*chunkBytes)])
		}
		c.mu.Lock()
		if ch.err = err; err != nil {
			ch.key = chunkKey{} // it is fetched again the next time
		}
		c.mu.Unlock()
		close(ch.ready)
		c.put(ch)
	}
	if r != nil {
		_ = r.Close() // it was read
	}
}
