package e2e

import (
	"crypto/sha256"
	"crypto/tls"
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
		{
			"paths of the guest's control routes and of the worker's own, also encoded and with dots", "404 or 502",
			attackPaths,
		},
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
			"lists of directories with long names and large attributes, which nobody reads",
			"429 beyond 4 MiB; memory of guest, worker and gateway stays", attackLists,
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
		"Authorization", "", "X-Access-Token", v.token,
		proto.HeaderSandboxID, v.id, proto.HeaderSandboxPort, strconv.Itoa(port),
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
	sendRaw(t, conn, "%s %s HTTP/1.1\r\nHost: worker\r\n%s: %s\r\n%s: %s\r\nContent-Length: %d\r\n"+
		"Connection: close\r\n\r\n%s",
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
	return tls.Client(l.plainTunnel(t), &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true})
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
				found = string(m[1])
				if l.overTunnel(t, http.MethodGet, "/health", v.id, found, "") == http.StatusNoContent {
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
		{b.id, ""},
		{b.id, made},
		{b.id, ofA},
		{a.id, ofB},
		{"", ofA},
		{"", ""},
		{strings.ToUpper(a.id), ofA},
		{a.id + "," + b.id, ofA},
		{"../" + a.id, ofA},
		{a.id, strings.ToUpper(ofA)},
		{a.id, ofA + "," + ofB},
		{a.id, ofA[:63]},
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
			{http.MethodDelete, "/v1/sandboxes/" + c.id},
			{http.MethodGet, "/sandboxes/" + c.id},
			{http.MethodDelete, "/sandboxes/" + c.id},
			{http.MethodPost, "/sandboxes/" + c.id + "/pause"},
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
		r := owner.get("/files?path=precious", "Authorization", "", "X-Access-Token", v.token,
			proto.HeaderSandboxID, id, proto.HeaderSandboxPort, "49983")
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
		"/init", "/init/", "//init", "/./init", "/x/../init", "/%69nit", "/x/%2e%2e/init", "/init%2f", "/freeze",
		"/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade", "/init;x", "/INIT", "/init%00", `/\init`,
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
	names := strings.Join(
		[]string{proto.HeaderSandboxID, proto.HeaderSandboxPort, proto.HeaderSandbox, proto.HeaderTicket}, ", ")
	for name, headers := range map[string][]string{
		"sent":                secrets,
		"twice":               append(secrets, secrets...),
		"with another before": append([]string{"Authorization: Basic eDo="}, secrets...),
		"named":               append(secrets, "Connection: "+names+", close"),
		"as trailers":         append(secrets, "Trailer: "+names),
		"spaces":              append(secrets, "Authorization:   bearer   "+v.key),
	} {
		lines := v.toServer() + v.lines(headers...) + "Host: x\r\nConnection: close\r\n"
		answer := l.raw(t, "POST /x HTTP/1.1\r\n"+lines+"Transfer-Encoding: chunked\r\n\r\n0\r\n"+
			v.lines(secrets...)+"\r\n")
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
	const chunked, end = "Transfer-Encoding: chunked\r\n", "\r\n0\r\n\r\n"
	length := fmt.Sprintf("Content-Length: %d\r\n", n)
	for name, text := range map[string]string{
		"both lengths":     "POST" + head + length + chunked + end + inner,
		"chunked last":     "POST" + head + chunked + "Content-Length: 4\r\n" + fmt.Sprintf("\r\n%x\r\n", n) + inner + end,
		"two lengths":      "POST" + head + "Content-Length: 0\r\n" + length + "\r\n" + inner,
		"joined lengths":   "POST" + head + fmt.Sprintf("Content-Length: 0, %d\r\n\r\n", n) + inner,
		"signed length":    "POST" + head + fmt.Sprintf("Content-Length: +%d\r\n\r\n", n) + inner,
		"identity":         "POST" + head + "Transfer-Encoding: chunked, identity\r\n" + end + inner,
		"twice chunked":    "POST" + head + chunked + "Transfer-Encoding: x\r\n" + end + inner,
		"space":            "POST" + head + "Transfer-Encoding : chunked\r\nContent-Length: 0\r\n\r\n" + inner,
		"tab":              "POST" + head + "Transfer-Encoding:\x0bchunked\r\nContent-Length: 0\r\n\r\n" + inner,
		"folded":           "POST" + head + "X: y\r\n " + chunked + "Content-Length: 0\r\n\r\n" + inner,
		"line feeds":       "POST" + head + "X: y\nContent-Length: 0\n\n" + inner,
		"carriage returns": "POST" + head + "X: y\rContent-Length: 0\r\n\r\n" + inner,
		"extension":        "POST" + head + chunked + fmt.Sprintf("\r\n%x;a=\"\r\n", n) + inner + end,
		"a line feed":      "POST" + head + chunked + "\r\n2;\nxx" + end + inner,
		"overflow":         "POST" + head + chunked + "\r\n10000000000000000\r\n\r\n" + inner,
		"signed chunk":     "POST" + head + chunked + "\r\n+0\r\n\r\n" + inner,
		"an old version":   "POST" + strings.Replace(head, "1.1", "1.0", 1) + chunked + end + inner,
		"a body of GET":    "GET" + head + length + "\r\n" + inner,
		"expected":         "POST" + head + "Expect: 100-continue\r\n" + length + "\r\n" + inner,
		"upgrade":          "GET" + upgrade + "Connection: Upgrade, close\r\nUpgrade: x\r\n\r\n" + inner,
		"upgrade to h2c": "GET" + upgrade + "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\n" +
			"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n" + inner,
		"upgrade with a body": "POST" + upgrade + "Connection: Upgrade, close\r\nUpgrade: websocket\r\n" + length + "\r\n" +
			inner,
		"target": "GET /outer%20HTTP/1.1%0d%0aX:%20y%0d%0a%0d%0aGET%20/smuggled" +
			strings.TrimPrefix(head, " /outer") + "\r\n",
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
	"/two", "/both", "/lengths", "/empty", "/unchanged", "/switch", "/extension", "/short", "/none", "/garbage",
	"/denied",
}

func attackAnswerSmuggling(t *testing.T, l *liveDeployment) {
	a, b := l.sandbox(t), l.sandbox(t)
	a.serve()
	b.serve()
	port, _ := strconv.Atoi(serverPort)
	for i := range 3 {
		for _, path := range weirdAnswers {
			r, err := a.try(t.Context(), http.MethodGet, path, nil, a.headers(port)...)
			if err == nil && (r.status == http.StatusSwitchingProtocols || strings.Contains(string(r.body), "stolen")) {
				t.Errorf("%s: %s", path, r)
			}
			for j, v := range []*target{a, b, b, a} {
				own := fmt.Sprintf("/own-%d-%d-%s", i, j, path[1:])
				r := v.get(own, v.headers(port)...)
				if r.status != http.StatusOK || !strings.HasPrefix(string(r.body), "GET "+own+" ") {
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
		want := http.StatusOK
		if path == "/redirect" {
			want = http.StatusTemporaryRedirect
		}
		status, answer := l.request(t, "GET "+path, "Host: x", strings.TrimSpace(v.toServer()))
		if status != want {
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
		"\r\nContent-Type: application/octet-stream\r\nExpect: 100-continue\r\nContent-Length: 2\r\n"+
		"Connection: close\r\n\r\nok")
	if !strings.HasPrefix(answer, "HTTP/1.1 200 ") || !strings.Contains(answer, "\r\nContent-Security-Policy: ") {
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
	eventually(t, "requests beyond the limit are refused", func() (bool, any) {
		return refused.Load() >= more, refused.Load()
	})
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
