package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	rpc "connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/processpb"
	"github.com/bullpen-run/bullpen/proto"
	schema "github.com/bullpen-run/bullpen/proto/api"
)

// liveSandbox is a live sandbox and a client of it.
type liveSandbox struct {
	*api
	id string
}

// newSandbox creates a live sandbox and returns it once it runs.
func (a *api) newSandbox(body request) *liveSandbox {
	a.t.Helper()
	var made schema.LiveSandbox
	r := a.do(http.MethodPost, "/v1/sandboxes", body)
	if r.into(a.t, &made); r.status != http.StatusCreated || made.State != "running" {
		a.t.Fatalf("create a sandbox: %s", r)
	}
	return &liveSandbox{a, made.ID}
}

// path returns the path of a route of the sandbox.
func (s *liveSandbox) path(route string) string { return "/v1/sandboxes/" + s.id + route }

// change sends a request that changes the sandbox, and returns the sandbox.
func (s *liveSandbox) change(method, route string) (x schema.LiveSandbox) {
	s.t.Helper()
	r := s.do(method, s.path(route), nil)
	if r.into(s.t, &x); r.status != http.StatusOK {
		s.t.Fatalf("%s %s: %s", method, route, r)
	}
	return x
}

// awaits waits until the sandbox is in a state for a reason, "" for one that has not stopped.
func (s *liveSandbox) awaits(state, reason string) {
	s.t.Helper()
	eventually(s.t, state+" "+reason, func() (bool, any) {
		r, err := s.try(s.t.Context(), http.MethodGet, s.path(""), nil)
		if err != nil {
			return false, err
		}
		var x schema.LiveSandbox
		r.into(s.t, &x)
		got := ""
		if x.Reason != nil {
			got = string(*x.Reason)
		}
		return string(x.State) == state && got == reason, fmt.Sprintf("%s %s of %+v", x.State, got, x)
	})
}

// run runs a Bash program in the sandbox as a user, and returns its output and its exit status.
func (s *liveSandbox) run(user, code string) (stdout string, exit int32, err error) {
	s.t.Helper()
	return s.runWithin(s.t.Context(), user, code)
}

// runWithin is run, until ctx is done.
func (s *liveSandbox) runWithin(
	ctx context.Context, user, code string,
) (stdout string, exit int32, err error) {
	client := processpb.NewProcessClient(s.http, s.base+s.path("/guest"), rpc.WithProtoJSON())
	call := rpc.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", code}},
	})
	call.Header().Set("Authorization", "Bearer "+s.key)
	call.Header().Set("Bullpen-User", user)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := client.Start(ctx, call)
	if err != nil {
		return "", 0, err
	}
	var out bytes.Buffer
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		out.Write(event.GetData().GetStdout())
		if end := event.GetEnd(); end != nil {
			exit = end.GetExitCode()
		}
	}
	return out.String(), exit, stream.Err()
}

// check checks what a Bash program prints.
func (s *liveSandbox) check(code, want string) {
	s.t.Helper()
	if got, exit, err := s.run("user", code); got != want || exit != 0 || err != nil {
		s.t.Errorf("%s printed %q with exit status %d, %v; want %q", code, got, exit, err, want)
	}
}

// checkLog checks the entries of the sandbox's log, once the last is there.
func (s *liveSandbox) checkLog(t *testing.T, want string) {
	t.Helper()
	eventually(t, "the log", func() (bool, any) {
		var logs schema.SandboxLogs
		r := s.do(http.MethodGet, s.path("/logs"), nil)
		if r.into(t, &logs); r.status != http.StatusOK || logs.Truncated {
			t.Fatalf("%s", r)
		}
		var all []string
		streams := map[string]string{} // the order of the two outputs is not fixed
		for _, e := range logs.Entries {
			switch e.Type {
			case "output":
				streams[e.Stream] += " " + e.Text
			case "end":
				all = append(all, streams["stdout"]+streams["stderr"]+fmt.Sprintf(" exit %d", *e.ExitCode))
				clear(streams)
			default:
				all = append(all, " "+e.Type)
			}
		}
		return strings.TrimSpace(strings.Join(all, "")) == want, all
	})
}

