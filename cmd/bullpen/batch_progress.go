package main

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// progressEvery is the time between two lines of progress where no terminal is.
	progressEvery = 10 * time.Second
	barWidth      = 30 // with the text it fits into 80 columns
)

// progress shows how far a batch has come: a bar on a terminal, and otherwise a line now and then.
type progress struct {
	streams
	id     string
	quiet  bool
	bars   *mpb.Progress // nil where no terminal is
	bar    *mpb.Bar
	text   atomic.Value // string, shown behind the bar
	at     time.Time    // of the last line
	status proto.BatchStatus
}

func newProgress(s streams, id string, quiet bool) *progress {
	p := &progress{streams: s, id: id, quiet: quiet}
	if !quiet && s.terminal {
		p.bars = mpb.New(mpb.WithOutput(s.err), mpb.WithWidth(barWidth))
	}
	return p
}

// show shows the state of the batch.
func (p *progress) show(b *api.Batch, now time.Time) {
	switch {
	case p.quiet:
	case p.bars != nil:
		text := describe(b)
		if b.Status != proto.BatchRunning {
			text += fmt.Sprintf(" (%s)", b.Status)
		}
		p.text.Store(text)
		if p.bar == nil {
			p.bar = p.bars.AddBar(int64(b.Counts.Total), mpb.BarRemoveOnComplete(),
				mpb.PrependDecorators(decor.Percentage(decor.WC{W: 5})),
				mpb.AppendDecorators(decor.Any(func(decor.Statistics) string { return p.text.Load().(string) })))
		}
		p.bar.SetCurrent(int64(b.Counts.Ended()))
	case b.CompletedAt == nil && (b.Status != p.status || now.Sub(p.at) >= progressEvery):
		p.errorf("%s %s: %s", p.id, b.Status, describe(b))
		p.at, p.status = now, b.Status
	}
}

// close removes the bar.
func (p *progress) close() {
	if p.bar != nil {
		p.bar.Abort(true)
	}
	if p.bars != nil {
		p.bars.Wait()
	}
}

// describe describes the state of a batch in one line.
func describe(b *api.Batch) string {
	text := fmt.Sprintf("%d of %d done", b.Counts.Ended(), b.Counts.Total)
	if b.Counts.Failed > 0 {
		text += fmt.Sprintf(", %d failed", b.Counts.Failed)
	}
	if b.Counts.Cancelled > 0 {
		text += fmt.Sprintf(", %d cancelled", b.Counts.Cancelled)
	}
	if b.Rate > 0 {
		text += ", " + formatRate(b.Rate)
	}
	if b.TimeLeft != nil {
		text += fmt.Sprintf(", %s left", time.Duration(*b.TimeLeft)*time.Second)
	}
	if b.WaitingFor != nil {
		text += ", " + b.WaitingFor.Message
	}
	return text
}

func formatRate(perSecond float64) string { return fmt.Sprintf("%.3g/s", perSecond) }
