package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// firstLine compares how long the first line of output takes. It must arrive before the program
// ends.
type firstLine struct {
	Bare    *summary `json:"bare"`
	Bullpen *summary `json:"bullpen"`
}

// measureFirstLine runs `print(1)` and reads its stream of events.
func measureFirstLine(ctx context.Context, a *api, p program, d time.Duration) *firstLine {
	var bare, bullpen series
	for spent := time.Duration(0); spent < d && ctx.Err() == nil; {
		began := time.Now()
		bare.once(ctx, p.bareFirstLine)
		bullpen.once(ctx, p.streamFirstLine(a))
		spent += time.Since(began)
	}
	return &firstLine{bare.summary(), bullpen.summary()}
}

func (p *program) bareFirstLine(ctx context.Context) (sample, error) {
	began := time.Now()
	cmd := p.command(ctx)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return sample{}, fmt.Errorf("run the bare %s: %w", p.language, err)
	}
	line := make([]byte, len(p.output))
	_, err = io.ReadFull(out, line)
	took := time.Since(began)
	if err := errors.Join(err, cmd.Wait()); err != nil {
		return sample{}, fmt.Errorf("run the bare %s: %w", p.language, err)
	}
	return sample{took: took}, p.check(string(line))
}

func (p *program) streamFirstLine(a *api) runner {
	const capacity = 2 * readPiece
	return func(ctx context.Context) (sample, error) {
		s, err := a.stream(ctx, p.language, p.code, capacity)
		if err != nil {
			return sample{}, err
		}
		e, err := s.decode()
		if err != nil {
			return sample{}, err
		}
		return sample{took: s.arrived(e.firstEnd)}, p.check(string(e.output))
	}
}

// events is the decoded content of a stream.
type events struct {
	output            []byte
	firstEnd, lastEnd int // offsets of the ends of the first and last output event
	outputs           int
	result            *proto.Result
}

// decode checks that the events are complete and in order.
func (s *streamed) decode() (*events, error) {
	e := new(events)
	end, seq := 0, int64(0)
	for line := range bytes.Lines(s.body) {
		end += len(line)
		var event struct {
			Type   proto.EventType `json:"type"`
			Seq    int64           `json:"seq"`
			Data   string          `json:"data"`
			Result *proto.Result   `json:"result"`
		}
		if err := json.Unmarshal(line, &event); err != nil {
			return nil, fmt.Errorf("an event after number %d is not understood: %w", seq, err)
		}
		if event.Type == proto.EventKeepalive {
			continue
		}
		if event.Seq != seq+1 {
			return nil, fmt.Errorf("event %d follows event %d: events were lost", event.Seq, seq)
		}
		seq = event.Seq
		switch event.Type {
		case proto.EventOutput:
			e.output = append(e.output, event.Data...)
			e.outputs++
			e.lastEnd = end
			if e.firstEnd == 0 {
				e.firstEnd = end
			}
		case proto.EventResult:
			e.result = event.Result
		}
	}
	switch {
	case e.result == nil:
		return nil, errors.New("the stream ended without a result")
	case e.result.ErrorMessage != nil:
		return nil, errors.New(*e.result.ErrorMessage)
	case e.result.ExitCode != 0:
		return nil, fmt.Errorf("exit code %d: %s", e.result.ExitCode, e.result.Stderr)
	}
	return e, nil
}

// The output of each bulk program.
const (
	bulkLines = 100_000
	bulkLine  = 100 // bytes, including the newline
	bulkBytes = bulkLines * bulkLine
	// bulkRoom fits the events and the result, which repeats the output.
	bulkRoom = 4 * bulkBytes
)

// Both print numbers from 1, so that every line differs. The python program itself enables line
// buffering, so that the bare interpreter does it too.
var bulkPrograms = []struct {
	name     string
	language proto.Language
	code     string
}{
	{"python, print in a loop", proto.Python, fmt.Sprintf(`import sys
sys.stdout.reconfigure(line_buffering=True)
for i in range(1, %d):
    print(f"{i:0%d}")
`, bulkLines+1, bulkLine-1)},
	{"bash, seq", proto.Bash, fmt.Sprintf("seq -f '%%0%d.0f' 1 %d\n", bulkLine-1, bulkLines)},
}