// bootID returns the boot id that programs in the sandbox read, which is not the machine's.
func (s *liveSandbox) bootID(t *testing.T) string {
	t.Helper()
	const path = "/proc/sys/kernel/random/boot_id"
	own, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var id string
	for _, user := range []string{"root", "user"} {
		got, _, err := s.run(user, "cat "+path+"; (echo x >"+path+") 2>/dev/null || echo no")
		first, rest, _ := strings.Cut(got, "\n")
		if !uuidPattern.MatchString(first) || first == strings.TrimSpace(string(own)) || rest != "no\n" || err != nil {
			t.Errorf("%s reads the boot id %q, %v", user, got, err)
		}
		if id != "" && id != first {
			t.Errorf("two users read the boot ids %s and %s", id, first)
		}
		id = first
	}
	return id
}

var uuidPattern = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)

var answersOfGuests = repeatsFlag("guest-answers", 300, 5000, "commands whose output must arrive whole")

// testLiveSandboxes is what tenants see of live sandboxes, and how each way of ending is told.
func testLiveSandboxes(t *testing.T, p *programs, in topology) {
	args := []string{"--sandboxes", "4"}
	if in.separate {
		args = append(args, p.newBucket(t).flags()...)
	}
	sys := newSystem(t, p, in, 2, args...)

	t.Run("cycles", func(t *testing.T) { // edits and removals survive every pause
		s := sys.in(t).newSandbox(request{"on_timeout": "pause", "env_vars": request{"GREETING": "hello"}})
		s.check("echo $GREETING $HOME $PWD $USER; id -u", "hello /home/user /home/user user\n1000\n")
		boots := map[string]bool{}
		for i := range 6 {
			boots[s.bootID(t)] = true
			s.check(fmt.Sprintf("echo %d >>log; rm -f gone%d; echo %d >gone%d; wc -l <log; ls", i, i-1, i, i),
				fmt.Sprintf("%d\ngone%d\nlog\n", i+1, i))
			if x := s.change(http.MethodPost, "/pause"); x.State != "paused" || *x.Reason != "paused" {
				t.Errorf("paused %+v", x)
			}
			if x := s.change(http.MethodPost, "/resume"); x.State != "running" || x.Starts != i+2 {
				t.Errorf("resumed %+v", x)
			}
		}
		if boots[s.bootID(t)] = true; len(boots) != 7 {
			t.Errorf("7 starts have the boot ids %v", boots)
		}
		if x := s.change(http.MethodDelete, ""); x.State != "ended" || *x.Reason != "killed" {
			t.Errorf("deleted %+v", x)
		}
		if _, _, err := s.run("user", "true"); err == nil {
			t.Error("a program ran in a deleted sandbox")
		}
	})
	t.Run("saves", func(t *testing.T) { testLiveSaves(t, sys) })
	t.Run("contexts", func(t *testing.T) { testContexts(t, sys) })
	t.Run("commands", func(t *testing.T) { // the answers of guests begin while a proxy still reads the requests
		s := sys.in(t).newSandbox(request{})
		for range answersOfGuests.n() {
			if s.check("echo hi", "hi\n"); t.Failed() {
				break
			}
		}
		s.change(http.MethodDelete, "")
	})
	t.Run("acts", func(t *testing.T) { // an operator finds who did what
		one := sys.in(t)
		secret, second := one.newKey("default", "enterprise")
		s := one.newSandbox(request{"on_timeout": "pause"})
		other := &liveSandbox{one.with(secret), s.id}
		other.change(http.MethodPost, "/pause")
		other.change(http.MethodPost, "/resume")
		for range 3 {
			s.change(http.MethodPost, "/extend")
		}
		other.do(http.MethodPost, s.path("/nothing"), nil) // no act
		r := other.do(http.MethodDelete, s.path(""), nil, "X-Request-Id", "the-end")
		if r.status != http.StatusOK {
			t.Fatalf("%s", r)
		}
		other.change(http.MethodDelete, "") // changes nothing
		var x schema.LiveSandbox
		one.get(s.path("")).into(t, &x)
		var acts []string
		for i, a := range x.Acts {
			acts = append(acts, fmt.Sprint(a.Act, " by ", strings.ReplaceAll(a.KeyID, second, "the second")))
			if since := a.At.Sub(x.CreatedAt.Time); since < 0 || i > 0 && a.At.Before(x.Acts[i-1].At.Time) || a.RequestID == "" {
				t.Errorf("%+v", a)
			}
		}
		want := "[create by key_bootstrap pause by the second resume by the second extend by key_bootstrap " +
			"delete by the second]"
		if fmt.Sprint(acts) != want || x.Acts[len(x.Acts)-1].RequestID != "the-end" {
			t.Errorf("%v by %+v, want %s", acts, x.Acts, want)
		}
	})
	t.Run("ends", func(t *testing.T) {
		a := sys.in(t)
		s := a.newSandbox(request{"on_timeout": "pause"})
		s.check("echo kept >f", "")
		_, _, _ = s.run("user", `python3 -c 'x = bytearray(3 << 30)'`)
		s.awaits("paused", "memory_limit_exceeded")
		s.change(http.MethodPost, "/resume")
		s.check("cat f", "kept\n")
		// A user cannot end the guest or the init, and root only its own sandbox.
		if out, _, err := s.run("user", "kill -9 1; kill -9 2; echo alive"); out != "alive\n" || err != nil {
			t.Errorf("after signals of a user: %q, %v", out, err)
		}
		_, _, _ = s.run("root", "kill -9 2; sleep 60")
		s.awaits("ended", "guest_ended")
		idle := a.newSandbox(request{"idle_timeout": 1})
		idle.awaits("ended", "idle")
		expired := a.newSandbox(request{"timeout": 1, "on_timeout": "pause"})
		expired.awaits("paused", "expired")
		expired.change(http.MethodDelete, "")
		expired.awaits("ended", "killed")
		key, id := a.newKey("default", "enterprise")
		revoked := a.with(key).newSandbox(request{"on_timeout": "pause"})
		a.do(http.MethodDelete, "/v1/admin/keys/"+id, nil)
		(&liveSandbox{a, revoked.id}).awaits("ended", "key_revoked")
	})
	t.Run("privileges", func(t *testing.T) {
		s := sys.in(t).newSandbox(request{})
		for _, user := range []string{"user", "root"} {
			out, _, err := s.run(user, "grep ^Cap /proc/self/status | cut -f2 | sort -u")
			if want := strings.Repeat("0", 16) + "\n"; !strings.HasPrefix(out, want) || err != nil {
				t.Errorf("%s has %q, %v", user, out, err)
			}
		}
		// Root owns the settings of the sandbox's network, whose limits bound what the host's kernel holds.
		for _, path := range procFiles {
			out, _, err := s.run("root", "{ echo 1 >"+path+"; } 2>/dev/null || echo refused")
			if out != "refused\n" || err != nil {
				t.Errorf("root wrote %s: %q, %v", path, out, err)
			}
		}
		if out, _, err := s.run("root", "perl -e '"+limitGuest+"'"); out != "refused\n" || err != nil {
			t.Errorf("root limits the guest: %q, %v", out, err)
		}
		s.check("echo alive", "alive\n")
		s.change(http.MethodDelete, "")
	})
	t.Run("root", func(t *testing.T) { testWritableRoot(t, sys) })
	t.Run("logs", func(t *testing.T) {
		a := sys.in(t)
		s := a.newSandbox(request{"on_timeout": "pause"})
		s.check("echo one", "one\n")
		s.change(http.MethodPost, "/pause")
		s.change(http.MethodPost, "/resume")
		_, _, _ = s.run("user", `echo '{"pid":1}'; echo oops >&2; printf %s partial; exit 3`)
		// Root may not write in the name of others either: the guest's standard output is out of its reach.
		for _, user := range []string{"user", "root"} {
			_, _, _ = s.run(user, `for f in /proc/2/fd/1 /proc/1/fd/1; do (echo forged >$f) 2>/dev/null; done`)
		}
		s.checkLog(t, "start {\"pid\":1}\n partial oops\n exit 3 start exit 1 start exit 1")
		s.change(http.MethodDelete, "")
		s.awaits("ended", "killed")
		s.checkLog(t, "start {\"pid\":1}\n partial oops\n exit 3 start exit 1 start exit 1")

		const secret = `it's "quoted" \ <&>`
		a.do(http.MethodPut, "/v1/admin/secrets/LOGGED", request{"value": secret})
		r := a.do(http.MethodPost, "/v1/admin/keys",
			request{"name": "logged", "org": "default", "secrets": []string{"LOGGED=TOKEN!"}})
		var key struct{ Key string }
		if r.into(t, &key); r.status != http.StatusCreated {
			t.Fatalf("%s", r)
		}
		s = a.with(key.Key).newSandbox(request{})
		s.check(`echo "$TOKEN"; printf '%s and' "$TOKEN"`, secret+"\n"+secret+" and")
		s.change(http.MethodDelete, "")
		if r := s.do(http.MethodGet, s.path("/logs"), nil); bytes.Contains(r.body, []byte("quoted")) ||
			!bytes.Contains(r.body, []byte("*** and")) {
			t.Errorf("a secret is in the log: %s", r)
		}

		const lines = 1_000_000 // more than the log takes, and none is lost for the client
		s = a.newSandbox(request{})
		if out, _, err := s.run("user", fmt.Sprintf("seq %d", lines)); strings.Count(out, "\n") != lines || err != nil {
			t.Errorf("%d lines, %v", strings.Count(out, "\n"), err)
		}
		s.check("echo after", "after\n")
		s.change(http.MethodDelete, "")
		var logs schema.SandboxLogs
		r = s.do(http.MethodGet, s.path("/logs"), nil)
		if r.into(t, &logs); !logs.Truncated || len(r.body) < 64<<10 || len(r.body) > 5<<20 ||
			logs.Entries[0].Type != "start" {
			t.Errorf("%d bytes in %d entries, truncated: %v", len(r.body), len(logs.Entries), logs.Truncated)
		}
		if other, _ := a.newKey("other-logs", "pro"); a.with(other).get(s.path("/logs")).status != http.StatusNotFound {
			t.Error("another organisation reads the log")
		}
	})
	t.Run("metrics", func(t *testing.T) { // of the sandbox, and not of the machine
		s := sys.in(t).newSandbox(request{})
		ctx, cancel := context.WithCancel(t.Context())
		busy := make(chan struct{})
		go func() {
			defer close(busy)
			_, _, _ = s.runWithin(ctx, "user", `head -c 100M /dev/zero >/tmp/f; exec python3 -c 'x = bytearray(200 << 20)
while True: pass'`)
		}()
		eventually(t, "the metrics of a busy sandbox", func() (bool, any) {
			var m struct {
				CPUs     float64 `json:"cpu_count"`
				CPU      float64 `json:"cpu_used_pct"`
				MemTotal int64   `json:"mem_total"`
				MemUsed  int64   `json:"mem_used"`
				MemCache int64   `json:"mem_cache"`
			}
			s.get(s.path("/guest/metrics")).into(t, &m)
			return m.CPUs == 1 && m.CPU > 10 && m.CPU <= 100 && m.MemTotal == 1<<30 && m.MemUsed > 300<<20 &&
				m.MemUsed < 600<<20 && m.MemCache >= 100<<20 && m.MemCache < 110<<20, m
		})
		cancel()
		<-busy
		s.change(http.MethodDelete, "")
	})
	t.Run("usage", func(t *testing.T) { // of the starts of a sandbox, and the quota of time
		a := sys.in(t)
		if r := a.do(http.MethodPost, "/v1/admin/plans", request{
			"name": "seconds", "monthly": request{"sandbox_seconds": request{"hard": 1}},
		}); r.status != http.StatusCreated {
			t.Fatalf("%s", r)
		}
		key, _ := a.newKey("seconds", "seconds")
		s := a.with(key).newSandbox(request{"on_timeout": "pause"})
		s.check(`python3 -c 'import time
while time.process_time() < 1.2: pass'`, "")
		s.change(http.MethodPost, "/pause")
		today := time.Now().UTC()
		rows := s.usage(t, "/v1/usage", url.Values{
			"from": {today.AddDate(0, 0, -1).Format(proto.UsageDayLayout)}, "to": {today.Format(proto.UsageDayLayout)},
		})
		if len(rows) != 1 || rows[0].Executions.Total != 1 || rows[0].CPUSeconds < 1.2 || rows[0].MemorySeconds <= 0 ||
			rows[0].SandboxSeconds < 1.2 || rows[0].SandboxSeconds > 3600 {
			t.Errorf("%+v", rows)
		}
		eventually(t, "the time is used up", func() (bool, any) {
			r := s.do(http.MethodPost, s.path("/resume"), nil)
			if r.status == http.StatusOK {
				s.change(http.MethodPost, "/pause")
			}
			return r.status == http.StatusTooManyRequests && bytes.Contains(r.body, []byte("sandbox_seconds")), r
		})
		if r := s.inline(bash("echo other work")); r.Stdout != "other work\n" {
			t.Errorf("%+v", r)
		}
		s.change(http.MethodDelete, "")
	})
	t.Run("fairness", func(t *testing.T) {
		a := sys.in(t)
		greedyKey, _ := a.newKey("greedy", "enterprise")
		modestKey, _ := a.newKey("modest", "enterprise") // of the same weight
		greedy, modest := a.with(greedyKey), a.with(modestKey)
		var held []*liveSandbox
		for range 4 { // all that the worker has
			held = append(held, greedy.newSandbox(request{}))
		}
		var waiting []*pending
		starting := func(a *api, n int) {
			eventually(t, "sandboxes wait", func() (bool, any) {
				r := a.get("/v1/sandboxes?state=starting")
				return strings.Count(string(r.body), `"starting"`) == n, r
			})
		}
		for range 3 {
			waiting = append(waiting, greedy.begin(http.MethodPost, "/v1/sandboxes", request{}))
		}
		starting(greedy, 3)
		own := modest.begin(http.MethodPost, "/v1/sandboxes", request{})
		starting(modest, 1)
		if r := modest.inline(bash("echo at once")); r.Stdout != "at once\n" {
			t.Errorf("an execution beside them: %+v", r)
		}
		held[0].change(http.MethodDelete, "")
		held[1].change(http.MethodDelete, "")
		if r := own.answer(t); r.status != http.StatusCreated { // one of the first two
			t.Errorf("%s", r)
		}
		for _, a := range []*api{greedy, modest} {
			var list schema.LiveSandboxes
			a.get("/v1/sandboxes").into(t, &list)
			for _, x := range list.Sandboxes {
				(&liveSandbox{a, x.ID}).change(http.MethodDelete, "")
			}
		}
		for _, w := range waiting {
			w.answer(t)
		}
	})
	t.Run("home", func(t *testing.T) { // of a thread that executions use as well
		a := sys.in(t)
		write := request{"code": "echo from a program >f", "language": "bash", "thread_id": "shared-home"}
		if r := a.inline(write); !r.Success {
			t.Fatalf("%+v", r)
		}
		s := a.newSandbox(request{"thread_id": "shared-home"})
		s.check("cat f; echo from a sandbox >>f", "from a program\n")
		a.execute(request{"code": "true", "language": "bash", "thread_id": "shared-home"}).rejection(
			t, http.StatusConflict, "conflict")
		s.change(http.MethodDelete, "")
		if r := a.inline(request{"code": "cat f", "language": "bash", "thread_id": "shared-home"}); r.Stdout !=
			"from a program\nfrom a sandbox\n" {
			t.Errorf("after the sandbox: %+v", r)
		}
	})
	t.Run("drain", func(t *testing.T) {
		s := sys.in(t).newSandbox(request{})
		s.check("echo precious >f", "")
		sys.worker.signal(syscall.SIGTERM)
		sys.worker.exitCode(t)
		if in.separate {
			sys.startWorker(t)
		} else {
			sys.startFront(t)
			sys.ready(t)
			s.api = sys.in(t)
		}
		s.awaits("paused", "worker_drained")
		eventually(t, "resumed", func() (bool, any) {
			r := s.do(http.MethodPost, s.path("/resume"), nil)
			return r.status == http.StatusOK, r
		})
		s.check("cat f", "precious\n")
		s.change(http.MethodDelete, "")
	})
}

