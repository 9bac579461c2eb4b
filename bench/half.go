package main

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/bullpen-run/bullpen/client/load"
	"github.com/bullpen-run/bullpen/proto"
)

const (
	halfCallers = 8 // half of the rate that this many callers reach is used
	halfSides   = 5 // multiple of the time for one side of a cell
	// Requests in this time do not count, while the pool adapts to the request rate.
	halfBefore = time.Second
)

// halfLoad is the latency of requests at half of the rate that callers reach in a closed loop.
type halfLoad struct {
	Language    proto.Language `json:"language"`
	Unavailable string         `json:"unavailable,omitempty"`
	Asked       float64        `json:"asked_per_second"`
	Latency     *summary       `json:"latency,omitempty"` // since each was due; its rate is the rate of responses
	Ratio       float64        `json:"p99_to_p50"`
}

// measureHalf sends requests at a fixed rate, for d per language. The rate is half of that in the
// cells.
func measureHalf(ctx context.Context, a *api, cells []cell, d time.Duration, progress io.Writer) ([]halfLoad, error) {
	host, err := ownPIDSpace()
	if err != nil {
		return nil, err
	}
	var all []halfLoad
	for _, l := range languages {
		k := printing(l.name)
		c := cellOf(cells, k.language, halfCallers)
		if c == nil || c.Bullpen.Runs == 0 {
			all = append(all, halfLoad{
				Language: k.language, Unavailable: fmt.Sprintf("the rate of %d callers is not known", halfCallers),
			})
			continue
		}
		h := halfLoad{Language: k.language, Asked: c.Bullpen.PerSecond / 2}
		_, _ = fmt.Fprintf(progress, "%s, %.0f/s, half of what %d callers reached …\n", k.language, h.Asked, halfCallers)
		var nonce atomic.Int64
		nonce.Store(firstNonce())
		run := func(ctx context.Context) (sample, error) { return k.inJail(ctx, a, nonce.Add(1), host) }
		var before, s series
		before.open(ctx, load.Steady(h.Asked, halfBefore), run)
		s.open(ctx, load.Steady(h.Asked, d), run)
		s.elapsed = max(s.elapsed, d) // the next one would be due then
		h.Latency = s.summary()
		h.Ratio = ratio(h.Latency.P99, h.Latency.P50)
		all = append(all, h)
	}
	return all, nil
}

// printHalf prints the results.
func printHalf(line func(string, ...any), all []halfLoad) {
	line("")
	line("at half of the rate of %d callers\tasked\tgot\tp50\tp99\tp99.9\tof\tp99 to p50", halfCallers)
	for _, h := range all {
		if h.Unavailable != "" {
			line("%s\tunavailable: %s", h.Language, h.Unavailable)
			continue
		}
		s := h.Latency
		line("%s\t%.1f/s\t%.1f/s\t%.2f ms\t%.2f ms\t%.2f ms\t%d\t%.2f", h.Language, h.Asked, s.PerSecond, s.P50, s.P99,
			s.P999, s.Runs, h.Ratio)
		if s.Errors > 0 {
			line("%s: %d runs failed, the first: %s", h.Language, s.Errors, s.FirstError)
		}
	}
}

// target returns the target figure.
func (h halfLoad) target() figure {
	f := atMost(fmt.Sprintf("%s at half of the rate of %d callers, p99", h.Language, halfCallers),
		targetHalfRatio, "of p50")
	if h.Unavailable != "" {
		return f.unknown(h.Unavailable)
	}
	s := h.Latency
	if s.Runs == 0 {
		return f.none(s)
	}
	note := fmt.Sprintf("p50 %.1f ms, p99 %.1f ms, p99.9 %.1f ms of %d; %.1f/s of %.1f/s", s.P50, s.P99, s.P999, s.Runs,
		s.PerSecond, h.Asked)
	return f.is(h.Ratio, h.Ratio <= targetHalfRatio && s.Errors == 0, withErrors(note, s))
}
