package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// longestBlock is the longest time that one side runs before the other. blocksPerCell is the least
// number of blocks of each side.
const (
	longestBlock  = time.Second
	blocksPerCell = 2
)

// callers are the measured numbers of concurrent callers.
var callers = []int{1, 2, 8, 32}

// cell compares the two sides for one language and number of callers.
type cell struct {
	Language    proto.Language `json:"language"`
	Callers     int            `json:"callers"`
	Unavailable string         `json:"unavailable,omitempty"` // why it was not measured
	Bare        *summary       `json:"bare,omitempty"`
	Bullpen     *summary       `json:"bullpen,omitempty"`
	Ratio       *ratios        `json:"ratio,omitempty"`

	samples []sample // bullpen's samples
}

// ratios are bullpen's figures divided by the bare interpreter's.
type ratios struct {
	P50       float64 `json:"p50"`
	P99       float64 `json:"p99"`
	PerSecond float64 `json:"runs_per_second"`
}

// cellOf returns the cell of a language and number of callers, or nil if it was not measured.
func cellOf(cells []cell, l proto.Language, callers int) *cell {
	for i, c := range cells {
		if c.Language == l && c.Callers == callers && c.Unavailable == "" {
			return &cells[i]
		}
	}
	return nil
}

// compare measures all cells.
func compare(
	ctx context.Context, a *api, programs []program, missing map[proto.Language]string, d time.Duration,
	progress io.Writer,
) []cell {
	var cells []cell
	found := map[proto.Language]program{}
	for _, p := range programs {
		// The first run also shows whether the server supports the language.
		if result, _, err := a.execute(ctx, p.language, p.code, programTimeout); err == nil && result.ErrorMessage != nil {
			missing[p.language] = "the server cannot run it: " + *result.ErrorMessage
			continue
		}
		found[p.language] = p
	}
	for _, l := range languages {
		p, ok := found[l.name]
		if !ok {
			cells = append(cells, cell{Language: l.name, Unavailable: missing[l.name]})
			continue
		}
		for _, n := range callers {
			if ctx.Err() != nil {
				return cells
			}
			_, _ = fmt.Fprintf(progress, "%s with %d callers …\n", l.name, n)
			cells = append(cells, measureCell(ctx, a, p, n, d))
		}
	}
	return cells
}

func measureCell(ctx context.Context, a *api, p program, callers int, d time.Duration) cell {
	bare, bullpen := &side{run: p.bare}, &side{run: p.inline(a)}
	for _, s := range []*side{bare, bullpen} {
		var warm series
		for range callers {
			warm.once(ctx, s.run)
		}
	}
	alternate(ctx, d, min(longestBlock, d/blocksPerCell), callers, bare, bullpen)
	c := cell{
		Language: p.language, Callers: callers, Bare: bare.summary(), Bullpen: bullpen.summary(), samples: bullpen.samples,
	}
	c.Ratio = &ratios{
		P50: ratio(c.Bullpen.P50, c.Bare.P50), P99: ratio(c.Bullpen.P99, c.Bare.P99),
		PerSecond: ratio(c.Bullpen.PerSecond, c.Bare.PerSecond),
	}
	return c
}
