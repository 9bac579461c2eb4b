package files

import (
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// A grant survives encoding whatever its path is. No other token is accepted.
func FuzzGrant(f *testing.F) {
	f.Add("a\nb\n\n", int64(5), "YQ.YQ", int64(0), false)
	f.Add("", int64(-1), ".", int64(3), true)
	f.Fuzz(func(t *testing.T, path string, size int64, other string, version int64, inline bool) {
		secret := [32]byte{1}
		g := grant{
			method: "PUT", org: "acme", source: proto.SourceThread, id: "t", path: path, size: size,
			expiresAt: time.Unix(1000, 0), version: max(0, version), inline: inline,
		}
		token := g.token(secret)
		if got, err := parseGrant(secret, token, time.Unix(999, 0)); err != nil || *got != g {
			t.Errorf("%+v is %+v, %v", g, got, err)
		}
		if got, err := parseGrant(secret, other, time.Unix(999, 0)); err == nil && other != token {
			t.Errorf("%q is %+v", other, got)
		}
	})
}
