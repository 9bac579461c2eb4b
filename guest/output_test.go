package main_test

import (
	"bufio"
	"strconv"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/bullpen-run/bullpen/guest/processpb"
)

func TestNumbered(t *testing.T) {
	s := newSandbox(t)
	r := bash("for i in 1 2 3 4 5; do echo $i; read -r; done")
	r.Stdin, r.Numbered = nil, true
	e := s.begin("", r)
	for i := uint64(1); i <= 5; i++ {
		data := e.next().GetData()
		if data.GetSeq() != i || string(data.GetStdout()) != strconv.Itoa(int(i))+"\n" {
			t.Fatalf("event %d: %v", i, data)
		}
		check(t, s.send(pid(e.pid), "\n"))
	}
	if r := e.all(); r.end.GetStatus() != "exit status 0" {
		t.Fatalf("%+v", r)
	}
	after := s.attach(&processpb.ConnectRequest{Process: pid(e.pid), AfterSeq: proto.Uint64(3)})
	if seq := after.next().GetData().GetSeq(); seq != 4 {
		t.Fatalf("the first chunk has the number %d", seq)
	}
	last := s.attach(&processpb.ConnectRequest{Process: pid(e.pid), AfterSeq: proto.Uint64(5)})
	if r := last.all(); r.stdout != "" || r.end == nil {
		t.Fatalf("%+v", r)
	}
	if seq := s.attach(&processpb.ConnectRequest{Process: pid(e.pid)}).next().GetData().GetSeq(); seq != 0 {
		t.Fatalf("a client that does not ask gets the number %d", seq)
	}
	stream, err := s.process.Connect(t.Context(),
		connect.NewRequest(&processpb.ConnectRequest{Process: pid(e.pid), AfterSeq: proto.Uint64(6)}))
	check(t, err)
	stream.Receive()
	wantCode(t, stream.Err(), connect.CodeOutOfRange, "5 chunks")
	check(t, stream.Close())
}

// TestGap loses output that nobody reads, and says how much.
func TestGap(t *testing.T) {
	s := newSandbox(t)
	const size = 3_000_000
	r := bash("read -r; head -c 3000000 /dev/zero; echo >&2; read -r")
	r.Stdin = nil
	e := s.begin("", r)
	e.close()
	check(t, s.send(pid(e.pid), "\n"))
	// The second line of input is read when all has been written.
	check(t, s.closeStdin(pid(e.pid)))
	eventually(t, func() bool { return len(s.list()) == 0 })

	again := s.attach(&processpb.ConnectRequest{Process: pid(e.pid), AfterSeq: proto.Uint64(0)})
	gap := again.next().GetGap()
	if gap.GetFirst() != 1 || gap.GetBytes() == 0 || gap.GetBytes() != gap.GetTotal() {
		t.Fatalf("%v", gap)
	}
	total, seq := gap.GetBytes(), gap.GetLast()
	for again.stream.Receive() && again.msg().GetEnd() == nil {
		data := again.msg().GetData()
		if seq++; data.GetSeq() != seq {
			t.Fatalf("chunk %d instead of %d", data.GetSeq(), seq)
		}
		total += uint64(len(data.GetStdout()) + len(data.GetStderr()))
	}
	if total != size+1 || again.msg().GetEnd() == nil {
		t.Fatalf("%d bytes, %v", total, again.stream.Err())
	}
	if kept := size - int(gap.GetBytes()); kept < 900_000 || kept > 1<<20 {
		t.Fatalf("%d bytes were kept", kept)
	}
	part := s.attach(&processpb.ConnectRequest{Process: pid(e.pid), AfterSeq: proto.Uint64(1)})
	if g := part.next().GetGap(); g.GetFirst() != 2 || g.GetBytes() != 0 || g.GetTotal() != gap.GetTotal() {
		t.Fatalf("%v", g)
	}
	// A client of E2B begins with what there is.
	if r := s.attach(&processpb.ConnectRequest{Process: pid(e.pid)}).all(); r.err != nil || len(r.stdout) == 0 {
		t.Fatalf("%d bytes, %v", len(r.stdout), r.err)
	}
}

// TestSlowReader gets all output, although the buffer is much smaller.
func TestSlowReader(t *testing.T) {
	s := newSandbox(t)
	e := s.begin("", bash("seq 1000000"))
	eventually(t, func() bool { return len(s.list()) == 1 })
	lines := 0
	for r := bufio.NewScanner(strings.NewReader(e.all().stdout)); r.Scan(); {
		if lines++; r.Text() != strconv.Itoa(lines) {
			t.Fatalf("line %d is %q", lines, r.Text())
		}
	}
	if lines != 1_000_000 {
		t.Fatalf("%d lines", lines)
	}
}
