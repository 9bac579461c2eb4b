package objectfs

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	fusefs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/bullpen-run/bullpen/proto"
)

// pageEntries is how many entries of a directory are listed at once.
const pageEntries = 1000

// maxName is the maximum length of a name in a directory, in bytes.
const maxName = 255

// Flags of renameat2.
const renameNoReplace = 1

// dir is a directory.
type dir struct {
	fusefs.Inode
	server *server

	mu   sync.Mutex
	path string // below the mount, empty for its root
	// unstored are files that were created and not stored yet.
	unstored map[string]*file
}

var (
	_ fusefs.NodeLookuper       = (*dir)(nil)
	_ fusefs.NodeOpendirHandler = (*dir)(nil)
	_ fusefs.NodeCreater        = (*dir)(nil)
	_ fusefs.NodeMkdirer        = (*dir)(nil)
	_ fusefs.NodeUnlinker       = (*dir)(nil)
	_ fusefs.NodeRmdirer        = (*dir)(nil)
	_ fusefs.NodeRenamer        = (*dir)(nil)
	_ fusefs.NodeGetattrer      = (*dir)(nil)
	_ fusefs.NodeSetattrer      = (*dir)(nil)
	_ fusefs.NodeStatfser       = (*dir)(nil)
	_ fusefs.NodeFsyncer        = (*dir)(nil)
	_ fusefs.NodeLinker         = (*dir)(nil)
	_ fusefs.NodeSymlinker      = (*dir)(nil)
	_ fusefs.NodeMknoder        = (*dir)(nil)
)

func (d *dir) where() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.path
}

// below returns the path of a name in the directory.
func (d *dir) below(name string) string { return join(d.where(), name) }

func (d *dir) unstoredFile(name string) *file {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.unstored[name]
}

func (d *dir) setUnstored(name string, f *file) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f == nil {
		delete(d.unstored, name)
		return
	}
	if d.unstored == nil {
		d.unstored = map[string]*file{}
	}
	d.unstored[name] = f
}

// entry is what a name refers to.
type entry struct {
	dir    bool
	object proto.StoredObject // of a file
}

// find returns the store's entry at a path. A directory hides an object of the same name.
func (s *server) find(path string, known *fusefs.Inode) (entry, error) {
	ctx, cancel := request(0)
	defer cancel()
	if known != nil {
		if _, ok := known.Operations().(*file); ok {
			// Most likely it still is one.
			if o, err := s.Objects.Stat(ctx, path); !errors.Is(err, fs.ErrNotExist) {
				return entry{object: o}, err
			}
		}
	}
	var isDir bool
	var listErr error
	listed := make(chan struct{})
	go func() {
		defer close(listed)
		var objects []proto.StoredObject
		var dirs []string
		objects, dirs, _, listErr = s.Objects.List(ctx, path, "", 1)
		isDir = len(objects)+len(dirs) > 0
	}()
	o, err := s.Objects.Stat(ctx, path)
	<-listed
	switch {
	case isDir:
		return entry{dir: true}, nil
	case err == nil:
		return entry{object: o}, nil
	case errors.Is(err, fs.ErrNotExist) && listErr != nil:
		return entry{}, listErr
	}
	return entry{}, err
}

// IsFile reports whether a path is a file as far as the store can tell. A directory hides an object of the same name.
func IsFile(o Objects, path string) bool {
	e, err := (&server{Config: Config{Objects: o}}).find(path, nil)
	return err == nil && !e.dir
}

// Lookup returns the file or directory of a name.
func (d *dir) Lookup(_ context.Context, name string, out *fuse.EntryOut) (*fusefs.Inode, syscall.Errno) {
	if f := d.unstoredFile(name); f != nil {
		f.fill(&out.Attr)
		return f.EmbeddedInode(), 0
	}
	path := d.below(name)
	if e := d.checkName(name); e != 0 {
		return nil, e
	}
	e, err := d.server.find(path, d.GetChild(name))
	if err != nil {
		return nil, errno(err)
	}
	return d.child(name, e, out), 0
}

