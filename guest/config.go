package main

import (
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/bullpen-run/bullpen/guest/account"
)

// config is the file that the guest is started with.
type config struct {
	Env         map[string]string `json:"env"`
	Users       []account.User    `json:"users"`
	DefaultUser string            `json:"default_user"`
	Dir         string            `json:"dir"`
	// HeartbeatTimeout is the age of the heartbeat at which the guest ends. If it is 0, there is no
	// heartbeat.
	HeartbeatTimeout time.Duration `json:"heartbeat_timeout"`
	// LogBytes is how much of what processes print the guest copies to its standard output.
	LogBytes int `json:"log_bytes"`
	// CPU is the sandbox's number of processors. Memory is its memory limit in bytes. 0 stands for
	// all of the machine.
	CPU    float64 `json:"cpu"`
	Memory uint64  `json:"memory"`
	// Interpreters are absolute paths by the names of runtimes, and Runners is the directory of the runners of cells.
	Interpreters map[string]string `json:"interpreters"`
	Runners      string            `json:"runners"`
	// Preload are the Python modules that contexts have imported when they begin.
	Preload []string `json:"preload"`
	// Masks are secrets of the sandbox, which contexts must not print.
	Masks []string `json:"masks"`
	// Start is the number of the sandbox's start, from 1.
	Start int `json:"start"`
}

// readConfig reads and checks a config.
func readConfig(path string) (config, *account.Users, error) {
	var c config
	b, err := os.ReadFile(path) //nolint:gosec // the argument of whoever starts the guest
	if err != nil {
		return c, nil, fmt.Errorf("read config: %w", err)
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return c, nil, fmt.Errorf("decode config: %w", err)
	}
	users := &account.Users{List: c.Users, Default: c.DefaultUser}
	if _, err := users.Lookup(""); err != nil {
		return c, nil, fmt.Errorf("default user of config: %w", err)
	}
	for _, user := range c.Users {
		if user.Name == "" || user.Home == "" {
			return c, nil, fmt.Errorf("user %d of config has no name or no home", user.UID)
		}
	}
	return c, users, nil
}
