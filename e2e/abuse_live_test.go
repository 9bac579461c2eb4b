package e2e

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	schema "github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// liveAttack is an attack on live sandboxes, or from inside one. All share a deployment of separate
// processes. After each, the test checks that a bystander's sandbox answers and has its files.
type liveAttack struct {
	name, outcome string
	test          func(*testing.T, *liveDeployment)
}

// liveAttacks returns the attacks on live sandboxes.
func liveAttacks() []liveAttack {
	return []liveAttack{
		{
			"the worker's port with no ticket, a made-up one, another sandbox's, an earlier start's, a removed sandbox's",
			"refused by the worker; the guest sees nothing", attackTickets,
		},
		{
			"connections to the worker's port that send nothing, stop within headers or a body, or stay open",
			"closed; gateways go on", attackTunnelConnections,
		},
		{"ids that are guessed, malformed or another organisation's", "404, 502 or 401", attackIDs},
		{
			"ids, ports, hosts and tokens that are doubled, joined, contradictory or of another sandbox",
			"400, 401, 403 or 502", attackRouting,
		},
		{"paths of the guest's control routes and of the worker's own, also encoded and with dots", "404 or 502", attackPaths},
		{
			"headers of the way to a sandbox, sent by a client, named in `Connection`, or sent twice",
			"the sandbox gets neither these nor the API key, tokens and cookies", attackRequestHeaders,
		},
		{
			"requests within requests: contradictory lengths, chunk extensions, old versions of HTTP, upgrades",
			"no other request reaches a sandbox", attackRequestSmuggling,
		},
		{
			"answers within answers: contradictory lengths, bodies where none may be, unasked upgrades, garbage",
			"the next answers, and those of others, are their own", attackAnswerSmuggling,
		},
		{
			"cookies, tickets and ids of requests in the headers, interim headers and trailers of answers, and redirects",
			"removed; redirects are passed on", attackAnswerHeaders,
		},
		{"headers of 6 MB, headers and interim answers without end", "502; memory stays", attackHugeHeaders},
		{
			"bodies that never end, more of them than a sandbox can have requests",
			"429 beyond 512; other sandboxes answer", attackOpenRequests,
		},
		{
			"the descriptors, memory, variables and limits of the guest and the init, as `user` and as `root`",
			"refused", attackGuestFromInside,
		},
		{"settings of the kernel in proc, as `root` of a sandbox", "read-only", attackProc},
		{"`root` that kills or stops the guest", "the sandbox ends as `guest_ended`", attackGuestEnd},
		{
			"every process, descriptor, processor and file that a sandbox can have", "the guest answers", attackExhaustion,
		},
		{"all memory", "the sandbox ends as `memory_limit_exceeded`", attackMemory},
		{
			"thousands of processes whose output nobody reads", "256 at a time; memory of guest, worker and gateway stays",
			attackManyProcesses,
		},
		{
			"output without end, with no reader and with one that stops reading",
			"memory of guest, worker and gateway stays; what fell out is told", attackOutput,
		},
		{
			"files of the host, by `..`, links and proc, and users that there are not",
			"401, 403 or 404; nothing outside the sandbox", attackFiles,
		},
		{
			"signed URLs for another path, operation, user or sandbox, expired, or with doubled parameters",
			"401", attackSignedURLs,
		},
	}
}

// liveDeployment is a deployment with a bystander.
type liveDeployment struct {
	*system
	bystander *liveSandbox
	endpoint  proto.WorkerEndpoint // of the worker
}

// liveDomain is the domain of sandboxes in a liveDeployment.
const liveDomain = "sandboxes.test"

// testLiveAbuse runs the attacks on live sandboxes one after another.
func testLiveAbuse(t *testing.T, p *programs) {
	l := newLiveDeployment(t, p)
	for _, a := range liveAttacks() {
		t.Run(a.name, func(t *testing.T) {
			a.test(t, l)
			for _, proc := range []*process{l.front, l.worker} {
				if proc.ended() {
					t.Fatalf("%s has ended:\n%s", proc.name, proc.tail())
				}
			}
			(&liveSandbox{l.in(t), l.bystander.id}).check("cat precious", "precious\n")
		})
	}
}

func newLiveDeployment(t *testing.T, p *programs) *liveDeployment {
	sys := newSystem(t, p, topology{separate: true}, 1, "--sandboxes", "6", "--sandbox-domain", liveDomain)
	l := &liveDeployment{system: sys}
	nc := connect(t, p, sys.broker)
	worker := strings.TrimSuffix(workerName(t, nc), queue.LiveWorker(""))
	m, err := nc.RequestMsg(nats.NewMsg(store.EndpointSubject(queue.LiveWorker(worker))), patience)
	if err == nil {
		err = json.Unmarshal(m.Data, &l.endpoint)
	}
	if err != nil {
		t.Fatal(err)
	}
	l.bystander = sys.newSandbox(request{"timeout": 3600})
	l.bystander.check("echo precious >precious", "")
	return l
}

// sandbox returns a new sandbox, which ends with the test.
func (l *liveDeployment) sandbox(t *testing.T) *target {
	t.Helper()
	s := l.in(t).newSandbox(request{"timeout": 3600, "on_timeout": "pause"})
	t.Cleanup(func() { s.do(http.MethodDelete, s.path(""), nil) })
	var tokens struct{ EnvdAccessToken string }
	l.in(t).get("/sandboxes/"+s.id, "X-API-Key", s.key).into(t, &tokens)
	if len(tokens.EnvdAccessToken) < 32 {
		t.Fatalf("no access token for %s", s.id)
	}
	return &target{liveSandbox: s, token: tokens.EnvdAccessToken}
}

// target is a sandbox that is attacked, or attacks.
type target struct {
	*liveSandbox
	token string // E2B's access token
}

// serverPort is the port of the hostile server.
const serverPort = "8000"

// serve starts the hostile server in the sandbox.
func (v *target) serve() {
	v.t.Helper()
	code, err := os.ReadFile(filepath.Join("testdata", "abuse", "server.py"))
	if err != nil {
		v.t.Fatal(err)
	}
	v.write("server.py", "user", code)
	v.check(`setsid python3 server.py `+serverPort+` >log 2>&1 </dev/null &
until grep -q listening log; do sleep 0.01; done`, "")
}

// write writes a file in the sandbox as a user.
func (v *target) write(path, user string, content []byte) *reply {
	v.t.Helper()
	return v.do(http.MethodPost, "/files?"+url.Values{"path": {path}, "username": {user}}.Encode(), content,
		v.headers(proto.GuestPort, "Content-Type", "application/octet-stream")...)
}