// child returns the inode of an entry.
func (d *dir) child(name string, e entry, out *fuse.EntryOut) *fusefs.Inode {
	if e.object.Name = d.below(name); e.dir {
		d.server.fillDir(&out.Attr)
		if known := d.GetChild(name); known != nil {
			if _, ok := known.Operations().(*dir); ok {
				return known
			}
		}
		return d.NewInode(context.Background(), &dir{server: d.server, path: d.below(name)},
			fusefs.StableAttr{Mode: syscall.S_IFDIR})
	}
	if known := d.GetChild(name); known != nil {
		if f, ok := known.Operations().(*file); ok {
			f.refresh(e.object)
			f.fill(&out.Attr)
			return known
		}
	}
	f := &file{server: d.server, parent: d, object: e.object, stored: true, checked: time.Now()}
	f.fill(&out.Attr)
	d.server.added(d, name)
	return d.NewInode(context.Background(), f, fusefs.StableAttr{Mode: syscall.S_IFREG})
}

// OpendirHandle opens the directory for reading.
func (d *dir) OpendirHandle(context.Context, uint32) (fusefs.FileHandle, uint32, syscall.Errno) {
	return &stream{dir: d}, 0, 0
}

// stream is a directory that is being read, page by page.
type stream struct {
	dir     *dir
	page    []item
	offset  uint64 // of the next entry
	after   string // the next page; empty for the first
	end     bool   // there are no more pages
	current item
	listed  int // entries so far
}

type item struct {
	name string
	entry
}

// Readdirent returns the next entry, nil at the end.
func (r *stream) Readdirent(context.Context) (*fuse.DirEntry, syscall.Errno) {
	for len(r.page) == 0 {
		if r.end {
			return nil, 0
		}
		if err := r.next(); err != nil {
			return nil, errno(err)
		}
	}
	r.current, r.page = r.page[0], r.page[1:]
	r.offset++
	r.listed++
	mode := uint32(syscall.S_IFREG)
	if r.current.dir {
		mode = syscall.S_IFDIR
	}
	return &fuse.DirEntry{Name: r.current.name, Mode: mode, Off: r.offset}, 0
}

// next lists a page.
func (r *stream) next() error {
	ctx, cancel := request(0)
	defer cancel()
	objects, dirs, after, err := r.dir.server.Objects.List(ctx, r.dir.where(), r.after, pageEntries)
	if err != nil {
		return err
	}
	if r.after == "" {
		r.addUnstored()
	}
	shown := map[string]bool{}
	for _, name := range dirs {
		if proto.ValidSegment(name) && !shown[name] {
			shown[name] = true
			r.page = append(r.page, item{name, entry{dir: true}})
		}
	}
	for _, o := range objects {
		if proto.ValidSegment(o.Name) && !shown[o.Name] && r.dir.unstoredFile(o.Name) == nil {
			shown[o.Name] = true
			r.page = append(r.page, item{o.Name, entry{object: o}})
		}
	}
	r.end = after == "" || after == r.after
	r.after = after
	return nil
}

func (r *stream) addUnstored() {
	r.dir.mu.Lock()
	defer r.dir.mu.Unlock()
	for name := range r.dir.unstored {
		r.page = append(r.page, item{name: name})
	}
}

// Lookup returns the entry that Readdirent returned last. The kernel gets only a limited number of
// files of a directory.
func (r *stream) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fusefs.Inode, syscall.Errno) {
	if r.listed > 2*maxNodes {
		return nil, syscall.ENOENT
	}
	if f := r.dir.unstoredFile(name); f != nil {
		f.fill(&out.Attr)
		return f.EmbeddedInode(), 0
	}
	if name != r.current.name {
		return r.dir.Lookup(ctx, name, out)
	}
	return r.dir.child(name, r.current.entry, out), 0
}

// Seekdir starts again. Other positions cannot be found.
func (r *stream) Seekdir(_ context.Context, off uint64) syscall.Errno {
	if off != 0 {
		return syscall.EINVAL
	}
	*r = stream{dir: r.dir}
	return 0
}

// checkName returns an error if no object can have a name.
func (d *dir) checkName(name string) syscall.Errno {
	switch {
	case len(name) > maxName || len(d.below(name))+1 > proto.MaxObjectKey:
		return syscall.ENAMETOOLONG
	case !proto.ValidSegment(name):
		return syscall.EINVAL
	case !utf8.ValidString(name): // keys are Unicode: another name would stand for it
		return syscall.ENOENT
	}
	return 0
}

