package thread

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
)

const (
	// tarReadAhead is the size of the buffer of a tar in bytes.
	tarReadAhead = 64 << 10
	// maxTarHeader is an upper bound in bytes for the headers of one entry: its path and link, its
	// attributes, times and sizes, and the padding of its content.
	maxTarHeader = 16 << 10
	// maxTarPadding is more than any program writes after the end of a tar, in bytes.
	maxTarPadding = 1 << 20
	// rootMode are mode bits that every home has, so that its programs can enter it.
	rootMode = 0o700
	// setID are the set-uid and the set-gid bit.
	setID = 0o6000
	// The times of files in the years 1 to 9999, in seconds since 1970. Others have no text form.
	minTime, maxTime = -62_135_596_800, 253_402_300_799
)

// Unpack unpacks a tar below a directory of a thread's home, and returns the number of the newest
// version. It creates the thread and the directory if necessary. An entry replaces whatever is at
// its path, except that directories are merged. The change is one new version; after an error
// nothing has changed.
//
// The error is a [*proto.FieldError] for a tar that is malformed, incomplete, or has an entry that
// a home cannot have or that only an attack would have; its message names the entry. It is a
// [*proto.PathError] or a [*proto.SpaceError] if the files exceed u.Most, and a [*proto.BusyError]
// if an execution holds the thread at the end.
func (v *Versions) Unpack(
	ctx context.Context, org, thread, path string, u *proto.TarUpload,
) (version int64, err error) {
	spool, err := v.Spool()
	if err != nil {
		return 0, err
	}
	defer func() { _ = spool.Close() }() // it has no name, and nobody reads it again
	p := &unpacker{
		TarUpload: u, ctx: ctx, path: path, spool: spool, root: &node{kind: layer.Dir},
		explicit: make(map[*node]bool), names: make(map[*node]int),
	}
	if err := p.read(); err != nil {
		return 0, fmt.Errorf("unpack a tar into thread %s: %w", thread, err)
	}
	if err := v.putObjects(ctx, org, p); err != nil {
		return 0, fmt.Errorf("unpack a tar into thread %s: %w", thread, err)
	}
	version, err = v.edit(ctx, org, thread, true, u.Most, func(e *edit) error {
		dir := e.root
		if path != "" {
			for name := range strings.SplitSeq(path, "/") {
				dir = e.makeDir(dir, name, e.now)
			}
		}
		p.addTo(e, dir, p.root)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("unpack a tar into thread %s: %w", thread, err)
	}
	return version, nil
}

// putObjects stores the large files of a tar.
func (v *Versions) putObjects(ctx context.Context, org string, p *unpacker) error {
	return p.root.walk(nil, true, func(_ *layer.Path, n *node) error {
		if n.content.object == nil {
			return nil
		}
		return v.PutObject(ctx, org, *n.content.object, n.size, n.content.spooled().(io.ReaderAt))
	})
}

// unpacker reads a tar into nodes in memory, with the content of files in a spool file.
type unpacker struct {
	*proto.TarUpload
	ctx        context.Context // of the request
	in         *tarInput
	path       string // of the directory to unpack below
	spool      *os.File
	spooled    int64 // bytes
	entries    int64
	attributes int64 // bytes
	root       *node // the directory to unpack below
	explicit   map[*node]bool
	names      map[*node]int // of files with several
}

// entryError refuses a tar because of an entry.
func entryError(name, format string, args ...any) error {
	return proto.FieldErrorf("body", "has the entry %q, which %s; nothing was changed", proto.Shorten(name),
		fmt.Sprintf(format, args...))
}

// tarInput limits how much of a tar is read, and detects whether it ends with zeros.
type tarInput struct {
	from  io.Reader
	left  int64
	zeros int   // at the end of what was read, at least; exact below tarBlock
	err   error // of from, but io.EOF
}

// Read implements [io.Reader].
func (in *tarInput) Read(p []byte) (int, error) {
	if in.left <= 0 {
		in.err = proto.FieldErrorf("body",
			"is longer than a tar of as many files and bytes as the sandbox of this API key has room for; nothing was changed")
		return 0, in.err
	}
	n, err := in.from.Read(p[:min(int64(len(p)), in.left)])
	in.left -= int64(n)
	last := p[max(0, n-tarBlock):n] // so many zeros are enough to know
	in.zeros += len(last)
	if at := len(bytes.TrimRight(last, "\x00")); at > 0 {
		in.zeros = len(last) - at
	}
	if err != nil && !errors.Is(err, io.EOF) {
		in.err = err
	}
	return n, err
}

func (p *unpacker) read() error {
	p.in = &tarInput{from: bufio.NewReaderSize(p.Body, tarReadAhead), left: p.Most.Bytes + p.Most.Files*maxTarHeader +
		tarReadAhead}
	for r := tar.NewReader(p.in); ; {
		if p.ctx.Err() != nil {
			return context.Cause(p.ctx)
		}
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			if p.in.zeros < tarBlock {
				return proto.FieldErrorf("body", "is a tar without its end; nothing was changed")
			}
			// The rest is padding, and the end of a compressed body has its checksum.
			if n, err := io.CopyN(io.Discard, p.in, maxTarPadding+1); n <= maxTarPadding {
				return p.bodyError(err)
			}
			return proto.FieldErrorf("body", "has more than %d bytes after the end of its tar; nothing was changed",
				maxTarPadding)
		}
		if err != nil {
			return p.bodyError(err)
		}
		if p.entries++; p.entries > p.Most.Files {
			return p.tooLarge(h.Name)
		}
		if err := p.Proceed((&node{target: h.Linkname, xattrs: xattrs(h)}).cost() + int64(len(h.Name))); err != nil {
			return err
		}
		if err := p.add(h, r); err != nil {
			return err
		}
		if p.Entry != nil && h.Typeflag != tar.TypeXGlobalHeader {
			p.Entry(h.Name)
		}
	}
}

