package objectfs

import (
	"context"
	"io"
	"sync"
	"syscall"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// chunkBytes is how much is read from the store at once, at most.
	chunkBytes = 1 << 20
	// cacheChunks is the number of chunks in memory, of all files together.
	cacheChunks = 12
	// aheadChunks is how many chunks are fetched before they are read, if a file is read in order.
	aheadChunks = 4
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

// readAt reads from an object. With ordered, the chunks after the one that is read are fetched too.
func (c *cache) readAt(o proto.StoredObject, p []byte, off int64, ordered bool) (int, error) {
	if off >= o.Size {
		return 0, nil
	}
	p = p[:min(int64(len(p)), o.Size-off)]
	for done := 0; done < len(p); {
		at := off + int64(done)
		index := at / chunkBytes
		ch := c.get(o, index, true)
		if ordered {
			for i := index + 1; i <= index+aheadChunks && i*chunkBytes < o.Size; i++ {
				if next := c.get(o, i, false); next != nil {
					c.put(next)
				}
			}
		}
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
// chunks are in use, get waits for one, or returns nil.
func (c *cache) get(o proto.StoredObject, index int64, wait bool) *chunk {
	key := chunkKey{o.Name, o.Tag, index}
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		c.clock++
		var oldest *chunk
		for _, ch := range c.chunks {
			if ch.key == key && ch.ready != nil {
				ch.used = c.clock
				ch.users++
				return ch
			}
			if ch.users == 0 && (oldest == nil || ch.used < oldest.used) {
				oldest = ch
			}
		}
		if oldest != nil {
			oldest.key, oldest.used, oldest.err, oldest.n = key, c.clock, nil, 0
			oldest.ready = make(chan struct{})
			oldest.users = 2
			go c.fetch(oldest, o)
			return oldest
		}
		if !wait {
			return nil
		}
		c.freed.Wait()
	}
}

func (c *cache) put(ch *chunk) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch.users--
	c.freed.Signal()
}

// fetch fills a chunk.
func (c *cache) fetch(ch *chunk, o proto.StoredObject) {
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	if ch.buf == nil {
		ch.buf = make([]byte, chunkBytes)
	}
	offset := ch.key.index * chunkBytes
	n := min(chunkBytes, o.Size-offset)
	r, err := c.objects.Open(ctx, o, offset, n)
	if err == nil {
		ch.n, err = io.ReadFull(r, ch.buf[:n])
		_ = r.Close() // it was read
	}
	c.mu.Lock()
	if ch.err = err; err != nil {
		ch.key = chunkKey{} // it is fetched again the next time
	}
	c.mu.Unlock()
	close(ch.ready)
	c.put(ch)
}