// checkNew returns an error if an object cannot get a name. Stores differ in the control characters
// that they keep, so objects with any are read-only.
func (d *dir) checkNew(name string) syscall.Errno {
	switch {
	case !utf8.ValidString(name):
		return syscall.EILSEQ
	case strings.ContainsFunc(name, unicode.IsControl):
		return syscall.EINVAL
	}
	return d.checkName(name)
}

// Create creates a file, which is stored when it is closed.
func (d *dir) Create(
	_ context.Context, name string, _, _ uint32, out *fuse.EntryOut,
) (*fusefs.Inode, fusefs.FileHandle, uint32, syscall.Errno) {
	if e := d.checkNew(name); e != 0 {
		return nil, nil, 0, e
	}
	d.server.markWritten()
	f := &file{
		server: d.server, parent: d,
		object: proto.StoredObject{Name: d.below(name), Modified: time.Now()}, handles: 1,
	}
	f.begin(newContent(d.server.Spool))
	f.dirty = true
	d.setUnstored(name, f)
	f.fill(&out.Attr)
	d.server.added(d, name)
	return d.NewInode(context.Background(), f, fusefs.StableAttr{Mode: syscall.S_IFREG}), &handle{writes: true}, 0, 0
}

// Mkdir creates a directory.
func (d *dir) Mkdir(_ context.Context, name string, _ uint32, out *fuse.EntryOut) (*fusefs.Inode, syscall.Errno) {
	if e := d.checkNew(name); e != 0 {
		return nil, e
	}
	ctx, cancel := request(0)
	defer cancel()
	if _, err := d.server.Objects.Put(ctx, d.below(name)+"/", 0, strings.NewReader("")); err != nil {
		return nil, errno(err)
	}
	return d.child(name, entry{dir: true}, out), 0
}

// Unlink removes a file.
func (d *dir) Unlink(_ context.Context, name string) syscall.Errno {
	f, _ := d.fileOf(name)
	if f == nil {
		return d.delete(d.below(name))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stored {
		if e := d.delete(f.object.Name); e != 0 {
			return e
		}
	}
	f.remove()
	d.setUnstored(name, nil)
	d.server.record(f.object.Name, 0)
	return 0
}

func (d *dir) delete(path string) syscall.Errno {
	ctx, cancel := request(0)
	defer cancel()
	return errno(d.server.Objects.Delete(ctx, path))
}

// fileOf returns the file of a name that the kernel knows, or nil. ok reports whether it knows any.
func (d *dir) fileOf(name string) (f *file, ok bool) {
	known := d.GetChild(name)
	if known == nil {
		return d.unstoredFile(name), false
	}
	f, _ = known.Operations().(*file)
	return f, true
}

// empty returns ENOTEMPTY if a directory has entries other than its marker.
func (s *server) empty(path string) syscall.Errno {
	ctx, cancel := request(0)
	defer cancel()
	objects, dirs, _, err := s.Objects.List(ctx, path, "", 2)
	if err != nil {
		return errno(err)
	}
	if len(dirs) > 0 {
		return syscall.ENOTEMPTY
	}
	for _, o := range objects {
		if o.Name != "" {
			return syscall.ENOTEMPTY
		}
	}
	return 0
}

func (d *dir) hasUnstored() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.unstored) > 0
}

// Rmdir removes an empty directory.
func (d *dir) Rmdir(_ context.Context, name string) syscall.Errno {
	if known := d.GetChild(name); known != nil {
		if child, ok := known.Operations().(*dir); ok && child.hasUnstored() {
			return syscall.ENOTEMPTY
		}
	}
	if e := d.server.empty(d.below(name)); e != 0 {
		return e
	}
	return d.delete(d.below(name) + "/")
}

// Rename renames a file by a copy, or an empty directory. A directory with content is renamed by no
// single request: programs such as mv copy it after EXDEV.
func (d *dir) Rename(
	_ context.Context, name string, newParent fusefs.InodeEmbedder, newName string, flags uint32,
) syscall.Errno {
	to, ok := newParent.(*dir)
	if !ok || flags&^renameNoReplace != 0 {
		return syscall.EINVAL
	}
	if e := to.checkNew(newName); e != 0 {
		return e
	}
	if flags&renameNoReplace != 0 {
		_, err := d.server.find(to.below(newName), nil)
		if err == nil || to.unstoredFile(newName) != nil {
			return syscall.EEXIST
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return errno(err)
		}
	}
	d.server.markWritten()
	f, known := d.fileOf(name)
	if f != nil {
		return d.renameFile(f, name, to, newName)
	}
	if known {
		return d.renameDir(name, to, newName)
	}
	e, err := d.server.find(d.below(name), nil)
	if err != nil {
		return errno(err)
	}
	if e.dir {
		return d.renameDir(name, to, newName)
	}
	f = &file{server: d.server, parent: d, object: e.object, stored: true}
	return d.renameFile(f, name, to, newName)
}

