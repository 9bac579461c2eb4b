package objectfs

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"sync"
	"syscall"
	"time"

	fusefs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/bullpen-run/bullpen/proto"
)

// file is a file. Its content is the object's, or in the spool while the file is open for writing.
type file struct {
	fusefs.Inode
	server *server

	mu      sync.RWMutex
	parent  *dir
	object  proto.StoredObject // its name is the file's path; without a spool, the object as last seen
	stored  bool               // the object exists
	removed bool               // the program has removed or replaced it
	checked time.Time          // when the object was seen
	content *content           // nil if there is none in the spool
	dirty   bool               // content was not stored yet
	handles int                // open descriptions
}

var (
	_ fusefs.NodeOpener    = (*file)(nil)
	_ fusefs.NodeReader    = (*file)(nil)
	_ fusefs.NodeWriter    = (*file)(nil)
	_ fusefs.NodeFlusher   = (*file)(nil)
	_ fusefs.NodeFsyncer   = (*file)(nil)
	_ fusefs.NodeReleaser  = (*file)(nil)
	_ fusefs.NodeGetattrer = (*file)(nil)
	_ fusefs.NodeSetattrer = (*file)(nil)
	_ fusefs.NodeStatfser  = (*file)(nil)
)

// orderedBytes is how much of a file is read sequentially before readahead begins.
const orderedBytes = 256 << 10

// handle is an open description of a file.
type handle struct {
	writes bool

	mu    sync.Mutex
	next  int64 // the chunk after the one that was read last
	bytes int64 // that were read in order
}

// ordered reports whether the file is read in order. The kernel may swap adjacent reads.
func (h *handle) ordered(off, n int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if first := off / chunkBytes; first != h.next && first != h.next-1 {
		h.bytes = 0
	}
	h.bytes += n
	h.next = (off+max(n, 1)-1)/chunkBytes + 1
	return h.bytes > orderedBytes
}

func (f *file) fill(out *fuse.Attr) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	f.fillLocked(out)
}

func (f *file) fillLocked(out *fuse.Attr) {
	size := f.object.Size
	if f.content != nil {
		size = f.content.size
	}
	f.server.fillFile(out, size, f.object.Modified)
}

// refresh takes over what the store has.
func (f *file) refresh(o proto.StoredObject) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refreshLocked(o)
}

func (f *file) refreshLocked(o proto.StoredObject) {
	if f.content != nil || f.removed {
		return
	}
	o.Name = f.object.Name
	f.object, f.stored, f.checked = o, true, time.Now()
}

// look looks the object up in the store, unless it did a moment ago.
func (f *file) look() error {
	if f.content != nil || time.Since(f.checked) < cacheTime {
		return nil
	}
	ctx, cancel := request(0)
	defer cancel()
	o, err := f.server.Objects.Stat(ctx, f.object.Name)
	if err == nil {
		f.refreshLocked(o)
	}
	return err
}

// Open opens the file.
func (f *file) Open(_ context.Context, flags uint32) (fusefs.FileHandle, uint32, syscall.Errno) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.look(); err != nil {
		return nil, 0, errno(err)
	}
	writes := flags&syscall.O_ACCMODE != syscall.O_RDONLY
	if writes && flags&syscall.O_TRUNC != 0 {
		if e := f.resize(0); e != 0 {
			return nil, 0, e
		}
	}
	f.handles++
	return &handle{writes: writes}, 0, 0
}

// begin puts content of the file into the spool.
func (f *file) begin(c *content) {
	f.content = c
	f.server.mu.Lock()
	defer f.server.mu.Unlock()
	f.server.open[f] = struct{}{}
}

// fetch makes sure that the content is in the spool.
func (f *file) fetch() syscall.Errno {
	if f.content != nil {
		return 0
	}
	f.server.markWritten()
	c := newContent(f.server.Spool)
	if f.object.Size > 0 {
		if f.object.Size > f.server.Spool.Free() {
			return syscall.ENOSPC
		}
		if err := f.download(c); err != nil {
			c.close()
			return errno(err)
		}
	}
	f.begin(c)
	return 0
}

func (f *file) download(c *content) error {
	ctx, cancel := request(f.object.Size)
	defer cancel()
	r, err := f.server.Objects.Open(ctx, f.object, 0, f.object.Size)
	if err != nil {
		return err
	}
	_, err = io.CopyBuffer(io.NewOffsetWriter(c, 0), struct{ io.Reader }{r}, make([]byte, 128<<10))
	if err == nil && c.size != f.object.Size {
		err = syscall.EIO
	}
	return errors.Join(err, r.Close())
}