// call calls a procedure of the guest.
func (v *target) call(procedure string, message request) *reply {
	v.t.Helper()
	return v.do(http.MethodPost, v.path("/guest/"+procedure), message, "Content-Type", "application/json")
}

// headers returns the headers of a request of E2B's clients to a port, and others.
func (v *target) headers(port int, more ...string) []string {
	return append([]string{
		"Authorization", "", proto.HeaderSandboxID, v.id, proto.HeaderSandboxPort, strconv.Itoa(port), "X-Access-Token", v.token,
	}, more...)
}

// toServer returns the lines with which a raw request reaches the hostile server.
func (v *target) toServer() string {
	return v.lines(proto.HeaderSandboxID+": "+v.id, proto.HeaderSandboxPort+": "+serverPort, "X-Access-Token: "+v.token)
}

func (*target) lines(all ...string) string { return strings.Join(all, "\r\n") + "\r\n" }

// seen returns the heads of all requests that the hostile server has got.
func (v *target) seen() string {
	v.t.Helper()
	port, _ := strconv.Atoi(serverPort)
	r := v.get("/seen", v.headers(port)...)
	if r.status != http.StatusOK {
		v.t.Fatalf("requests that the server has got: %s", r)
	}
	return string(r.body)
}

// raw sends bytes to the gateway and returns everything that comes back until it closes the connection.
func (l *liveDeployment) raw(t *testing.T, text string) string {
	t.Helper()
	conn := dial(t, l.api)
	defer func() { _ = conn.Close() }()
	sendRaw(t, conn, "%s", text)
	answer, _ := io.ReadAll(conn) // a reset is an answer, too
	return strings.TrimPrefix(string(answer), "HTTP/1.1 100 Continue\r\n\r\n")
}

// request sends a raw request with header lines, and returns the status and the whole answer.
func (l *liveDeployment) request(t *testing.T, line string, headers ...string) (status int, answer string) {
	t.Helper()
	answer = l.raw(t, line+" HTTP/1.1\r\n"+strings.Join(append(headers, "Connection: close"), "\r\n")+"\r\n\r\n")
	if _, err := fmt.Sscanf(answer, "HTTP/1.1 %d ", &status); err != nil {
		t.Fatalf("%s %q: answer %q", line, headers, short(answer))
	}
	return status, answer
}

// overTunnel sends a request to the worker as a gateway does.
func (l *liveDeployment) overTunnel(t *testing.T, method, path, sandbox, ticket, body string) int {
	t.Helper()
	conn := l.tunnel(t)
	defer func() { _ = conn.Close() }()
	sendRaw(t, conn, "%s %s HTTP/1.1\r\nHost: worker\r\n%s: %s\r\n%s: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
		method, path, proto.HeaderSandbox, sandbox, proto.HeaderTicket, ticket, len(body), body)
	answer, err := io.ReadAll(conn)
	if err != nil {
		t.Fatal(err)
	}
	status := 0
	_, _ = fmt.Sscanf(string(answer), "HTTP/1.1 %d ", &status)
	return status
}

// plainTunnel connects to the worker's port.
func (l *liveDeployment) plainTunnel(t *testing.T) net.Conn {
	t.Helper()
	dial := l.programs.machine.dialer()
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	conn, err := dial(t.Context(), "tcp", l.endpoint.Address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// tunnel connects to the worker's port over TLS.
func (l *liveDeployment) tunnel(t *testing.T) *tls.Conn {
	t.Helper()
	return tls.Client(l.plainTunnel(t), &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true}) //nolint:gosec
}

// ticket returns the present ticket of a sandbox, which only the gateway knows: it is in the buffer of the
// gateway's connection to the worker.
func (l *liveDeployment) ticket(t *testing.T, v *target) string {
	t.Helper()
	pattern := regexp.MustCompile(proto.HeaderSandbox + ": " + v.id + "\r\n" + proto.HeaderTicket + ": ([0-9a-f]{64})")
	var found string
	eventually(t, "the ticket is found", func() (bool, any) {
		v.check("true", "")
		memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", l.front.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = memory.Close() }()
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", l.front.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(maps)) {
			var from, to int64
			var mode string
			if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &mode); err != nil || !strings.HasPrefix(mode, "rw") {
				continue
			}
			b := make([]byte, to-from)
			n, _ := memory.ReadAt(b, from)
			for _, m := range pattern.FindAllSubmatch(b[:n], -1) {
				if ticket := string(m[1]); l.overTunnel(t, http.MethodGet, "/health", v.id, ticket, "") == http.StatusNoContent {
					found = ticket
					return true, nil
				}
			}
		}
		return false, "none"
	})
	return found
}

func attackTickets(t *testing.T, l *liveDeployment) {
	a, b := l.sandbox(t), l.sandbox(t)
	ofA, ofB := l.ticket(t, a), l.ticket(t, b)
	var before schema.LiveSandbox
	b.get(b.path("")).into(t, &before)
	refused := func(what, id, ticket string) {
		t.Helper()
		for _, path := range []string{"/health", proto.ExpiryPath, "/../.bullpen/expires_at", "/"} {
			status := l.overTunnel(t, http.MethodPut, path, id, ticket, time.Now().Format(time.RFC3339))
			if status != proto.StatusNoSandbox {
				t.Errorf("%s: %s is answered with %d", what, path, status)
			}
		}
	}
	made := fmt.Sprintf("%x", sha256.Sum256([]byte(b.id)))
	for _, c := range [][2]string{
		{b.id, ""}, {b.id, made}, {b.id, ofA}, {a.id, ofB}, {"", ofA}, {"", ""}, {strings.ToUpper(a.id), ofA},
		{a.id + "," + b.id, ofA}, {"../" + a.id, ofA}, {a.id, strings.ToUpper(ofA)}, {a.id, ofA + "," + ofB}, {a.id, ofA[:63]},
		{b.id, ofA + "\r\n" + proto.HeaderSandbox + ": " + a.id}, // the first counts
	} {
		refused("a wrong ticket", c[0], c[1])
	}
	a.change(http.MethodPost, "/pause")
	refused("of a paused sandbox", a.id, ofA)
	a.change(http.MethodPost, "/resume")
	refused("of an earlier start", a.id, ofA)
	if l.ticket(t, a) == ofA {
		t.Error("the ticket of another start is the same")
	}
	var after schema.LiveSandbox
	b.get(b.path("")).into(t, &after)
	if fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("the sandbox was %+v and is %+v", before, after)
	}
	b.check("echo alive", "alive\n")
	b.change(http.MethodDelete, "")
	refused("of a removed sandbox", b.id, ofB)
}

