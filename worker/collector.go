package worker

import (
	"io"

	"github.com/bullpen-run/bullpen/proto"
)

// collector keeps the beginning of an output for the result, and passes all of it on. It is written by one goroutine and read after
// the program has ended.
type collector struct {
	limit int // bytes
	kept  []byte
	over  bool
	next  io.Writer
}

func (c *collector) Write(p []byte) (int, error) {
	if room := c.limit - len(c.kept); room < len(p) {
		c.over = true
		c.kept = append(c.kept, p[:room]...)
	} else {
		c.kept = append(c.kept, p...)
	}
	return c.next.Write(p)
}

// text gives what was kept, cut between characters if there was more.
func (c *collector) text() (s string, truncated bool) {
	if c.over {
		c.kept = c.kept[:proto.CutUTF8(c.kept)]
	}
	return string(c.kept), c.over
}
