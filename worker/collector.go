package worker

import (
	"io"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// collector keeps the beginning of an output for the result, and passes all of it on. It is written by one goroutine and read after
// the program has ended.
type collector struct {
	limit int // bytes
	kept  strings.Builder
	over  bool
	next  io.Writer
}

func (c *collector) Write(p []byte) (int, error) {
	keep := p
	if room := c.limit - c.kept.Len(); room < len(p) {
		c.over = true
		keep = p[:room]
	}
	c.kept.Write(keep)
	return c.next.Write(p)
}

// text gives what was kept, cut between characters if there was more.
func (c *collector) text() (s string, truncated bool) {
	s = c.kept.String()
	if c.over {
		s = s[:proto.CutUTF8(s)]
	}
	return s, c.over
}