// testLiveSandboxLost kills the worker of live sandboxes: nothing starts a second time, which a file on
// the machine shows, and the sandbox tells why it ended.
func testLiveSandboxLost(t *testing.T, p *programs, in topology) {
	args := []string{"--sandboxes", "4"}
	if in.separate {
		args = append(args, p.newBucket(t).flags()...)
	}
	sys := newSystem(t, p, in, 2, args...)
	paused, killed := sys.newSandbox(request{"on_timeout": "pause"}), sys.newSandbox(request{})
	paused.check("echo 1 >f", "")
	paused.change(http.MethodPost, "/pause")
	paused.change(http.MethodPost, "/resume")
	paused.check("echo 2 >>f", "")
	saved := sys.newSandbox(request{"on_timeout": "pause"})
	saved.check("echo 1 >f; mkdir d; echo kept >d/a; ln d/a b; echo removed >gone", "")
	saved.save(1)
	saved.check("rm gone; mv d e; echo 2 >>f", "")
	saved.save(2)
	saved.check("echo 3 >>f; touch lost", "")
	sys.worker.kill()
	if in.separate {
		sys.startWorker(t)
	} else {
		sys.startFront(t)
		sys.ready(t)
		paused.api, killed.api, saved.api = sys.api, sys.api, sys.api
	}
	killed.awaits("ended", "worker_lost")
	paused.awaits("paused", "worker_lost")
	paused.change(http.MethodPost, "/resume")
	paused.check("cat f", "1\n") // what the last pause saved
	saved.awaits("paused", "worker_lost")
	saved.change(http.MethodPost, "/resume")
	saved.check("cat f e/a b; ls; stat -c %h b", "1\n2\nkept\nkept\nb\ne\nf\n2\n")
}

