package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
	"github.com/bullpen-run/bullpen/cmd/internal/up"
	topologies "github.com/bullpen-run/bullpen/deploy/up"
)

type upCommand struct {
	File  string `short:"f" placeholder:"FILE" help:"Topology in YAML. Default: the one that --print prints."`
	Data  string `default:"./bullpen-up" placeholder:"DIR" help:"Directory for the data of all processes. It is created if necessary, and only one bullpen up may use it at a time."`
	Print bool   `help:"Print the topology instead of starting it."`
}

func (*upCommand) Help() string {
	return `By default: three NATS servers, Redis, a scheduler, a sender of webhooks, two workers, and two gateways at
127.0.0.1:8080 and :8081. Each has a network namespace of its own; their common network has no way out. A process that
ends is restarted. Needs root, bullpen and nsjail. See docs/guides/deploy.md for the file.

Prints the process ids and then the output of all processes. Ctrl-C or SIGTERM stops them, gateways first. A second
Ctrl-C kills them. The data stays for the next start.

Examples:

  bullpen up
  bullpen up --print >topology.yaml
  bullpen up -f topology.yaml --data /var/tmp/demo`
}

func (c *upCommand) Run(ctx context.Context, s streams) error {
	name, text := "the default topology", topologies.Default
	if c.File != "" {
		var err error
		if text, err = os.ReadFile(c.File); err != nil {
			return fmt.Errorf("read the topology: %w", err)
		}
		name = c.File
	}
	topology, err := up.Read(name, text)
	if err != nil {
		return err
	}
	if c.Print {
		_, err := s.out.Write(text)
		return err
	}
	return up.Run(ctx, topology, c.Data, s.out)
}

// natsCommand and redisCommand are the servers that `bullpen up` starts.
type natsCommand struct {
	Data, Name, Host string   `required:""`
	Peers            []string `required:""`
	Password         string   `required:"" env:"BULLPEN_UP_PASSWORD"`
}

func (c *natsCommand) Run(ctx context.Context, s streams) error {
	return up.ServeNATS(ctx, c.Data, c.Name, c.Host, c.Peers, c.Password, serverLog(s))
}

type redisCommand struct {
	Host     string `required:""`
	Password string `required:"" env:"BULLPEN_UP_PASSWORD"`
}

func (c *redisCommand) Run(ctx context.Context, s streams) error {
	return up.ServeRedis(ctx, c.Host, c.Password, serverLog(s))
}

func serverLog(s streams) *slog.Logger { return app.NewLogger(s.err, slog.LevelInfo, app.LogText) }