// attackTunnelConnections also waits until the worker has closed everything, except with -short.
func attackTunnelConnections(t *testing.T, l *liveDeployment) {
	const silent = 500
	conns := make([]net.Conn, 0, silent)
	for i := range cap(conns) {
		conn := l.plainTunnel(t)
		switch i % 4 {
		case 1:
			sendRaw(t, conn, "\x16\x03\x01\x02\x00") // a handshake begins
		case 2:
			secure := l.tunnel(t)
			sendRaw(t, secure, "GET /health HTTP/1.1\r\nHost: worker\r\n")
		case 3:
			sendRaw(t, conn, "GET /health HTTP/1.1\r\n\r\n")
		}
		conns = append(conns, conn)
	}
	for name, request := range map[string]string{
		"a request":          "GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
		"a body without end": "POST / HTTP/1.1\r\nHost: worker\r\nContent-Length: 1000\r\n\r\nabc",
		"chunks without end": "POST / HTTP/1.1\r\nHost: worker\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
	} {
		conn := l.tunnel(t)
		sendRaw(t, conn, "%s", request)
		if answer, err := io.ReadAll(conn); !strings.HasPrefix(string(answer), "HTTP/1.1 530 ") {
			t.Errorf("%s: answer %q, %v", name, answer, err)
		}
	}
	l.sandbox(t).check("echo alive", "alive\n")
	if testing.Short() {
		return
	}
	for i, conn := range conns {
		if _, err := io.ReadAll(conn); err != nil && strings.Contains(err.Error(), "timeout") {
			t.Fatalf("connection %d stays open", i)
		}
	}
}

func attackIDs(t *testing.T, l *liveDeployment) {
	secret, _ := l.in(t).newKey("stranger", "enterprise")
	owner, stranger, v := l.in(t), l.in(t).with(secret), l.sandbox(t)
	unknown := proto.NewSandboxID()
	for _, c := range []struct {
		who *api
		id  string
	}{
		{stranger, v.id},
		{owner, unknown},
		{owner, v.id[:len(v.id)-1]},
		{owner, strings.ToUpper(v.id)},
		{owner, v.id + "x"},
		{owner, v.id + "%00"},
		{owner, "*"},
		{owner, "%3E"},
		{owner, "%2e%2e"},
		{owner, "..%2f" + v.id},
		{owner, v.id + "%2fguest"},
		{owner, strings.Repeat("a", 4096)},
	} {
		for _, route := range []string{"", "/guest/health", "/guest/files?path=x"} {
			if r := c.who.get("/v1/sandboxes/" + c.id + route); r.status != http.StatusNotFound {
				t.Errorf("GET %s%s: %s", c.id, route, r)
			}
		}
		for _, route := range []string{"/extend", "/pause", "/resume", "/guest/process.Process/List"} {
			if r := c.who.do(http.MethodPost, "/v1/sandboxes/"+c.id+route, request{}); r.status != http.StatusNotFound {
				t.Errorf("POST %s%s: %s", c.id, route, r)
			}
		}
		for _, way := range [][2]string{
			{http.MethodDelete, "/v1/sandboxes/" + c.id}, {http.MethodGet, "/sandboxes/" + c.id},
			{http.MethodDelete, "/sandboxes/" + c.id}, {http.MethodPost, "/sandboxes/" + c.id + "/pause"},
			{http.MethodPost, "/v2/sandboxes/" + c.id + "/connect"},
		} {
			r := c.who.do(way[0], way[1], nil, "X-API-Key", c.who.key)
			if r.status != http.StatusNotFound && r.status != http.StatusBadRequest {
				t.Errorf("%s %s: %s", way[0], way[1], r)
			}
		}
	}
	for id, want := range map[string]int{
		unknown: http.StatusBadGateway, l.bystander.id: http.StatusUnauthorized, "x": http.StatusBadGateway,
	} {
		r := owner.get("/files?path=precious", "Authorization", "", proto.HeaderSandboxID, id, proto.HeaderSandboxPort, "49983",
			"X-Access-Token", v.token)
		if r.status != want {
			t.Errorf("files of %s with a token of another sandbox: %s", id, r)
		}
	}
	v.check("echo alive", "alive\n")
}

func attackRouting(t *testing.T, l *liveDeployment) {
	a, b := l.sandbox(t), l.sandbox(t)
	a.check("echo of a >f", "")
	b.check("echo of b >f", "")
	const line = "GET /files?path=f"
	id := func(v string) string { return proto.HeaderSandboxID + ": " + v }
	port := func(v string) string { return proto.HeaderSandboxPort + ": " + v }
	host := func(v string) string { return "Host: " + v + "." + liveDomain }
	const token = "X-Access-Token: "
	guest, x := port("49983"), "Host: x"
	for name, c := range map[string]struct {
		want    int
		line    string
		headers []string
	}{
		"by headers":          {200, line, []string{x, id(a.id), guest, token + a.token}},
		"by host":             {200, line, []string{host("49983-" + a.id), token + a.token}},
		"another's token":     {401, line, []string{x, id(b.id), guest, token + a.token}},
		"another's, to port":  {403, line, []string{x, id(b.id), port("80"), token + a.token}},
		"two tokens":          {401, line, []string{x, id(b.id), guest, token + a.token, token + b.token}},
		"joined tokens":       {401, line, []string{x, id(b.id), guest, token + a.token + "," + b.token}},
		"two ids":             {400, line, []string{x, id(a.id), id(b.id), guest, token + a.token}},
		"joined ids":          {502, line, []string{x, id(a.id + "," + b.id), guest, token + a.token}},
		"ids with a dash":     {502, line, []string{x, id(a.id + "-" + b.id), guest, token + a.token}},
		"upper case":          {502, line, []string{x, id(strings.ToUpper(a.id)), guest, token + a.token}},
		"no id":               {502, line, []string{x, id(""), guest, token + a.token}},
		"two ports":           {400, line, []string{x, id(a.id), guest, port("80"), token + a.token}},
		"id without port":     {400, line, []string{x, id(a.id), token + a.token}},
		"port without id":     {400, line, []string{x, guest, token + a.token}},
		"port with a sign":    {400, line, []string{x, id(a.id), port("+49983"), token + a.token}},
		"port with a zero":    {400, line, []string{x, id(a.id), port("049983"), token + a.token}},
		"port 0":              {400, line, []string{x, id(a.id), port("0"), token + a.token}},
		"port 115519":         {400, line, []string{x, id(a.id), port("115519"), token + a.token}},
		"host with port 0":    {400, line, []string{host("0-" + a.id), token + a.token}},
		"host, port too high": {400, line, []string{host("99999-" + a.id), token + a.token}},
		"host with a label":   {502, line, []string{host("49983-" + a.id + ".x"), token + a.token}},
		"host with a suffix":  {404, line, []string{host("49983-"+a.id) + ".x", token + a.token}},
		"host in user info":   {400, line, []string{"Host: 49983-" + a.id + "." + liveDomain + "@x", token + a.token}},
		"host and other id":   {400, line, []string{host("49983-" + a.id), id(b.id), guest, token + a.token}},
		"host and other port": {400, line, []string{host("49983-" + a.id), id(a.id), port("80"), token + a.token}},
		"two hosts":           {400, line, []string{host("49983-" + a.id), host("49983-" + b.id), token + a.token}},
		"absolute target": {
			401, "GET http://49983-" + b.id + "." + liveDomain + "/files?path=f",
			[]string{host("49983-" + a.id), token + a.token},
		},
		"absolute target of the API": {
			401, "GET http://api." + liveDomain + "/v1/sandboxes", []string{host("49983-" + a.id), token + a.token},
		},
		"CONNECT":   {404, "CONNECT 127.0.0.1:8000", []string{host("8000-" + a.id), token + a.token}},
		"asterisk":  {200, "OPTIONS *", []string{x, id(a.id), guest, token + a.token}}, // of the server itself
		"path of *": {400, "GET *", []string{x, id(b.id), guest, token + a.token}},
	} {
		status, answer := l.request(t, c.line, c.headers...)
		_, body, _ := strings.Cut(answer, "\r\n\r\n")
		ok := strings.HasPrefix(name, "by ")
		if status != c.want || strings.Contains(answer, "of b") || strings.Contains(body, "of a\n") != ok {
			t.Errorf("%s: %s", name, short(answer))
		}
	}
}