// procFiles are files of /proc that not even root in a sandbox may write.
var procFiles = [...]string{ // read only
	"/proc/1/oom_score_adj", "/proc/sys/kernel/hostname", "/proc/sys/net/ipv4/ip_default_ttl",
	"/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/user/max_inotify_watches", "/proc/sysrq-trigger",
}

// limitGuest is Perl that takes all open files from the guest, with each group that root can have.
var limitGuest = strings.NewReplacer("NUMBER", strconv.Itoa(unix.SYS_PRLIMIT64), "FILES",
	strconv.Itoa(unix.RLIMIT_NOFILE)).Replace(`
	$limit = pack("QQ", 3, 3);
	for $group (0, 1000, 1) {
		$( = $) = $group;
		opendir $tasks, "/proc/2/task";
		for $task (grep { /^[0-9]+$/ } readdir $tasks) {
			print("lowered\n"), exit if syscall(NUMBER, $task + 0, FILES, $limit, 0) == 0;
		}
	}
	print "refused\n";
`)

// inotifyOfManyUsers is Perl that takes all instances of inotify that it can get as each of many users. The
// kernel counts the instances of all jails towards the limit of the host's root, 128 by default.
var inotifyOfManyUsers = strings.ReplaceAll(`
	$taken = 0;
	for $user (1001 .. 1040) {
		pipe $read, $write;
		if (!($child = fork)) {
			$( = $) = $user; $< = $> = $user;
			$n = 0; $n++ while syscall(NUMBER, 0) >= 0;
			syswrite $write, "$n\n"; close $write; sleep 1000;
		}
		push @children, $child;
		close $write;
		$taken += <$read>;
	}
	print $taken >= 1 && $taken <= 64 ? "enough\n" : "$taken\n";
	kill KILL => @children;
`, "NUMBER", strconv.Itoa(unix.SYS_INOTIFY_INIT1))

