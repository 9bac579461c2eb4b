package worker

import (
	"io"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

func newCollector(limit int, next io.Writer) *collector {
	return &collector{limit: limit, kept: new(strings.Builder), next: next}
}

// collector keeps the beginning of an output for the result, and passes all of it on. It is written by one goroutine and read after
// the program has ended.
type collector struct {
	limit int // bytes
	kept  *strings.Builder
	over  bool
	next  io.Writer
}

func (c *collector) Write(p []byte) (int, error) {
	keep := p
	if room := c.limit - c.kept.Len(); room < len(p) {
		c.over = true
		keep = p[:room]
	}
	c.makeRoom(len(keep))
	c.kept.Write(keep)
	return c.next.Write(p)
}

// makeRoom doubles the room for output when it is used up, but makes no more than the limit: a builder by itself may make twice as much,
// or copy output of many MiB many times.
func (c *collector) makeRoom(n int) {
	if c.kept.Cap()-c.kept.Len() >= n {
		return
	}
	larger := new(strings.Builder)
	larger.Grow(min(max(2*c.kept.Cap(), c.kept.Len()+n), c.limit))
	larger.WriteString(c.kept.String())
	c.kept = larger
}

// text gives what was kept, cut between characters if there was more.
func (c *collector) text() (s string, truncated bool) {
	s = c.kept.String()
	if c.over {
		s = s[:proto.CutUTF8(s)]
	}
	return s, c.over
}
