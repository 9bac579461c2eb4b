package up

import (
	"bufio"
	"fmt"
	"io"
	"sync"
)

// maxLine is the length in bytes at which a line is split for printing.
const maxLine = 64 << 10

// console prints the lines of all processes, each with the name of its process.
type console struct {
	w     io.Writer
	width int // of names

	mu sync.Mutex
}

// copy prints the lines of r, until it ends.
func (c *console) copy(name string, r io.Reader) {
	lines := bufio.NewReaderSize(r, maxLine)
	for {
		line, _, err := lines.ReadLine()
		if err != nil {
			return
		}
		c.printf(name, "%s", line)
	}
}

// printf prints a line.
func (c *console) printf(name, format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, _ = fmt.Fprintf(c.w, "%-*s | %s\n", c.width, name, fmt.Sprintf(format, args...))
}