// bodyError returns the error for a body that could not be read as a tar.
func (p *unpacker) bodyError(err error) error {
	switch {
	case err == nil || errors.Is(err, io.EOF):
		return nil
	case p.in.err != nil:
		return p.in.err
	default:
		return proto.FieldErrorf("body", "is not a complete tar: %v; nothing was changed", err)
	}
}

func (p *unpacker) tooLarge(name string) error {
	return &proto.PathError{Path: name, Message: fmt.Sprintf(
		"exceeds what the sandbox of this API key has room for, %d bytes and %d files and directories; nothing was changed",
		p.Most.Bytes, p.Most.Files)}
}

// add adds an entry.
func (p *unpacker) add(h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil // a comment
	}
	parts, err := p.split(h.Name, h.Name)
	if err != nil {
		return err
	}
	n := &node{mode: uint32(h.Mode & layer.ModeBits), xattrs: xattrs(h)}
	n.touch(h.ModTime)
	switch {
	case h.Mode&setID != 0:
		return entryError(h.Name, "has a set-uid or set-gid bit")
	case n.sec < minTime || n.sec > maxTime:
		return entryError(h.Name, "was modified in no year from 1 to 9999")
	}
	if err := p.checkAttributes(h, n); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return p.addDir(h, parts, n)
	case tar.TypeReg, tar.TypeGNUSparse:
		if err := p.addContent(h, n, content); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if n.kind, n.target, n.mode = layer.Symlink, h.Linkname, 0o777; len(n.xattrs) > 0 {
			return entryError(h.Name, "is a symlink with extended attributes")
		}
		if err := p.checkTarget(h, len(parts)); err != nil {
			return err
		}
	case tar.TypeLink:
		if n, err = p.linked(h); err != nil {
			return err
		}
	default:
		return entryError(h.Name, "is neither a file nor a directory nor a link")
	}
	if len(parts) == 0 {
		return entryError(h.Name, "names no file")
	}
	dir, err := p.parent(h, parts)
	if err != nil {
		return err
	}
	name := parts[len(parts)-1]
	if old := dir.children[name]; old != nil && old.kind == layer.Dir {
		return entryError(h.Name, "takes the place of a directory of the tar")
	}
	dir.setChild(name, n)
	return nil
}