func attackPaths(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	v.serve()
	var before, after schema.LiveSandbox
	v.get(v.path("")).into(t, &before)
	to := strings.Split(strings.TrimSpace(v.toServer()), "\r\n")
	guest := []string{to[0], proto.HeaderSandboxPort + ": 49983", to[2]}
	for _, path := range []string{
		"/init", "/init/", "//init", "/./init", "/x/../init", "/%69nit", "/x/%2e%2e/init", "/init%2f", "/freeze", "/unfreeze",
		"/collapse", "/fsfreeze", "/fsthaw", "/upgrade", "/init;x", "/INIT", "/init%00", `/\init`,
	} {
		for _, method := range []string{"GET ", "POST ", "PUT "} {
			status, answer := l.request(t, method+path, append(guest, "Host: x", "Content-Length: 0")...)
			if status != http.StatusNotFound {
				t.Errorf("%s%s: %s", method, path, short(answer))
			}
		}
	}
	until := time.Now().Format(time.RFC3339)
	for _, path := range []string{
		"/.bullpen/expires_at", "/%2ebullpen/expires_at", "/.bullpen%2fexpires_at", "/.bullpen/./expires_at",
		"//.bullpen/expires_at", "/x/../.bullpen/expires_at", "/.bullpen/expires_at?x", "/.bullpen/expires_at/",
		"http://worker/.bullpen/expires_at",
	} {
		for _, headers := range [][]string{guest, to} {
			l.raw(t, "PUT "+path+" HTTP/1.1\r\nHost: x\r\n"+v.lines(headers...)+
				fmt.Sprintf("Connection: close\r\nContent-Length: %d\r\n\r\n%s", len(until), until))
		}
		l.in(t).do(http.MethodPost, v.path("/guest"+strings.TrimPrefix(path, "http://worker")), []byte(until))
	}
	v.check("echo alive", "alive\n")
	if v.get(v.path("")).into(t, &after); fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("the sandbox was %+v and is %+v", before, after)
	}
}

func attackRequestHeaders(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	v.serve()
	secrets := []string{
		proto.HeaderSandbox + ": forged", proto.HeaderTicket + ": forged", "Bullpen-User: forged", "Cookie: forged",
		"X-API-Key: " + v.key, "Authorization: Bearer " + v.key, "Proxy-Authorization: Basic forged",
		"X-Forwarded-For: forged", "Forwarded: for=forged", "X-Forwarded-Proto: forged",
	}
	names := proto.HeaderSandboxID + ", " + proto.HeaderSandboxPort + ", " + proto.HeaderSandbox + ", " + proto.HeaderTicket
	for name, headers := range map[string][]string{
		"sent":                secrets,
		"twice":               append(secrets, secrets...),
		"with another before": append([]string{"Authorization: Basic eDo="}, secrets...),
		"named":               append(secrets, "Connection: "+names+", close"),
		"as trailers":         append(secrets, "Trailer: "+names),
		"spaces":              append(secrets, "Authorization:   bearer   "+v.key),
	} {
		lines := v.toServer() + v.lines(headers...) + "Host: x\r\nConnection: close\r\n"
		answer := l.raw(t, "POST /x HTTP/1.1\r\n"+lines+"Transfer-Encoding: chunked\r\n\r\n0\r\n"+v.lines(secrets...)+"\r\n")
		_, echo, _ := strings.Cut(answer, "\r\n\r\n")
		if !strings.HasPrefix(answer, "HTTP/1.1 200 ") || !strings.HasPrefix(echo, "POST /x ") {
			t.Errorf("%s: %s", name, short(answer))
		}
	}
	seen := strings.ToLower(v.seen())
	for _, word := range []string{"forged", v.key, v.token, v.id, "bullpen-", "e2b-sandbox", "x-access-token"} {
		if strings.Contains(seen, strings.ToLower(word)) {
			t.Errorf("the sandbox got %q: %s", word, seen)
		}
	}
}

