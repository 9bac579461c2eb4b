package wire

import (
	"bytes"
	"reflect"
	"strings"
	"testing"
)

func sample() StartFrame {
	return StartFrame{
		Argv: []string{"python3", "/home/x/main.py"}, Env: []string{"A=1", "B=\n=", ""}, Dir: "/home/x", Stdin: NoInput,
		UID: 1000, GID: 1001,
		Files: []File{
			{Path: "/home/x/main.py", Mode: 0o644, Content: []byte("print()\x00")},
			{Path: "/y", Owner: OwnerInit, Content: []byte{}},
		},
	}
}

// frame parses an order into a StartFrame.
func frame(t *testing.T, o Order) (s StartFrame) {
	t.Helper()
	text := func(b []byte) string {
		if bytes.IndexByte(b, 0) != len(b)-1 {
			t.Errorf("a string %q", b)
		}
		return string(b[:len(b)-1])
	}
	list := func(l Strings) (all []string) {
		n := l.N
		for b := l.Next(); b != nil; b = l.Next() {
			all = append(all, text(b))
		}
		if len(all) != n || l.N != 0 {
			t.Errorf("%d strings, not %d", len(all), n)
		}
		return all
	}
	s = StartFrame{Argv: list(o.Argv), Env: list(o.Env), Dir: text(o.Dir), Stdin: text(o.Stdin), UID: o.UID, GID: o.GID}
	for f, ok := o.Files.Next(); ok; f, ok = o.Files.Next() {
		s.Files = append(s.Files, File{text(f.Path), f.Mode, f.Owner, f.Content})
	}
	return s
}

func sampleJail() JailFrame {
	return JailFrame{Root: 10_000, Program: 99_999, Processes: 256, Mounts: []Mount{
		{Source: "proc", Target: "/proc", Type: "proc", Flags: 14},
		{Target: "/tmp", Type: "tmpfs", Options: "size=1,mode=0755"},
	}}
}

// jailFrame parses an order for a jail into a JailFrame.
func jailFrame(j JailOrder) JailFrame {
	s := JailFrame{Root: j.Root, Program: j.Program, Processes: j.Processes}
	text := func(b []byte) string { return string(b[:len(b)-1]) }
	for m, ok := j.Mounts.Next(); ok; m, ok = j.Mounts.Next() {
		s.Mounts = append(s.Mounts, Mount{text(m.Source), text(m.Target), text(m.Type), m.Flags, text(m.Options)})
	}
	return s
}

func TestRoundTrip(t *testing.T) {
	want := sample()
	b := want.Encode(Start)
	typ, n, ok := ParseHeader([HeaderSize]byte(b), MaxToInit)
	if typ != Start || n != len(b)-HeaderSize || !ok {
		t.Fatalf("header %c %d %v", typ, n, ok)
	}
	if o, ok := ParseOrder(b[HeaderSize:]); !ok {
		t.Error("refused")
	} else if got := frame(t, o); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v", got)
	}
	j := sampleJail()
	b = j.Encode()
	if typ, n, ok := ParseHeader([HeaderSize]byte(b), MaxToInit); typ != Jail || n != len(b)-HeaderSize || !ok {
		t.Fatalf("header %c %d %v", typ, n, ok)
	}
	if o, ok := ParseJail(b[HeaderSize:]); !ok {
		t.Error("refused")
	} else if got := jailFrame(o); !reflect.DeepEqual(got, j) {
		t.Errorf("got %+v", got)
	}
	var buf [MaxToWorker]byte
	f := PutFailed(&buf, "exec ", []byte("x"), 2)
	if got, ok := parseFailed(t, f); !ok || got != (FailedFrame{"exec x", 2}) {
		t.Errorf("got %+v", got)
	}
	e := ExitedFrame{Code: -1, Signal: 9, BySeccomp: true, MaxRSSKiB: 1 << 40}
	x := e.Encode()
	if typ, n, _ := ParseHeader([HeaderSize]byte(x[:]), MaxToWorker); typ != Exited || n != len(x)-HeaderSize {
		t.Errorf("header %c %d", typ, n)
	}
	if got, ok := ParseExited(x[HeaderSize:]); !ok || got != e {
		t.Errorf("got %+v", got)
	}
	if got, ok := ParseSignal(SignalFrame(15)[HeaderSize:]); !ok || got != 15 {
		t.Errorf("got %d", got)
	}
}

func parseFailed(t *testing.T, b []byte) (FailedFrame, bool) {
	t.Helper()
	if typ, n, ok := ParseHeader([HeaderSize]byte(b), MaxToWorker); typ != Failed || n != len(b)-HeaderSize || !ok {
		t.Errorf("header %c %d %v", typ, n, ok)
	}
	return ParseFailed(b[HeaderSize:])
}

// A long step is truncated.
func TestFailedIsTruncated(t *testing.T) {
	long := strings.Repeat("x", MaxToWorker)
	for _, n := range []int{0, 1, MaxToWorker/2 - 5, MaxToWorker/2 - 4, len(long)} {
		var buf [MaxToWorker]byte
		want := FailedFrame{("exec " + long[:n])[:min(5+n, MaxToWorker/2)], 7}
		if got, ok := parseFailed(t, PutFailed(&buf, "exec ", []byte(long[:n]), 7)); !ok || got != want {
			t.Errorf("%d bytes became %+v", n, got)
		}
		if got, ok := parseFailed(t, PutFailed(&buf, long[:n], nil, 7)); !ok || got.Step != long[:min(n, MaxToWorker/2)] {
			t.Errorf("%d bytes became %+v", n, got)
		}
	}
}

