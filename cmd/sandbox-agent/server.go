package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

// drain is how long running programs may continue after SIGTERM. Clients kill a server that has not
// exited after 5 seconds.
const drain = time.Second

type serverCommand struct {
	Host string `short:"H" default:"127.0.0.1" help:"Address to listen on."`
	Port uint16 `short:"p" default:"2468" help:"Port to listen on. 0 selects a free port and logs it."`

	CORSAllowOrigin      []string `name:"cors-allow-origin" short:"O" sep:"none" placeholder:"ORIGIN" help:"Origin whose web pages may call this server. Repeatable."`
	CORSAllowMethod      []string `name:"cors-allow-method" short:"M" sep:"none" placeholder:"METHOD" help:"Method that these web pages may use. Repeatable. Default: all."`
	CORSAllowHeader      []string `name:"cors-allow-header" short:"A" sep:"none" placeholder:"HEADER" help:"Header that these web pages may send. Repeatable. Default: all."`
	CORSAllowCredentials bool     `name:"cors-allow-credentials" short:"C" help:"Let these web pages send credentials."`

	NoTelemetry bool   `help:"Does nothing: this program sends no telemetry."`
	LogToFile   bool   `help:"Write the log to a file in $$SANDBOX_AGENT_LOG_DIR, or in sandbox-agent/logs of the user's data directory."`
	Data        string `name:"data" env:"SANDBOX_AGENT_DATA_DIR" placeholder:"DIR" help:"Directory for sessions. A later server with the same directory continues them. Default: a temporary directory, so sessions end with the server."`
}

func (*serverCommand) Help() string {
	return `Give a token. With --no-token, everyone who can reach the address can use the server.

The environment variables of bullpen serve apply, such as BULLPEN_AGENT_MOCK_DELAY and BULLPEN_LOG_LEVEL.`
}

// Run serves until ctx is done.
func (c *serverCommand) Run(ctx context.Context, a *access) error {
	if (a.Token == "") != a.NoToken {
		return errors.New("give either --token TOKEN or --no-token")
	}
	if c.LogToFile {
		log, err := openLog()
		if err != nil {
			return err
		}
		defer log.Close() //nolint:errcheck // each line is written already
		os.Stderr = log
	}
	if a.NoToken && !loopback(c.Host) {
		_, _ = fmt.Fprintf(os.Stderr, "sandbox-agent: without a token, everyone who can reach %s can use this server\n",
			c.Host)
	}
	if c.Data == "" {
		dir, err := os.MkdirTemp("", "sandbox-agent-")
		if err != nil {
			return fmt.Errorf("make a directory for sessions: %w", err)
		}
		defer os.RemoveAll(dir) //nolint:errcheck // it is temporary
		c.Data = dir
	}
	// These flags override environment variables, which may be meant for another server.
	cfg, err := app.ParseConfig([]string{
		"--listen", net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port))), "--data", c.Data, "--drain", drain.String(),
		"--roles", "gateway,worker,scheduler,webhook", "--nats", "",
	})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.Data, 0o700); err != nil {
		return fmt.Errorf("make the data directory: %w", err)
	}
	if cfg.BootstrapKey, err = app.PersistKey(filepath.Join(c.Data, "bootstrap.key"), cfg.Region); err != nil {
		return err
	}
	return app.RunBehind(ctx, cfg, func(server http.Handler) http.Handler {
		return newFront(c, a.Token, cfg.BootstrapKey, server)
	})
}

// openLog opens today's log file.
func openLog() (*os.File, error) {
	dir := os.Getenv("SANDBOX_AGENT_LOG_DIR")
	if dir == "" {
		data := os.Getenv("XDG_DATA_HOME")
		if data == "" {
			home, err := os.UserHomeDir()
			if err != nil {
				return nil, fmt.Errorf("find a directory for the log: %w", err)
			}
			data = filepath.Join(home, ".local", "share")
		}
		dir = filepath.Join(data, "sandbox-agent", "logs")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil { //nolint:gosec // the user chooses it
		return nil, fmt.Errorf("make a directory for the log: %w", err)
	}
	name := filepath.Join(dir, "log-"+time.Now().Format(time.DateOnly))
	return os.OpenFile(name, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600) //nolint:gosec // as above
}