func attackRequestSmuggling(t *testing.T, l *liveDeployment) {
	a, b := l.sandbox(t), l.sandbox(t)
	a.serve()
	b.serve()
	inner := "GET /smuggled HTTP/1.1\r\nHost: x\r\n" + b.lines(
		proto.HeaderSandboxID+": "+b.id, proto.HeaderSandboxPort+": "+serverPort, proto.HeaderSandbox+": "+b.id) + "\r\n"
	upgrade := " /outer HTTP/1.1\r\nHost: x\r\n" + a.toServer()
	head := upgrade + "Connection: close\r\n"
	n := len(inner)
	for name, text := range map[string]string{
		"both lengths": "POST" + head + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", n+5) + inner,
		"chunked last": "POST" + head + fmt.Sprintf("Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n%x\r\n", n) +
			inner + "\r\n0\r\n\r\n",
		"two lengths":      "POST" + head + fmt.Sprintf("Content-Length: 0\r\nContent-Length: %d\r\n\r\n", n) + inner,
		"joined lengths":   "POST" + head + fmt.Sprintf("Content-Length: 0, %d\r\n\r\n", n) + inner,
		"signed length":    "POST" + head + fmt.Sprintf("Content-Length: +%d\r\n\r\n", n) + inner,
		"identity":         "POST" + head + "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + inner,
		"twice chunked":    "POST" + head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n" + inner,
		"space":            "POST" + head + "Transfer-Encoding : chunked\r\nContent-Length: 0\r\n\r\n" + inner,
		"tab":              "POST" + head + "Transfer-Encoding:\x0bchunked\r\nContent-Length: 0\r\n\r\n" + inner,
		"folded":           "POST" + head + "X: y\r\n Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n" + inner,
		"line feeds":       "POST" + head + "X: y\nContent-Length: 0\n\n" + inner,
		"carriage returns": "POST" + head + "X: y\rContent-Length: 0\r\n\r\n" + inner,
		"extension": "POST" + head + fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x;a=\"\r\n", n) +
			inner + "\r\n0\r\n\r\n",
		"extension with a line feed": "POST" + head + "Transfer-Encoding: chunked\r\n\r\n2;\nxx\r\n0\r\n\r\n" + inner,
		"overflow":                   "POST" + head + "Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n\r\n" + inner,
		"chunk with a sign":          "POST" + head + "Transfer-Encoding: chunked\r\n\r\n+0\r\n\r\n" + inner,
		"HTTP/1.0":                   "POST" + strings.Replace(head, "1.1", "1.0", 1) + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner,
		"a body of GET":              "GET" + head + fmt.Sprintf("Content-Length: %d\r\n\r\n", n) + inner,
		"expected":                   "POST" + head + fmt.Sprintf("Expect: 100-continue\r\nContent-Length: %d\r\n\r\n", n) + inner,
		"upgrade":                    "GET" + upgrade + "Connection: Upgrade, close\r\nUpgrade: x\r\n\r\n" + inner,
		"upgrade to h2c": "GET" + upgrade + "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n" +
			"\r\n" + inner,
		"upgrade with a body": "POST" + upgrade + fmt.Sprintf("Connection: Upgrade, close\r\nUpgrade: websocket\r\nContent-Length: %d\r\n\r\n", n) +
			inner,
		"target": "GET /outer%20HTTP/1.1%0d%0aX:%20y%0d%0a%0d%0aGET%20/smuggled HTTP/1.1\r\nHost: x\r\n" + a.toServer() + "Connection: close\r\n\r\n",
		"header": "GET" + head + "X: y%0d%0a%0d%0aGET /smuggled\r\n\r\n",
	} {
		l.raw(t, text)
		a.check("true", "")
		for _, v := range []*target{a, b} {
			if seen := v.seen(); strings.Contains("\n"+seen, "\nGET /smuggled ") {
				t.Fatalf("%s: a sandbox got %s", name, seen)
			}
		}
	}
}

// weirdAnswers are the paths of the hostile server whose answers have other ends than they say.
var weirdAnswers = []string{
	"/two", "/both", "/lengths", "/empty", "/unchanged", "/switch", "/extension", "/short", "/none", "/garbage", "/denied",
}

func attackAnswerSmuggling(t *testing.T, l *liveDeployment) {
	a, b := l.sandbox(t), l.sandbox(t)
	a.serve()
	b.serve()
	port, _ := strconv.Atoi(serverPort)
	for i := range 3 {
		for _, path := range weirdAnswers {
			if r, err := a.try(t.Context(), http.MethodGet, path, nil, a.headers(port)...); err == nil &&
				(r.status == http.StatusSwitchingProtocols || strings.Contains(string(r.body), "stolen") && path != "/lengths") {
				t.Errorf("%s: %s", path, r)
			}
			for j, v := range []*target{a, b, b, a} {
				own := fmt.Sprintf("/own-%d-%d-%s", i, j, path[1:])
				if r := v.get(own, v.headers(port)...); r.status != http.StatusOK || !strings.HasPrefix(string(r.body), "GET "+own+" ") {
					t.Errorf("after %s, %s is answered with %s", path, own, r)
				}
			}
			b.check("echo alive", "alive\n")
		}
	}
}

func attackAnswerHeaders(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	v.serve()
	for _, path := range []string{"/headers", "/redirect", "/interim", "/trailers", "/connection"} {
		status, answer := l.request(t, "GET "+path, "Host: x", strings.TrimSpace(v.toServer()))
		if path == "/redirect" != (status == http.StatusTemporaryRedirect) || status == http.StatusOK == (path == "/redirect") {
			t.Errorf("%s: %s", path, short(answer))
		}
		if strings.Contains(answer, "evil") || strings.Count(answer, "X-Request-Id: req_") != 1 {
			t.Errorf("%s: %s", path, answer)
		}
		if path == "/trailers" && !strings.Contains(answer, "Fine: yes") {
			t.Errorf("a trailer is missing: %s", answer)
		}
	}
	// The gateway's own headers survive interim answers, such as those that a client asks for.
	answer := l.raw(t, "POST "+v.path("/guest/files?path=f")+" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+v.key+
		"\r\nContent-Type: application/octet-stream\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
	if !strings.HasPrefix(answer, "HTTP/1.1 200 ") || !strings.Contains(answer, "Content-Security-Policy: default-src 'none'") {
		t.Errorf("after 100 Continue: %s", answer)
	}
}

func attackHugeHeaders(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	v.serve()
	memory := l.watchMemory(t)
	callers(64, func(i int) {
		path := []string{"/huge", "/endless", "/hints"}[i%3]
		port, _ := strconv.Atoi(serverPort)
		r, err := v.try(t.Context(), http.MethodGet, path, nil, v.headers(port)...)
		if err != nil || r.status != http.StatusBadGateway {
			t.Errorf("%s: %v, %v", path, r, err)
		}
	})
	memory.check(t)
	v.check("echo alive", "alive\n")
}

func attackOpenRequests(t *testing.T, l *liveDeployment) {
	const most, more = 512, 100
	v := l.sandbox(t)
	head := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"+
		"Connect-Protocol-Version: 1\r\nContent-Length: 1000\r\n\r\n{", v.path("/guest/process.Process/List"), v.key)
	var refused atomic.Int64
	var readers sync.WaitGroup
	conns := make([]net.Conn, most+more)
	for i := range conns {
		conns[i] = dial(t, l.in(t))
		sendRaw(t, conns[i], "%s", head)
		readers.Go(func() {
			answer := make([]byte, len("HTTP/1.1 429"))
			if _, err := io.ReadFull(conns[i], answer); err == nil && string(answer) == "HTTP/1.1 429" {
				refused.Add(1)
			}
		})
	}
	eventually(t, "requests beyond the limit are refused", func() (bool, any) { return refused.Load() >= more, refused.Load() })
	l.sandbox(t).check("echo alive", "alive\n")
	for _, conn := range conns {
		_ = conn.Close()
	}
	readers.Wait()
	if n := refused.Load(); n != more {
		t.Errorf("%d requests were refused, want %d", n, more)
	}
	eventually(t, "the sandbox answers", func() (bool, any) {
		out, _, err := v.run("user", "echo alive")
		return out == "alive\n", err
	})
}

