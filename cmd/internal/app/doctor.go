package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/inject"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
)

// Check is a requirement on this machine, and whether it is met.
type Check struct {
	Name     string `json:"name"`
	OK       bool   `json:"ok"`
	Optional bool   `json:"optional"` // jobs can run without it
	Found    string `json:"found"`
	Remedy   string `json:"remedy,omitempty"` // what to do when it is not OK
}

// Doctor checks the requirements of c's roles. It starts jails like a worker, and leaves nothing
// behind.
func Doctor(ctx context.Context, c *Config) []Check {
	var checks []Check
	if c.Has(RoleWorker) {
		checks = append(checks, checkRoot(), checkNamespaces(), checkCgroups("/"),
			checkUIDs("/proc/self/uid_map", c.UIDRange))
		checks = append(checks, checkJails(ctx, c)...)
		checks = append(checks, checkImages(c.ImageDir), checkSplitLocks("/"))
		checks = append(checks, Check{Name: "slots", OK: true, Found: fmt.Sprintf("%d programs at once", c.SlotCount())})
	}
	checks = append(checks, checkData(c))
	if c.needsStore() {
		checks = append(checks, checkStore(ctx, c))
	}
	checks = append(checks, checkNATS(ctx, c)...)
	checks = append(checks, checkRedis(ctx, c)...)
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
	check := Check{
		Name:   "namespaces",
		Remedy: "boot a kernel with all of them, or raise /proc/sys/user/max_…_namespaces where it is 0",
	}
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

// checkJails starts nsjail, a jail, each language in a jail, and jails with a network and a home on
// disk.
func checkJails(ctx context.Context, c *Config) []Check {
	path, err := findNsjail(c.NsjailPath)
	if err != nil {
		return []Check{{Name: "nsjail", Found: err.Error(), Remedy: "run `make build`, or name it with --nsjail"}}
	}
	checks := []Check{{Name: "nsjail", OK: true, Found: path}}
	started := Check{Name: "jail", Remedy: "fix what is missing above; until then a worker here accepts no jobs"}
	fail := func(err error) []Check {
		started.Found = err.Error()
		return append(checks, started)
	}
	quiet := slog.New(slog.DiscardHandler)
	network, noNetwork := openNetwork(ctx, c, quiet)
	if network != nil {
		defer func() { _ = network.Close() }() // closed when the process ends
	}
	settings, remove, noDisk := scratch(c)
	defer remove()
	maker, err := openJails(settings, nsjail.Config{Network: network, Log: quiet})
	if err != nil {
		return fail(err)
	}
	began := time.Now()
	runtimes, err := maker.Probe(ctx, jailSpec())
	took := time.Since(began)
	var tools string
	var more []Check
	if err == nil {
		tools, err = missingTools(ctx, maker)
		more = []Check{
			checkNetwork(ctx, maker, noNetwork),
			optionalCheck("network limits", "set in each jail", "not set, or not all", maker.NetLimits()),
			optionalCheck("packet fragments", "single pages", "not limited, or not known", maker.Fragments()),
			checkRoots(), checkDisk(ctx, maker, noDisk), checkMounts(settings, maker, noDisk),
		}
	}
	if err := errors.Join(err, maker.Close()); err != nil {
		return fail(err)
	}
	started.OK, started.Found = true,
		fmt.Sprintf("%d programs ran in jails within %d ms", len(runtimes), took.Milliseconds())
	checks = append(checks, started)
	some := false
	for _, r := range runtimes {
		some = some || r.Available
	}
	for _, r := range runtimes {
		check := Check{Name: string(r.Language), OK: r.Available, Optional: some, Found: r.Found}
		if !r.Available {
			check.Found, check.Remedy = r.Problem, r.Install+": jails see /usr, not somebody's home"
			if r.Language == proto.Python && c.DefaultImage == "" {
				check.Optional, check.Found = false,
					"PYTHON IS MISSING, the language of executions that name none, and of agents: "+r.Problem
			}
		}
		checks = append(checks, check)
	}
	if c.DefaultImage != "" {
		checks = append(checks, Check{
			Name: "runtimes", OK: true, Found: "those of image " + c.DefaultImage + ", for sandboxes without an image",
		})
	} else if some {
		checks = append(checks, Check{
			Name: "runtimes", OK: true,
			Found: "this host's, for sandboxes without an image: meant for trying out; --default-image names an image instead",
		})
	}
	checks = append(checks, Check{
		Name: "tools", OK: tools == "", Optional: true, Found: orDefault(tools, "those that agents' file tools use"),
		Remedy: installTools(tools) + ": file tools of agents run them in Bash programs",
	})
	return append(checks, more...)
}

// scratch returns the settings with a temporary data directory, which remove deletes. It is next to
// the real one, since homes on disk depend on the file system. If it cannot be created, scratch
// returns c.
func scratch(c *Config) (settings *Config, remove func(), err error) {
	dir, err := existing(c.Data)
	if err == nil {
		dir, err = os.MkdirTemp(dir, ".bullpen-doctor-")
	}
	if err != nil {
		return c, func() {}, err
	}
	own := *c
	own.Data = dir
	return &own, func() { _ = os.RemoveAll(dir) }, nil
}

// checkNetwork creates a jail with a network, unless err already explains why it cannot.
func checkNetwork(ctx context.Context, maker *nsjail.Maker, err error) Check {
	if err == nil {
		spec := jailSpec()
		spec.Network.Policy = proto.NetworkUnrestricted
		err = tryJail(ctx, maker, spec)
	}
	return optionalCheck("network", "sandboxes may have one", "this worker does not run sandboxes with a network", err)
}

// optionalCheck returns a check whose failure a worker can live with. If err is nil, held describes
// the feature, otherwise lacking describes the consequence.
func optionalCheck(name, held, lacking string, err error) Check {
	if err != nil {
		return Check{Name: name, Optional: true, Found: lacking, Remedy: err.Error()}
	}
	return Check{Name: name, Optional: true, OK: true, Found: held}
}

// checkRoots checks that hosts can be verified, which is required before adding secrets to
// requests.
func checkRoots() Check {
	_, err := inject.SystemRoots()
	return optionalCheck("certificates", "secrets may be added to requests of programs",
		"this worker does not run programs whose requests get secrets", err)
}

// checkDisk creates a jail with a home too large for memory, unless err already explains why it
// cannot.
func checkDisk(ctx context.Context, maker *nsjail.Maker, err error) Check {
	if err == nil {
		err = maker.TryDisk(ctx, jailSpec())
	}
	return optionalCheck("homes on disk", "sandboxes may have them",
		"this worker does not run sandboxes whose home or /tmp is larger than their memory allows", err)
}

// checkMounts checks that storage connections can be mounted, unless err already explains why they
// cannot.
func checkMounts(c *Config, maker *nsjail.Maker, err error) Check {
	if err == nil {
		_, err = openMounts(c, maker)
	}
	return optionalCheck("mounts", "sandboxes may have storage connections",
		"this worker does not run sandboxes with storage connections", err)
}

func tryJail(ctx context.Context, maker *nsjail.Maker, spec jail.Spec) error {
	j, err := maker.Prepare(ctx, spec)
	if err != nil {
		return err
	}
	return j.Close()
}

// checkImages checks the directory of images.
func checkImages(dir string) Check {
	check := Check{
		Name: "images", Optional: true,
		Remedy: "free disk space there, or name another directory with --image-dir; until then this worker does not run " +
			"sandboxes with an image",
	}
	free, err := usableImages(dir)
	if err != nil {
		check.Found = err.Error()
		return check
	}
	check.OK, check.Found = true, fmt.Sprintf("%s, %.1f GiB free", dir, gibibytes(free))
	return check
}

// usableImages checks that images can be unpacked in dir, and that jails can reach and run them. It
// does not create dir. It returns the free bytes.
func usableImages(dir string) (free int64, err error) {
	if free, err = writable(dir); err != nil {
		return 0, err
	}
	return free, passable(dir)
}

// passable checks that every user may traverse the existing directories of dir, and that programs
// may be started from it.
func passable(dir string) error {
	at, err := existing(dir)
	if err != nil {
		return err
	}
	var disk syscall.Statfs_t
	if err := syscall.Statfs(at, &disk); err != nil {
		return err
	}
	if disk.Flags&unix.ST_NOEXEC != 0 {
		return fmt.Errorf("%s is mounted noexec: no program could be started from there", at)
	}
	for ; ; at = filepath.Dir(at) {
		info, err := os.Stat(at)
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o001 == 0 {
			return fmt.Errorf("not every user may pass through %s, and jails are users of their own", at)
		}
		if at == "/" {
			return nil
		}
	}
}

// installTools returns what to do about the result of [missingTools].
func installTools(missing string) string {
	packages := map[string]bool{}
	for line := range strings.SplitSeq(missing, ", ") {
		switch strings.TrimPrefix(line, "missing: ") {
		case "python3":
			packages["python3"] = true
		case "grep", "GNU grep":
			packages["grep"] = true
		default:
			packages["coreutils"] = true
		}
	}
	return "install the packages " + strings.Join(slices.Sorted(maps.Keys(packages)), ", ")
}

// missingTools returns the programs missing in a jail that agents' file tools need.
func missingTools(ctx context.Context, maker *nsjail.Maker) (string, error) {
	j, err := maker.Prepare(ctx, jailSpec())
	if err != nil {
		return "", err
	}
	const script = `for t in python3 grep head cat wc tail tr mkdir dirname test rm
do command -v $t >/dev/null || echo "missing: $t"; done
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
		return "bash ended as " + string(outcome.Kind), nil
	}
	return strings.Join(strings.Split(strings.TrimSpace(out.String()), "\n"), ", "), nil
}

// checkData checks that the data directory is writable, without creating it.
func checkData(c *Config) Check {
	check := Check{
		Name:   "data directory",
		Remedy: "free disk space there, lower --disk-reserve, or name another directory with --data",
	}
	dir, err := existing(c.Data)
	if err == nil {
		_, err = writable(dir)
	}
	var free, reserve int64
	if err == nil {
		free, reserve, err = (&dataDisk{dir: dir, reserve: int64(c.DiskReserve)}).space()
	}
	if err != nil {
		check.Found = err.Error()
		if errors.Is(err, fs.ErrPermission) {
			check.Remedy = fmt.Sprintf(
				"let user id %d write there, run it as the user who may, or name another directory with --data", os.Geteuid())
		}
		return check
	}
	check.OK = free >= reserve
	check.Found = fmt.Sprintf("%s, %.1f GiB free, %.1f GiB reserved", c.Data, gibibytes(free), gibibytes(reserve))
	return check
}

// existing returns dir, or its nearest existing parent.
func existing(dir string) (string, error) {
	at, err := filepath.Abs(dir)
	for err == nil {
		if _, err := os.Stat(at); !errors.Is(err, fs.ErrNotExist) || at == "/" {
			break
		}
		at = filepath.Dir(at)
	}
	return at, err
}

// writable checks that a file can be created in dir, or in its nearest existing parent, and returns
// the free bytes there.
func writable(dir string) (free int64, err error) {
	at, err := existing(dir)
	if err != nil {
		return 0, err
	}
	probe, err := os.CreateTemp(at, ".bullpen-doctor-")
	if err != nil {
		return 0, err
	}
	if err := errors.Join(probe.Close(), os.Remove(probe.Name())); err != nil {
		return 0, err
	}
	var disk syscall.Statfs_t
	if err := syscall.Statfs(at, &disk); err != nil {
		return 0, err
	}
	return int64(disk.Bavail) * disk.Bsize, nil
}

func gibibytes(n int64) float64 { return float64(n) / (1 << 30) }

func orDefault(s, other string) string {
	if s == "" {
		return other
	}
	return s
}