func bulkOutput() []byte {
	want := make([]byte, 0, bulkBytes)
	for i := range bulkLines {
		want = fmt.Appendf(want, "%0*d\n", bulkLine-1, i+1)
	}
	return want
}

// throughput is the speed of output. A run counts only if nothing of its output was lost.
type throughput struct {
	Program     string   `json:"program"`
	Bytes       int      `json:"bytes"`
	SHA256      string   `json:"sha256"`
	Bare        *summary `json:"bare"`    // until all output was read
	Bullpen     *summary `json:"bullpen"` // until the last line arrived, including the start of the program
	Result      *summary `json:"result"`  // until the result arrived, which repeats the output
	BareMB      float64  `json:"bare_mb_per_second"`
	BullpenMB   float64  `json:"bullpen_mb_per_second"`
	RSSBefore   float64  `json:"rss_before_mb,omitempty"` // the server's
	RSSPeak     float64  `json:"rss_peak_mb,omitempty"`   // during streaming
	Unavailable string   `json:"unavailable,omitempty"`
}

// measureThroughput runs each bulk program several times, alternating between bare and in a jail.
func measureThroughput(ctx context.Context, t *target, dir string, runs int) ([]throughput, error) {
	want := bulkOutput()
	sum := sha256.Sum256(want)
	var all []throughput
	for i, b := range bulkPrograms {
		p, err := newProgram(filepath.Join(dir, fmt.Sprintf("bulk-%d", i)), b.language, b.code)
		if err != nil {
			return all, err
		}
		p.output = string(want)
		tp := throughput{Program: b.name, Bytes: len(want), SHA256: hex.EncodeToString(sum[:])}
		var bare, bullpen series
		var results []float64
		memory := watchMemory(t.pid)
		for range runs {
			bare.once(ctx, p.bare)
			bullpen.once(ctx, func(ctx context.Context) (sample, error) {
				lines, result, err := bulk(ctx, t.api, p)
				if err == nil {
					results = append(results, millis(result))
				}
				return sample{took: lines}, err
			})
		}
		tp.RSSBefore, tp.RSSPeak = memory()
		tp.Bare, tp.Bullpen, tp.Result = bare.summary(), bullpen.summary(), summarise(results)
		tp.BareMB, tp.BullpenMB = megabytesPerSecond(tp.Bare), megabytesPerSecond(tp.Bullpen)
		all = append(all, tp)
	}
	return all, nil
}

// bulk streams p and checks every byte in the events and in the result.
func bulk(ctx context.Context, a *api, p program) (lines, result time.Duration, err error) {
	s, err := a.stream(ctx, p.language, p.code, bulkRoom)
	if err != nil {
		return 0, 0, err
	}
	e, err := s.decode()
	if err != nil {
		return 0, 0, err
	}
	want, got := sha256.Sum256([]byte(p.output)), sha256.Sum256(e.output)
	switch {
	case len(e.output) != len(p.output) || e.outputs != bulkLines:
		return 0, 0, fmt.Errorf("%d bytes came in %d events and should have been %d in %d", len(e.output), e.outputs,
			len(p.output), bulkLines)
	case !slices.Equal(want[:], got[:]):
		return 0, 0, fmt.Errorf("the output has the checksum %x and should have %x", got, want)
	case e.result.Stdout != p.output:
		return 0, 0, fmt.Errorf("the result has %d bytes of output, not the %d that were streamed", len(e.result.Stdout),
			len(p.output))
	}
	return s.arrived(e.lastEnd), s.arrived(len(s.body)), nil
}

func megabytesPerSecond(s *summary) float64 { return ratio(bulkBytes/1e6, s.P50/1000) }