func (d *dir) renameFile(f *file, name string, to *dir, newName string) syscall.Errno {
	f.mu.Lock()
	defer f.mu.Unlock()
	old, path := f.object.Name, to.below(newName)
	if f.dirty {
		stored := f.stored
		f.object.Name = path
		if e := f.store(); e != 0 {
			f.object.Name = old
			d.server.record(path, 0)
			return e
		}
		d.server.record(old, 0)
		if stored {
			if e := d.delete(old); e != 0 {
				return e
			}
		}
	} else {
		ctx, cancel := request(f.object.Size)
		defer cancel()
		if err := d.server.Objects.Copy(ctx, old, path); err != nil {
			return errno(err)
		}
		if e := d.delete(old); e != 0 {
			return e
		}
		f.object.Name = path
		f.checked = time.Time{} // it has another time now
	}
	if replaced, _ := to.fileOf(newName); replaced != nil && replaced != f {
		replaced.mu.Lock()
		replaced.remove()
		replaced.mu.Unlock()
	}
	d.setUnstored(name, nil)
	to.setUnstored(newName, nil)
	f.parent = to
	return 0
}

func (d *dir) renameDir(name string, to *dir, newName string) syscall.Errno {
	child, _ := d.GetChild(name).Operations().(*dir)
	if child == nil || child.hasUnstored() {
		return syscall.EXDEV
	}
	switch e := d.server.empty(d.below(name)); {
	case e == syscall.ENOTEMPTY:
		return syscall.EXDEV
	case e != 0:
		return e
	}
	if e := d.server.empty(to.below(newName)); e != 0 {
		return e
	}
	ctx, cancel := request(0)
	defer cancel()
	if _, err := d.server.Objects.Put(ctx, to.below(newName)+"/", 0, strings.NewReader("")); err != nil {
		return errno(err)
	}
	path := to.below(newName)
	if e := d.delete(d.below(name) + "/"); e != 0 {
		return e
	}
	child.mu.Lock()
	child.path = path
	child.mu.Unlock()
	return 0
}

// Getattr returns the attributes, which no directory has stored.
func (d *dir) Getattr(_ context.Context, _ fusefs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	d.server.fillDir(&out.Attr)
	return 0
}

// Setattr changes nothing: a store has no modes and times of directories.
func (d *dir) Setattr(_ context.Context, _ fusefs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if !d.server.keepsOwner(in) {
		return syscall.EPERM
	}
	d.server.fillDir(&out.Attr)
	return 0
}

// keepsOwner reports whether a change leaves the owner and the group as they are.
func (s *server) keepsOwner(in *fuse.SetAttrIn) bool {
	uid, hasUID := in.GetUID()
	gid, hasGID := in.GetGID()
	return (!hasUID || uid == s.UID) && (!hasGID || gid == s.GID)
}

// Statfs reports the space for files that are being written.
func (d *dir) Statfs(_ context.Context, out *fuse.StatfsOut) syscall.Errno {
	d.server.statfs(out)
	return 0
}

// Fsync has nothing to do: directories change immediately.
func (d *dir) Fsync(context.Context, fusefs.FileHandle, uint32) syscall.Errno { return 0 }

// Link is refused: an object has one name.
func (d *dir) Link(context.Context, fusefs.InodeEmbedder, string, *fuse.EntryOut) (*fusefs.Inode, syscall.Errno) {
	return nil, syscall.EPERM
}

// Symlink is refused: a store has none.
func (d *dir) Symlink(context.Context, string, string, *fuse.EntryOut) (*fusefs.Inode, syscall.Errno) {
	return nil, syscall.EPERM
}

// Mknod is refused: a store has only objects.
func (d *dir) Mknod(context.Context, string, uint32, uint32, *fuse.EntryOut) (*fusefs.Inode, syscall.Errno) {
	return nil, syscall.EPERM
}
