package worker

import (
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

func newCollector(limit int, next Stream) *collector {
	return &collector{limit: limit, kept: new(strings.Builder), next: next}
}

// collector keeps the beginning of an output for the result and passes all of it on. One goroutine
// writes it; it is read after the program has ended.
type collector struct {
	limit int // bytes
	kept  *strings.Builder
	over  bool
	next  Stream
}

func (c *collector) Write(p []byte) (int, error) {
	keep := p[:min(len(p), c.limit-c.kept.Len())]
	keep = keep[:c.next.Keep(len(keep))]
	c.over = c.over || len(keep) < len(p)
	c.grow(len(keep))
	c.kept.Write(keep)
	return c.next.Write(p)
}

// grow doubles the capacity when it is used up, up to the limit. A plain builder may allocate twice
// the limit, or copy many MiB many times.
func (c *collector) grow(n int) {
	if c.kept.Cap()-c.kept.Len() >= n {
		return
	}
	larger := new(strings.Builder)
	larger.Grow(min(max(2*c.kept.Cap(), c.kept.Len()+n), c.limit))
	larger.WriteString(c.kept.String())
	c.kept = larger
}

// text returns the kept output, cut between characters if there was more.
func (c *collector) text() (s string, truncated bool) {
	s = c.kept.String()
	if c.over {
		s = s[:proto.CutUTF8(s)]
	}
	return s, c.over
}
