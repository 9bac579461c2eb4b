package objectfs

import (
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// spoolBlock is the unit in which a spool allocates space, in bytes.
const spoolBlock = 64 << 10

// Spool holds the content of files being written, in one size-limited file on disk.
type Spool struct {
	file  *os.File
	limit int64 // blocks

	mu   sync.Mutex
	next int64   // first block that was never used
	free []int64 // blocks that were used before; they are holes of the file again
}

// NewSpool returns a spool in an empty file with a limit in bytes.
func NewSpool(file *os.File, limit int64) *Spool {
	return &Spool{file: file, limit: limit / spoolBlock}
}

// Free returns the number of bytes that are left.
func (s *Spool) Free() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return (s.limit - s.next + int64(len(s.free))) * spoolBlock
}

// allocate returns a block that reads as zeros. The error is ENOSPC if there is none.
func (s *Spool) allocate() (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.free); n > 0 {
		b := s.free[n-1]
		s.free = s.free[:n-1]
		return b, nil
	}
	if s.next == s.limit {
		return 0, syscall.ENOSPC
	}
	s.next++
	return s.next - 1, nil
}

// release frees a block. A block that cannot be emptied is not used again.
func (s *Spool) release(block int64) {
	if unix.Fallocate(int(s.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, block*spoolBlock,
		spoolBlock) != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, block)
}

// content is the content of one file in a spool. Its methods are not called concurrently, except
// ReadAt with itself.
type content struct {
	spool  *Spool
	size   int64
	blocks map[int64]int64 // block of the file to block of the spool; missing ones are zeros
}

func newContent(s *Spool) *content { return &content{spool: s, blocks: map[int64]int64{}} }

// ReadAt implements [io.ReaderAt].
func (c *content) ReadAt(p []byte, off int64) (int, error) {
	if off >= c.size {
		return 0, io.EOF
	}
	short := int64(len(p)) > c.size-off
	if short {
		p = p[:c.size-off]
	}
	for done := 0; done < len(p); {
		at := off + int64(done)
		part := p[done:min(len(p), done+int(spoolBlock-at%spoolBlock))]
		clear(part)
		if b, ok := c.blocks[at/spoolBlock]; ok {
			// The file may end before the block does.
			if _, err := c.spool.file.ReadAt(part, b*spoolBlock+at%spoolBlock); err != nil && err != io.EOF {
				return done, err
			}
		}
		done += len(part)
	}
	if short {
		return len(p), io.EOF
	}
	return len(p), nil
}

// WriteAt implements [io.WriterAt]. The error is ENOSPC if the spool is full.
func (c *content) WriteAt(p []byte, off int64) (int, error) {
	for done := 0; done < len(p); {
		at := off + int64(done)
		part := p[done:min(len(p), done+int(spoolBlock-at%spoolBlock))]
		b, ok := c.blocks[at/spoolBlock]
		if !ok {
			var err error
			if b, err = c.spool.allocate(); err != nil {
				return done, err
			}
			c.blocks[at/spoolBlock] = b
		}
		n, err := c.spool.file.WriteAt(part, b*spoolBlock+at%spoolBlock)
		done += n
		c.size = max(c.size, off+int64(done))
		if err != nil {
			return done, err
		}
	}
	return len(p), nil
}

// truncate sets the size.
func (c *content) truncate(size int64) error {
	if size < c.size {
		for i, b := range c.blocks {
			if i*spoolBlock >= size {
				c.spool.release(b)
				delete(c.blocks, i)
			}
		}
		if b, ok := c.blocks[size/spoolBlock]; ok {
			if _, err := c.spool.file.WriteAt(make([]byte, spoolBlock-size%spoolBlock),
				b*spoolBlock+size%spoolBlock); err != nil {
				return err
			}
		}
	}
	c.size = size
	return nil
}

func (c *content) close() {
	for _, b := range c.blocks {
		c.spool.release(b)
	}
	c.blocks, c.size = nil, 0
}