// prying tries to reach the guest and the init, and prints what it could do.
const prying = `
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
def no(what, f):
    try:
        if f() is not False:
            print(what)
    except OSError:
        pass
def call(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
guest = [int(p) for p in os.listdir("/proc") if p.isdigit() and open(f"/proc/{p}/stat").read().split(") ")[1].split()[1] == "1"
         and open(f"/proc/{p}/comm").read() == "guest\n"]
if len(guest) != 1:
    print("guests", guest)
for pid in [1] + guest:
    for name in ["mem", "environ", "maps", "auxv", "syscall", "stack", "pagemap", "personality", "io"]:
        for mode in [os.O_RDONLY, os.O_RDWR]:
            no(f"{pid} {name}", lambda: os.close(os.open(f"/proc/{pid}/{name}", mode)) if os.read(os.open(f"/proc/{pid}/{name}", mode), 1) else False)
    for name in ["fdinfo", "map_files"]:
        no(f"{pid} {name}", lambda: os.listdir(f"/proc/{pid}/{name}"))
    for name in ["root", "cwd", "exe", "ns/net", "fd/3", "fd/4", "fd/5"]:
        no(f"{pid} {name}", lambda: os.readlink(f"/proc/{pid}/{name}"))
        no(f"{pid} {name} open", lambda: os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
    no(f"{pid} ptrace", lambda: call(libc.ptrace(16, pid, 0, 0)))
    no(f"{pid} seize", lambda: call(libc.ptrace(0x4206, pid, 0, 0)))
    local = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
    remote = (ctypes.c_size_t * 2)(0x400000, 8)
    no(f"{pid} vm_readv", lambda: call(libc.process_vm_readv(pid, local, 1, remote, 1, 0)))
    for fd in range(3, 9):
        no(f"{pid} getfd", lambda: call(libc.syscall(438, os.pidfd_open(pid), fd, 0)))
    if os.getuid():
        for s in [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]:
            no(f"{pid} {s}", lambda: os.kill(pid, s))
        no(f"{pid} prlimit", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)))
    no(f"{pid} nice", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19) if os.getuid() else False)
if "/bullpen" in open("/proc/net/unix").read():
    print("the path of a socket")
print("done")
`

func attackGuestFromInside(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	for _, user := range []string{"user", "root"} {
		out, exit, err := v.run(user, "python3 - <<'END'\n"+prying+"\nEND")
		if out != "done\n" || exit != 0 || err != nil {
			t.Errorf("%s: %q, exit status %d, %v", user, out, exit, err)
		}
	}
	v.check("echo alive", "alive\n")
}

func attackProc(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	for _, user := range []string{"user", "root"} {
		out, _, err := v.run(user, `find /proc -type f -writable 2>/dev/null | while read -r f; do [ -f "$f" ] && echo "$f"; done # no devices
for f in /proc/sys/kernel/{msgmax,msgmnb,sem,shmall,pid_max} /proc/{1,2,self}/oom_score_adj /proc/self/comm; do
  (echo 1000 >$f) 2>/dev/null && echo $f
done; echo done`)
		if out != "done\n" || err != nil {
			t.Errorf("%s can write %s, %v", user, out, err)
		}
	}
}

func attackGuestEnd(t *testing.T, l *liveDeployment) {
	for _, signal := range []string{"KILL", "STOP", "ABRT"} {
		v := l.in(t).newSandbox(request{"timeout": 3600})
		_, _, _ = v.run("root", "kill -"+signal+" 2; sleep 3600")
		v.awaits("ended", "guest_ended")
	}
}

// answers checks that the guest answers, whatever its processes do.
func (v *target) answers(what string) {
	v.t.Helper()
	if r := v.get(v.path("/guest/health")); r.status != http.StatusNoContent {
		v.t.Errorf("%s: %s", what, r)
	}
	if r := v.write("/tmp/probe", "user", []byte("probe")); r.status != http.StatusOK && r.status != http.StatusInsufficientStorage {
		v.t.Errorf("%s: write a file: %s", what, r)
	}
	if r := v.get("/files?path=/etc/hostname", v.headers(proto.GuestPort)...); r.status != http.StatusOK {
		v.t.Errorf("%s: read a file: %s", what, r)
	}
	if r := v.call("process.Process/List", request{}); r.status != http.StatusOK {
		v.t.Errorf("%s: list processes: %s", what, r)
	}
}

func attackExhaustion(t *testing.T, l *liveDeployment) {
	for name, code := range map[string]string{
		"processes": `import os, time
while True:
    try:
        if os.fork() == 0: time.sleep(3600)
    except OSError: break`,
		"threads": `import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(3600,)).start()
    except RuntimeError: break`,
		"forks": `import os
for _ in range(60): os.fork()
while True:
    try:
        if os.fork() == 0: os._exit(0)
        os.wait()
    except OSError: pass`,
		"processors": `import os
for _ in range(50):
    if os.fork() == 0:
        while True: pass`,
		"descriptors": `import os, time
for _ in range(8):
    os.fork()
    fds = []
    while True:
        try: fds.append(os.open("/dev/null", os.O_RDONLY))
        except OSError: break`,
		"files": `
n = 0
for d in ["/tmp", "/dev/shm"]:
    try:
        with open(d + "/fill", "wb") as f:
            while True: f.write(b"x" * (1 << 20)); f.flush()
    except OSError: pass`,
		"sockets": `import socket, time
s = []
while True:
    try: s.append(socket.socket(socket.AF_UNIX)); s[-1].bind("\0%d" % len(s)); s[-1].listen()
    except OSError: break`,
	} {
		v := l.sandbox(t)
		code += "\nprint('done', flush=True)\nimport time\ntime.sleep(3600)\n"
		v.write("a.py", "user", []byte(code))
		v.check("setsid python3 a.py >log 2>&1 </dev/null &", "")
		if name != "forks" {
			eventually(t, name, func() (bool, any) {
				r := v.get("/files?path=log", v.headers(proto.GuestPort)...)
				return strings.Contains(string(r.body), "done"), r
			})
		}
		for range 2 {
			v.answers(name)
		}
		(&liveSandbox{l.in(t), l.bystander.id}).check("echo alive", "alive\n")
		v.change(http.MethodDelete, "")
	}
}

