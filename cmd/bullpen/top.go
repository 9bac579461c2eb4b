package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type topCommand struct {
	remote `embed:""`
}

func (*topCommand) Help() string {
	return `Shows the pools of workers with their queue, the workers, the executions of the organisation and their
webhooks, and reads them every 2 seconds. Pools and workers need a global administrator's key.

  1 2 3 4     one section on the whole screen
  0           all sections
  up, down    scroll a section that has the whole screen
  space       pause and go on
  q           quit

Example:

  bullpen top`
}

// topExecutions is how many of the newest executions are read.
const topExecutions = 100

// topTimeout limits one reading of everything.
const topTimeout = 10 * time.Second

func (c *topCommand) Run(ctx context.Context, s streams) error {
	out, ok := s.out.(*os.File)
	if !ok || !isTerminal(out) {
		return errors.New("top needs a terminal: bullpen workers, bullpen workers pools and bullpen ls print the same")
	}
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	m := &topModel{ctx: ctx, read: func(ctx context.Context) topPage { return readTop(ctx, cl) }}
	_, err = tea.NewProgram(m, tea.WithContext(ctx), tea.WithInput(s.in), tea.WithOutput(out)).Run()
	if errors.Is(err, tea.ErrProgramKilled) && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// topSection is one table of the screen.
type topSection struct {
	title string
	lines []string // the first one names the columns
}

// topPage is what was read at a time.
type topPage struct {
	at       time.Time
	state    string // of the server, one line
	sections []topSection
}

// readTop reads everything. A section that cannot be read has the error.
func readTop(ctx context.Context, cl *client.Client) topPage {
	ctx, cancel := context.WithTimeout(ctx, topTimeout)
	defer cancel()
	top := topPage{at: time.Now(), state: "ready"}
	var list *api.Executions
	var errList error
	table := func(title string, rows func(p *page) error) topSection {
		var text bytes.Buffer
		p := newPage(&text)
		if err := errors.Join(rows(p), p.flush()); err != nil {
			return topSection{title, []string{strings.Map(printable, err.Error())}}
		}
		return topSection{title, strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")}
	}
	top.sections = make([]topSection, 4)
	var all sync.WaitGroup
	all.Go(func() {
		if err := cl.Ready(ctx); err != nil {
			top.state = strings.Map(printable, err.Error())
		}
	})
	all.Go(func() {
		top.sections[0] = table("1 Pools, with the queues of all organisations", func(p *page) error {
			pools, err := cl.Admin().Pools(ctx)
			printPools(p, pools)
			return err
		})
	})
	all.Go(func() {
		top.sections[1] = table("2 Workers", func(p *page) error {
			workers, err := cl.Admin().Workers(ctx)
			printWorkers(p, workers...)
			return err
		})
	})
	all.Go(func() { list, errList = cl.Executions(ctx, client.ExecutionFilter{}, topExecutions) })
	all.Wait()
	top.sections[2] = table("3 Executions of this organisation", func(p *page) error {
		if errList != nil {
			return errList
		}
		slices.SortStableFunc(list.Executions, func(a, b api.ListedExecution) int {
			return topOrder(a.Status) - topOrder(b.Status)
		})
		printExecutions(p, list)
		return nil
	})
	top.sections[3] = table("4 Webhooks of this organisation that are pending or have failed", func(p *page) error {
		if errList != nil {
			return errList
		}
		p.row("TRACE", "WEBHOOK", "EXECUTION", "CREATED")
		for _, e := range list.Executions {
			if w := e.WebhookDeliveryStatus; w != nil && *w != proto.DeliveryDelivered {
				p.row(e.TraceID, *w, e.Status, e.CreatedAt)
			}
		}
		return nil
	})
	return top
}

// topOrder orders executions: those that run come first, then those that wait.
func topOrder(s proto.Status) int {
	switch s {
	case proto.StatusRunning:
		return 0
	case proto.StatusQueued:
		return 1
	default:
		return 2
	}
}

// topModel is the screen.
type topModel struct {
	ctx           context.Context // of the command
	read          func(ctx context.Context) topPage
	page          topPage
	width, height int
	only          int // number of the section that has the whole screen; 0 for all sections
	scrolled      int // lines of that section above the screen
	paused        bool
}

// topTick is when the next reading begins.
type topTick struct{}

// Init reads the first page.
func (m *topModel) Init() tea.Cmd { return m.refresh }

func (m *topModel) refresh() tea.Msg { return m.read(m.ctx) }

// Update handles keys, sizes and pages.
func (m *topModel) Update(message tea.Msg) (tea.Model, tea.Cmd) {
	next := tea.Tick(watchEvery, func(time.Time) tea.Msg { return topTick{} })
	switch message := message.(type) {
	case topPage:
		if !m.paused {
			m.page = message
		}
		return m, next
	case topTick:
		if m.paused {
			return m, next
		}
		return m, m.refresh
	case tea.WindowSizeMsg:
		m.width, m.height = message.Width, message.Height
	case tea.KeyPressMsg:
		switch key := message.String(); key {
		case "q", "ctrl+c":
			return m, tea.Quit
		case "0", "1", "2", "3", "4":
			m.only, m.scrolled = int(key[0]-'0'), 0
		case "down", "j":
			m.scrolled++
		case "up", "k":
			m.scrolled = max(0, m.scrolled-1)
		case "space":
			m.paused = !m.paused
		}
	}
	return m, nil
}

// View draws the page as it fits on the screen.
func (m *topModel) View() tea.View {
	v := tea.NewView(strings.Join(m.lines(), "\n"))
	v.AltScreen = true
	return v
}

// lines returns the lines of the screen.
func (m *topModel) lines() []string {
	if m.page.sections == nil {
		return []string{"reading …"}
	}
	state := m.page.state
	if m.paused {
		state = "paused, " + state
	}
	lines := []string{fmt.Sprintf("%s  %s   1-4 one section, 0 all, space pause, q quit",
		m.page.at.Format(time.TimeOnly), state)}
	sections := m.page.sections
	if m.only > 0 {
		sections = sections[m.only-1 : m.only]
	}
	// Each section has a title and an empty line. What is left is shared; what a section does not need,
	// those after it get.
	left := m.height - len(lines) - 2*len(sections)
	for i, s := range sections {
		rows := s.lines[1:]
		if m.only > 0 {
			m.scrolled = min(m.scrolled, max(0, len(s.lines)-left))
			rows = rows[min(m.scrolled, len(rows)):]
		}
		share := min(len(rows)+1, max(2, left/(len(sections)-i)))
		left -= share
		lines = append(lines, "", s.title)
		lines = append(append(lines, s.lines[0]), rows[:min(share-1, len(rows))]...)
	}
	for i := range lines {
		lines[i] = ansi.Truncate(lines[i], m.width, "…")
	}
	return lines[:min(len(lines), m.height)]
}