// testWritableRoot changes the file system of an image as root. Nothing of it leaves the sandbox or outlives
// its pause.
func testWritableRoot(t *testing.T, sys *system) {
	a := sys.in(t)
	image := hostPrograms(t, "/bin/bash", "/bin/cat", "/bin/chmod", "/bin/chown", "/bin/dd", "/bin/grep", "/bin/mkdir",
		"/bin/perl", "/bin/rm", "/bin/stat")
	for name, content := range map[string]string{
		"etc/passwd": "root:x:0:0::/:/bin/sh\nwww-data:x:33:33::/:/bin/sh\n", "etc/group": "www-data:x:33:\n",
		"etc/motd": "welcome\n", "opt/tool": "old\n",
	} {
		path := filepath.Join(image, name)
		err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644))
		if err != nil {
			t.Fatal(err)
		}
	}
	sys.imageCommand(t, "import", "--json", "rooted", image)
	a.newProfile("rooted", request{"image": "rooted", "disk": request{"root": "64MiB"}})
	key, _ := a.boundKey("rooted")
	s := a.with(key).newSandbox(request{"on_timeout": "pause"})
	root := func(code, want string) {
		t.Helper()
		if out, _, err := s.run("root", "{ "+code+"; } 2>&1"); out != want || err != nil {
			t.Errorf("%s printed %q, %v; want %q", code, out, err, want)
		}
	}
	root("cat /etc/motd /opt/tool", "welcome\nold\n")
	root("mkdir /app; echo new >/app/f; echo new >/opt/tool; rm /etc/motd; cat /app/f /opt/tool; echo /etc/mot*",
		"new\nnew\n/etc/mot*\n")
	root("grep ^www-data /etc/passwd; chown www-data:www-data /app; chmod 700 /app; stat -c '%U %u %a' /app",
		"www-data:x:33:33::/:/bin/sh\nwww-data 33 700\n")
	root("echo mine >/home/user/f; stat -c %U /home/user", "user\n")
	root("chown 3000 /app || echo no such id", "chown: changing ownership of '/app': Invalid argument\nno such id\n")
	s.check("stat -c %U f; cat f; for f in /x /etc/x /opt/tool /app/f; do echo x 2>/dev/null >$f || echo no; done",
		"root\nmine\nno\nno\nno\nno\n")
	root("dd if=/dev/zero of=/big bs=1M count=100 status=none; rm /big; echo small >/small; cat /small",
		"dd: error writing '/big': No space left on device\nsmall\n")
	root("perl -e '"+inotifyOfManyUsers+"'", "enough\n")
	root("perl -e '"+limitGuest+"'", "refused\n")
	for _, path := range procFiles {
		root("{ echo 1 >"+path+"; } 2>/dev/null || echo refused", "refused\n")
	}
	other := a.with(key).newSandbox(request{})
	other.check("cat /etc/motd /opt/tool; echo /app*", "welcome\nold\n/app*\n")
	other.change(http.MethodDelete, "")
	boot := s.bootID(t)
	s.change(http.MethodPost, "/pause")
	s.change(http.MethodPost, "/resume")
	s.check("cat f /opt/tool; echo /app*", "mine\nold\n/app*\n")
	if s.bootID(t) == boot {
		t.Error("the boot id has stayed")
	}
	s.change(http.MethodDelete, "")
}
