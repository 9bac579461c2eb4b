package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// options are the command's flags.
type options struct {
	quick    bool
	duration time.Duration // per side of each cell
	url, key string        // of a server that is already running
	server   string        // program to start otherwise
	json     string        // path for the figures instead of the directory of results
	svg      string        // path for a drawing of the figures; empty for none
	soak     int           // number of executions of a soak instead of a benchmark
	soakFor  time.Duration // of a soak with mixed load and restarts instead of a benchmark
	nats     string        // NATS server to start for that
	csv      string        // path for its samples; empty for none
	profile  string        // directory for profiles of a busy server instead of a benchmark
}

const (
	cellDuration      = 6 * time.Second
	quickCellDuration = 300 * time.Millisecond
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case err == nil:
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out, progress io.Writer) error {
	o, err := parse(args, progress)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "bullpen-bench-")
	if err != nil {
		return fmt.Errorf("make a directory for programs and the server's data: %w", err)
	}
	keep := false
	defer func() {
		if !keep {
			_ = os.RemoveAll(dir)
		}
	}()
	if o.soakFor > 0 {
		if err = soakMixed(ctx, o, dir, out, progress); err != nil {
			keep = true
			err = fmt.Errorf("%w\n(the logs are in %s)", err, dir)
		}
		return err
	}
	t, err := openTarget(ctx, o, dir)
	if err != nil {
		return err
	}
	switch {
	case o.soak > 0:
		err = soak(ctx, t, o.soak, out, progress)
	case o.profile != "":
		err = profile(ctx, t, o, dir, out, progress)
	default:
		err = benchmark(ctx, t, o, dir, out, progress)
	}
	return errors.Join(err, t.close())
}

func parse(args []string, out io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(out)
	f.BoolVar(&o.quick, "quick", false,
		"measure for a few seconds only: enough to see that it works, too few samples for a p99")
	f.DurationVar(&o.duration, "duration", 0, "time for each side of each cell (default 6s, with --quick 300ms)")
	f.StringVar(&o.url, "url", "",
		"measure the server at this URL rather than start one; what needs its log or its process is not measured")
	f.StringVar(&o.key, "key", os.Getenv("BULLPEN_API_KEY"),
		"API key for --url; better in BULLPEN_API_KEY, because other processes can read flags")
	f.StringVar(&o.server, "server", "bin/bullpen", "the program to start as the server")
	f.StringVar(&o.json, "json", "", "write the figures to this file rather than to "+latestResult+
		"; the figures of --quick are written only with it")
	f.StringVar(&o.svg, "svg", "",
		"draw the comparison with the bare interpreter, or the samples of --soak-for, into this file")
	f.IntVar(&o.soak, "soak", 0,
		"instead of measuring, run this many executions in sequence and fail if they leave anything behind")
	f.DurationVar(&o.soakFor, "soak-for", 0,
		"instead of measuring, send mixed load to several processes for this time while they are restarted and killed, "+
			"and fail if anything grows or is lost")
	f.StringVar(&o.nats, "nats-server", "bin/nats-server", "the NATS server to start with --soak-for")
	f.StringVar(&o.csv, "csv", "", "write the samples of --soak-for to this file")
	f.StringVar(&o.profile, "profile", "",
		"instead of measuring, make profiles of the server while it works for --duration, in this directory")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	switch {
	case f.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q: see --help", f.Arg(0))
	case o.duration < 0:
		return o, fmt.Errorf("--duration: %s must be more than 0, such as 6s", o.duration)
	case o.soak < 0:
		return o, fmt.Errorf("--soak: %d must be a number of executions, such as 10000", o.soak)
	case o.soakFor < 0:
		return o, fmt.Errorf("--soak-for: %s must be more than 0, such as 1h", o.soakFor)
	case (o.soak > 0 || o.soakFor > 0 || o.profile != "") && o.url != "":
		return o, errors.New("--soak, --soak-for and --profile look at the server's process, so that they start one: " +
			"leave --url out")
	case o.soakFor > 0 && (o.soak > 0 || o.profile != ""):
		return o, errors.New("--soak-for does not go with --soak and --profile: leave them out")
	case o.soak > 0 && o.profile != "":
		return o, errors.New("--soak and --profile are not to be had at once: leave one out")
	case o.url != "" && o.key == "":
		return o, errors.New("--url needs an API key: set BULLPEN_API_KEY or --key")
	}
	if o.duration == 0 {
		o.duration = cellDuration
		if o.quick {
			o.duration = quickCellDuration
		}
	}
	return o, nil
}
