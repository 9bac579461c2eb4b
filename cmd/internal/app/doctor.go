package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
)

// Check is one requirement of this machine and how it is met.
type Check struct {
	Name     string `json:"name"`
	OK       bool   `json:"ok"`
	Optional bool   `json:"optional"` // jobs can run without it
	Found    string `json:"found"`
	Remedy   string `json:"remedy,omitempty"` // what to do when it is not OK
}

// Doctor checks what the roles of c need. It starts jails, as a worker does, and leaves nothing behind.
func Doctor(ctx context.Context, c *Config) []Check {
	var checks []Check
	if c.Has(RoleWorker) {
		checks = append(checks, checkRoot(), checkNamespaces(), checkCgroups("/"), checkUIDs("/proc/self/uid_map", c.UIDRange))
		checks = append(checks, checkJails(ctx, c)...)
		checks = append(checks, Check{Name: "slots", OK: true, Found: fmt.Sprintf("%d programs at once", c.SlotCount())})
	}
	checks = append(checks, checkData(c.Data))
	checks = append(checks, checkNATS(ctx, c)...)
	for i := range checks {
		if checks[i].OK {
			checks[i].Remedy = ""
		}
	}
	return checks
}

func checkRoot() Check {
	return Check{
		Name: "root", OK: os.Geteuid() == 0, Found: fmt.Sprintf("user id %d", os.Geteuid()),
		Remedy: "run it as root: jails get users and control groups of their own, and programs never run as root",
	}
}

func checkNamespaces() Check {
	check := Check{Name: "namespaces", Remedy: "boot a kernel with all of them, or raise /proc/sys/user/max_…_namespaces where it is 0"}
	var missing []string
	names := []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"}
	for _, name := range names {
		limit, err := os.ReadFile("/proc/sys/user/max_" + name + "_namespaces")
		if err != nil || strings.TrimSpace(string(limit)) == "0" {
			missing = append(missing, name)
		}
	}
	check.OK = len(missing) == 0
	check.Found = strings.Join(names, " ")
	if !check.OK {
		check.Found = "missing: " + strings.Join(missing, " ")
	}
	return check
}

// checkJails starts nsjail, a jail, and each language in a jail.
func checkJails(ctx context.Context, c *Config) []Check {
	path, err := findNsjail(c.NsjailPath)
	if err != nil {
		return []Check{{Name: "nsjail", Found: err.Error(), Remedy: "run `make build`, or name it with --nsjail"}}
	}
	checks := []Check{{Name: "nsjail", OK: true, Found: path}}
	started := Check{Name: "jail", Remedy: "mend what is missing above; in a container, run it privileged"}
	fail := func(err error) []Check {
		started.Found = err.Error()
		return append(checks, started)
	}
	maker, err := openJails(c, nsjail.Config{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return fail(err)
	}
	began := time.Now()
	runtimes, err := maker.Probe(ctx, jailSpec())
	took := time.Since(began)
	var tools string
	if err == nil {
		tools, err = missingTools(ctx, maker)
	}
	if err := errors.Join(err, maker.Close()); err != nil {
		return fail(err)
	}
	started.OK, started.Found = true, fmt.Sprintf("%d programs ran in jails within %d ms", len(runtimes), took.Milliseconds())
	checks = append(checks, started)
	some := false
	for _, r := range runtimes {
		some = some || r.Available
	}
	for _, r := range runtimes {
		check := Check{Name: r.Language, OK: r.Available, Optional: some, Found: r.Version}
		if !r.Available {
			check.Found = r.Problem
			check.Remedy = "install " + r.Command + " with the system's packages: jails see /usr, not somebody's home"
		}
		checks = append(checks, check)
	}
	return append(checks, Check{
		Name: "tools", OK: tools == "", Optional: true, Found: orDefault(tools, "those that agents' file tools use"),
		Remedy: "install coreutils and GNU grep with the system's packages: file tools of agents run them in Bash programs",
	})
}

// missingTools names the programs that agents' file tools run and that a jail does not have.
func missingTools(ctx context.Context, maker *nsjail.Maker) (string, error) {
	j, err := maker.Prepare(ctx, jailSpec())
	if err != nil {
		return "", err
	}
	const script = `for t in python3 grep head cat wc tail tr mkdir dirname test rm; do command -v $t >/dev/null || echo "missing: $t"; done
echo x | grep -rHnFZ --include='*' --exclude-dir=none x /dev/null; [ $? -le 1 ] || echo "missing: GNU grep"`
	var out strings.Builder
	outcome, err := j.Run(ctx, jail.Program{
		Argv: []string{"bash", "-c", script}, Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin"}, Dir: maker.Home(),
		Timeout: 10 * time.Second, Stdout: &out,
	})
	if err != nil {
		return "", err
	}
	if outcome.Kind != jail.Exited {
		return "bash did not say: " + string(outcome.Kind), nil
	}
	return strings.Join(strings.Split(strings.TrimSpace(out.String()), "\n"), ", "), nil
}

// checkData checks that what must survive can be written, without making the directory.
func checkData(dir string) Check {
	check := Check{Name: "data directory", Remedy: "make room, or name another directory with --data"}
	existing, err := filepath.Abs(dir)
	for err == nil {
		if _, err := os.Stat(existing); !errors.Is(err, fs.ErrNotExist) || existing == "/" {
			break
		}
		existing = filepath.Dir(existing)
	}
	var probe *os.File
	if err == nil {
		probe, err = os.CreateTemp(existing, ".bullpen-doctor-")
	}
	if err == nil {
		err = errors.Join(probe.Close(), os.Remove(probe.Name()))
	}
	var disk syscall.Statfs_t
	if err == nil {
		err = syscall.Statfs(existing, &disk)
	}
	if err != nil {
		check.Found = err.Error()
		if errors.Is(err, fs.ErrPermission) {
			check.Remedy = fmt.Sprintf("let user id %d write there, run it as the user who may, or name another directory with --data", os.Geteuid())
		}
		return check
	}
	free := int64(disk.Bavail) * disk.Bsize
	check.OK = free > diskReserve
	check.Found = fmt.Sprintf("%s, %.1f GiB free", dir, float64(free)/(1<<30))
	return check
}

func orDefault(s, other string) string {
	if s == "" {
		return other
	}
	return s
}
