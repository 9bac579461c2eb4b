package worker

import (
	"io"

	"github.com/bullpen-run/bullpen/guest/cell"
	"github.com/bullpen-run/bullpen/guest/mask"
	"github.com/bullpen-run/bullpen/proto"
)

// displays collects what a cell shows, for the result, and publishes it. A program can forge what its
// runner prints, so that limits are enforced here, too. It is not safe for concurrent use.
type displays struct {
	events    Output
	masks     *mask.Masks
	kept      []proto.Display
	truncated bool // something is missing
}

// richOutputs returns the standard output and error of a runner with a nonce. They write what the cell
// prints to stdout and stderr, which take everything, and what it shows to d. closeBoth must be called
// when the program has ended.
func richOutputs(nonce string, stdout, stderr io.Writer, d *displays) (out, err io.Writer, closeBoth func()) {
	reader := &cell.Reader{
		Nonce: nonce,
		Text: func(fromStderr bool, piece []byte) error {
			to := stdout
			if fromStderr {
				to = stderr
			}
			_, err := to.Write(piece)
			return err
		},
		Frame: d.frame,
	}
	o, e := reader.Stdout(), reader.Stderr()
	return o, e, func() {
		_ = e.Close() // nothing waits for it any more
		_ = o.Close()
	}
}

func (d *displays) frame(f cell.Frame) {
	switch f.Type {
	case cell.TypeDisplay:
		f.Display.Mask(d.masks)
		d.add(proto.Display(*f.Display))
	case cell.TypeEnd:
		d.truncated = d.truncated || f.End.Dropped > 0
	}
}

// add adds a display, without the parts for which there is no space.
func (d *displays) add(shown proto.Display) {
	if len(d.kept) == proto.MaxDisplays {
		d.truncated = true
		return
	}
	if len(shown.Data) > proto.MaxDisplayForms {
		shown = proto.Display{Result: shown.Result, Truncated: []string{cell.TypeDisplay}}
	}
	if string(shown.Metadata) == "{}" {
		shown.Metadata = nil
	}
	if !shown.Cut(d.events.KeepDisplay) {
		d.truncated = true
		return
	}
	d.truncated = d.truncated || len(shown.Truncated) > 0
	d.kept = append(d.kept, shown)
	d.events.Display(len(d.kept)-1, &shown)
}