func attackMemory(t *testing.T, l *liveDeployment) {
	for _, user := range []string{"user", "root"} {
		v := l.in(t).newSandbox(request{"timeout": 3600})
		_, _, _ = v.run(user, `for i in 1 2 3; do python3 -c 'x = [bytearray(1 << 20) for _ in range(4000)]' & done; wait`)
		v.awaits("ended", "memory_limit_exceeded")
	}
}

// memoryWatch knows how much memory the processes used before an attack.
type memoryWatch struct {
	*liveDeployment
	front, worker proto.Bytes
}

// Limits of memory, by the host's counters. Those of front and worker are beyond what they had before.
const (
	frontGrowth = 128 * proto.MiB
	workerGrows = 96 * proto.MiB
	guestMost   = 72 * proto.MiB
)

func (l *liveDeployment) watchMemory(t *testing.T) *memoryWatch {
	for _, proc := range []*process{l.front, l.worker} { // begin with new peaks, see proc_pid_clear_refs(5)
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", proc.cmd.Process.Pid), []byte("5"), 0); err != nil {
			t.Fatal(err)
		}
	}
	return &memoryWatch{l, l.front.status(t, "VmRSS"), l.worker.status(t, "VmRSS")}
}

// check checks the most that front and worker have had since, and what the guests have.
func (m *memoryWatch) check(t *testing.T) {
	t.Helper()
	front, worker, guest := m.liveDeployment.front.status(t, "VmHWM"), m.liveDeployment.worker.status(t, "VmHWM"), m.guests(t)
	t.Logf("front %s, %s more; worker %s, %s more; the largest guest %s", front, front-m.front, worker, worker-m.worker, guest)
	if front-m.front > frontGrowth || worker-m.worker > workerGrows || guest > guestMost {
		t.Error("memory is not limited")
	}
}

// guests returns the peak of the largest guest on the worker.
func (l *liveDeployment) guests(t *testing.T) (most proto.Bytes) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(line, []byte("/guest.json\x00")) {
			continue
		}
		status, err := os.ReadFile(filepath.Join(filepath.Dir(file), "status"))
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(status), "\nVmHWM:")
		var kib int64
		if _, err := fmt.Sscanf(rest, "%d kB", &kib); err == nil {
			most = max(most, proto.Bytes(kib)*proto.KiB)
		}
	}
	if most == 0 {
		t.Fatal("there is no guest")
	}
	return most
}

// startOnly starts a program and leaves its output unread. It returns the answer's status.
func (v *target) startOnly(code string) (int, io.Closer, error) {
	message, err := json.Marshal(map[string]any{"process": map[string]any{"cmd": "/bin/bash", "args": []string{"-c", code}}})
	if err != nil {
		return 0, nil, err
	}
	body := append([]byte{0, 0, 0, byte(len(message) >> 8), byte(len(message))}, message...)
	r, err := v.open(v.t.Context(), http.MethodPost, v.path("/guest/process.Process/Start"), body,
		"Content-Type", "application/connect+json", "Connect-Protocol-Version", "1")
	if err != nil {
		return 0, nil, err
	}
	return r.StatusCode, r.Body, nil
}

var startedByFlood = repeatsFlag("live-flood", 600, 10_000, "processes that a flood of live sandboxes starts")

func attackManyProcesses(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	memory := l.watchMemory(t)
	callers(startedByFlood.n(), func(i int) {
		code := "seq 100000"
		if i%10 == 0 {
			code = "sleep 3600"
		}
		_, stream, err := v.startOnly(code)
		if err != nil {
			t.Errorf("process %d: %v", i, err)
			return
		}
		_ = stream.Close()
	})
	memory.check(t)
	var list struct{ Processes []any }
	r := v.call("process.Process/List", request{})
	if r.into(t, &list); r.status != http.StatusOK || len(list.Processes) > 256 {
		t.Errorf("%d processes: %s", len(list.Processes), r)
	}
	v.answers("after the flood")
}

func attackOutput(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	memory := l.watchMemory(t)
	size := "1G"
	if testing.Short() {
		size = "128M"
	}
	// Without a reader, the program must end, since its output falls out of the buffer.
	for i := range 4 {
		_, stream, err := v.startOnly(fmt.Sprintf("sleep 0.2; head -c %s /dev/zero; echo x >done%d", size, i))
		if err != nil {
			t.Fatal(err)
		}
		_ = stream.Close()
	}
	// These stop reading.
	for range 16 {
		_, stream, err := v.startOnly("cat /dev/zero")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = stream.Close() }()
	}
	eventually(t, "the programs without readers end", func() (bool, any) {
		out, _, err := v.run("user", "ls done* 2>/dev/null | wc -l")
		return out == "4\n", fmt.Sprint(out, err)
	})
	v.answers("while output waits")
	memory.check(t)
}

