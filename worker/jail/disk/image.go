package disk

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Parameters of the file system. All defaults of mke2fs and mke2fs.conf are overridden, since the
// image is patched afterwards.
const (
	blockSize      = 4096
	inodeSize      = 256
	blocksPerGroup = 8 * blockSize
	ownInodes      = 11 // the reserved ones and lost+found, which is removed
	rootOnly       = 10 // those of ownInodes in use without lost+found
	nobody         = 1<<16 - 1
	// No checksums, so that blocks can be patched; no journal, since nothing outlives the process.
	features = "none,dir_index,dir_nlink,ext_attr,extent,extra_isize,filetype,flex_bg,huge_file,large_file,sparse_super"
)

// Limits of Size.
const (
	MaxBytes  = 1 << 40
	MaxInodes = 1 << 26
)

// template is a formatted, empty file system: its size and its non-zero blocks.
type template struct {
	bytes  int64
	blocks map[int64][]byte
	order  []int64
}

// format creates the template of a size.
func format(ctx context.Context, dir string, size Size) (*template, error) {
	image, err := tempFile(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = image.Close() }()
	// More than enough. limit removes the excess.
	blocks, inodes := size.blocks(), size.Inodes+ownInodes
	total := max(blocks+blocks/16+inodes/8+16384, 2*inodes)
	if err := image.Truncate(total * blockSize); err != nil {
		return nil, fmt.Errorf("size the image: %w", err)
	}
	if err := makeFS(ctx, image, inodes); err != nil {
		return nil, err
	}
	free, err := removeLostFound(image)
	if err != nil {
		return nil, err
	}
	t := &template{bytes: total * blockSize}
	if t.blocks, err = readBlocks(image); err != nil {
		return nil, fmt.Errorf("read the image: %w", err)
	}
	if err := t.limit(free, blocks, size.Inodes); err != nil {
		return nil, err
	}
	t.order = slices.Sorted(maps.Keys(t.blocks))
	return t, nil
}

// tempFile creates a file without a name, which disappears when it is closed.
func tempFile(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create an image: %w: the directory must be on ext4, XFS, Btrfs or another file system "+
			"with O_TMPFILE", err)
	}
	return f, nil
}

// makeFS runs mke2fs on the image.
func makeFS(ctx context.Context, image *os.File, inodes int64) error {
	program, err := findMke2fs()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, program, "-q", "-F", "-b", strconv.Itoa(blockSize), "-I",
		strconv.Itoa(inodeSize), "-m", "0",
		"-N", strconv.FormatInt(inodes, 10), "-U", "clear", "-O", features, "/proc/self/fd/3")
	cmd.Env = []string{"MKE2FS_CONFIG=/dev/null"}
	cmd.ExtraFiles = []*os.File{image}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", program, err, strings.Join(strings.Fields(string(out)), " "))
	}
	return nil
}

// findMke2fs also searches root's usual PATH.
func findMke2fs() (string, error) {
	for _, name := range []string{"mke2fs", "/usr/sbin/mke2fs", "/sbin/mke2fs"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("mke2fs not found: install e2fsprogs, which sandboxes with disk volumes need")
}

// removeLostFound removes lost+found and returns the free space.
func removeLostFound(image *os.File) (unix.Statfs_t, error) {
	var free unix.Statfs_t
	m, err := mount(image, 0)
	if err != nil {
		return free, err
	}
	err = unix.Unlinkat(int(m.Fd()), "lost+found", unix.AT_REMOVEDIR)
	if err == nil {
		err = unix.Fstatfs(int(m.Fd()), &free)
	}
	if err == nil {
		err = freeze(m)
	}
	return free, errors.Join(err, m.Close())
}

// readBlocks returns the non-zero blocks.
func readBlocks(image *os.File) (map[int64][]byte, error) {
	blocks := map[int64][]byte{}
	zero := string(make([]byte, blockSize))
	for end := int64(0); ; {
		start, err := image.Seek(end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return blocks, nil
		}
		if err == nil {
			end, err = image.Seek(start, unix.SEEK_HOLE)
		}
		if err != nil {
			return nil, err
		}
		for at := start &^ (blockSize - 1); at < end; at += blockSize {
			b := make([]byte, blockSize)
			if _, err := image.ReadAt(b, at); err != nil && !errors.Is(err, io.EOF) {
				return nil, err
			}
			if string(b) != zero {
				blocks[at/blockSize] = b
			}
		}
	}
}

// Offsets in the superblock and in a group descriptor. Descriptors have 32 bytes each and begin at
// block 1.
const (
	superAt           = 1024
	superReserved     = superAt + 0x08
	superFreeInodes   = superAt + 0x10
	superInodeGroup   = superAt + 0x28
	superMagic        = superAt + 0x38
	superReservedUID  = superAt + 0x50
	superReservedGID  = superAt + 0x52
	magic             = 0xef53
	descriptorSize    = 32
	groupInodeBitmap  = 0x04
	groupFreeInodes   = 0x0e
	descriptorsInside = blockSize / descriptorSize
)

// limit removes what the file system has in excess of the size: it reserves blocks and marks inodes
// as used. Blocks are not reserved for root: overlayfs writes with root's uid but without
// CAP_SYS_RESOURCE.
func (t *template) limit(free unix.Statfs_t, blocks, inodes int64) error {
	super := t.blocks[0]
	if super == nil || binary.LittleEndian.Uint16(super[superMagic:]) != magic {
		return errors.New("mke2fs did not create ext4")
	}
	tooMany, excess := int64(free.Bavail)-blocks, int64(free.Ffree)-inodes
	if tooMany < 0 || excess < 0 {
		return fmt.Errorf("mke2fs created %d blocks and %d inodes, fewer than the %d and %d needed", free.Bavail, free.Ffree,
			blocks, inodes)
	}
	binary.LittleEndian.PutUint32(super[superReserved:], uint32(tooMany))
	binary.LittleEndian.PutUint16(super[superReservedUID:], nobody)
	binary.LittleEndian.PutUint16(super[superReservedGID:], nobody)
	binary.LittleEndian.PutUint32(super[superFreeInodes:], uint32(inodes))
	perGroup := int64(binary.LittleEndian.Uint32(super[superInodeGroup:]))
	for group := int64(free.Files)/perGroup - 1; excess > 0 && group >= 0; group-- {
		descriptors := t.blocks[1+group/descriptorsInside]
		d := descriptors[group%descriptorsInside*descriptorSize:][:descriptorSize]
		left := int64(binary.LittleEndian.Uint16(d[groupFreeInodes:]))
		taken := min(left, excess)
		bitmap := t.block(int64(binary.LittleEndian.Uint32(d[groupInodeBitmap:])))
		for bit, n := perGroup-1, taken; n > 0; bit-- {
			if mask := byte(1) << (bit % 8); bitmap[bit/8]&mask == 0 {
				bitmap[bit/8] |= mask
				n--
			}
		}
		binary.LittleEndian.PutUint16(d[groupFreeInodes:], uint16(left-taken))
		excess -= taken
	}
	return nil
}

func (t *template) block(n int64) []byte {
	if t.blocks[n] == nil {
		t.blocks[n] = make([]byte, blockSize)
	}
	return t.blocks[n]
}

// image creates a file with the file system.
func (t *template) image(dir string) (*os.File, error) {
	f, err := tempFile(dir)
	if err != nil {
		return nil, err
	}
	err = f.Truncate(t.bytes)
	for _, n := range t.order {
		if err == nil {
			_, err = f.WriteAt(t.blocks[n], n*blockSize)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("write an image: %w", err), f.Close())
	}
	return f, nil
}