func TestParseHeaderRefuses(t *testing.T) {
	for _, h := range [][HeaderSize]byte{{0, 0, 0, 0, Start}, {1, 0, 0, 1, Start}, {0xff, 0xff, 0xff, 0xff, Start}} {
		if _, _, ok := ParseHeader(h, MaxToWorker); ok {
			t.Errorf("%v accepted", h)
		}
	}
}

// A string that the kernel would read otherwise than it is written is refused, and so
// is what is shorter or longer than it says.
func TestParseOrderRefuses(t *testing.T) {
	s := sample()
	whole := s.Encode(Start)[HeaderSize:]
	for n := range whole {
		if _, ok := ParseOrder(whole[:n]); ok {
			t.Errorf("%d of %d bytes accepted", n, len(whole))
		}
	}
	if _, ok := ParseOrder(append(whole, 0)); ok {
		t.Error("a byte too many accepted")
	}
	for name, change := range map[string]func(s *StartFrame){
		"argv":  func(s *StartFrame) { s.Argv[1] = "a\x00b" },
		"env":   func(s *StartFrame) { s.Env[0] = "A=1\x00" },
		"dir":   func(s *StartFrame) { s.Dir = "\x00" },
		"stdin": func(s *StartFrame) { s.Stdin = "/\x00" },
		"path":  func(s *StartFrame) { s.Files[1].Path = "/x\x00/y" },
	} {
		s := sample()
		change(&s)
		if _, ok := ParseOrder(s.Encode(Start)[HeaderSize:]); ok {
			t.Errorf("%s with a zero byte accepted", name)
		}
	}
	s = sample()
	s.Argv, s.Env = nil, nil
	unended := s.Encode(Start)[HeaderSize:]
	unended[4+4+4+len(s.Dir)] = 'x'
	if _, ok := ParseOrder(unended); ok {
		t.Error("a string without an end accepted")
	}
}

func TestParseJailRefuses(t *testing.T) {
	j := sampleJail()
	whole := j.Encode()[HeaderSize:]
	for n := range whole {
		if _, ok := ParseJail(whole[:n]); ok {
			t.Errorf("%d of %d bytes accepted", n, len(whole))
		}
	}
	if _, ok := ParseJail(append(whole, 0)); ok {
		t.Error("a byte too many accepted")
	}
	j.Mounts[1].Options = "a\x00b"
	if _, ok := ParseJail(j.Encode()[HeaderSize:]); ok {
		t.Error("options with a zero byte accepted")
	}
}

// The init has nowhere to allocate.
func TestInitFunctionsAllocateNothing(t *testing.T) {
	s := sample()
	b := s.Encode(Start)[HeaderSize:]
	forJail := sampleJail()
	within := forJail.Encode()[HeaderSize:]
	var buf [MaxToWorker]byte
	allocated := testing.AllocsPerRun(10, func() {
		o, ok := ParseOrder(b)
		j, also := ParseJail(within)
		for m, more := j.Mounts.Next(); more; m, more = j.Mounts.Next() {
			ok = ok && also && len(m.Target) > 0
		}
		for v := o.Env.Next(); v != nil; v = o.Env.Next() {
			ok = ok && len(v) > 0
		}
		for f, more := o.Files.Next(); more; f, more = o.Files.Next() {
			ok = ok && len(f.Path) > 0
		}
		exited := ExitedFrame{Code: 1}.Encode()
		if f := PutFailed(&buf, "write ", o.Dir, 1); !ok || f[4] != Failed || exited[4] != Exited {
			t.Error("not parsed")
		}
	})
	if allocated != 0 {
		t.Errorf("%v allocations", allocated)
	}
}

func FuzzParse(f *testing.F) {
	s := sample()
	var buf [MaxToWorker]byte
	f.Add(s.Encode(Start)[HeaderSize:])
	f.Add(PutFailed(&buf, "x", nil, 1)[HeaderSize:])
	j := sampleJail()
	f.Add(j.Encode()[HeaderSize:])
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		if o, ok := ParseOrder(b); ok {
			s := frame(t, o)
			if again := s.Encode(Start)[HeaderSize:]; !bytes.Equal(again, b) {
				t.Errorf("%x became %+v, and %x", b, s, again)
			}
		}
		if j, ok := ParseJail(b); ok {
			s := jailFrame(j)
			if again := s.Encode()[HeaderSize:]; !bytes.Equal(again, b) {
				t.Errorf("%x became %+v, and %x", b, s, again)
			}
		}
		if e, ok := ParseFailed(b); ok && len(e.Step) < 1024 {
			var buf [MaxToWorker]byte
			if again := PutFailed(&buf, e.Step, nil, e.Errno)[HeaderSize:]; !bytes.Equal(again, b) {
				t.Errorf("%x became %+v, and %x", b, e, again)
			}
		}
		ParseExited(b)
		ParseSignal(b)
	})
}
