package e2b

import (
	"crypto/sha256"
	"encoding/base64"
	"net/url"
	"testing"
	"time"
)

const (
	sandboxID = "iabcdefghijklmnopqrstuvwxyz"
	otherID   = "izzzzzzzzzzzzzzzzzzzzzzzzzz"
)

func testTokens() Tokens { return Tokens{Key: &[32]byte{1, 2, 3}} }

func TestTokens(t *testing.T) {
	tokens := testTokens()
	all := map[string]bool{
		tokens.Access(sandboxID): true, tokens.Traffic(sandboxID): true, tokens.Access(otherID): true,
		Tokens{Key: &[32]byte{9}}.Access(sandboxID): true,
	}
	if len(all) != 4 || tokens.Access(sandboxID) != testTokens().Access(sandboxID) {
		t.Errorf("tokens are not stable, or not their own: %v", all)
	}
}

// sign returns a signature as E2B's clients make it.
func sign(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

func TestSignatures(t *testing.T) {
	tokens, now := testTokens(), time.Unix(1000, 0)
	token := tokens.Access(sandboxID)
	for _, c := range []struct {
		name, operation, query string
		want                   signature
	}{
		{"none", signedRead, "path=/a", unsigned},
		{"read", signedRead, "path=/a&signature=" + url.QueryEscape(sign("/a:read::"+token)), signed},
		{"user", signedRead, "path=/a&username=root&signature=" + url.QueryEscape(sign("/a:read:root:"+token)), signed},
		{"other user", signedRead, "path=/a&username=root&signature=" + url.QueryEscape(sign("/a:read::"+token)), unsigned},
		{"read to write", signedWrite, "path=/a&signature=" + url.QueryEscape(sign("/a:read::"+token)), unsigned},
		{"other path", signedRead, "path=/b&signature=" + url.QueryEscape(sign("/a:read::"+token)), unsigned},
		{
			"other sandbox", signedRead, "path=/a&signature=" + url.QueryEscape(sign("/a:read::"+tokens.Access(otherID))),
			unsigned,
		},
		{
			"in time", signedRead, "path=/a&signature_expiration=1000&signature=" +
				url.QueryEscape(sign("/a:read::"+token+":1000")), signed,
		},
		{
			"expired", signedRead, "path=/a&signature_expiration=999&signature=" +
				url.QueryEscape(sign("/a:read::"+token+":999")), expiredSignature,
		},
		{
			"zero", signedRead, "path=/a&signature_expiration=0&signature=" + url.QueryEscape(sign("/a:read::"+token+":0")),
			expiredSignature,
		},
		{
			"negative", signedRead, "path=/a&signature_expiration=-1&signature=" +
				url.QueryEscape(sign("/a:read::"+token+":-1")), expiredSignature,
		},
		{
			"expiration not signed", signedRead, "path=/a&signature_expiration=2000&signature=" +
				url.QueryEscape(sign("/a:read::"+token)), unsigned,
		},
		{
			"expiration removed", signedRead, "path=/a&signature=" + url.QueryEscape(sign("/a:read::"+token+":2000")),
			unsigned,
		},
		{
			"no number", signedRead, "path=/a&signature_expiration=x&signature=" + url.QueryEscape(sign("/a:read::"+token+":x")),
			unsigned,
		},
		{
			"two paths", signedRead, "path=/a&path=/b&signature=" + url.QueryEscape(sign("/a:read::"+token)), unsigned,
		},
		{
			"two users", signedRead, "path=/a&username=&username=root&signature=" + url.QueryEscape(sign("/a:read::"+token)),
			unsigned,
		},
	} {
		query, err := url.ParseQuery(c.query)
		if err != nil {
			t.Fatal(err)
		}
		if got := tokens.checkSignature(sandboxID, c.operation, query, now); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

func TestMetadataFilter(t *testing.T) {
	for text, want := range map[string]map[string]string{
		"":                    {},
		"a%2520b=c%2526d":     {"a b": "c&d"},
		"a=b&c=d":             {"a": "b", "c": "d"},
		"a%253Db=%25C3%25A9":  {"a=b": "é"},
		"key":                 {"key": ""},
		"a%2520b%3Dc%252526d": {"a b": "c%26d"},
	} {
		got, err := parseMetadata(text)
		if err != nil || len(got) != len(want) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
		for key, value := range want {
			if got[key] != value {
				t.Errorf("%q: %v, want %v", text, got, want)
			}
		}
	}
	for _, bad := range []string{"%", "a=%25", "%2525zz=%25zz"} {
		if _, err := parseMetadata(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestClientsThatAskForMemoryByDefault(t *testing.T) {
	for agent, want := range map[string]bool{
		"e2b-python-sdk/2.45.1": true, "e2b-js-sdk/2.50.0": true, "e2b-js-sdk/1.0.0": true, "e2b-python-sdk/2.51.0": false,
		"e2b-python-sdk/2.63.0": false, "e2b-js-sdk/3.0.0": false, "curl/8": false, "": false, "e2b-js-sdk/x": false,
		"e2b-js-sdk/2": false,
	} {
		if asksForMemory(agent) != want {
			t.Errorf("%s: %v", agent, !want)
		}
	}
}
