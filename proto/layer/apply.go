package layer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Target is a tree of directories that [Apply] changes from one version to the next. F refers to a
// file or symlink in the tree.
type Target[F any] interface {
	// Detach removes the directory at path from the tree, which Enter attaches again as a move.
	Detach(move int, path string) error
	// Enter makes the directory at path the current one, after creating or attaching it where
	// e.Base demands that. The root has the nil path.
	Enter(at *Path, e *Entry) error
	// Leave makes the parent directory the current one.
	Leave() error
	// Remove removes a name in the current directory with everything below it, if it exists.
	Remove(name string) error
	// Create creates a file or symlink in the current directory, where nothing has its name.
	Create(at *Path, e *Entry) (F, error)
	// Link creates another name of a file or symlink in the current directory.
	Link(name string, to F) error
}

// Apply changes t, which is the previous version, into the next one. After an error t is neither.
func Apply[F any](ctx context.Context, in Source, t Target[F]) error {
	a := applier[F]{in: in, target: t}
	if err := a.run(ctx); err != nil {
		path := "/" + a.at.String()
		if len(path) > 200 {
			path = "…" + path[len(path)-200:]
		}
		return fmt.Errorf("in %q: %w", path, err)
	}
	return nil
}

type applier[F any] struct {
	in     Source
	target Target[F]
	at     *Path // the current directory
	depth  int   // of the current directory; 0 before the root
	groups []F
}

func (a *applier[F]) run(ctx context.Context) error {
	if err := a.detachMoves(); err != nil {
		return err
	}
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		e, err := a.in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := a.apply(e); err != nil {
			return fmt.Errorf("%.300q: %w", e.Name, err)
		}
	}
}

// detachMoves detaches the deepest directories first, so that no move is inside another one.
func (a *applier[F]) detachMoves() error {
	moves := a.in.Moves()
	order := make([]int, len(moves))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int {
		return cmp.Compare(strings.Count(moves[j], "/"), strings.Count(moves[i], "/"))
	})
	for _, i := range order {
		if err := a.target.Detach(i, moves[i]); err != nil {
			return fmt.Errorf("move %.300q: %w", moves[i], err)
		}
	}
	return nil
}

func (a *applier[F]) apply(e *Entry) error {
	if e.Kind == Leave {
		a.at, a.depth = a.at.Parent(), a.depth-1
		return a.target.Leave()
	}
	var at *Path
	if a.depth > 0 {
		at = a.at.Child(e.Name)
		if e.Kind != Dir || e.Base != Merge {
			if err := a.target.Remove(e.Name); err != nil {
				return err
			}
		}
	}
	switch e.Kind {
	case Dir:
		if err := a.target.Enter(at, e); err != nil {
			return err
		}
		a.at, a.depth = at, a.depth+1
	case File, Symlink:
		f, err := a.target.Create(at, e)
		if err != nil {
			return err
		}
		if e.Group > 0 {
			a.groups = append(a.groups, f)
		}
	case Link:
		return a.target.Link(e.Name, a.groups[e.Group-1])
	case Delete, Leave:
	}
	return nil
}

// Path is a path relative to a home. Its ancestors are shared, so that the paths of many deeply
// nested files take little memory. The root is nil.
type Path struct {
	parent *Path
	name   string
}

// Child returns the path of name in p. Name may itself have several components.
func (p *Path) Child(name string) *Path { return &Path{p, name} }

// Parent returns the directory that contains p. The parent of the root is the root.
func (p *Path) Parent() *Path {
	if p == nil {
		return nil
	}
	return p.parent
}

// Name returns the last element of p.
func (p *Path) Name() string { return p.name }

// String returns the components of p, separated by slashes.
func (p *Path) String() string {
	var names []string
	for ; p != nil; p = p.parent {
		names = append(names, p.name)
	}
	slices.Reverse(names)
	return strings.Join(names, "/")
}
