package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bullpen-run/bullpen/proto"
)

func decodeProfile(t *testing.T, body string) proto.Profile {
	t.Helper()
	p, err := DecodeProfile("", []byte(body), proto.DefaultProfile())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestProfileIsDecodedWhole(t *testing.T) {
	got := decodeProfile(
		t,
		`{"name":"web.1","image":"py-3.14","cpu":2.5,"memory":"2GiB","pids":64,
		"disk":{"home":"3 GiB","tmp":1048576,"inodes":1000},
		"network":{"policy":"allowlist","allow":["pypi.org"],"private":["db.corp:5432"],"bandwidth":1048576,
			"connection_rate":20},
		"env":{"A":"1"},"output":"1536KiB","isolation":"",
		"preload":["numpy","matplotlib.pyplot"]}`)
	want := proto.Profile{
		Name: "web.1", Image: "py-3.14", CPU: 2.5, Memory: 2 * proto.GiB, Pids: 64,
		Disk: proto.Disk{Home: 3 * proto.GiB, Tmp: proto.MiB, Inodes: 1000},
		Network: proto.Network{
			Policy: proto.NetworkAllowlist, Allow: []string{"pypi.org"}, Private: []string{"db.corp:5432"},
			Bandwidth: proto.MiB, ConnectionRate: 20,
		},
		Env:     map[string]string{"A": "1"},
		Output:  1536 * proto.KiB,
		Preload: []string{"numpy", "matplotlib.pyplot"},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	body, err := json.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	const canonical = `{"name":"web.1","image":"py-3.14","cpu":2.5,"memory":"2GiB","pids":64,"disk":{"home":"3GiB",` +
		`"tmp":"1MiB","inodes":1000},` +
		`"network":{"policy":"allowlist","allow":["pypi.org"],"private":["db.corp:5432"],` +
		`"bandwidth":"1MiB","connection_rate":20},"env":{"A":"1"},` +
		`"output":"1536KiB","preload":["numpy",` +
		`"matplotlib.pyplot"]}`
	if string(body) != canonical {
		t.Errorf("shown as\n%s, want\n%s", body, canonical)
	}
	if d := cmp.Diff(want, decodeProfile(t, canonical)); d != "" {
		t.Errorf("what is shown is read as something else: %s", d)
	}
}

func TestAbsentProfileFieldsAreTheDefaults(t *testing.T) {
	defaults := proto.DefaultProfile()
	defaults.Output, defaults.Env = 5*proto.MiB, map[string]string{"FROM": "default"}
	want := defaults
	want.Name = "a"
	for _, body := range []string{
		`{"name":"a"}`, `{"name":"a","disk":{}}`,
		`{"name":"a","image":null,"cpu":null,"memory":null,"pids":null,"disk":null,"network":null,"env":null,` +
			`"output":null,"isolation":null,"preload":null,"system_calls":null}`,
		`{"name":"a","isolation":"","preload":[],"system_calls":[]}`,
		`{"name":"a","disk":{"home":null,"tmp":null,"inodes":null},` +
			`"network":{"policy":null,"allow":null,"private":null,"bandwidth":null,"connection_rate":null}}`,
	} {
		got, err := DecodeProfile("", []byte(body), defaults)
		if err != nil {
			t.Errorf("%s: %v", body, err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", body, d)
		}
	}
	if got := decodeProfile(t, `{"name":"a","memory":"4GiB"}`); got.Disk != proto.DefaultProfile().Disk {
		t.Errorf("with more memory: %+v", got.Disk)
	}
	if got := decodeProfile(t, `{"name":"a","memory":"256MiB"}`); got.Disk.Home != 128*proto.MiB ||
		got.Disk.Tmp != 64*proto.MiB {
		t.Errorf("with less memory: %+v, which would never be full before the memory is", got.Disk)
	}
	if got := decodeProfile(t, `{"name":"a","memory":"256MiB","disk":{"home":"1GiB"}}`); got.Disk.Home != proto.GiB {
		t.Errorf("a home that was asked for: %+v", got.Disk)
	}
}

func TestProfilesDoNotShareTheirEnvironment(t *testing.T) {
	defaults := proto.DefaultProfile()
	got := decodeProfile(t, `{"name":"a"}`)
	got.Env["A"] = "1"
	if len(defaults.Env) != 0 {
		t.Error("the default has what was set in another")
	}
}

func TestProfileNames(t *testing.T) {
	body := []byte(`{"name":"b"}`)
	for _, name := range []string{"", "b"} {
		if p, err := DecodeProfile(name, body, proto.DefaultProfile()); err != nil || p.Name != "b" {
			t.Errorf("%q: %s, %v", name, p.Name, err)
		}
	}
	if p, err := DecodeProfile("b", []byte(`{}`), proto.DefaultProfile()); err != nil || p.Name != "b" {
		t.Errorf("%s, %v", p.Name, err)
	}
	if _, err := DecodeProfile("a", body, proto.DefaultProfile()); err == nil ||
		!strings.HasPrefix(err.Error(), "name must be a ") {
		t.Errorf("two names: %v", err)
	}
}

// TestProfileLimits checks every limit and the values just beyond it.
func TestProfileLimits(t *testing.T) {
	numbered := func(n int) string {
		m := map[string]string{}
		for i := range n {
			m[fmt.Sprintf("K%d", i)] = "v"
		}
		body, _ := json.Marshal(m)
		return string(body)
	}
	sized := func(last int) string { // 16 variables of 4 + 4092 bytes; last is the size of the last value
		m := map[string]string{}
		for i := range 16 {
			m[fmt.Sprintf("K%03d", i)] = strings.Repeat("v", 4092)
		}
		m["K015"] = strings.Repeat("é", last/2) + strings.Repeat("v", last%2)
		body, _ := json.Marshal(m)
		return string(body)
	}
	rules := func(n int) string { return `["` + strings.Repeat(`a.b","`, n-1) + `a.b"]` }
	private := func(n int) string { return `["` + strings.Repeat(`a.b:1","`, n-1) + `a.b:1"]` }
	modules := func(n int) string {
		var names []string
		for i := range n {
			names = append(names, fmt.Sprintf("m%d", i))
		}
		body, _ := json.Marshal(names)
		return string(body)
	}
	type bound struct {
		member string
		ok     bool
	}
	for field, bounds := range map[string][]bound{
		"name": {
			{`"name":"` + strings.Repeat("a", 63) + `"`, true},
			{`"name":"` + strings.Repeat("a", 64) + `"`, false},
			{`"name":"0._-"`, true},
			{`"name":""`, false},
			{`"name":".a"`, false},
			{`"name":"A"`, false},
			{`"name":"a/b"`, false},
			{`"name":"a\n"`, false},
			{`"name":"default"`, false},
			{`"name":null`, false},
			{`"name":1`, false},
		},
		"memry":        {{`"memry":"1GiB"`, false}},
		"disk.size":    {{`"disk":{"size":1}`, false}},
		"network.deny": {{`"network":{"deny":[]}`, false}},
		"image": {
			{`"image":""`, true},
			{`"image":"py-3.14"`, true},
			{`"image":"/srv/images/py"`, true},
			{`"image":"/` + strings.Repeat("a", 4095) + `"`, true},
			{`"image":"/` + strings.Repeat("a", 4096) + `"`, false},
			{`"image":"/"`, false},
			{`"image":"/srv/../etc"`, false},
			{`"image":"/srv/"`, false},
			{`"image":"/srv/\u0000"`, false},
			{`"image":"srv/py"`, false},
			{`"image":"Py"`, false},
			{`"image":1`, false},
		},
		"cpu": {
			{`"cpu":0.05`, true},
			{`"cpu":0.049`, false},
			{`"cpu":64`, true},
			{`"cpu":64.001`, false},
			{`"cpu":0`, false},
			{`"cpu":-1`, false},
			{`"cpu":1e999`, false},
			{`"cpu":"1"`, false},
		},
		"memory": {
			{`"memory":"32MiB"`, true},
			{`"memory":33554431`, false},
			{`"memory":"1024GiB"`, true},
			{`"memory":1099511627777`, false},
			{`"memory":99999999999999999999`, false},
			{`"memory":-1`, false},
			{`"memory":"1GB"`, false},
			{`"memory":1.5`, false},
			{`"memory":true`, false},
		},
		"pids": {
			{`"pids":16`, true},
			{`"pids":15`, false},
			{`"pids":32768`, true},
			{`"pids":32769`, false},
			{`"pids":99999999999999999999`, false},
			{`"pids":16.5`, false},
			{`"pids":"16"`, false},
		},
		"disk": {{`"disk":"1GiB"`, false}, {`"disk":[]`, false}},
		"disk.home": {
			{`"disk":{"home":"1MiB"}`, true},
			{`"disk":{"home":1048575}`, false},
			{`"disk":{"home":"1024GiB"}`, true},
			{`"disk":{"home":1099511627777}`, false},
			{`"disk":{"home":{}}`, false},
			{`"disk":{"home":"1GiB","home":"2GiB"}`, false},
		},
		"disk.tmp": {
			{`"disk":{"tmp":"1MiB"}`, true},
			{`"disk":{"tmp":1048575}`, false},
			{`"disk":{"tmp":"1024GiB"}`, true},
			{`"disk":{"tmp":1099511627777}`, false},
		},
		"disk.inodes": {
			{`"disk":{"inodes":256}`, true},
			{`"disk":{"inodes":255}`, false},
			{`"disk":{"inodes":16777216}`, true},
			{`"disk":{"inodes":16777217}`, false},
			{`"disk":{"inodes":"256"}`, false},
		},
		"network": {{`"network":"blocked"`, false}},
		"network.policy": {
			{`"network":{"policy":"unrestricted"}`, true},
			{`"network":{"policy":"blocked"}`, true},
			{`"network":{"policy":"open"}`, false},
			{`"network":{"policy":1}`, false},
		},
		"network.allow": {
			{`"network":{"policy":"allowlist","allow":` + rules(100) + `}`, true},
			{`"network":{"policy":"allowlist","allow":` + rules(101) + `}`, false},
			{`"network":{"policy":"allowlist"}`, false},
			{`"network":{"policy":"blocked","allow":["a.b"]}`, false},
			{`"network":{"allow":["a.b"]}`, false},
			{`"network":{"policy":"allowlist","allow":["a b"]}`, false},
			{`"network":{"policy":"allowlist","allow":"pypi.org"}`, false},
			{`"network":{"policy":"allowlist","allow":[1]}`, false},
		},
		"network.bandwidth": {
			{`"network":{"policy":"unrestricted","bandwidth":"16KiB"}`, true},
			{`"network":{"policy":"unrestricted","bandwidth":16383}`, false},
			{`"network":{"policy":"allowlist","allow":["a.b"],"bandwidth":"1024GiB"}`, true},
			{`"network":{"policy":"unrestricted","bandwidth":1099511627777}`, false},
			{`"network":{"policy":"unrestricted","bandwidth":0}`, false},
			{`"network":{"policy":"unrestricted","bandwidth":"fast"}`, false},
			{`"network":{"bandwidth":"1MiB"}`, false},
		},
		"network.connection_rate": {
			{`"network":{"policy":"unrestricted","connection_rate":1}`, true},
			{`"network":{"policy":"unrestricted","connection_rate":300}`, true},
			{`"network":{"policy":"unrestricted","connection_rate":301}`, false},
			{`"network":{"policy":"unrestricted","connection_rate":0}`, false},
			{`"network":{"policy":"unrestricted","connection_rate":1.5}`, false},
			{`"network":{"connection_rate":1}`, false},
		},
		"network.private": {
			{`"network":{"policy":"allowlist","private":["a.b:1"]}`, true},
			{`"network":{"policy":"unrestricted","private":` + private(32) + `}`, true},
			{`"network":{"policy":"unrestricted","private":` + private(33) + `}`, false},
			{`"network":{"policy":"blocked","private":["a.b:1"]}`, false},
			{`"network":{"private":["a.b:1"]}`, false},
			{`"network":{"policy":"unrestricted","private":["a.b"]}`, false},
			{`"network":{"policy":"unrestricted","private":["10.0.0.0/8:1"]}`, false},
			{`"network":{"policy":"unrestricted","private":"a.b:1"}`, false},
			{`"network":{"policy":"unrestricted","private":[1]}`, false},
		},
		"env": {
			{`"env":` + numbered(50), true},
			{`"env":` + numbered(51), false},
			{`"env":` + sized(4092), true},
			{`"env":` + sized(4093), false},
			{`"env":{"PATH":"/"}`, false},
			{`"env":{"LD_PRELOAD":"x"}`, false},
			{`"env":{"a":"x"}`, false},
			{`"env":{"A":"\u0000"}`, false},
			{`"env":{"A":"` + strings.Repeat("v", 4096) + `"}`, true},
			{`"env":{"A":"` + strings.Repeat("v", 4097) + `"}`, false},
			{`"env":[]`, false},
		},
		"env.A": {{`"env":{"A":1}`, false}},
		"output": {
			{`"output":1`, true},
			{`"output":0`, false},
			{`"output":"256MiB"`, true},
			{`"output":268435457`, false},
		},
		"isolation": {
			{`"isolation":"strict"`, true},
			{`"isolation":"strict","preload":[]`, true},
			{`"isolation":"Strict"`, false},
			{`"isolation":"shared"`, false},
			{`"isolation":true`, false},
		},
		"preload": {
			{`"preload":["numpy","_a.B_2.c"]`, true},
			{`"preload":` + modules(32), true},
			{`"preload":` + modules(33), false},
			{`"preload":["` + strings.Repeat("a", 128) + `"]`, true},
			{`"preload":["` + strings.Repeat("a", 129) + `"]`, false},
			{`"preload":["a","b","a"]`, false},
			{`"preload":["numpy"],"isolation":"strict"`, false},
			{`"preload":[""]`, false},
			{`"preload":["."]`, false},
			{`"preload":["a."]`, false},
			{`"preload":[".a"]`, false},
			{`"preload":["a..b"]`, false},
			{`"preload":["a b"]`, false},
			{`"preload":["a-b"]`, false},
			{`"preload":["2a"]`, false},
			{`"preload":["a.2"]`, false},
			{`"preload":["é"]`, false},
			{`"preload":["a\n"]`, false},
			{`"preload":["a;import b"]`, false},
			{`"preload":["../a"]`, false},
			{`"preload":[1]`, false},
			{`"preload":"numpy"`, false},
			{`"preload":{}`, false},
		},
		"terminals": {
			{`"terminals":0`, true},
			{`"terminals":64`, true},
			{`"terminals":65`, false},
			{`"terminals":-1`, false},
			{`"terminals":1.5`, false},
			{`"terminals":"2"`, false},
		},
		"system_calls": {
			{`"system_calls":["landlock_create_ruleset","cachestat"]`, true},
			{`"system_calls":["` + strings.Join(proto.AddableSystemCalls(), `","`) + `"]`, true},
			{`"system_calls":["cachestat","cachestat"]`, false},
			{`"system_calls":["ptrace"]`, false},
			{`"system_calls":["reboot"]`, false},
			{`"system_calls":["read"]`, false},
			{`"system_calls":["clone3"]`, false},
			{`"system_calls":["451"]`, false},
			{`"system_calls":[""]`, false},
			{`"system_calls":[451]`, false},
			{`"system_calls":"cachestat"`, false},
		},
	} {
		for _, b := range bounds {
			body := `{` + b.member + `}`
			if field != "name" {
				body = `{"name":"a",` + b.member + `}`
			}
			_, err := DecodeProfile("", []byte(body), proto.DefaultProfile())
			if b.ok {
				if err != nil {
					t.Errorf("%.60s: %v", b.member, err)
				}
				continue
			}
			wrong := new(proto.FieldError)
			if !errors.As(err, &wrong) || wrong.Field != field || !strings.HasPrefix(wrong.Message, field+" ") {
				t.Errorf("%.60s: error %v (%q), want one about %s", b.member, err, wrong.Field, field)
			}
		}
	}
}

func TestInvalidIsolationAndPreload(t *testing.T) {
	for body, want := range map[string]string{
		`"isolation":"forked"`: "isolation must be strict, or empty for what the worker chooses",
		`"isolation":"strict","preload":["numpy"]`: "preload does not go with the isolation strict, where nothing is " +
			"forked: leave out one of the two",
		`"preload":["a","b","a"]`: "preload has a twice",
	} {
		if _, err := DecodeProfile("web", []byte(`{`+body+`}`), proto.DefaultProfile()); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", body, err, want)
		}
	}
}

// The schema names the system calls that a profile can add.
func TestSystemCallsInTheSchema(t *testing.T) {
	field, _ := reflect.TypeFor[proto.Profile]().FieldByName("SystemCalls")
	if got, want := field.Tag.Get("valuePattern"), "^("+strings.Join(proto.AddableSystemCalls(), "|")+")$"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestSandboxOfAProfile(t *testing.T) {
	p := decodeProfile(t, `{"name":"web","image":"py","cpu":0.5,"memory":"64MiB","pids":20,"disk":{"home":"2MiB",`+
		`"tmp":"3MiB","inodes":300},`+
		`"network":{"policy":"unrestricted"},"env":{"A":"1"},"output":7,"preload":["numpy"],"system_calls":["cachestat"],`+
		`"terminals":3}`)
	want := proto.Sandbox{
		Image: "py", ImageDigest: "sha256:1", CPU: 0.5, Memory: 64 << 20, Pids: 20, HomeBytes: 2 << 20, TmpBytes: 3 << 20,
		Inodes:  300,
		Network: proto.Network{Policy: proto.NetworkUnrestricted}, OutputBytes: 7, Preload: []string{"numpy"},
		SystemCalls: []string{"cachestat"},
		Terminals:   3,
	}
	if d := cmp.Diff(want, p.Sandbox("sha256:1")); d != "" {
		t.Error(d)
	}
	strict := decodeProfile(t, `{"name":"web","isolation":"strict"}`)
	if got := strict.Sandbox(""); got.Isolation != proto.IsolationStrict || got.Preload != nil {
		t.Errorf("%+v", got)
	}
	for image, name := range map[string]string{"": "", "/srv/py": "", "py": "py"} {
		p.Image = image
		if got, ok := p.ImageName(); ok != (name != "") || ok && got != name {
			t.Errorf("the image %q is %q in the registry, %v", image, got, ok)
		}
	}
}

// What was stored before there were profiles is still read, and has no network.
func TestKeyRequestNamesItsProfile(t *testing.T) {
	for sandbox, want := range map[string]string{
		"": "", `,"profile":null`: "", `,"profile":"default"`: "", `,"profile":"web.1"`: "web.1",
	} {
		r, err := Decode[KeyRequest]([]byte(`{"name":"n","org":"o","plan":"pro"` + sandbox + `}`))
		if err != nil || r.Key().Profile != want {
			t.Errorf("%s: %+v, %v", sandbox, r, err)
		}
	}
	for _, sandbox := range []string{`""`, `"../x"`, `"A"`, `1`} {
		_, err := Decode[KeyRequest]([]byte(`{"name":"n","org":"o","plan":"pro","profile":` + sandbox + `}`))
		if wrong := new(proto.FieldError); !errors.As(err, &wrong) || wrong.Field != "profile" {
			t.Errorf("%s: %v", sandbox, err)
		}
	}
}

func TestKeyRequestLimitsItsExecutions(t *testing.T) {
	for concurrent, want := range map[string]int{
		"": 0, `,"concurrent":null`: 0, `,"concurrent":1`: 1, `,"concurrent":100`: 100,
	} {
		r, err := Decode[KeyRequest]([]byte(`{"name":"n","org":"o","plan":"pro"` + concurrent + `}`))
		if err != nil || r.Key().Concurrent != want {
			t.Errorf("%s: %+v, %v", concurrent, r, err)
		}
	}
	for _, concurrent := range []string{"0", "-1", "1000001", "1.5", `"2"`, "1e99"} {
		_, err := Decode[KeyRequest]([]byte(`{"name":"n","org":"o","plan":"pro","concurrent":` + concurrent + `}`))
		if wrong := new(proto.FieldError); !errors.As(err, &wrong) || wrong.Field != "concurrent" {
			t.Errorf("%s: %v", concurrent, err)
		}
	}
}

func FuzzDecodeProfile(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, `{"name":"a"}`,
		`{"name":"a","memory":"2GiB","disk":{"home":1,"x":[]},"network":{"policy":"allowlist","allow":["a.b"]},` +
			`"env":{"A":"b"}}`,
		`{"name":"a","cpu":1e-9,"pids":-0,"output":"1 KiB"}`, `{"name":"a","image":"/x","disk":null}`,
		`{"name":"a","isolation":"strict"}`, `{"name":"a","preload":["numpy","matplotlib.pyplot"]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		p, err := DecodeProfile("", body, proto.DefaultProfile())
		if err != nil {
			if field := new(proto.FieldError); !errors.As(err, &field) || field.Field == "" ||
				!strings.HasPrefix(field.Message, field.Field) {
				t.Fatalf("error %#v", err)
			}
			return
		}
		again, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		second, err := DecodeProfile(p.Name, again, proto.DefaultProfile())
		if err != nil {
			t.Fatalf("%s: %v", again, err)
		}
		if d := cmp.Diff(p, second); d != "" {
			t.Fatalf("%s is read as something else: %s", again, d)
		}
	})
}