func attackFiles(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	dir, err := os.MkdirTemp("/var/tmp", "canary-") // sandboxes have a /tmp of their own
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	canary := filepath.Join(dir, "canary")
	if err := os.WriteFile(canary, []byte("canary"), 0o666); err != nil {
		t.Fatal(err)
	}
	v.check(`ln -s / root; ln -s /proc/self/mem mem; ln -s /proc/1/root init; ln -s /etc/passwd passwd
ln -s /run/bullpen/job job; ln -s /proc/self/oom_score_adj score; ln -s self self; echo mine >/tmp/mine; chmod 600 /tmp/mine`, "")
	if out, _, err := v.run("root", "echo roots >/tmp/roots; chmod 600 /tmp/roots; mkdir -m 700 /tmp/dir; echo roots >/tmp/dir/f"); err != nil || out != "" {
		t.Fatalf("%q, %v", out, err)
	}
	files := func(path, user string) string {
		return "/files?" + url.Values{"path": {path}, "username": {user}}.Encode()
	}
	up := strings.Repeat("../", 20)
	for _, user := range []string{"user", "root"} {
		for _, path := range []string{
			canary, up + canary[1:], "root" + canary, "init" + canary, "/proc/self/root" + canary, "/proc/1/root" + canary,
			"/proc/1/cwd" + canary, "mem", "/proc/1/mem", "/proc/1/environ", "/proc/self/fd/3", "/proc/1/fd/3", "/proc/kcore",
			"self", "/dev/mem", "/dev/random", "/proc/kmsg", up + "etc/shadow", "~root/x", "a\x00b",
		} {
			if r := v.get(files(path, user), v.headers(proto.GuestPort)...); r.status < http.StatusBadRequest {
				t.Errorf("%s reads %q: %s", user, path, r)
			}
		}
		for _, path := range []string{
			canary, "root" + canary, "init" + canary, "mem", "score", "passwd", "/etc/x", "/x", "/usr/x", "/proc/1/mem",
			"/proc/self/mem", "/proc/self/oom_score_adj", "/proc/sys/kernel/msgmax", "/proc/self/fd/1", "/proc/self/fd/4",
			"/proc/self/exe", "/dev/null", "/dev/full", "self",
		} {
			if r := v.write(path, user, []byte("owned")); r.status < http.StatusBadRequest {
				t.Errorf("%s writes %q: %s", user, path, r)
			}
		}
	}
	// The guest has more rights than `user`, but not for what a link of `user` names.
	for _, path := range []string{"job/x", "job/guest.json"} {
		if r := v.write(path, "user", []byte("owned")); r.status != http.StatusForbidden {
			t.Errorf("user writes %q: %s", path, r)
		}
		for _, r := range []*reply{
			v.call("filesystem.Filesystem/Remove", request{"path": path}),
			v.call("filesystem.Filesystem/Move", request{"source": path, "destination": "got"}),
		} {
			if r.status == http.StatusOK && path == "job/guest.json" || r.status == http.StatusUnsupportedMediaType {
				t.Errorf("user removes or moves %q: %s", path, r)
			}
		}
	}
	for _, user := range []string{"nobody", "0", "1000", "ROOT", "root\x00", "root,user", "user:root", " root", "../root", "daemon"} {
		if r := v.get(files("f", user), v.headers(proto.GuestPort)...); r.status != http.StatusUnauthorized {
			t.Errorf("as %q: %s", user, r)
		}
		basic := "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"))
		if user == "user:root" {
			continue // the name ends at the colon
		}
		r := v.do(http.MethodPost, "/process.Process/Start", []byte("\x00\x00\x00\x00\x02{}"),
			v.headers(proto.GuestPort, "Authorization", basic, "Content-Type", "application/connect+json")...)
		if !strings.Contains(string(r.body), "unauthenticated") {
			t.Errorf("start as %q: %s", user, r)
		}
	}
	if b, err := os.ReadFile(canary); string(b) != "canary" {
		t.Errorf("the file outside has %q, %v", b, err)
	}
	if out, _, err := v.run("root", "head -c 5 /run/bullpen/job/guest.json; ls /run/bullpen/job"); out != "{\"env"+"guest.json\n" || err != nil {
		t.Errorf("the guest's own files: %q, %v", out, err)
	}
}

func attackSignedURLs(t *testing.T, l *liveDeployment) {
	v, other := l.sandbox(t), l.sandbox(t)
	for _, x := range []*target{v, other} {
		x.check("echo fine >f; echo secret >g", "")
	}
	signature := func(parts ...string) string {
		sum := sha256.Sum256([]byte(strings.Join(append(parts[:3:3], append([]string{v.token}, parts[3:]...)...), ":")))
		return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
	}
	in := func(d time.Duration) string { return strconv.FormatInt(time.Now().Add(d).Unix(), 10) }
	soon, past := in(time.Hour), in(-time.Hour)
	read, dated := signature("f", "read", "user"), signature("f", "read", "user", soon)
	for name, c := range map[string]struct {
		want   int
		id     string
		method string
		query  url.Values
		more   string
	}{
		"as signed": {200, v.id, "GET", url.Values{"path": {"f"}, "username": {"user"}, "signature": {read}}, ""},
		"until later": {
			200, v.id, "GET", url.Values{"path": {"f"}, "username": {"user"}, "signature": {dated}, "signature_expiration": {soon}}, "",
		},
		"another path":     {401, v.id, "GET", url.Values{"path": {"g"}, "username": {"user"}, "signature": {read}}, ""},
		"another form":     {401, v.id, "GET", url.Values{"path": {"./f"}, "username": {"user"}, "signature": {read}}, ""},
		"another user":     {401, v.id, "GET", url.Values{"path": {"f"}, "username": {"root"}, "signature": {read}}, ""},
		"no user":          {401, v.id, "GET", url.Values{"path": {"f"}, "signature": {read}}, ""},
		"another sandbox":  {401, other.id, "GET", url.Values{"path": {"f"}, "username": {"user"}, "signature": {read}}, ""},
		"a write":          {401, v.id, "POST", url.Values{"path": {"f"}, "username": {"user"}, "signature": {read}}, ""},
		"a removal":        {401, v.id, "DELETE", url.Values{"path": {"f"}, "username": {"user"}, "signature": {read}}, ""},
		"two paths":        {401, v.id, "GET", url.Values{"path": {"f", "g"}, "username": {"user"}, "signature": {read}}, ""},
		"two users":        {401, v.id, "GET", url.Values{"path": {"f"}, "username": {"user", "root"}, "signature": {read}}, ""},
		"a semicolon":      {401, v.id, "GET", url.Values{"username": {"user"}, "signature": {read}}, "&path=g;path=f"},
		"without its date": {401, v.id, "GET", url.Values{"path": {"f"}, "username": {"user"}, "signature": {dated}}, ""},
		"another date": {
			401, v.id, "GET",
			url.Values{"path": {"f"}, "username": {"user"}, "signature": {dated}, "signature_expiration": {in(2 * time.Hour)}}, "",
		},
		"expired": {
			401, v.id, "GET", url.Values{
				"path": {"f"}, "username": {"user"}, "signature": {signature("f", "read", "user", past)},
				"signature_expiration": {past},
			}, "",
		},
		"joined parts": {401, v.id, "GET", url.Values{"path": {"f:read"}, "username": {"user"}, "signature": {read}}, ""},
	} {
		status, answer := l.request(t, c.method+" /files?"+c.query.Encode()+c.more, "Host: 49983-"+c.id+"."+liveDomain, "Content-Length: 0")
		if status != c.want || strings.Contains(answer, "secret") || strings.Contains(answer, "fine\n") != (c.want == http.StatusOK) {
			t.Errorf("%s: %s", name, short(answer))
		}
	}
	if status, answer := l.request(t, "GET /filesystem.Filesystem/Stat?signature="+url.QueryEscape(read),
		"Host: 49983-"+v.id+"."+liveDomain); status != http.StatusUnauthorized {
		t.Errorf("a signature for another route: %s", short(answer))
	}
}