// split returns the components of a path in the tar. entry is the name of its entry.
func (p *unpacker) split(entry, path string) ([]string, error) {
	var parts []string
	for part := range strings.SplitSeq(path, "/") {
		switch part {
		case "", ".":
		case "..":
			return nil, entryError(entry, `has a path with ".."`)
		default:
			parts = append(parts, part)
		}
	}
	whole := strings.Join(parts, "/")
	if p.path != "" {
		whole = strings.TrimSuffix(p.path+"/"+whole, "/")
	}
	switch err := checkPath(whole); {
	case strings.HasPrefix(path, "/"):
		return nil, entryError(entry, "has an absolute path")
	case whole != "" && err != nil:
		return nil, entryError(entry, "has a path that a home cannot have: %v", err)
	}
	return parts, nil
}

// parent returns an entry's parent directory, creating it if the tar lacks it.
func (p *unpacker) parent(h *tar.Header, parts []string) (*node, error) {
	dir := p.root
	for _, name := range parts[:len(parts)-1] {
		sub := dir.children[name]
		if sub == nil {
			sub = &node{kind: layer.Dir}
			if err := p.countDir(h.Name); err != nil {
				return nil, err
			}
			dir.setChild(name, sub)
		}
		if sub.kind != layer.Dir {
			return nil, entryError(h.Name, "is below %q, which is no directory in the tar", proto.Shorten(name))
		}
		dir = sub
	}
	return dir, nil
}

// countDir counts a directory that has no entry of its own.
func (p *unpacker) countDir(entry string) error {
	if p.entries++; p.entries > p.Most.Files {
		return p.tooLarge(entry)
	}
	return p.Proceed((&node{}).cost())
}

func (p *unpacker) addDir(h *tar.Header, parts []string, n *node) error {
	n.kind = layer.Dir
	dir := p.root
	if len(parts) > 0 {
		parent, err := p.parent(h, parts)
		if err != nil {
			return err
		}
		name := parts[len(parts)-1]
		if dir = parent.children[name]; dir == nil {
			dir = n
			parent.setChild(name, n)
		}
		if dir.kind != layer.Dir {
			return entryError(h.Name, "takes the place of a file of the tar")
		}
	}
	dir.mode, dir.sec, dir.nsec, dir.xattrs = n.mode, n.sec, n.nsec, n.xattrs
	p.explicit[dir] = true
	return nil
}

// addContent spools the content of a file.
func (p *unpacker) addContent(h *tar.Header, n *node, content io.Reader) error {
	if h.Size > p.Most.Bytes-p.spooled {
		return p.tooLarge(h.Name) // includes the holes of sparse files, which are filled
	}
	at, sum, out := p.spooled, sha256.New(), &spoolWriter{file: p.spool}
	if _, err := io.CopyN(io.MultiWriter(out, sum), content, h.Size); err != nil {
		if out.err != nil {
			return fmt.Errorf("spool a tar: %w", out.err)
		}
		return p.bodyError(noEOF(err))
	}
	p.spooled += h.Size
	n.kind, n.size = layer.File, h.Size
	n.content.spooled = func() io.Reader { return io.NewSectionReader(p.spool, at, h.Size) }
	if h.Size > 0 {
		n.extents = []layer.Extent{{Len: h.Size}}
	}
	if h.Size > layer.MaxInline {
		digest := layer.Digest(sum.Sum(nil))
		n.content.object = &digest
	}
	return nil
}

// spoolWriter keeps the error of its file, to distinguish it from errors of the body.
type spoolWriter struct {
	file *os.File
	err  error
}

// Write implements [io.Writer].
func (w *spoolWriter) Write(b []byte) (int, error) {
	n, err := w.file.Write(b)
	w.err = err
	return n, err
}

