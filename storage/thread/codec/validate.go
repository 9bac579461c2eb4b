package codec

import (
	"errors"
	"fmt"
	"strings"

	"github.com/bullpen-run/bullpen/proto/layer"
)

// validator checks a layer for both Writer and Index, so that nothing is stored that could not be
// restored.
type validator struct {
	left       layer.Limits
	limits     layer.Limits
	attributes int64    // bytes so far
	moves      []bool   // which moves have been used
	stack      []string // the last name in each open directory
	groups     []int    // number of names of each group
	begun      bool
}

func newValidator(limits layer.Limits, moves []string) (*validator, error) {
	v := &validator{left: limits, limits: limits, moves: make([]bool, len(moves))}
	seen := make(map[string]bool, len(moves))
	size := 0
	for _, path := range moves {
		if size += len(path); size > layer.MaxMoves {
			return nil, fmt.Errorf("the paths of moved directories take more than %d bytes: %w", layer.MaxMoves, layer.ErrLimit)
		}
		if err := v.countEntry(); err != nil {
			return nil, err
		}
		if err := checkMove(path); err != nil {
			return nil, err
		}
		if seen[path] {
			return nil, fmt.Errorf("%q is moved twice", path)
		}
		seen[path] = true
	}
	return v, nil
}

func checkMove(path string) error {
	depth := 1
	for name := range strings.SplitSeq(path, "/") {
		if depth++; !layer.ValidName(name) || depth > layer.MaxDepth {
			return fmt.Errorf("invalid path of a move %.300q", path)
		}
	}
	return nil
}

func (v *validator) countEntry() error {
	if v.left.Entries--; v.left.Entries < 0 {
		return fmt.Errorf("more than %d files, directories and deletions: %w", v.limits.Entries, layer.ErrLimit)
	}
	return nil
}

// complete reports whether the root has been left.
func (v *validator) complete() bool { return v.begun && len(v.stack) == 0 }

// check validates the next entry.
func (v *validator) check(e *layer.Entry) error {
	if v.complete() {
		return errors.New("an entry after the end")
	}
	if e.Kind == layer.Leave {
		return v.leave()
	}
	if err := v.countEntry(); err != nil {
		return err
	}
	if err := v.checkName(e); err != nil {
		return err
	}
	if v.attributes += layer.AttributeBytes(e.Xattrs); v.attributes > layer.MaxAttributes {
		return layer.ErrAttributes
	}
	switch e.Kind {
	case layer.Dir:
		return errors.Join(v.enter(e), checkMetadata(e))
	case layer.File:
		return errors.Join(checkMetadata(e), v.checkContent(e), v.checkGroup(e))
	case layer.Symlink:
		if e.Target == "" || len(e.Target) > layer.MaxTarget || strings.ContainsRune(e.Target, 0) {
			return fmt.Errorf("the target of symlink %q has %d bytes, not 1 to %d without NUL", e.Name, len(e.Target),
				layer.MaxTarget)
		}
		return errors.Join(checkMetadata(e), v.checkGroup(e))
	case layer.Link:
		return v.checkGroup(e)
	case layer.Delete:
		return nil
	}
	return fmt.Errorf("unknown kind of entry %q", e.Kind)
}

func (v *validator) leave() error {
	if !v.begun {
		return errors.New("the root is missing")
	}
	if v.stack = v.stack[:len(v.stack)-1]; len(v.stack) > 0 {
		return nil
	}
	for _, used := range v.moves {
		if !used {
			return errors.New("a move has no destination")
		}
	}
	return nil
}

func (v *validator) checkName(e *layer.Entry) error {
	if !v.begun {
		v.begun = true
		if e.Kind != layer.Dir || e.Name != "" || e.Base == layer.Moved || e.Base == layer.Fresh && len(v.moves) > 0 {
			return errors.New("the first entry is not a root")
		}
		return nil
	}
	last := &v.stack[len(v.stack)-1]
	if !layer.ValidName(e.Name) {
		return fmt.Errorf("invalid name %.300q", e.Name)
	}
	if e.Name <= *last {
		return fmt.Errorf("name %q follows %q", e.Name, *last)
	}
	*last = e.Name
	return nil
}

func (v *validator) enter(e *layer.Entry) error {
	if len(v.stack) == layer.MaxDepth {
		return layer.ErrDepth
	}
	v.stack = append(v.stack, "")
	if e.Base > layer.Moved {
		return fmt.Errorf("directory %q has the unknown base %d", e.Name, e.Base)
	}
	if e.Base == layer.Moved {
		if e.Move < 0 || e.Move >= len(v.moves) || v.moves[e.Move] {
			return fmt.Errorf("directory %q is move %d, which is unknown or used", e.Name, e.Move)
		}
		v.moves[e.Move] = true
	}
	return nil
}

func (v *validator) checkGroup(e *layer.Entry) error {
	switch {
	case e.Kind != layer.Link && e.Group == 0:
		return nil
	case e.Kind != layer.Link && e.Group == len(v.groups)+1:
		v.groups = append(v.groups, 0)
	case e.Kind != layer.Link || e.Group < 1 || e.Group > len(v.groups):
		return fmt.Errorf("%q has group %d of %d", e.Name, e.Group, len(v.groups))
	}
	names := &v.groups[e.Group-1]
	if *names++; *names > layer.MaxLinks {
		return fmt.Errorf("%q is a file with more than %d names", e.Name, layer.MaxLinks)
	}
	return nil
}

func (v *validator) checkContent(e *layer.Entry) error {
	if e.Size < 0 || e.Size > layer.MaxFileSize {
		return fmt.Errorf("file %q has a size of %d bytes, more than %d", e.Name, e.Size, int64(layer.MaxFileSize))
	}
	if len(e.Extents) > layer.MaxExtents {
		return fmt.Errorf("file %q has %d extents, more than %d", e.Name, len(e.Extents), layer.MaxExtents)
	}
	end := int64(-1)
	for _, x := range e.Extents {
		if x.Offset <= end || x.Len <= 0 || x.Len > e.Size || x.Offset > e.Size-x.Len {
			return fmt.Errorf("the extents of file %q are out of order or beyond its end", e.Name)
		}
		end = x.Offset + x.Len
	}
	if v.left.Bytes -= e.Data(); v.left.Bytes < 0 {
		return fmt.Errorf("more than %d bytes in files: %w", v.limits.Bytes, layer.ErrLimit)
	}
	return nil
}

func checkMetadata(e *layer.Entry) error {
	if e.Mode&^layer.ModeBits != 0 || e.Nsec >= 1e9 {
		return fmt.Errorf("%q has mode %#o and nanoseconds %d", e.Name, e.Mode, e.Nsec)
	}
	last := ""
	for _, x := range e.Xattrs {
		if x.Name <= last || len(x.Name) > layer.MaxName-len("user.") || strings.ContainsRune(x.Name, 0) {
			return fmt.Errorf("attribute %.300q of %q is out of order or has an invalid name", x.Name, e.Name)
		}
		last = x.Name
	}
	if size := layer.AttributeBytes(e.Xattrs); size > layer.MaxXattrs {
		return fmt.Errorf("the attributes of %q take %d bytes, more than %d", e.Name, size, layer.MaxXattrs)
	}
	return nil
}