// resize sets the size. Nothing is fetched for an empty file.
func (f *file) resize(size int64) syscall.Errno {
	if size > f.server.Spool.limit*spoolBlock {
		return syscall.EFBIG
	}
	if size == 0 && f.content == nil {
		f.server.markWritten()
		f.begin(newContent(f.server.Spool))
	}
	if e := f.fetch(); e != 0 {
		return e
	}
	if err := f.content.truncate(size); err != nil {
		return errno(err)
	}
	f.dirty, f.object.Modified = true, time.Now()
	return 0
}

// Read reads from the spool or the store.
func (f *file) Read(_ context.Context, h fusefs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.content != nil {
		n, err := f.content.ReadAt(dest, off)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, errno(err)
		}
		return fuse.ReadResultData(dest[:n]), 0
	}
	ordered := false
	if h, ok := h.(*handle); ok {
		ordered = h.ordered(off, int64(len(dest)))
	}
	n, err := f.server.cache.readAt(f.object, dest, off, ordered)
	if err != nil {
		return nil, errno(err)
	}
	return fuse.ReadResultData(dest[:n]), 0
}

// Write writes to the spool.
func (f *file) Write(_ context.Context, _ fusefs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if off+int64(len(data)) > f.server.Spool.limit*spoolBlock {
		return 0, syscall.EFBIG
	}
	if e := f.fetch(); e != 0 {
		return 0, e
	}
	n, err := f.content.WriteAt(data, off)
	if n > 0 {
		f.dirty, f.object.Modified = true, time.Now()
		return uint32(n), 0
	}
	return 0, errno(err)
}

// store stores the content if it has changed. The caller holds f.mu.
func (f *file) store() syscall.Errno {
	if !f.dirty || f.removed {
		return 0
	}
	ctx, cancel := request(f.content.size)
	defer cancel()
	o, err := f.server.Objects.Put(ctx, f.object.Name, f.content.size, f.content)
	e := errno(err)
	if f.server.record(f.object.Name, e); e != 0 {
		return e
	}
	f.object, f.stored, f.dirty, f.checked = o, true, false, time.Now()
	f.parent.forgetUnstored(f)
	return 0
}

// Flush stores the file. It is called for each close of a descriptor. Closing a read-only
// descriptor does not store others' pending writes.
func (f *file) Flush(_ context.Context, h fusefs.FileHandle) syscall.Errno {
	if h, ok := h.(*handle); ok && !h.writes {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.store()
}

// Fsync stores the file.
func (f *file) Fsync(context.Context, fusefs.FileHandle, uint32) syscall.Errno {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.store()
}

// Release ends an open description. The last one frees the spool.
func (f *file) Release(context.Context, fusefs.FileHandle) syscall.Errno {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.handles--
	return f.settle()
}

// settle stores writes through memory maps, and frees the spool, if the file is not open.
func (f *file) settle() syscall.Errno {
	if f.handles > 0 || f.content == nil {
		return 0
	}
	e := f.store()
	if e != 0 || f.removed {
		f.parent.forgetUnstored(f)
	}
	f.content.close()
	f.content, f.dirty = nil, false
	f.checked = time.Time{}
	f.server.mu.Lock()
	defer f.server.mu.Unlock()
	delete(f.server.open, f)
	return e
}

// remove marks a file whose name is gone. Open descriptors can still read its content.
func (f *file) remove() { f.removed, f.stored = true, false }

func (d *dir) forgetUnstored(f *file) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, other := range d.unstored {
		if other == f {
			delete(d.unstored, name)
		}
	}
}

// Getattr returns the attributes.
func (f *file) Getattr(_ context.Context, _ fusefs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.look(); err != nil && (!f.removed || !errors.Is(err, fs.ErrNotExist)) {
		return errno(err)
	}
	f.fillLocked(&out.Attr)
	return 0
}

// Setattr changes the size. Modes and times are accepted and not stored, since a store has none.
func (f *file) Setattr(_ context.Context, _ fusefs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if !f.server.keepsOwner(in) {
		return syscall.EPERM
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if size, ok := in.GetSize(); ok {
		if err := f.look(); err != nil {
			return errno(err)
		}
		if e := f.resize(int64(size)); e != 0 {
			return e
		}
		if e := f.settle(); e != 0 {
			return e
		}
	}
	f.fillLocked(&out.Attr)
	return 0
}

// Statfs reports the space for files that are being written.
func (f *file) Statfs(_ context.Context, out *fuse.StatfsOut) syscall.Errno {
	f.server.statfs(out)
	return 0
}