// checkTarget checks that a symlink at that depth does not leave the home. Only the beginning of
// its target may have "..", since later ones could follow another symlink.
func (p *unpacker) checkTarget(h *tar.Header, depth int) error {
	target := h.Linkname
	if target == "" || len(target) > layer.MaxTarget || strings.ContainsRune(target, 0) {
		return entryError(h.Name, "is a symlink whose target does not have 1 to %d bytes without NUL", layer.MaxTarget)
	}
	outside := entryError(h.Name, "is a symlink to %q, which may be outside the home", proto.Shorten(target))
	up := depth - 1
	if p.path != "" {
		up += 1 + strings.Count(p.path, "/")
	}
	if strings.HasPrefix(target, "/") {
		rest, below := strings.CutPrefix(target, p.Home)
		if !below || rest != "" && rest[0] != '/' {
			return outside
		}
		target, up = rest, 0
	}
	down := false
	for part := range strings.SplitSeq(target, "/") {
		switch {
		case part == "" || part == ".":
		case part != "..":
			down = true
		case down || up == 0:
			return outside
		default:
			up--
		}
	}
	return nil
}

// linked returns the earlier file that a hard link names.
func (p *unpacker) linked(h *tar.Header) (*node, error) {
	parts, err := p.split(h.Name, h.Linkname)
	if err != nil {
		return nil, err
	}
	n := p.root.find(strings.Join(parts, "/"))
	if n == nil || n.kind == layer.Dir {
		return nil, entryError(h.Name, "is a hard link to %q, which is no earlier file of the tar", proto.Shorten(h.Linkname))
	}
	if p.names[n]++; p.names[n] >= layer.MaxLinks {
		return nil, entryError(h.Name, "is a hard link to a file with more than %d names", layer.MaxLinks)
	}
	n.linked = true
	return n, nil
}

const xattrPrefix = "SCHILY.xattr."

// xattrs returns an entry's extended attributes that a home can have, by name.
func xattrs(h *tar.Header) (all []layer.Xattr) {
	for _, key := range slices.Sorted(maps.Keys(h.PAXRecords)) {
		if name, ok := strings.CutPrefix(key, xattrPrefix+"user."); ok {
			name = strings.NewReplacer("%3D", "=", "%25", "%").Replace(name)
			all = append(all, layer.Xattr{Name: name, Value: []byte(h.PAXRecords[key])})
		}
	}
	slices.SortFunc(all, func(a, b layer.Xattr) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func (p *unpacker) checkAttributes(h *tar.Header, n *node) error {
	for key := range h.PAXRecords {
		if name, ok := strings.CutPrefix(key, xattrPrefix); ok && !strings.HasPrefix(name, "user.") {
			return entryError(h.Name, "has the extended attribute %q; only those in user.* can be saved", proto.Shorten(name))
		}
	}
	last := ""
	for i, x := range n.xattrs {
		if len(x.Name) > layer.MaxName-len("user.") || x.Name == "" || strings.ContainsRune(x.Name, 0) ||
			i > 0 && x.Name == last {
			return entryError(h.Name, "has an extended attribute with an invalid name")
		}
		last = x.Name
	}
	size := layer.AttributeBytes(n.xattrs)
	if size > layer.MaxXattrs {
		return entryError(h.Name, "has %d bytes of extended attributes, more than %d", size, layer.MaxXattrs)
	}
	if p.attributes += size; p.attributes > layer.MaxAttributes {
		return entryError(h.Name, "makes the extended attributes of all files take more than %d bytes", layer.MaxAttributes)
	}
	return nil
}

// addTo adds a directory of the tar to a directory of the home.
func (p *unpacker) addTo(e *edit, to, from *node) {
	for name, n := range from.children {
		if n.kind == layer.Dir {
			p.addTo(e, e.makeDir(to, name, e.now), n)
		} else {
			to.setChild(name, n)
		}
	}
	if !p.explicit[from] {
		return
	}
	to.mode, to.sec, to.nsec, to.xattrs = from.mode, from.sec, from.nsec, from.xattrs
	if to == e.root {
		to.mode |= rootMode
	}
}
