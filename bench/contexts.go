package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	wire "github.com/bullpen-run/bullpen/proto/api"
)

const (
	contextRuns  = 100 // of each kind of call
	contextsMany = 20  // contexts whose memory is measured
	barePython   = "/usr/bin/python3"
	plots        = "plots" // a profile that preloads pandas and matplotlib
)

// Cells of the measurements.
const (
	importCell = "import pandas, matplotlib.pyplot as plt"
	forkCell   = `import os, time
began = time.perf_counter()
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
print((time.perf_counter() - began) * 1000)`
	// drawCell draws a figure that notes when it has been rendered.
	drawCell = `import time, matplotlib.pyplot as plt
figure, axes = plt.subplots()
axes.plot([1, 3, 2])
plt.close(figure)
def savefig(*args, save=figure.savefig, **options):
    global rendered
    save(*args, **options)
    rendered = time.time()
figure.savefig = savefig`
	showCell     = "figure"
	renderedCell = "print(rendered * 1000)"
)

// contexts holds the figures of interpreters that keep their state. All kinds of call are measured in turn.
type contexts struct {
	Import  *summary `json:"bare_ipython_import_ms"`
	Fork    *summary `json:"fork_ms"` // of an interpreter, by itself
	First   *summary `json:"create_to_first_result_ms"`
	Cell    *summary `json:"cell_ms"`
	Picture *summary `json:"picture_after_rendering_ms"`

	Contexts  int     `json:"contexts"`
	MemoryMiB float64 `json:"private_mib_each"` // with pandas and matplotlib in the parent, the largest
}

// measureContexts measures contexts of Python. dir holds the data of the server.
func measureContexts(ctx context.Context, program, dir string, quick bool) (_ *contexts, err error) {
	t, err := startServer(ctx, program, filepath.Join(dir, "contexts"))
	if err != nil {
		return nil, fmt.Errorf("measure contexts: %w", err)
	}
	defer func() { err = errors.Join(err, t.close()) }()
	if err := t.ready(ctx); err != nil {
		return nil, err
	}
	key, err := profileKey(ctx, t.api, `{"name":"`+plots+`","preload":["pandas","matplotlib.pyplot"]}`, plots)
	if err != nil {
		return nil, fmt.Errorf("measure contexts: %w", err)
	}
	c := apiOf(t.url, key, t.http).client
	x, err := c.CreateSandbox(ctx, &wire.SandboxRequest{Timeout: sandboxTimeout})
	if err != nil {
		return nil, fmt.Errorf("measure contexts: %w", err)
	}
	m, runs := &contexts{Contexts: contextsMany}, contextRuns
	if quick {
		runs = quickRuns
	}
	if err := m.calls(ctx, c, x.ID, runs); err != nil {
		return nil, fmt.Errorf("measure calls of contexts: %w", err)
	}
	if err := m.memory(ctx, c, x.ID); err != nil {
		return nil, fmt.Errorf("measure the memory of contexts: %w", err)
	}
	return m, nil
}

// contextOf creates a context and runs a cell in it.
func contextOf(ctx context.Context, c *client.Client, sandbox, code string) (string, *wire.CellResult, error) {
	x, err := c.CreateContext(ctx, sandbox, &wire.ContextRequest{Language: string(proto.Python)})
	if err != nil {
		return "", nil, err
	}
	result, err := runCell(ctx, c, sandbox, x.ID, code)
	return x.ID, result, err
}

// runCell runs a cell, which must not fail.
func runCell(ctx context.Context, c *client.Client, sandbox, id, code string) (*wire.CellResult, error) {
	result, err := c.RunCell(ctx, sandbox, id, &wire.CellRequest{Code: code})
	if err == nil && result.Status != "ok" {
		err = fmt.Errorf("a cell ended with %s: %v", result.Status, result.Error)
	}
	return result, err
}

// printedBy returns the number that a cell prints.
func printedBy(ctx context.Context, c *client.Client, sandbox, id, code string) (float64, error) {
	result, err := runCell(ctx, c, sandbox, id, code)
	if err != nil {
		return 0, err
	}
	return strconv.ParseFloat(strings.TrimSpace(result.Stdout), 64)
}

