package wire

import (
	"reflect"
	"testing"
)

func sample() StartFrame {
	return StartFrame{
		Argv: []string{"python3", "/home/x/main.py"}, Env: []string{"A=1", "B=\n="}, Dir: "/home/x", UID: 1000, GID: 1001,
		Files: []File{{Path: "/home/x/main.py", Mode: 0o644, Content: []byte("print()\x00")}, {Path: "/y", Owner: OwnerInit, Content: []byte{}}},
	}
}

func TestRoundTrip(t *testing.T) {
	want := sample()
	b := want.Encode(Start)
	typ, n, ok := ParseHeader([HeaderSize]byte(b), MaxToInit)
	if typ != Start || n != len(b)-HeaderSize || !ok {
		t.Fatalf("header %c %d %v", typ, n, ok)
	}
	if got, ok := ParseStart(b[HeaderSize:]); !ok || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v", got)
	}
	f := FailedFrame{Step: "exec x", Errno: 2}
	if got, ok := ParseFailed(f.Encode()[HeaderSize:]); !ok || got != f {
		t.Errorf("got %+v", got)
	}
	e := ExitedFrame{Code: -1, Signal: 9, BySeccomp: true, MaxRSSKiB: 1 << 40}
	if got, ok := ParseExited(e.Encode()[HeaderSize:]); !ok || got != e {
		t.Errorf("got %+v", got)
	}
	if got, ok := ParseSignal(SignalFrame(15)[HeaderSize:]); !ok || got != 15 {
		t.Errorf("got %d", got)
	}
	long := FailedFrame{Step: string(make([]byte, 1<<20))}.Encode()
	if len(long) > MaxToWorker {
		t.Errorf("a failed frame of %d bytes", len(long))
	}
}

func TestParseHeaderRefuses(t *testing.T) {
	for _, h := range [][HeaderSize]byte{{0, 0, 0, 0, Start}, {1, 0, 0, 1, Start}, {0xff, 0xff, 0xff, 0xff, Start}} {
		if _, _, ok := ParseHeader(h, MaxToWorker); ok {
			t.Errorf("%v accepted", h)
		}
	}
}

func FuzzParse(f *testing.F) {
	s := sample()
	f.Add(s.Encode(Start)[HeaderSize:])
	f.Add(FailedFrame{Step: "x", Errno: 1}.Encode()[HeaderSize:])
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, ok := ParseStart(b); ok {
			if again, ok := ParseStart(s.Encode(Start)[HeaderSize:]); !ok || !reflect.DeepEqual(again, s) {
				t.Errorf("%+v became %+v", s, again)
			}
		}
		if e, ok := ParseFailed(b); ok && len(e.Step) < 1024 {
			if again, ok := ParseFailed(e.Encode()[HeaderSize:]); !ok || again != e {
				t.Errorf("%+v became %+v", e, again)
			}
		}
		ParseExited(b)
		ParseSignal(b)
	})
}
