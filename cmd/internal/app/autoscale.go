package app

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/scaler"
	"github.com/bullpen-run/bullpen/scheduler/autoscale"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/queue"
)

// AutoscaleDriver changes the number of workers.
type AutoscaleDriver string

// The drivers.
const (
	AutoscaleNone AutoscaleDriver = "none" // the recommendation is only shown
	AutoscaleExec AutoscaleDriver = "exec" // a command of the operator
	// AutoscaleProcess runs workers as processes on this machine.
	AutoscaleProcess AutoscaleDriver = "process"
	// AutoscaleKubernetes answers KEDA, which scales a workload of Kubernetes.
	AutoscaleKubernetes AutoscaleDriver = "kubernetes"
)

// AutoscaleDrivers lists every driver.
func AutoscaleDrivers() []AutoscaleDriver {
	return []AutoscaleDriver{AutoscaleNone, AutoscaleProcess, AutoscaleExec, AutoscaleKubernetes}
}

// validateAutoscale checks the settings of autoscaling.
func (c *Config) validateAutoscale() error {
	if err := setting("autoscale", slices.Contains(AutoscaleDrivers(), c.Autoscale), "unknown driver %q: choose from %v",
		c.Autoscale, AutoscaleDrivers()); err != nil {
		return err
	}
	if err := setting("autoscale", c.Autoscale == AutoscaleNone ||
		c.dispatches(), "only a gateway or scheduler scales workers"); err != nil {
		return err
	}
	if err := setting("autoscale-command", (c.Autoscale == AutoscaleExec) == (c.AutoscaleCommand != ""),
		"goes with --autoscale exec"); err != nil {
		return err
	}
	if err := c.validateKedaListen(); err != nil {
		return err
	}
	if err := setting("autoscale", c.Autoscale != AutoscaleProcess || !c.Embedded() ||
		c.Has(RoleWorker), "the driver process needs the role worker"); err != nil {
		return err
	}
	_, err := c.policies()
	if err != nil {
		return fmt.Errorf("--autoscale-policy: %w", err)
	}
	return nil
}

func (c *Config) validateKedaListen() error {
	if err := setting("keda-listen", (c.Autoscale == AutoscaleKubernetes) == (c.KedaListen != ""),
		"goes with --autoscale kubernetes"); err != nil || c.KedaListen == "" {
		return err
	}
	_, port, err := net.SplitHostPort(c.KedaListen)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	return setting("keda-listen", err == nil, "%q must be an address with a port, such as :9077", c.KedaListen)
}

// serveKeda answers KEDA until ctx is done.
func (s *system) serveKeda(ctx context.Context) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", s.cfg.KedaListen)
	if err != nil {
		return fmt.Errorf("listen: %w: choose another --keda-listen", err)
	}
	return (&scaler.Keda{Pools: s.queue.Pools, Log: s.log}).Serve(ctx, listener)
}

// dispatches reports whether this process may lead the dispatchers.
func (c *Config) dispatches() bool { return c.Has(RoleScheduler) || c.Has(RoleGateway) }

func (c *Config) policies() (*scaler.Policies, error) {
	if c.AutoscalePolicy == "" {
		return scaler.DefaultPolicies(), nil
	}
	return scaler.ReadPolicies(c.AutoscalePolicy)
}

// autoscaler returns the dispatcher's autoscaler in this process, and the parts it needs.
func (s *system) autoscaler() (*queue.Autoscaler, []part, error) {
	policies, err := s.cfg.policies()
	if err != nil {
		return nil, nil, err
	}
	a := &queue.Autoscaler{Policy: policies.Of, Starts: s.cfg.Autoscale != AutoscaleNone || s.cfg.AutoscalePolicy != ""}
	run := &scaler.Scaler{Failed: s.metrics.ScalingFailed, Log: s.log}
	parts := []part{{"autoscaler", run.Run}}
	switch s.cfg.Autoscale {
	case AutoscaleNone:
		return a, nil, nil
	case AutoscaleKubernetes: // it is asked, not called
		return a, []part{{"external scaler for KEDA", s.serveKeda}}, nil
	case AutoscaleExec:
		run.Driver = &scaler.Exec{Command: s.cfg.AutoscaleCommand}
	case AutoscaleProcess:
		local, err := s.localWorkers(policies)
		if err != nil {
			return nil, nil, err
		}
		run.Driver, a.Policy = local, local.policy
		parts = append(parts, part{"workers", local.Run})
	}
	a.Scale = run.Set
	return a, parts, nil
}

const (
	// natsSocket is the socket of the embedded NATS for workers on this machine, in the data
	// directory.
	natsSocket = "nats.sock"
	// unixScheme begins the URL of such a socket.
	unixScheme = "unix://"
	// localDrainGrace is how long a worker may take to end after its programs.
	localDrainGrace = 15 * time.Second
)

// withoutWorker returns the settings of a process with an embedded NATS and without a worker of its own.
func (c *Config) withoutWorker() *Config {
	own := *c
	own.Roles = slices.DeleteFunc(slices.Clone(c.Roles), func(r Role) bool { return r == RoleWorker })
	return &own
}