// shownAfter returns the milliseconds from the rendering of a figure in the sandbox to the answer with its picture.
func shownAfter(ctx context.Context, c *client.Client, sandbox, id string) (float64, error) {
	if _, err := runCell(ctx, c, sandbox, id, drawCell); err != nil {
		return 0, err
	}
	result, err := runCell(ctx, c, sandbox, id, showCell)
	answered := time.Now()
	if err != nil {
		return 0, err
	}
	if len(result.Results) != 1 || result.Results[0].Data["image/png"] == nil {
		return 0, fmt.Errorf("a cell with a figure has %d results", len(result.Results))
	}
	rendered, err := printedBy(ctx, c, sandbox, id, renderedCell)
	return float64(answered.UnixMicro())/1000 - rendered, err
}

// calls measures IPython on the host, a fork, a new context with its first result, a cell, and a picture, in turn.
func (m *contexts) calls(ctx context.Context, c *client.Client, sandbox string, runs int) error {
	var bare, fork, first, cell, picture []float64
	warm, _, err := contextOf(ctx, c, sandbox, importCell)
	if err != nil {
		return err
	}
	for i := range runs + 1 {
		var id string
		forked, errFork := printedBy(ctx, c, sandbox, warm, forkCell)
		shown, errPicture := shownAfter(ctx, c, sandbox, warm)
		err := errors.Join(errFork, errPicture,
			timed(&bare, func() error { return exec.CommandContext(ctx, barePython, "-c", "import IPython").Run() }),
			timed(&cell, func() error {
				_, err := runCell(ctx, c, sandbox, warm, "6 * 7")
				return err
			}),
			timed(&first, func() (err error) {
				id, _, err = contextOf(ctx, c, sandbox, "6 * 7")
				return err
			}))
		if err == nil {
			err = c.DeleteContext(ctx, sandbox, id)
		}
		if err != nil {
			return err
		}
		fork, picture = append(fork, forked), append(picture, shown)
		if i == 0 { // warm-up
			bare, fork, first, cell, picture = nil, nil, nil, nil, nil
		}
	}
	m.Import, m.Fork, m.First = summarise(bare), summarise(fork), summarise(first)
	m.Cell, m.Picture = summarise(cell), summarise(picture)
	return nil
}

// memory measures what each of many contexts has for itself after it has imported what its parent has.
func (m *contexts) memory(ctx context.Context, c *client.Client, sandbox string) error {
	for range m.Contexts {
		_, result, err := contextOf(ctx, c, sandbox, importCell)
		if err != nil {
			return err
		}
		m.MemoryMiB = max(m.MemoryMiB, float64(result.Memory)/(1<<20))
	}
	return nil
}

const (
	targetFirstCells  = 3  // times a cell, besides a fork
	targetFirstImport = .1 // times the import of IPython
	targetCellMS      = 4
	targetPictureMS   = 10
	targetContextMiB  = 20
)

func (m *contexts) figures() []figure {
	first := atMost("new Python context to its first result, less a fork, p50", targetFirstCells, "cells")
	imports := atMost("new Python context to its first result, p50", targetFirstImport, "imports of IPython")
	cell := atMost("cell in a context, p50", targetCellMS, "ms")
	picture := atMost("picture in an answer after its rendering, p50", targetPictureMS, "ms")
	memory := atMost("memory of a context, with pandas and matplotlib in its parent", targetContextMiB, "MiB")
	if m == nil {
		const why = "needs a server that is started here"
		return []figure{
			first.unknown(why), imports.unknown(why), cell.unknown(why), picture.unknown(why), memory.unknown(why),
		}
	}
	inCells, inImports := (m.First.P50-m.Fork.P50)/m.Cell.P50, m.First.P50/m.Import.P50
	note := fmt.Sprintf("%.1f ms; %d samples in turn; cell %.1f ms, fork %.1f ms, import of IPython on the host %.0f ms",
		m.First.P50, m.First.Runs, m.Cell.P50, m.Fork.P50, m.Import.P50)
	return []figure{
		first.is(inCells, inCells <= targetFirstCells, note),
		imports.is(inImports, inImports <= targetFirstImport, note),
		cell.is(m.Cell.P50, m.Cell.P50 <= targetCellMS, fmt.Sprintf("p99 %.1f ms", m.Cell.P99)),
		picture.is(m.Picture.P50, m.Picture.P50 <= targetPictureMS, fmt.Sprintf("p99 %.1f ms", m.Picture.P99)),
		memory.is(m.MemoryMiB, m.MemoryMiB <= targetContextMiB, fmt.Sprintf("the largest of %d", m.Contexts)),
	}
}
