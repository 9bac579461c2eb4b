// Package objectfs serves a part of a bucket as a FUSE file system. A directory is the common part
// of keys up to a slash, or an empty object whose key ends with one. A file is read in chunks, and
// written into a spool that is stored as one object when a descriptor of the file is closed or
// synced. Objects whose keys cannot be paths are hidden.
//
// The serving process needs no privileges: another process has mounted the file system.
package objectfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	fusefs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// requestTimeout limits each request to the store that moves at most a chunk.
	requestTimeout = 20 * time.Second
	// slowestBytes is the rate in bytes per second below which larger transfers time out.
	slowestBytes = 1 << 20
	// cacheTime is how long names, sizes and times of objects are believed.
	cacheTime = time.Second
	// maxNodes is the number of files that the kernel may cache before the oldest are dropped. Each
	// takes about 1 KiB here.
	maxNodes = 8192
	// MaxRequest is the size of the largest read or write request of the kernel, in bytes. It is an
	// option of the mount too.
	MaxRequest = 512 << 10
	// requestBytes limits the memory of requests of the kernel.
	requestBytes = 3 << 20
)

// Objects is a store of objects by path. Its methods may be called concurrently. Errors wrap
// fs.ErrNotExist, fs.ErrPermission, os.ErrDeadlineExceeded or a syscall.Errno; others are EIO.
type Objects interface {
	// List returns a page of the objects and directories in a directory, with any names.
	List(ctx context.Context, dir, after string, most int32) (objects []proto.StoredObject, dirs []string,
		next string, err error)
	Stat(ctx context.Context, name string) (proto.StoredObject, error)
	// Open returns n bytes of the object from offset. It fails if the object has another tag by now.
	Open(ctx context.Context, o proto.StoredObject, offset, n int64) (io.ReadCloser, error)
	// Put stores an object, which appears when it is complete.
	Put(ctx context.Context, name string, size int64, content io.ReaderAt) (proto.StoredObject, error)
	Copy(ctx context.Context, from, to string) error
	Delete(ctx context.Context, name string) error
}

// Config configures a file system.
type Config struct {
	Objects Objects
	Device  int    // descriptor of /dev/fuse, mounted already; Serve closes it
	UID     uint32 // owner of all files
	GID     uint32
	Spool   *Spool
	// OnWrite is called before the first change of a file is accepted.
	OnWrite func()
}

// Failure is a file that could not be stored.
type Failure struct {
	Path string        `json:"path"`
	Why  syscall.Errno `json:"why"`
}

// server is one mounted file system.
type server struct {
	Config
	cache   *cache
	written sync.Once

	mu       sync.Mutex
	open     map[*file]struct{}       // files with content in the spool
	failures map[string]syscall.Errno // by path
	nodes    []node                   // known to the kernel, oldest first
}

type node struct {
	parent *dir
	name   string
}

// Serve serves the file system until it is unmounted and all files are stored. It returns the files
// that could not be stored.
func Serve(cfg Config) ([]Failure, error) {
	s := &server{
		Config: cfg, cache: newCache(cfg.Objects), open: map[*file]struct{}{},
		failures: map[string]syscall.Errno{},
	}
	timeout := cacheTime
	quiet := log.New(io.Discard, "", 0)
	server, err := fusefs.Mount(fmt.Sprintf("/dev/fd/%d", cfg.Device), &dir{server: s}, &fusefs.Options{
		EntryTimeout: &timeout, AttrTimeout: &timeout, Logger: quiet, UID: cfg.UID, GID: cfg.GID,
		MountOptions: fuse.MountOptions{
			DisableXAttrs: true, Logger: quiet, MaxWrite: MaxRequest, MaxInflightRequestBytes: requestBytes, Name: "storage",
		},
	})
	if err != nil {
		return nil, fmt.Errorf("serve a mount: %w", err)
	}
	server.Wait()
	s.storeAll()
	var all []Failure
	for path, why := range s.failures {
		all = append(all, Failure{path, why})
	}
	slices.SortFunc(all, func(a, b Failure) int { return strings.Compare(a.Path, b.Path) })
	return all, nil
}

// storeAll stores pending writes of memory maps and of killed processes.
func (s *server) storeAll() {
	s.mu.Lock()
	var files []*file
	for f := range s.open {
		files = append(files, f)
	}
	s.mu.Unlock()
	for _, f := range files {
		f.mu.Lock()
		_ = f.store() // recorded
		f.mu.Unlock()
	}
}

func (s *server) markWritten() { s.written.Do(s.OnWrite) }

// record remembers whether a file could be stored.
func (s *server) record(path string, why syscall.Errno) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if why == 0 {
		delete(s.failures, path)
	} else {
		s.failures[path] = why
	}
}

// added is called for each file that the kernel looks up. It evicts the oldest from the kernel's cache
// if there are too many.
func (s *server) added(parent *dir, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nodes = append(s.nodes, node{parent, name})
	if len(s.nodes) > maxNodes {
		old := slices.Clone(s.nodes[:maxNodes/2])
		s.nodes = append([]node(nil), s.nodes[maxNodes/2:]...)
		// The kernel may hold a lock of the directory during this request.
		go func() {
			for _, n := range old {
				_ = n.parent.NotifyEntry(n.name) // the kernel may have forgotten it already
			}
		}()
	}
}

// errno converts an error of the store.
func errno(err error) syscall.Errno {
	number, ok := errors.AsType[syscall.Errno](err)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, fs.ErrNotExist):
		return syscall.ENOENT
	case errors.Is(err, fs.ErrPermission):
		return syscall.EACCES
	case errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded):
		return syscall.ETIMEDOUT
	case ok:
		return number
	default:
		return syscall.EIO
	}
}

// request returns the context of a request to the store that transfers size bytes. A signal to the
// program does not end it: the Go runtime sends itself signals all the time.
func request(size int64) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), requestTimeout+time.Duration(size/slowestBytes)*time.Second)
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

func (s *server) fillDir(out *fuse.Attr) {
	out.Mode, out.Nlink = syscall.S_IFDIR|0o755, 2
	out.Uid, out.Gid, out.Blksize = s.UID, s.GID, 4096
}

func (s *server) fillFile(out *fuse.Attr, size int64, modified time.Time) {
	out.Mode, out.Nlink = syscall.S_IFREG|0o644, 1
	out.Uid, out.Gid, out.Blksize = s.UID, s.GID, 4096
	out.Size, out.Blocks = uint64(size), uint64(size+511)/512
	out.SetTimes(&modified, &modified, &modified)
}

// statfs reports the space for files that are being written.
func (s *server) statfs(out *fuse.StatfsOut) {
	out.Bsize, out.Frsize, out.NameLen = spoolBlock, spoolBlock, 255
	out.Blocks, out.Bfree = uint64(s.Spool.limit), uint64(s.Spool.Free()/spoolBlock)
	out.Bavail = out.Bfree
}