// localWorkers are the workers that this process runs on its machine.
type localWorkers struct {
	*scaler.Process
	*system
	policies *scaler.Policies
	program  string // of this process
	data     string // absolute
	slots    int    // of each worker
}

func (s *system) localWorkers(policies *scaler.Policies) (*localWorkers, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the program of this process: %w", err)
	}
	data, err := filepath.Abs(s.cfg.Data)
	if err != nil {
		return nil, fmt.Errorf("find the data directory: %w", err)
	}
	policy := policies.Of(s.cfg.Pool)
	slots, most := s.cfg.localSlots(policy)
	l := &localWorkers{system: s, policies: policies, program: program, data: data, slots: slots}
	l.Process = &scaler.Process{
		Pool: s.cfg.Pool, Most: most, Command: l.command, Workers: s.queue, Grace: s.cfg.Drain + localDrainGrace,
		Failed: s.metrics.ScalingFailed, Log: s.log,
	}
	return l, nil
}

// localSlots returns the slots of each worker on this machine, and the maximum number of workers.
// Unless --slots is set, all workers together have the slots of a single worker.
func (c *Config) localSlots(policy autoscale.Policy) (slots, most int) {
	all := c.SlotCount()
	if slots = c.Slots; slots == 0 {
		slots = min(policy.SlotsPerWorker, all)
	} else {
		all = c.UIDRange.Count / UIDsPerSlot
	}
	return slots, max(1, min(policy.Max, all/slots))
}

// policy returns the policy of a pool. That of the local workers is limited by the machine.
func (l *localWorkers) policy(pool string) autoscale.Policy {
	p := l.policies.Of(pool)
	if pool == l.cfg.Pool {
		p.SlotsPerWorker, p.Max = l.slots, l.Most
		p.Min = min(p.Min, p.Max)
	}
	return p
}

// command implements [scaler.Process.Command].
func (l *localWorkers) command(number int) (*exec.Cmd, string, error) {
	dir, err := l.dataOf(number)
	if err != nil {
		return nil, "", err
	}
	store, err := l.cfg.StoreLocation()
	if err != nil {
		return nil, "", err
	}
	name := instanceName()
	cmd := exec.Command(l.program, "serve")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "BULLPEN_") })
	settings := workerSettings(reflect.ValueOf(l.cfg).Elem())
	settings["BULLPEN_ROLES"], settings["BULLPEN_DATA"], settings["BULLPEN_STORE"] = string(RoleWorker), dir, store
	settings["BULLPEN_SLOTS"], settings["BULLPEN_INSTANCE"] = strconv.Itoa(l.slots), name
	if l.embedded != nil {
		settings["BULLPEN_NATS"] = unixScheme + filepath.Join(l.data, natsSocket)
	}
	for variable, value := range settings {
		cmd.Env = append(cmd.Env, variable+"="+value)
	}
	return cmd, name, nil
}

// dataOf returns a data directory for a worker, skipping those still used by an earlier process's
// workers.
func (l *localWorkers) dataOf(number int) (string, error) {
	for range maxOrphans {
		dir := filepath.Join(l.data, "workers", strconv.Itoa(number))
		if !inUse(dir) {
			return dir, nil
		}
		number += l.Most
	}
	return "", fmt.Errorf("%d workers of earlier processes are still running", maxOrphans)
}

// maxOrphans bounds the workers of earlier processes that are left out.
const maxOrphans = 100

// inUse reports whether a process has locked a data directory.
func inUse(dir string) bool {
	f, err := os.Open(filepath.Join(dir, "lock"))
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }() // unlocks
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil
}

// workerSettings returns the settings that a worker uses, as environment variables.
func workerSettings(settings reflect.Value) map[string]string {
	found := map[string]string{}
	for field, value := range settings.Fields() {
		if field.Anonymous {
			maps.Copy(found, workerSettings(value))
			continue
		}
		name := field.Tag.Get("name")
		switch field.Tag.Get("group") {
		case "Worker", "Storage connections", "Threads", "NATS", "Log":
		default:
			if name != "drain" && name != "disk-reserve" && name != "memory" {
				continue
			}
		}
		if text := settingText(value); text != "" {
			found[field.Tag.Get("env")] = text
		}
	}
	return found
}

// settingText returns the value of a setting as a flag takes it: a list with commas.
func settingText(value reflect.Value) string {
	if value.Kind() != reflect.Slice {
		return fmt.Sprint(value.Interface())
	}
	var elements []string
	for _, e := range value.Seq2() {
		elements = append(elements, fmt.Sprint(e.Interface()))
	}
	return strings.Join(elements, ",")
}

// serveWorkers connects workers on this machine with the embedded NATS.
func (s *system) serveWorkers() (part, error) {
	data, err := filepath.Abs(s.cfg.Data)
	if err != nil {
		return part{}, fmt.Errorf("find the data directory: %w", err)
	}
	listener, err := natsembed.Listen(filepath.Join(data, natsSocket))
	if err != nil {
		return part{}, err
	}
	return part{"NATS for workers", func(ctx context.Context) error { return s.embedded.Serve(ctx, listener) }}, nil
}
