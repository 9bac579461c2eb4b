package proto

import "testing"

func TestBytes(t *testing.T) {
	for text, want := range map[string]Bytes{"0": 0, "17": 17, "1KiB": 1 << 10, "16 MiB": 16 << 20, "3GiB": 3 << 30} {
		var got Bytes
		if err := got.UnmarshalText([]byte(text)); err != nil || got != want {
			t.Errorf("%q is %d, %v; want %d", text, got, err, want)
		}
		var again Bytes
		if err := again.UnmarshalText([]byte(want.String())); err != nil || again != want {
			t.Errorf("%d is written %s, which is read as %d, %v", want, want, again, err)
		}
	}
	for b, want := range map[Bytes]string{
		0: "0", 1023: "1023", 1536 * MiB: "1536MiB", GiB + 1: "1073741825",
		2048 * GiB: "2048GiB",
	} {
		if got := b.String(); got != want {
			t.Errorf("%d is written %s, want %s", int64(b), got, want)
		}
	}
	for _, text := range []string{"", "-1", "MiB", "1.5GiB", "9999999999GiB", "1kb", "1  KiB"} {
		if err := new(Bytes).UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
}
